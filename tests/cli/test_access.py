"""Commands over TLS."""

from __future__ import annotations

import pytest

from kvplane_service.config import Config
from tests.service.certificates import Authority
from tests.service.guarded import guarded
from tests.service.rig import running


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@pytest.fixture
def asking(authority):
    """A service that speaks TLS and asks for a certificate."""
    pair = authority.issue("server")
    with running(
        Config(
            listen="127.0.0.1:0", tls_cert=pair.cert, tls_key=pair.key,
            tls_client_auth="require", tls_client_ca=authority.cert,
        )
    ) as service:  # fmt: skip
        yield service


@pytest.mark.parametrize("command", ["status", "replicas", "doctor"])
def test_commands_show_the_certificate_they_are_given(kvplane, asking, authority, command):
    mine = authority.issue("operator")
    flags = ["--tls-ca", authority.cert, "--tls-cert", mine.cert, "--tls-key", mine.key]
    code, output, errors = kvplane(*flags, command, "--service", asking.address)
    assert (code, errors) == (0, ""), output


def test_the_environment_says_the_same(kvplane, asking, authority, monkeypatch):
    mine = authority.issue("operator")
    for name, value in {"CA_FILE": authority.cert, "CERT_FILE": mine.cert, "KEY_FILE": mine.key}.items():
        monkeypatch.setenv(f"KVPLANE_{name}", value)
    assert kvplane("status", "--service", asking.address)[0] == 0


def test_without_one_nobody_is_answered(kvplane, asking, authority):
    assert kvplane("--tls-ca", authority.cert, "status", "--service", asking.address)[0] == 3


def test_a_certificate_without_tls_is_a_slip(kvplane):
    code, _, errors = kvplane("--tls-cert", "x", "status")
    assert code == 2
    assert "--tls-ca" in errors


def test_the_equivalent_call_names_the_files_and_no_token(kvplane, monkeypatch):
    monkeypatch.setenv("KVPLANE_TOKEN", "canary")
    _, output, _ = kvplane("--tls-ca", "ca.pem", "--tls-cert", "c", "--tls-key", "k", "status", "--grpcurl")
    assert '-cacert ca.pem -cert c -key k -H "authorization: Bearer $KVPLANE_TOKEN"' in output
    _, output, _ = kvplane("--tls-ca", "system", "--token-file", "t", "status", "--grpcurl")
    assert '-H "authorization: Bearer $(cat t)"' in output
    assert "-cacert" not in output
    assert "canary" not in output


@pytest.mark.parametrize("command", ["status", "replicas", "describe", "events", "doctor", "top"])
def test_commands_show_their_token(kvplane, tmp_path, monkeypatch, command):
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


def test_a_recording_shows_its_token(kvplane, tmp_path, monkeypatch):
    with guarded(tmp_path) as world:
        world.acme.register("acme/r")
        stream = world.acme.open("acme/r")
        stream.step()
        monkeypatch.setenv("KVPLANE_TOKEN", "token-operator")
        words = ("record", "acme/r", str(tmp_path / "log"), "--decisions", "1", "--service", world.service.address)
        assert kvplane(*words)[0] == 0
        stream.close()
