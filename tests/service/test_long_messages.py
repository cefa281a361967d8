"""Long messages are parsed, and long steps and unary calls applied, on a thread: over real gRPC."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager

import grpc
import pytest

from kvplane.base.errors import NotFound, OtherWriter
from kvplane.v1 import admin_pb2
from kvplane.v1 import allocation_pb2 as pb
from kvplane.wire.parsing import parse
from kvplane_service.replicas import applying
from kvplane_service.rpc import methods, session
from kvplane_service.runtime.executors import Executor
from tests.service.rig import NONCES, WAIT_S, HeldThread, Stream, column, error_of, held_thread, running, until
from tests.service.test_applying import session_of

TOKENS = 40
ALLOCATE = "/kvplane.v1.Allocation/AllocateSlots"
ADMIT = {
    "news": {"slot": column(0), "num_tokens": column(TOKENS), "tokens": column(*range(TOKENS))},
    "admit": {"slot": column(0)},
}


@pytest.fixture(scope="module")
def process():
    with running() as service:
        yield service


@pytest.fixture
def service(process, monkeypatch):
    monkeypatch.setattr(session, "LONG_MESSAGE_BYTES", 100)
    monkeypatch.setattr(methods, "LONG_MESSAGE_BYTES", 30)
    monkeypatch.setattr(applying, "MOST_INLINE_NS", 150)
    process.register()
    process.register("other")
    yield process
    for name in ("r", "other"):
        process.allocation.DeregisterReplica(pb.DeregisterReplicaRequest(replica=name))


@pytest.fixture
def held(service):
    with held_thread() as held:
        yield held


def send(stream, seq, part):
    stream.send(step={"epoch": stream.opened.epoch, "seq": seq, "parts": [part], "executed_through": max(0, seq - 3)})


def test_long_and_short_messages_are_answered_in_order(service):
    stream = service.open()
    end = {"facts": {"slot": column(0), "end": column(1)}}
    for seq, part in enumerate((ADMIT, end, ADMIT, {}), 1):
        send(stream, seq, part)
    answers = [stream.receive().result for _ in range(4)]
    assert [answer.seq for answer in answers] == [1, 2, 3, 4]
    assert [bool(answer.parts[0].admit_granted) for answer in answers] == [True, False, True, False]
    stream.close()


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"facts": {"slot": b"abc"}, "cache": {"evicted": column(*[1] * 50)}}, "parts[0].facts.slot"),
        ({"cache": {"evicted": column(*[1] * 50, 99)}}, "parts[0].cache.evicted[50]"),
        ({"news": {**ADMIT["news"], "num_tokens": column(9)}}, "parts[0].news.tokens"),
    ],
)
def test_a_refused_long_message_changes_nothing_and_the_session_continues(service, part, field):
    stream = service.open()
    stream.step(ADMIT)
    before = service.digest()
    assert stream.refused(part).field == field
    assert service.digest() == before
    assert stream.step({"run": {"slot": column(0)}}).result.seq == 2
    stream.close()


def test_a_repeat_of_a_long_step_gets_the_stored_answer(service):
    stream = service.open()
    first = stream.step(ADMIT)
    assert stream.step(ADMIT, seq=1, executed_through=0) == first
    stream.close()


def test_others_are_served_while_a_long_step_is_applied(service, held):
    stream, other = service.open(), service.open("other")
    send(stream, 1, ADMIT)
    assert held.began.wait(WAIT_S)
    assert other.step({}).result.seq == 1
    assert service.allocation.ListReplicas(pb.ListReplicasRequest()).replicas
    asked = service.allocation.FindCacheHit.future(
        pb.FindCacheHitRequest(replica="r", content={"token_ids": range(TOKENS)})
    )
    assert other.step({}).result.seq == 2
    assert not asked.done()
    held.go_on.set()
    assert asked.result(WAIT_S).num_tokens == TOKENS
    assert stream.receive().result.parts[0].admit_granted == column(TOKENS)
    stream.close(), other.close()


@pytest.mark.parametrize("what", [{"request_id": "a"}, {"content": {"token_ids": range(TOKENS)}}])
def test_an_explanation_of_another_replica_does_not_wait_for_a_long_step(service, held, what):
    stream, other = service.open(), service.open("other")
    held.go_on.set()
    for one in (stream, other):
        one.step({**ADMIT, "news": {**ADMIT["news"], "request_id": ["a"]}})
    held.go_on.clear(), held.began.clear()
    send(stream, 2, {"facts": {"slot": column(0), "end": column(1)}, **ADMIT})
    assert held.began.wait(WAIT_S)
    waiting = service.admin.Explain.future(admin_pb2.ExplainRequest(replica="r", **what))
    for _ in range(3):  # each begins after the one that waits
        assert service.admin.Explain(admin_pb2.ExplainRequest(replica="other", **what)).num_tokens == TOKENS
    assert not waiting.done()
    held.go_on.set()
    assert waiting.result(WAIT_S).num_tokens == TOKENS
    assert stream.receive().result.seq == 2
    stream.close(), other.close()


def test_a_session_that_breaks_off_in_a_long_step_finds_it_applied(service, held):
    stream = service.open()
    send(stream, 1, ADMIT)
    assert held.began.wait(WAIT_S)
    stream.vanish()
    until(lambda: service.in_loop(lambda: not service.app.registry.get("r").host.lease_left_ns))
    held.go_on.set()
    again = service.open(epoch=stream.opened.epoch, life_nonce=stream.nonce)
    assert again.opened.seq == 1
    assert again.step(ADMIT, seq=1, executed_through=0).result.parts[0].admit_granted == column(TOKENS)
    again.close()


def test_a_newer_session_waits_for_a_long_step(service, held):
    stream = service.open()
    send(stream, 1, ADMIT)
    assert held.began.wait(WAIT_S)
    newer = Stream(service.channel)
    newer.send(open={"replica": "r", "nonce": next(NONCES)})
    held.go_on.set()
    newer.opened = newer.receive().opened
    assert newer.opened.epoch > stream.opened.epoch
    assert isinstance(stream.end(), OtherWriter)  # before or after the answer to the long step
    newer.close()


def test_a_stream_that_breaks_off_in_a_long_close_has_closed(service, held):
    stream = service.open()
    held.go_on.set()
    stream.step(ADMIT)
    held.go_on.clear(), held.began.clear()
    stream.send(close={})
    assert held.began.wait(WAIT_S)
    stream.vanish()
    held.go_on.set()
    until(lambda: service.state() == "IDLE")
    assert service.describe().running_requests == 0


@contextmanager
def parsing_held(service, stream):
    """A long step of this session waits for the thread of long steps, behind work of another replica."""
    began, go_on = threading.Event(), threading.Event()

    def other_work():
        began.set()
        assert go_on.wait(WAIT_S)

    entry = service.app.registry.get("other")
    other = asyncio.run_coroutine_threadsafe(await_on(entry.offload, other_work), service.loop)
    assert began.wait(WAIT_S)
    try:
        send(stream, 1, ADMIT)
        until(lambda: service.in_loop(lambda: session_of(service.app.registry.get("r").host).is_held))
        yield
    finally:
        go_on.set()
        other.result(WAIT_S)


async def await_on(offload, call):
    await offload(call)


def test_an_engine_does_not_lapse_while_its_long_message_waits_to_be_parsed(service):
    stream, host = service.open(), service.app.registry.get("r").host

    def pass_lease():
        host.extend_lease(-3 * host._config.lease_ms * 1_000_000 // 2)
        host.expire()  # at once: a heartbeat renews the lease

    with parsing_held(service, stream):
        stream.send(heartbeat={})  # not read: it is behind the long message
        service.in_loop(pass_lease)
        assert service.in_loop(lambda: host.state.value) == "live"
        assert host.events.num_withdrawals == 0
    assert stream.receive().result.seq == 1
    assert service.in_loop(lambda: host.lease_left_ns) > 0
    service.in_loop(pass_lease)
    assert host.events.num_withdrawals == 1, "a silent engine lapses"
    stream.close()


def test_a_stream_that_breaks_off_while_its_long_message_waits_to_be_parsed_lapses(service):
    stream, host = service.open(), service.app.registry.get("r").host
    with parsing_held(service, stream):
        stream.vanish()
        until(lambda: service.in_loop(lambda: host.state.value) == "lapsed")
    assert service.describe().seq == 0


# ---- unary calls


def allocation(op_id="op"):
    return pb.AllocateSlotsRequest(
        header={"replica": "r", "op_id": op_id}, request_id="a", content={"token_ids": range(TOKENS)}
    )


def test_others_are_served_while_a_long_call_is_applied(service, held):
    other = service.open("other")
    first = service.allocation.AllocateSlots.future(allocation())
    assert held.began.wait(WAIT_S)
    later = service.allocation.Free.future(pb.FreeRequest(header={"replica": "r"}, request_id="a"))
    assert other.step({}).result.seq == 1
    assert service.allocation.ListReplicas(pb.ListReplicasRequest()).replicas
    assert not first.done()
    assert not later.done()
    held.go_on.set()
    assert first.result(WAIT_S).granted_tokens == TOKENS
    assert later.result(WAIT_S).result.seq == 2
    other.close()


def test_a_long_call_whose_deadline_expires_is_applied_once(service, held):
    first = service.allocation.AllocateSlots.future(allocation())
    assert held.began.wait(WAIT_S)
    first.cancel()  # what an expired deadline does to the call of the service
    repeat = service.allocation.AllocateSlots.future(allocation())
    held.go_on.set()
    assert repeat.result(WAIT_S).result.seq == 1
    assert service.allocation.AllocateSlots(allocation()) == repeat.result()
    assert service.describe().seq == 1


def test_a_replica_deregistered_during_a_long_call_can_be_registered_again(service, held):
    first = service.allocation.AllocateSlots.future(allocation())
    assert held.began.wait(WAIT_S)
    waiting = service.allocation.AllocateSlots.future(allocation("other op"))
    service.allocation.DeregisterReplica(pb.DeregisterReplicaRequest(replica="r"))
    service.register()
    held.go_on.set()
    assert first.result(WAIT_S).granted_tokens == TOKENS
    error = waiting.exception(WAIT_S)
    assert error is None or isinstance(error_of(error), NotFound)  # None: it arrived at the new replica
    service.allocation.DeregisterReplica(pb.DeregisterReplicaRequest(replica="r"))
    service.register()
    assert service.allocation.AllocateSlots(allocation()).result.seq == 1


def test_a_session_opens_after_a_long_call(service, held):
    first = service.allocation.AllocateSlots.future(allocation())
    assert held.began.wait(WAIT_S)
    newer = Stream(service.channel)
    newer.send(open={"replica": "r", "nonce": next(NONCES)})
    held.go_on.set()
    assert first.result(WAIT_S).granted_tokens == TOKENS
    assert newer.receive().opened.epoch > 1
    newer.close()


# ---- long requests


@pytest.fixture
def held_parser(service, monkeypatch):
    """Hold the parser of long requests until the test lets it go, or ends."""
    held = HeldThread()

    def wait_and_parse(message_class, raw):
        if threading.current_thread().name == "kvplane parsing of long requests":
            held.wait()
        return parse(message_class, raw)

    monkeypatch.setattr(methods, "parse_long", wait_and_parse)
    yield held
    held.go_on.set()


def test_others_are_served_while_a_long_request_is_parsed(service, held_parser):
    stream = service.open("other")
    first = service.allocation.AllocateSlots.future(allocation())
    assert held_parser.began.wait(WAIT_S)
    assert stream.step({}).result.seq == 1
    assert service.allocation.ListReplicas(pb.ListReplicasRequest()).replicas
    assert service.describe().seq == 0, "short requests of the same replica, too"
    held_parser.go_on.set()
    assert first.result(WAIT_S).granted_tokens == TOKENS
    stream.close()


def test_a_call_cancelled_while_its_request_is_parsed_is_not_applied(service, held_parser, monkeypatch):
    cancelled, offload = threading.Event(), Executor.__call__

    async def note_cancellation(self, call):
        try:
            return await offload(self, call)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    monkeypatch.setattr(Executor, "__call__", note_cancellation)
    first = service.allocation.AllocateSlots.future(allocation())
    assert held_parser.began.wait(WAIT_S)
    first.cancel()
    assert cancelled.wait(WAIT_S)
    later = service.allocation.AllocateSlots.future(allocation("later"))
    held_parser.go_on.set()
    assert later.result(WAIT_S).result.seq == 1
    assert service.describe().seq == 1


def test_a_replica_deregistered_while_a_request_is_parsed_is_not_found(service, held_parser):
    first = service.allocation.AllocateSlots.future(allocation())
    assert held_parser.began.wait(WAIT_S)
    service.allocation.DeregisterReplica(pb.DeregisterReplicaRequest(replica="r"))
    held_parser.go_on.set()
    refused = error_of(first.exception(WAIT_S))
    assert (type(refused), refused.field) == (NotFound, "header.replica")
    service.register()


def test_long_and_short_requests_get_the_same_answers(service, monkeypatch):
    calls = service.allocation
    tokens = {"token_ids": range(TOKENS)}
    over_32_bits = b"\x12\x01a\x1a\x08\x0a\x06\x81\x80\x80\x80\x80\x01"
    answers = []
    for most in (0, 1 << 30):
        monkeypatch.setattr(methods, "LONG_MESSAGE_BYTES", most)
        service.allocation.DeregisterReplica(pb.DeregisterReplicaRequest(replica="r"))
        service.register()
        answers.append(
            [
                calls.AllocateSlots(allocation()),
                calls.AllocateSlots(allocation()),
                calls.FindCacheHit(pb.FindCacheHitRequest(replica="r", content=tokens, with_blocks=True)),
                refused(calls.AllocateSlots, pb.AllocateSlotsRequest(header={"replica": "r"}, request_id="b")),
                refused(service.channel.unary_unary(ALLOCATE), over_32_bits),
                refused(service.channel.unary_unary(ALLOCATE), b"\xff"),
                calls.Free(pb.FreeRequest(header={"replica": "r"}, request_id="a")),
            ]
        )
    assert answers[0] == answers[1]
    assert [one[0] for one in answers[0][3:6]] == ["NOT_FOUND", "INVALID_ARGUMENT", "INVALID_ARGUMENT"]


def refused(call, request):
    with pytest.raises(grpc.RpcError) as raised:
        call(request)
    error = error_of(raised.value)
    return error.reason, error.field, str(error)
