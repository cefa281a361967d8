"""The file of owners, certificates that name them, and what is refused at the start."""

from __future__ import annotations

from typing import Any

import pytest

from kvplane import ModelSource, connect
from kvplane.base.errors import InvalidArgument, KvplaneError, NotFound, PermissionDenied
from kvplane.rpc.access import Tls
from kvplane_service.auth.owners import Owner, is_pattern, matches, overlap, read_owners
from kvplane_service.auth.tokens import line_of
from kvplane_service.config import Config
from kvplane_service.process.app import App
from tests.service.certificates import Authority
from tests.service.guarded import Guard
from tests.service.rig import running


@pytest.mark.parametrize(
    ("pattern", "name", "does"),
    [("a/*", "a/b", True), ("a/*", "a", False), ("a", "a", True), ("a", "ab", False), ("*", "", True), ("", "", True),
     ("", "a", False)],
)  # fmt: skip
def test_a_pattern_matches_a_name_or_a_prefix(pattern, name, does):
    assert matches(pattern, name) is does


@pytest.mark.parametrize(
    ("one", "other", "do"),
    [("a/*", "a/b*", True), ("a/*", "b/*", False), ("a", "a*", True), ("a", "a", True), ("a", "b", False),
     ("*", "x", True), ("a*", "ab*", True), ("ab", "a*", True)],
)  # fmt: skip
def test_overlapping_patterns(one, other, do):
    assert overlap(one, other) is do
    assert overlap(other, one) is do


def test_a_star_is_allowed_only_at_the_end():
    assert is_pattern("a*")
    assert not is_pattern("*a")


REFUSED = {
    "acme.scopse": ("acme: {scopse: []}", "the most similar key is scopes"),
    "acme.scopes.0": ("acme: {scopes: [alocate]}", "docs/operating/access.md"),
    "acme.limits.block": ("acme: {limits: {block: 1}}", "the most similar key is blocks"),
    "acme.limits.blocks": ("acme: {limits: {blocks: 0}}", "docs/operating/access.md"),
    "may stand only at the end of a name": ("acme: {domains: ['*x']}", "docs/operating/access.md"),
    "must begin with `jwt:` or `cert:`": ("acme: {subjects: [x]}", "docs/operating/access.md"),
    "the value of owner acme is a list": ("acme: [1]", "owner: {key"),
    "is not a mapping of owners": ("", "owner: {key"),
    "is not YAML": ("a: [", "owner: {key"),
    "overlap": ("acme: {replicas: ['x*']}\nrival: {replicas: [xy]}", "its own names"),
    "overlap ": ("acme: {}\nrival: {replicas: ['*']}", "its own names"),
    "acme and rival both have the subject cert:x": (
        "acme: {subjects: ['cert:x']}\nrival: {subjects: ['cert:x']}",
        "to one owner",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_invalid_owners_files_are_refused_by_field(tmp_path, what):
    text, remedy = REFUSED[what]
    path = tmp_path / "owners"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=what.strip()) as caught:
        read_owners(str(path))
    assert caught.value.field == "auth_owners"
    assert remedy in caught.value.remedy


def test_default_owner_may_use_replicas_under_its_name():
    owner = Owner(name="acme")
    assert {scope.value for scope in owner.scopes} == {"allocate", "read", "events", "report", "worker"}
    assert owner.may_name("acme/r")
    assert not owner.may_name("r")
    assert owner.may_use_domain("")
    assert not owner.may_use_domain("x")
    assert not owner.may_use("acme/r", "rival")


OWNED: dict[str, Any] = {"auth_owners": "owners", "auth_tokens": "tokens"}
KEYED: dict[str, Any] = {"auth_owners": "owners", "auth_jwks": "k"}
# What is set (files by their names in the folder) -> how it is refused, and which key is named.
BAD_STARTS: dict[str, tuple[dict[str, Any], type[KvplaneError], str]] = {
    "tokens without owners": ({"auth_tokens": "tokens"}, InvalidArgument, "auth_owners"),
    "owners without proof": ({"auth_owners": "owners"}, InvalidArgument, "auth_owners"),
    "a token without owner": ({**OWNED, "auth_tokens": "unknown"}, InvalidArgument, "auth_tokens"),
    "no tokens": ({**OWNED, "auth_tokens": "broken"}, InvalidArgument, "auth_tokens"),
    "no file": ({**OWNED, "auth_owners": "nothing"}, NotFound, "auth_owners"),
    "keys without issuer": ({**KEYED, "auth_jwt_audience": "a"}, InvalidArgument, "auth_jwt_issuer"),
    "keys without audience": ({**KEYED, "auth_jwt_issuer": "i"}, InvalidArgument, "auth_jwt_audience"),
    "an issuer without keys": ({**OWNED, "auth_jwt_issuer": "i"}, InvalidArgument, "auth_jwks"),
    "no audit log": ({**OWNED, "audit_log": "no/where"}, NotFound, "audit_log"),
}


@pytest.mark.parametrize("what", BAD_STARTS)
async def test_contradictory_auth_settings_prevent_a_start(tmp_path, monkeypatch, what):
    Guard(tmp_path)
    (tmp_path / "unknown").write_text(line_of("t", "unknown"))
    (tmp_path / "broken").write_text("canary")
    monkeypatch.chdir(tmp_path)
    settings, kind, field = BAD_STARTS[what]
    with pytest.raises(kind) as caught:
        App(Config(**settings))
    assert caught.value.field == field
    assert caught.value.remedy
    assert "canary" not in str(caught.value)


def test_plaintext_tokens_on_a_network_log_a_warning(tmp_path, caplog):
    with running(Guard(tmp_path).config(listen="0.0.0.0:0")):
        assert "in plain text" in caplog.text


def test_a_certificate_is_an_identity(tmp_path):
    authority = Authority(tmp_path)
    server = authority.issue("server")
    guard = Guard(tmp_path, {"acme": {}, "team": {"subjects": ["cert:spiffe://cluster/engine"]}})
    config = guard.config(
        auth_tokens="", tls_cert=server.cert, tls_key=server.key, tls_client_auth="require",
        tls_client_ca=authority.cert,
    )  # fmt: skip
    pairs = {
        "acme/r": authority.issue("acme"),
        "team/r": authority.issue("x", uri="spiffe://cluster/engine"),
    }
    with running(config) as service:
        for name, pair in pairs.items():
            with connect(service.address, tls=Tls(authority.cert, *pair)) as client:
                client.register_replica(name, ModelSource(model="llama-3.1-8b", num_blocks=100, max_model_len=512))
                assert [one.replica for one in client.list_replicas()] == [name]
        tls = Tls(authority.cert, *authority.issue("unknown"))
        with connect(service.address, tls=tls) as client, pytest.raises(PermissionDenied):
            client.status()
