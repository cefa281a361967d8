"""What a command says when the service is another one than it expects: the remedy names the option that helps."""

from __future__ import annotations

import pytest

from kvplane_service.config import Config
from tests.service.certificates import Authority
from tests.service.guarded import guarded
from tests.service.rig import running


def test_a_plaintext_client_on_a_tls_port_is_pointed_to_tls(kvplane, tmp_path):
    pair = Authority(tmp_path).issue("server")
    with running(Config(listen="127.0.0.1:0", tls_cert=pair.cert, tls_key=pair.key)) as service:
        code, _, errors = kvplane("status", "--service", service.address)
    assert (code, "--tls-ca" in errors) == (3, True), errors


def test_a_tls_client_on_a_plaintext_port_is_refused_with_a_remedy(kvplane, tmp_path):
    authority = Authority(tmp_path)
    authority.issue("server")
    with running() as service:
        code, _, errors = kvplane("status", "--service", service.address, "--tls-ca", authority.cert)
    assert (code, "--tls-ca" in errors) == (3, True), errors


@pytest.mark.parametrize("words", [("status",), ("replicas",), ("doctor",), ("describe", "r")])
def test_a_missing_token_names_the_option_and_no_header(kvplane, tmp_path, words):
    with guarded(tmp_path) as world:
        code, _, errors = kvplane(*words, "--service", world.service.address)
    assert code == 1
    assert "--token-file" in errors
    assert "Bearer" not in errors


def test_an_address_that_has_no_such_call_is_said_to_be_another_program(kvplane):
    with running() as service:
        code, _, errors = kvplane("fleet", "list", "--router", service.address)
    assert code == 1
    assert "--router" in errors
    assert "Method not found" not in errors


@pytest.mark.parametrize("words", [("describe",), ("requests",), ("mrc",), ("events",), ("reset", "--yes")])
def test_an_unknown_replica_suggests_the_nearest_name(kvplane, words):
    with running() as service:
        service.register("engine-17")
        service.register("other")
        code, _, errors = kvplane(*words, "engine-71", "--service", service.address)
        assert (code, "did you mean engine-17?" in errors) == (2, True), errors
        _, _, errors = kvplane(*words, "zzz", "--service", service.address)
        assert "did you mean" not in errors


def test_the_suggested_name_is_one_that_the_caller_may_see(kvplane, tmp_path):
    token = tmp_path / "token"
    token.write_text("token-rival")
    with guarded(tmp_path) as world:
        world.acme.register("acme/engine-17")
        world.rival.register("rival/r")
        there = ("--service", world.service.address, "--token-file", str(token))
        code, _, errors = kvplane("describe", "acme/engine-71", *there)
    assert (code, "did you mean" in errors) == (2, False), errors
