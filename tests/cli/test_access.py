"""How commands reach a service: TLS, tokens, addresses."""

from __future__ import annotations

import json

import pytest

from kvplane_service.config import Config
from tests.service.certificates import Authority
from tests.service.guarded import guarded
from tests.service.rig import running


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@pytest.fixture
def mutual_tls(authority):
    """A service that uses TLS and requires client certificates."""
    pair = authority.issue("server")
    with running(
        Config(
            listen="127.0.0.1:0", tls_cert=pair.cert, tls_key=pair.key,
            tls_client_auth="require", tls_client_ca=authority.cert,
        )
    ) as service:  # fmt: skip
        yield service


@pytest.mark.parametrize("command", ["status", "replicas", "doctor"])
def test_commands_present_their_certificate(kvplane, mutual_tls, authority, command):
    pair = authority.issue("operator")
    flags = ["--tls-ca", authority.cert, "--tls-cert", pair.cert, "--tls-key", pair.key]
    code, output, errors = kvplane(*flags, command, "--service", mutual_tls.address)
    assert (code, errors) == (0, ""), output


@pytest.mark.parametrize("variable", ["KVPLANE_TLS_CA", "KVPLANE_CA_FILE"])
def test_credentials_are_read_from_the_environment(kvplane, mutual_tls, authority, monkeypatch, variable):
    pair = authority.issue("operator")
    for name, value in {variable: authority.cert, "KVPLANE_CERT_FILE": pair.cert, "KVPLANE_KEY_FILE": pair.key}.items():
        monkeypatch.setenv(name, value)
    assert kvplane("status", "--service", mutual_tls.address)[0] == 0


def test_the_new_name_of_a_variable_takes_precedence(kvplane, mutual_tls, authority, monkeypatch):
    pair = authority.issue("operator")
    for name, value in {
        "TLS_CA": authority.cert,
        "CA_FILE": "old.pem",
        "CERT_FILE": pair.cert,
        "KEY_FILE": pair.key,
    }.items():
        monkeypatch.setenv(f"KVPLANE_{name}", value)
    monkeypatch.setenv("KVPLANE_SERVICE", mutual_tls.address)
    monkeypatch.setenv("KVPLANE_ADDRESS", "127.0.0.1:1")
    assert kvplane("status")[0] == 0


@pytest.mark.parametrize("variable", ["KVPLANE_SERVICE", "KVPLANE_ADDRESS"])
@pytest.mark.parametrize("words", [("status",), ("replicas",), ("doctor",), ("top", "--once"), ("drain", "--grpcurl")])
def test_the_service_is_read_from_the_environment(kvplane, monkeypatch, variable, words):
    monkeypatch.setenv(variable, "127.0.0.1:1")
    code, output, errors = kvplane(*words)
    assert code == (0 if "--grpcurl" in words else 3)
    assert "127.0.0.1:1" in output + errors


@pytest.mark.parametrize("name", ["KVPLANE_SERVICE", "--service", "--address"])
def test_replay_takes_the_address_of_a_service(kvplane, monkeypatch, tmp_path, name):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}\n')
    monkeypatch.setattr("kvplane_tools.cli.replay.trace.ServiceChild", None)  # no service is started
    with running() as service:
        words = [name, service.address] if name.startswith("--") else []
        if not words:
            monkeypatch.setenv(name, service.address)
        code, output, errors = kvplane("replay", str(trace), "--json", "--max-model-len", "4000", *words)
    assert (code, json.loads(output)["completed"]) == (0, 1), errors


def test_a_command_without_a_certificate_is_refused(kvplane, mutual_tls, authority):
    assert kvplane("--tls-ca", authority.cert, "status", "--service", mutual_tls.address)[0] == 3


def test_a_certificate_without_tls_is_wrong_use(kvplane):
    code, _, errors = kvplane("--tls-cert", "x", "status")
    assert code == 2
    assert "--tls-ca" in errors


def test_grpcurl_names_the_files_and_never_the_token(kvplane, monkeypatch):
    monkeypatch.setenv("KVPLANE_TOKEN", "canary")
    _, output, _ = kvplane("--tls-ca", "ca.pem", "--tls-cert", "c", "--tls-key", "k", "status", "--grpcurl")
    assert '-cacert ca.pem -cert c -key k -H "authorization: Bearer $KVPLANE_TOKEN"' in output
    _, output, _ = kvplane("--tls-ca", "system", "--token-file", "t", "status", "--grpcurl")
    assert '-H "authorization: Bearer $(cat t)"' in output
    assert "-cacert" not in output
    assert "canary" not in output


@pytest.mark.parametrize("command", ["status", "replicas", "describe", "events", "doctor", "top"])
def test_commands_present_their_token(kvplane, tmp_path, monkeypatch, command):
    with guarded(tmp_path) as world:
        world.acme.register("acme/r")
        more = {"describe": ["acme/r"], "events": ["acme/r"], "top": ["--once"]}
        words = [command, *more.get(command, []), "--service", world.service.address]
        token = tmp_path / "token"
        token.write_text("token-acme\n")
        code, output, errors = kvplane("--token-file", str(token), *words)
        assert (code, errors) == (0, ""), output
        assert kvplane(*words)[0] == 1
        monkeypatch.setenv("KVPLANE_TOKEN", "token-acme")
        assert kvplane(*words)[0] == 0


def test_a_recording_presents_its_token(kvplane, tmp_path, monkeypatch):
    with guarded(tmp_path) as world:
        world.acme.register("acme/r")
        stream = world.acme.open("acme/r")
        stream.step()
        monkeypatch.setenv("KVPLANE_TOKEN", "token-operator")
        words = ("record", "acme/r", str(tmp_path / "log"), "--decisions", "1", "--service", world.service.address)
        assert kvplane(*words)[0] == 0
        stream.close()
