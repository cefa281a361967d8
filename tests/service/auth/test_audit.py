"""The audit log: who changed what, who was refused; never a secret."""

from __future__ import annotations

import json
import logging
import os
import threading
from typing import Any

import grpc
import pytest

from kvplane.base.errors import NotFound
from kvplane.v1 import admin_pb2
from kvplane.v1 import allocation_pb2 as pb
from kvplane_service.auth.audit import AuditLog
from kvplane_service.config import Config
from tests.service.guarded import Caller, guarded
from tests.service.rig import column, running, until

CANARY = "canary-7f3a"
PROMPT = [777001, 777002, 777003]


def lines_of(path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def told(path) -> list[tuple[str, str, str]]:
    """Event, method, outcome of each line but the last, which says that all was written."""
    *lines, last = lines_of(path)
    assert last["event"] == "closed"
    return [(line["event"], line["method"].rpartition("/")[2], line["outcome"]) for line in lines]


def test_what_changes_something_is_told_with_who_and_how_it_ended(tmp_path):
    with guarded(tmp_path) as world:
        world.acme.register("acme/r")
        world.acme.describe("acme/r")
        stream = world.acme.open("acme/r")
        stream.step()
        stream.close()
        with pytest.raises(grpc.RpcError):
            world.rival.describe("acme/r")
        with pytest.raises(grpc.RpcError):
            world.rival.admin.Drain(admin_pb2.DrainRequest())
        world.acme.allocation.DeregisterReplica(pb.DeregisterReplicaRequest(replica="acme/r"))
    assert told(world.guard.audit_file) == [
        ("call", "RegisterReplica", "OK"),
        ("session_opened", "Session", "OK"),
        ("session_closed", "Session", "OK"),
        ("refused", "DescribeReplica", "NOT_FOUND"),
        ("refused", "Drain", "PERMISSION_DENIED"),
        ("call", "DeregisterReplica", "OK"),
    ]
    first = lines_of(world.guard.audit_file)[0]
    assert (first["owner"], first["replica"]) == ("acme", "acme/r")
    assert first["peer"].startswith("ipv4:127.0.0.1:")
    assert first["time"].endswith("+00:00")


def test_no_token_and_no_prompt_is_ever_told_or_logged(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    with guarded(tmp_path) as world:
        thief = Caller(world.service, CANARY)
        for caller in (thief, Caller(world.service, f"a.{CANARY}.c")):
            with pytest.raises(grpc.RpcError) as raised:
                caller.register("acme/r")
            assert CANARY not in str(raised.value)
        world.acme.register("acme/r")
        stream = world.acme.open("acme/r")
        news = {"slot": column(0), "num_tokens": column(3), "tokens": column(*PROMPT), "domain": [CANARY]}
        assert stream.refused({"news": news}).reason == "PERMISSION_DENIED"
        stream.step({"news": {**news, "domain": [""], "request_id": [CANARY]}, "admit": {"slot": column(0)}})
        content = {"token_ids": PROMPT, "extra_keys": {"salt": CANARY}}
        world.acme.allocation.FindCacheHit(pb.FindCacheHitRequest(replica="acme/r", content=content))
        stream.close()
        with pytest.raises(grpc.RpcError):
            world.acme.describe(f"{CANARY}\n\x00")
    text = world.guard.audit_file.read_text()
    assert "PERMISSION_DENIED" in text
    for secret in (CANARY, "777001", "token-acme"):
        assert secret not in text
        assert secret not in caplog.text


def test_it_is_kept_without_owners_too(tmp_path):
    path = tmp_path / "audit"
    with running(Config(listen="127.0.0.1:0", audit_log=str(path))) as service:
        service.register("r")
    assert told(path) == [("call", "RegisterReplica", "OK")]


def test_a_file_that_was_moved_away_is_followed_by_a_new_one(tmp_path):
    path, old = tmp_path / "audit", tmp_path / "old"
    log = AuditLog(str(path), lambda: 0)
    log.record("one")
    until(lambda: "one" in path.read_text())
    path.rename(old)
    log.record("two")
    log.close()
    assert [[line["event"] for line in lines_of(file)] for file in (old, path)] == [["one"], ["two", "closed"]]


def test_a_place_that_cannot_be_written_is_named_at_the_start(tmp_path):
    with pytest.raises(NotFound, match="No such file") as caught:
        AuditLog(str(tmp_path / "no" / "audit"), lambda: 0)
    assert caught.value.field == "audit_log"


def test_lines_that_find_no_room_are_counted(tmp_path, monkeypatch):
    """The file is a pipe that nobody reads yet, so the writer waits."""
    monkeypatch.setattr("kvplane_service.auth.audit.MAX_WAITING", 2)
    path = tmp_path / "audit"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    log = AuditLog(str(path), lambda: 0)
    for at in range(5000):
        log.record("event", text="x" * 1000, at=at + 1)
    os.set_blocking(reader, True)
    closing = threading.Thread(target=log.close)
    closing.start()
    read = b""
    while part := os.read(reader, 1 << 20):
        read += part
    closing.join()
    os.close(reader)
    lines = [json.loads(line) for line in read.decode().splitlines()]
    lost = sum(line["count"] for line in lines if line["event"] == "lines_lost")
    assert lost
    assert lost + sum(line["event"] == "event" for line in lines) == 5000


def test_standard_error_is_a_place(capsys):
    log = AuditLog("-", lambda: 0)
    log.record("seen", owner="acme")
    log.close()
    assert json.loads(capsys.readouterr().err.splitlines()[0])["owner"] == "acme"
