"""Static tokens: their digests, changes of the token file, and sessions that end with their token."""

from __future__ import annotations

import stat

import pytest

from kvplane.base.errors import InvalidArgument, Unauthenticated
from kvplane.v1 import admin_pb2, events_pb2
from kvplane_service.auth.tokens import StaticTokens, line_of, new_token, read_tokens
from tests.service.guarded import OWNERS, Caller, Guard, guarded, replace
from tests.service.rig import refusal, running, until

STATUS = admin_pb2.StatusRequest()


def test_token_file_accepts_exactly_its_tokens(tmp_path):
    path, tokens = tmp_path / "tokens", [new_token() for _ in range(3)]
    lines = [line_of(token, f"o{at}") for at, token in enumerate(tokens)]
    path.write_text("# comment\n\n" + "\n".join(f"{line}  # of {at}" for at, line in enumerate(lines)))
    found = read_tokens(str(path))
    assert [found.find(token) for token in tokens] == ["o0", "o1", "o2"]
    assert found.find(tokens[0][:-1]) is None
    assert found.find("") is None
    assert not any(token in path.read_text() for token in tokens)


def test_generated_tokens_have_256_bits_and_are_unique():
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(len(token) == len("kvp_") + 43 for token in tokens)


BAD_LINES = ["canary-token acme", "sha256:00 acme", "sha256:" + "0" * 64, "sha256:" + "G" * 64 + " a"]


@pytest.mark.parametrize("line", BAD_LINES)
def test_invalid_token_line_is_refused_by_number_without_its_text(tmp_path, line):
    path = tmp_path / "tokens"
    path.write_text(f"# first\n{line}\n")
    with pytest.raises(InvalidArgument, match="line 2") as caught:
        read_tokens(str(path))
    assert "canary" not in str(caught.value)


def test_a_repeated_token_is_refused(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"{line_of('t', 'a')}\n{line_of('t', 'b')}\n")
    with pytest.raises(InvalidArgument, match="same token as an earlier line"):
        read_tokens(str(path))


def test_token_comparison_takes_constant_time(monkeypatch):
    """So that the time taken reveals nothing."""
    looked = []

    def compare(one: bytes, other: bytes) -> bool:
        looked.append(one)
        return one == other

    monkeypatch.setattr("hmac.compare_digest", compare)
    tokens = StaticTokens(tuple((bytes([at]) * 32, str(at)) for at in range(5)))
    tokens.find("anything")
    assert len(looked) == 5


def test_token_command_prints_a_token_and_its_line(kvplane, tmp_path):
    code, output, _ = kvplane("token", "acme")
    token, line = output.splitlines()
    path = tmp_path / "tokens"
    path.write_text(line)
    assert code == 0
    assert read_tokens(str(path)).find(token) == "acme"


def test_added_and_removed_tokens_take_effect_at_once(tmp_path):
    with guarded(tmp_path) as world:
        world.acme.admin.Status(STATUS)
        world.guard.write_tokens("rival")
        with refusal(Unauthenticated):
            world.acme.admin.Status(STATUS)
        world.guard.write_tokens("acme", "rival")
        world.acme.admin.Status(STATUS)


def test_unusable_token_files_keep_the_previous_tokens(tmp_path, caplog):
    with guarded(tmp_path) as world:
        replace(world.guard.tokens_file, "nonsense")
        world.acme.admin.Status(STATUS)
        world.guard.tokens_file.unlink()
        world.acme.admin.Status(STATUS)
        world.guard.write_tokens("acme", "unknown")
        world.acme.admin.Status(STATUS)
        world.guard.write_owners({"acme": {"scopse": []}})
        world.acme.admin.Status(STATUS)
    assert "line 1" in caplog.text
    assert "owner 'unknown', which is not in" in caplog.text
    assert "the most similar key is scopes" in caplog.text


def test_streams_of_a_removed_token_are_ended(tmp_path):
    with guarded(tmp_path, lease_ms=100) as world:
        world.acme.register("acme/r")
        stream = world.acme.open("acme/r")
        other = world.rival
        other.register("rival/r")
        kept = other.open("rival/r")
        followed = world.acme.events.Subscribe(events_pb2.SubscribeRequest(replica="acme/r", after_seq=0))
        world.guard.write_tokens("rival", "operator")
        assert isinstance(stream.end(), Unauthenticated)
        with refusal(Unauthenticated):
            list(followed)
        assert kept.step().WhichOneof("kind") == "result"
        until(lambda: world.guard.audit_file.read_text().count("UNAUTHENTICATED") == 2)


def test_streams_end_when_their_owner_loses_the_scope(tmp_path):
    with guarded(tmp_path, lease_ms=100) as world:
        world.acme.register("acme/r")
        stream = world.acme.open("acme/r")
        world.guard.write_owners({**OWNERS, "acme": {"domains": ["gold"]}})
        assert isinstance(stream.end(), Unauthenticated)


def test_the_audit_file_is_private(tmp_path):
    guard = Guard(tmp_path)
    with running(guard.config()) as service:
        Caller(service, "token-acme").register("acme/r")
    assert stat.S_IMODE(guard.audit_file.stat().st_mode) == 0o600
