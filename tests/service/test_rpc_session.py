"""The stream of an engine over real gRPC: steps, the reasons for its end, and newer sessions."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from kvplane.base.errors import (
    DeadlineExceeded,
    InvalidArgument,
    LimitExceeded,
    NotFound,
    OtherWriter,
    ReplicaLapsed,
    SequenceError,
    StaleEpoch,
)
from kvplane.v1 import allocation_pb2 as pb
from kvplane.v1.replica_pb2 import AlignSpec, GroupSpec, ReplicaSpec
from kvplane_service.config import Config
from kvplane_service.replicas.engine_lives import EngineLives
from kvplane_service.replicas.sessions import SILENT_MS
from kvplane_service.rpc.methods import CallHooks, Context, stream_method
from tests.service import http2
from tests.service.auth.attacks import SESSION, Connection, Tally
from tests.service.rig import NONCES, SPEC, WAIT_S, Stream, column, refusal, running, until

ADMIT = {
    "news": {"slot": column(0), "num_tokens": column(40), "tokens": column(*range(40))},
    "admit": {"slot": column(0)},
}


@pytest.fixture(scope="module")
def process():
    with running() as service:
        yield service


@pytest.fixture
def service(process):
    process.register()
    yield process
    process.allocation.DeregisterReplica(pb.DeregisterReplicaRequest(replica="r"))


class TestSteps:
    def test_a_step_is_answered(self, service):
        stream = service.open()
        answer = stream.step(ADMIT)
        assert answer.result.seq == 1
        assert answer.result.parts[0].admit_granted == column(40)
        assert stream.close().WhichOneof("kind") == "closed"
        assert stream.end() is None
        assert service.state() == "IDLE"

    def test_events_are_answered_when_requested(self, service):
        stream = service.open(with_events=True)
        assert len(stream.step(ADMIT).result.parts[0].events) == 2
        stream.close()

    @pytest.mark.parametrize(
        ("part", "fields", "reason", "field"),
        [
            ({"facts": {"slot": b"abc"}}, {}, "INVALID_ARGUMENT", "parts[0].facts.slot"),
            ({"run": {"slot": column(0), "cap": column(1, 2)}}, {}, "INVALID_ARGUMENT", "parts[0].run.cap"),
            ({"admit": {"slot": column(7)}}, {}, "INVALID_ARGUMENT", "parts[0].admit.slot[0]"),
            ({"run": {"slot": column(0, 0)}}, {}, "INVALID_ARGUMENT", "parts[0].run.slot"),
            ({"news": {"slot": column(0), "num_tokens": column(1), "tokens": column(1)}}, {}, "INVALID_ARGUMENT", None),
            (
                {"facts": {"slot": column(0), "appended": column(2000), "tokens": column(*[1] * 2000)}},
                {},
                "INVALID_ARGUMENT",
                "parts[0].facts.appended[0]",
            ),
            ({"facts": {"slot": column(0), "computed": column(-2)}}, {}, "INVALID_ARGUMENT", None),
            ({"run": {"slot": column(0), "lookahead": column(2**32 - 1)}}, {}, "INVALID_ARGUMENT", None),
            ({"cache": {"evicted": column(41)}}, {}, "INVALID_ARGUMENT", "parts[0].cache.evicted[0]"),
            ({"peek": {"slot": column(*[0] * 10_000)}}, {}, "LIMIT_EXCEEDED", "parts"),
            ({}, {"seq": 9}, "SEQUENCE_ERROR", "seq"),
            ({}, {"seq": 0}, "SEQUENCE_ERROR", "seq"),
            ({}, {"executed_through": 9}, "INVALID_ARGUMENT", "executed_through"),
        ],
    )
    def test_a_refused_step_changes_nothing_and_the_stream_continues(self, service, part, fields, reason, field):
        stream = service.open()
        stream.step(ADMIT)
        before = service.digest()
        error = stream.refused(part, **fields)
        assert (error.reason, bool(error.message)) == (reason, True)
        if field is not None:
            assert error.field == field
        assert service.digest() == before
        assert stream.step({"run": {"slot": column(0)}}).result.seq == 2
        stream.close()

    def test_a_repeated_step_is_answered_from_the_store(self, service):
        stream = service.open()
        first = stream.step(ADMIT)
        before = service.digest()
        assert stream.step(ADMIT, seq=1, executed_through=0) == first
        assert service.digest() == before
        stream.seq = 1
        assert stream.refused({}, seq=1).reason == SequenceError.reason
        stream.close()

    def test_steps_are_answered_in_order(self, service):
        stream = service.open()
        for seq in range(1, 5):
            stream.send(step={"epoch": stream.opened.epoch, "seq": seq, "parts": [{}]})
        assert [stream.receive().result.seq for _ in range(4)] == [1, 2, 3, 4]
        stream.send(step={"epoch": stream.opened.epoch, "seq": 5, "parts": [{}]})
        assert stream.receive().error.reason == LimitExceeded.reason
        stream.close()


class TestEnds:
    @pytest.mark.parametrize(
        ("first", "kind", "field"),
        [
            ({"open": {"replica": "unknown", "nonce": 1}}, NotFound, "replica"),
            ({"open": {"replica": "r", "nonce": 1, "epoch": 5}}, InvalidArgument, "life_nonce"),
            ({"open": {"replica": "r", "nonce": 1, "epoch": 5, "life_nonce": 1}}, StaleEpoch, "epoch"),
            ({"open": {"replica": "r", "nonce": 1, "stamp_table": b"abc"}}, InvalidArgument, "open.stamp_table"),
            ({"open": {"replica": "r", "nonce": 1, "stamp_table": bytes(8)}}, InvalidArgument, "stamp_table"),
            ({"heartbeat": {}}, InvalidArgument, "kind"),
            ({"step": {"seq": 1}}, InvalidArgument, "kind"),
            ({}, InvalidArgument, "kind"),
        ],
    )
    def test_an_invalid_open_ends_the_stream_and_changes_nothing(self, service, first, kind, field):
        before = service.digest()
        stream = Stream(service.channel)
        stream.send(**first)
        error = stream.end()
        assert isinstance(error, kind)
        assert error.field == field
        assert service.digest() == before
        assert service.state() == "IDLE"

    def test_a_stream_without_open_is_refused(self, service):
        stream = Stream(service.channel)
        stream.finish()
        assert isinstance(stream.end(), InvalidArgument)

    @pytest.mark.parametrize("message", [{"open": {"replica": "r"}}, {}])
    def test_a_message_out_of_place_ends_the_stream(self, service, message):
        stream = service.open()
        stream.send(**message)
        error = stream.end()
        assert isinstance(error, InvalidArgument)
        assert error.field == "kind"

    def test_invalid_bytes_end_the_stream(self, service):
        stream = service.open()
        before = service.digest()
        stream.send_raw(b"\xff\xff")
        assert isinstance(stream.end(), InvalidArgument)
        assert service.digest() == before
        assert service.state() == "LAPSED"

    def test_a_step_of_a_stale_epoch_ends_the_stream(self, service):
        stream = service.open()
        stream.send(step={"epoch": 1, "seq": 1, "parts": [{}]})
        error = stream.end()
        assert isinstance(error, StaleEpoch)
        assert error.metadata == {"epoch": "2"}

    def test_a_deregistered_replica_ends_its_session(self, process):
        process.register("gone")
        stream = process.open("gone")
        process.allocation.DeregisterReplica(pb.DeregisterReplicaRequest(replica="gone"))
        assert isinstance(stream.end(), NotFound)

    def test_a_half_close_leaves_a_lapsed_replica(self, service):
        stream = service.open()
        stream.finish()
        assert stream.end() is None
        assert service.state() == "LAPSED"


class TestReplacedAndBrokenSessions:
    def test_a_newer_session_ends_the_older_stream_with_a_reason(self, service):
        older = service.open()
        older.step(ADMIT)
        newer = service.open()
        assert isinstance(older.end(), OtherWriter)
        assert newer.step(ADMIT).result.seq == 1
        assert service.state() == "LIVE"
        newer.close()

    def test_a_replaced_session_is_ended_while_it_is_busy(self, service):
        older = service.open()
        for seq in range(1, 200):
            older.send(step={"epoch": older.opened.epoch, "seq": seq, "executed_through": seq - 1, "parts": [{}]})
        newer = service.open()
        assert isinstance(older.end(), OtherWriter)
        assert newer.step().result.seq == 1
        newer.close()

    def test_a_vanished_client_leaves_a_lapsed_replica(self, service):
        stream = service.open()
        stream.step(ADMIT)
        stream.send(step={"epoch": stream.opened.epoch, "seq": 2, "executed_through": 1, "more": True, "parts": [{}]})
        stream.receive()
        stream.vanish()
        until(lambda: service.state() == "LAPSED")
        assert service.describe().running_requests == 1
        resumed = service.open(epoch=stream.opened.epoch, life_nonce=stream.nonce)
        assert (resumed.opened.seq, resumed.opened.next_part) == (1, 1)
        assert service.state() == "LIVE"
        resumed.vanish()
        until(lambda: service.state() == "LAPSED")
        new = service.open()
        assert (new.opened.epoch, new.opened.free_blocks) == (stream.opened.epoch + 1, 40)
        new.close()

    def test_a_broken_connection_leaves_a_lapsed_replica(self, service):
        other = type(service)(service.app, service.address, service.loop)
        other.open().step(ADMIT)
        other.channel.close()
        until(lambda: service.state() == "LAPSED")


def test_silence_lapses_a_session_and_a_heartbeat_restores_it():
    now = [0]
    with running(Config(listen="127.0.0.1:0", lease_ms=1000), clock=lambda: now[0]) as service:
        service.register()
        stream = service.open()
        now[0] += 1_000_000_001
        assert service.state() == "LAPSED"
        stream.send(heartbeat={})
        until(lambda: service.state() == "LIVE")


def test_a_session_of_which_a_part_of_a_message_arrives_ends():
    now, end_ns = [0], (1000 + SILENT_MS) * 1_000_000
    with running(Config(listen="127.0.0.1:0", lease_ms=1000), clock=lambda: now[0]) as service:
        service.register()

        async def hold_a_part() -> None:
            one = Connection(Tally())
            await one.connect(service.address)
            stream = one.call(SESSION)
            opening = pb.SessionRequest(open={"replica": "r", "nonce": next(NONCES)})
            await one.send(stream, http2.message(opening.SerializeToString()), end=False)
            await one.send(stream, http2.message(bytes(1 << 20))[:-1], end=False)
            while one.open:
                now[0] += 500_000_000
                await asyncio.sleep(0.1)
            await one.close()

        asyncio.run(asyncio.wait_for(hold_a_part(), WAIT_S))
        assert now[0] > end_ns
        assert service.state() == "LAPSED"


def test_a_session_that_was_silent_can_be_opened_again():
    now = [0]
    with running(Config(listen="127.0.0.1:0", lease_ms=1000), clock=lambda: now[0]) as service:
        service.register()
        silent = service.open()
        silent.step(ADMIT)
        now[0] += (1000 + SILENT_MS + 10) * 1_000_000
        error = silent.end()
        assert isinstance(error, DeadlineExceeded)
        assert "no whole message" in error.message
        assert service.open(epoch=silent.opened.epoch, life_nonce=silent.nonce).opened.seq == 1


def test_a_message_beyond_the_limit_ends_the_stream_and_changes_nothing():
    with running(Config(listen="127.0.0.1:0", max_message_bytes=1 << 16)) as service:
        service.register()
        stream = service.open()
        before = service.digest()
        stream.send(step={"epoch": 2, "seq": 1, "parts": [{"peek": {"slot": bytes(1 << 16)}}]})
        assert isinstance(stream.end(), LimitExceeded)
        assert service.digest() == before
        until(lambda: service.state() == "LAPSED")


def test_a_service_on_a_unix_socket(tmp_path):
    with running(Config(listen=f"unix:{tmp_path}/s")) as service:
        service.register()
        assert service.open().step(ADMIT).result.seq == 1


class TestSlowOpening:
    """A pool that takes until `may_begin` to be gone through."""

    @pytest.fixture
    def may_begin(self, monkeypatch):
        may_begin, real = threading.Event(), EngineLives.begin

        def begin(self, *given):
            while not may_begin.is_set():
                yield
            yield from real(self, *given)

        monkeypatch.setattr(EngineLives, "begin", begin)
        return may_begin

    def ask(self, service):
        stream = Stream(service.channel)
        stream.send(open={"replica": "r", "nonce": next(NONCES)})
        until(lambda: service.state() == "OPENING")
        return stream

    def test_slow_opening_blocks_reads_of_its_replica_only(self, service, may_begin):
        stream = self.ask(service)
        service.register("other")
        with refusal(ReplicaLapsed) as refused:
            content = pb.RequestContent(token_ids=[1, 2, 3])
            service.allocation.FindCacheHit(pb.FindCacheHitRequest(replica="r", content=content))
        assert "is beginning a new life" in str(refused[0])
        may_begin.set()
        assert stream.receive().opened.epoch > 1
        assert service.open("other").step().WhichOneof("kind") == "result"

    def test_slow_opening_stops_when_the_caller_is_gone(self, service, may_begin):
        self.ask(service).vanish()
        until(lambda: service.state() == "IDLE")
        may_begin.set()
        assert service.open().opened.epoch == 2, "no life was begun for it"

    def test_the_older_of_two_slow_openings_is_refused_by_name(self, service, may_begin):
        older = self.ask(service)
        newer = self.ask(service)
        assert isinstance(older.end(), OtherWriter)
        may_begin.set()
        assert newer.receive().opened.epoch == 2

    def test_slow_opening_of_a_removed_replica_is_refused(self, service, may_begin):
        stream = self.ask(service)
        service.allocation.DeregisterReplica(pb.DeregisterReplicaRequest(replica="r"))
        assert isinstance(stream.end(), NotFound)
        service.register()


SPLIT = ReplicaSpec(
    groups=[
        GroupSpec(kind="GROUP_KIND_MAMBA", block_size=64, mamba_mode="MAMBA_MODE_ALIGN", lookup_class=1),
        GroupSpec(kind="GROUP_KIND_FULL_ATTENTION", block_size=16),
    ],
    num_blocks=60,
    max_model_len=1024,
    hash_block_size=16,
    scheduler_block_size=64,
    max_in_flight_tokens=256,
    partial_hits=True,
    align=AlignSpec(block_size=64, chunk_limit=4096, stop_at_tail=True),
    blocks_per_state=4,
)


@pytest.mark.parametrize("spec", [SPEC, SPLIT], ids=["blocks", "split pages"])
def test_an_operators_call_goes_with_the_next_step_of_the_engine(service, spec):
    name = f"split-{spec.blocks_per_state}"
    service.register(name, spec)
    stream = service.open(name)
    calls = [
        (service.allocation.EvictBlocks, pb.EvictBlocksRequest(header={"replica": name}, block_ids=[20])),
        (service.allocation.ResetPrefixCache, pb.ResetPrefixCacheRequest(header={"replica": name})),
    ]
    for call, request in calls:
        asked = call.future(request, timeout=WAIT_S)
        until(lambda: service.in_loop(lambda: len(service.app.registry.get(name).host.mirror.requests._waiting) == 1))
        assert stream.step({}).WhichOneof("kind") == "result"
        asked.result()
    stream.finish()


async def test_a_client_that_goes_while_it_is_answered_is_no_fault_of_the_service(caplog):
    """On a busy machine gRPC reports that a client has gone after a write to it failed."""

    class Gone:
        async def write(self, raw: bytes) -> None:
            raise grpc.aio.InternalError("Failed execute_batch")

    async def answer(context: Any) -> None:
        await context.write(b"")

    async def ensure_local(_: str) -> None:
        raise AssertionError("no replica is named")

    method = pb.DESCRIPTOR.services_by_name["Allocation"].methods_by_name["Session"]
    session = stream_method("kvplane.v1.Allocation", method, SimpleNamespace(Session=answer), CallHooks(ensure_local))
    with pytest.raises(asyncio.CancelledError):
        await session(None, cast(Context, Gone()))
    assert not caplog.records
