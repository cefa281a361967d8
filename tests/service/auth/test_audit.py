"""The audit log records changes and refusals with their owner, and contains no secret."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import socket
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


def audited(path) -> list[tuple[str, str, str]]:
    """Event, method, outcome of each line but the last, which says that all was written."""
    *lines, last = lines_of(path)
    assert last["event"] == "closed"
    return [(line["event"], line["method"].rpartition("/")[2], line["outcome"]) for line in lines]


def test_changes_are_audited_with_owner_and_outcome(tmp_path):
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
    assert audited(world.guard.audit_file) == [
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


def test_no_token_or_prompt_is_audited_or_logged(tmp_path, caplog):
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


def test_audit_log_works_without_owners(tmp_path):
    path = tmp_path / "audit"
    with running(Config(listen="127.0.0.1:0", audit_log=str(path))) as service:
        service.register("r")
    assert audited(path) == [("call", "RegisterReplica", "OK")]


def test_audit_log_reopens_after_rotation(tmp_path):
    path, old = tmp_path / "audit", tmp_path / "old"
    log = AuditLog(str(path), lambda: 0)
    log.record("one")
    until(lambda: "one" in path.read_text())
    path.rename(old)
    log.record("two")
    log.close()
    assert [[line["event"] for line in lines_of(file)] for file in (old, path)] == [["one"], ["two", "closed"]]


class Away:
    """An audit log whose directory is removed after its first line, so that no new file can be created."""

    def __init__(self, directory) -> None:
        self.path = directory / "logs" / "audit"
        self.path.parent.mkdir()
        self.log = AuditLog(str(self.path), lambda: 0)
        self.log.record("one")
        until(lambda: "one" in self.path.read_text())
        (self.descriptor,) = [fd for fd in map(int, os.listdir("/proc/self/fd")) if target_of(fd) == str(self.path)]
        shutil.rmtree(self.path.parent)


def target_of(descriptor: int) -> str:
    """Path of an open file; "" if it was closed meanwhile."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return ""


def errors_of(caplog) -> list[str]:
    return [entry.message for entry in caplog.records if entry.name.endswith("audit")]


def test_audit_log_without_a_file_closes_no_descriptor_of_others(tmp_path, caplog):
    away = Away(tmp_path)
    left, right = socket.socketpair()
    away.log.record("two")
    until(lambda: bool(errors_of(caplog)))
    neighbour = socket.socket(fileno=fcntl.fcntl(left, fcntl.F_DUPFD_CLOEXEC, away.descriptor))
    with left, right, neighbour:
        assert neighbour.fileno() == away.descriptor
        away.log.record("three")
        away.path.parent.mkdir()
        away.log.record("four")
        away.log.close()
        neighbour.send(b"open")
        assert right.recv(4) == b"open"
    lines = lines_of(away.path)
    lost = sum(line["count"] for line in lines if line["event"] == "lines_lost")
    assert lost >= 1
    assert lost + sum(line["event"] in ("two", "three", "four") for line in lines) == 3
    assert lines[-1]["event"] == "closed"


def test_outage_of_the_audit_log_is_logged_once(tmp_path, caplog):
    away = Away(tmp_path)
    for _ in range(5):
        away.log.record("lost")
    away.log.close()
    began, ended = errors_of(caplog)
    assert began.startswith("the audit log cannot be written, lines are lost: [Errno 2]")
    assert ended == "the audit log ends without its last lines: 6 were lost"


def test_unwritable_audit_log_fails_at_start(tmp_path):
    with pytest.raises(NotFound, match="No such file") as caught:
        AuditLog(str(tmp_path / "no" / "audit"), lambda: 0)
    assert caught.value.field == "audit_log"


def test_lost_audit_lines_are_counted(tmp_path, monkeypatch):
    """The file is a pipe without a reader yet, so the writer waits."""
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


def test_audit_log_to_standard_error(capsys):
    log = AuditLog("-", lambda: 0)
    log.record("seen", owner="acme")
    log.close()
    assert json.loads(capsys.readouterr().err.splitlines()[0])["owner"] == "acme"
