"""Commands that list requests, look prompts up and change a replica, on a running service."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager

import grpc
import pytest

from kvplane import AdmitRow, Content, FactRow, NewsRow, connect, part_of
from kvplane.base.errors import Unavailable
from kvplane.base.requests import Allocate, Commit
from kvplane.base.step import End
from kvplane.v1 import allocation_pb2 as pb
from kvplane_service.config import Config
from tests.service.auth.test_audit import lines_of
from tests.service.guarded import guarded
from tests.service.rig import column, running, until

PROMPT = list(range(100, 164))


@pytest.fixture
def service():
    with running(Config(listen="127.0.0.1:0")) as service:
        service.register()
        service.register("empty")
        yield service


@contextmanager
def stepping(session, *parts):
    """An engine that runs these parts, and then empty steps until the end of the block."""
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            session.apply(part_of())
            time.sleep(0.001)

    for part in parts:
        session.apply(part)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def admitted(slot: int, name: str, tokens=PROMPT):
    return part_of(NewsRow(slot, tokens=tokens, request_id=name), AdmitRow(slot))


@pytest.fixture
def tokens(tmp_path):
    file = tmp_path / "tokens"
    file.write_text(" ".join(map(str, PROMPT)))
    return str(file)


def test_requests_lists_who_holds_most_blocks_first(service, kvplane):
    with connect(service.address) as client, client.session("r") as session:
        session.apply(admitted(0, "short", [7] * 20))
        session.apply(admitted(1, "long", [8] * 90))
        session.apply(part_of(NewsRow(2, tokens=[9] * 20, request_id="waits")))
        held = part_of(NewsRow(3, tokens=[6] * 50, request_id="sent"), AdmitRow(3))
        session.apply(held)
        session.apply(part_of(FactRow(3, end=End.HELD)))
        code, out, _ = kvplane("requests", "r", "--service", service.address)
        assert code == 0
        rows = [line.split() for line in out.splitlines()]
        assert rows[0] == ["REQUEST", "SLOT", "STATE", "BLOCKS", "COMPUTED", "OF", "TOKENS"]
        assert [row[:3] for row in rows[1:]] == [
            ["long", "1", "running"],
            ["sent", "3", "held"],
            ["short", "0", "running"],
            ["waits", "2", "waiting"],
        ]
        state = {one.slot: one for one in client.snapshot("r").requests}
        for row in rows[1:]:
            tables = state[int(row[1])].tables if row[2] == "running" else ()
            blocks = sum(1 for table in tables for block in table.block_ids if block)
            assert int(row[3]) == blocks or row[2] == "held"
        _, out, _ = kvplane("requests", "r", "--limit", "1", "-o", "wide", "--service", service.address)
        assert out.splitlines()[0].endswith("BY GROUP")
        assert out.splitlines()[-1] == "3 more: --limit"
        _, out, _ = kvplane("requests", "r", "-o", "name", "--service", service.address)
        assert out.split() == ["long", "sent", "short", "waits"]


def test_lookup_finds_the_replica_with_most_of_a_prompt(service, kvplane, tokens):
    service.register("half")
    service.register("gone")
    address = ("--service", service.address)
    with connect(service.address) as client:
        service.open("gone").vanish()
        until(lambda: service.state("gone") == "LAPSED")
        for name, count in (("r", 64), ("half", 32)):
            client.allocate_slots(name, Allocate("q", Content(token_ids=PROMPT[:count])))
            client.commit_blocks(name, Commit("q", computed_tokens=count, commit_tokens=count))
        code, out, _ = kvplane("lookup", "--tokens", tokens, "--service", service.address)
        assert code == 0
        rows = [line.split()[:3] for line in out.splitlines()]
        assert rows[1][0] == "r"
        assert rows[2][0] == "half"
        assert int(rows[1][1]) > int(rows[2][1]) > 0
        assert "the engine of gone is gone or silent" in out
        _, out, _ = kvplane("lookup", "--tokens", tokens, "-o", "name", "--service", service.address)
        assert out.split() == ["r", "half"]
        _, out, _ = kvplane("lookup", "--tokens", tokens, "-o", "jsonpath={.hits[0].replica}", *address)
        assert out == "r\n"
        code, _, errors = kvplane("lookup", "gone", "--tokens", tokens, "--service", service.address)
        assert code == 1
        assert "gone or silent" in errors
        code, _, errors = kvplane("lookup", "--service", service.address)
        assert code == 2
        assert "--tokens" in errors


def test_a_change_prints_what_is_lost_and_needs_a_yes(service, kvplane):
    address = ("--service", service.address)
    for words in (("deregister", "r"), ("reset", "r"), ("evict", "r", "1")):
        before = service.digest()
        code, out, errors = kvplane(*words, *address)
        assert code == 2
        assert "  lost: " in out
        assert "not confirmed" in errors
        assert "--yes" in errors
        assert service.digest() == before
    code, out, _ = kvplane("deregister", "r", "--yes", *address)
    assert code == 0
    assert out.splitlines()[-1] == "r: deregistered"
    assert kvplane("describe", "r", *address)[0] == 2


def test_a_live_replica_is_changed_in_a_step_of_its_engine(service, kvplane, tokens):
    address = ("--service", service.address)
    with connect(service.address) as client, client.session("r") as session:
        with stepping(session, admitted(0, "first")):
            code, out, errors = kvplane("reset", "r", "--yes", *address)
            assert code == 1
            assert "requests hold blocks of r" in errors
            code, out, _ = kvplane("evict", "r", "--tokens", tokens, "--yes", *address)
            assert code == 0
            assert "keys removed, in step " in out
            assert not out.splitlines()[-1].startswith("r: 0 keys")
            assert kvplane("evict", "r", "--tokens", tokens, "--yes", *address)[1] == "r: the prompt hits nothing\n"
        session.apply(part_of(FactRow(0, end=End.FREE)))
        with stepping(session, admitted(1, "second"), part_of(FactRow(1, end=End.FREE))):
            assert client.find_cache_hit("r", Content(token_ids=PROMPT)).hit_tokens
            assert kvplane("reset", "r", "--yes", *address)[:2][0] == 0
            assert client.find_cache_hit("r", Content(token_ids=PROMPT)).hit_tokens == 0
    code, out, _ = kvplane("snapshot", "r", *address)
    assert code == 0
    assert "every invariant holds; 0 keys" in out


def test_an_engine_that_runs_no_step_is_named_and_nothing_is_lost(service, kvplane, monkeypatch):
    monkeypatch.setattr("kvplane_service.replicas.cache_requests.TIMEOUT_S", 0.05)
    with connect(service.address) as client, client.session("r") as session:
        session.apply(admitted(0, "first"))
        before = service.digest()
        code, _, errors = kvplane("evict", "r", "1", "--yes", "--service", service.address)
        assert code == 3
        assert "has run no step within 0.05 s, and only its ranks can write the stamps" in errors
        assert "nothing was changed" in errors
        assert "--wait" in errors
        assert service.digest() == before
        session.apply(part_of())  # an expired request is not carried out later
        assert len(service.app.registry.get("r").host.decisions) == 3
        assert service.describe().counters.steps == 2


def test_wait_lasts_until_the_engine_runs_a_step(service, kvplane, monkeypatch):
    monkeypatch.setattr("kvplane_service.replicas.cache_requests.TIMEOUT_S", 0.05)
    requests = service.app.registry.get("r").host.mirror.requests
    late: list[str] = []
    with connect(service.address) as client, client.session("r") as session:
        session.apply(admitted(0, "first"))
        session.apply(part_of(FactRow(0, end=End.FREE)))
        ask = requests.ask

        async def ask_and_step(name, cache):
            try:
                return await ask(name, cache)
            except Unavailable:
                late.append(name)
                if len(late) == 3:
                    monkeypatch.setattr("kvplane_service.replicas.cache_requests.TIMEOUT_S", 10)
                    threading.Timer(0.1, session.apply, [part_of()]).start()
                raise

        monkeypatch.setattr(requests, "ask", ask_and_step)
        code, out, errors = kvplane("reset", "r", "--yes", "--wait", "--service", service.address)
        assert (code, out.splitlines()[-1]) == (0, "r: the prefix cache is empty")
        assert errors.splitlines()[0] == "the engine runs no step: waiting"
        assert len(late) >= 3


def test_no_block_is_evicted_after_the_engine_has_left(service, kvplane):
    """It would begin an engine life that keeps no key."""
    address = ("--service", service.address)
    with connect(service.address) as client, client.session("r") as session:
        session.apply(admitted(0, "first"))
        session.apply(part_of(FactRow(0, end=End.FREE)))
    before = service.digest()
    code, _, errors = kvplane("evict", "r", "1", "--yes", *address)
    assert (code, service.digest()) == (1, before)
    assert "an eviction would remove every key" in errors
    code, out, _ = kvplane("reset", "r", "--yes", *address)
    assert (code, out.splitlines()[-1]) == (0, "r: the prefix cache is empty")
    assert "lost: 6 keys" in out
    assert kvplane("evict", "r", "1", "--yes", *address)[0] == 0  # the life of unary calls


def test_a_repeated_step_carries_a_change_out_once(service):
    stream = service.open()
    answers: list[pb.EvictBlocksResponse] = []
    header = pb.MutationHeader(replica="r")
    evict = service.allocation.EvictBlocks.future(pb.EvictBlocksRequest(header=header, block_ids=[1]))
    host = service.app.registry.get("r").host
    until(lambda: host.mirror.requests.want_step(time.monotonic_ns))
    news = {"slot": column(0), "num_tokens": column(3), "tokens": column(1, 2, 3)}
    first = stream.step({"news": news, "admit": {"slot": column(0)}})
    answers.append(evict.result(10))
    stream.seq -= 1
    assert stream.step({"news": news, "admit": {"slot": column(0)}}) == first
    assert answers[0].result.seq == 1
    assert len([entry for entry in host.decisions if hasattr(entry, "step")]) == 1


def test_a_live_replica_is_changed_by_operators_only_and_audited(tmp_path):
    with guarded(tmp_path) as world:
        world.acme.register("acme/r")
        stream = world.acme.open("acme/r")
        header = pb.MutationHeader(replica="acme/r")
        changes = (
            lambda caller: caller.allocation.EvictBlocks(pb.EvictBlocksRequest(header=header, block_ids=[1])),
            lambda caller: caller.allocation.ResetPrefixCache(pb.ResetPrefixCacheRequest(header=header)),
            lambda caller: caller.allocation.DeregisterReplica(pb.DeregisterReplicaRequest(replica="acme/r")),
        )
        for change in changes:
            with pytest.raises(grpc.RpcError) as raised:
                change(world.acme)
            assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
        stream.send(close={})
        assert stream.receive().WhichOneof("kind") == "closed"
        changes[2](world.acme)  # its session is closed
    lines = [(line.get("owner"), line.get("method", "").rpartition("/")[2], line.get("outcome"))
             for line in lines_of(world.guard.audit_file)]  # fmt: skip
    for method in ("EvictBlocks", "ResetPrefixCache", "DeregisterReplica"):
        assert ("acme", method, "PERMISSION_DENIED") in lines
    assert ("acme", "DeregisterReplica", "OK") in lines


def test_output_formats_of_tables(service, kvplane):
    address = ("--service", service.address)
    assert kvplane("replicas", "-o", "name", *address)[1].split() == ["empty", "r"]
    wide = kvplane("replicas", "-o", "wide", *address)[1].splitlines()
    assert wide[0].split()[-6:] == ["PREEMPTED", "WORKERS", "STORE", "EPOCH", "AGE", "MODEL"]
    assert kvplane("replicas", "-o", "jsonpath=replicas[*].num_blocks", *address)[1].split() == ["41", "41"]
    assert json.loads(kvplane("status", "-o", "jsonpath=replicas", *address)[1]) == 2
    for wrong in ("xml", "jsonpath", "jsonpath=a b", "jsonpath=nothing", "name=r"):
        code, out, errors = kvplane("status", "-o", wrong, *address)
        assert (code, out) == (2, "")
        assert "--output" in errors
    assert kvplane("status", "-o", "name", *address)[0] == 2


def test_watch_repeats_until_the_service_ends(service, kvplane, monkeypatch):
    pauses = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("kvplane_tools.cli.output.time.sleep", sleep)
    code, out, _ = kvplane("replicas", "--watch", "7", "--service", service.address)
    assert code == 130
    assert pauses == [7.0] * 3
    assert out.count("REPLICA") == 3
