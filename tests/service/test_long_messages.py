"""A session's long messages are read, and its long steps applied, on a thread: over real gRPC."""

from __future__ import annotations

import threading

import pytest

from kvplane.base.errors import OtherWriter
from kvplane.v1 import allocation_pb2 as pb
from kvplane_service.core.replica import Replica
from kvplane_service.replicas import applying
from kvplane_service.rpc import session
from tests.service.rig import NONCES, WAIT_S, Stream, column, running, until

TOKENS = 40
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
    monkeypatch.setattr(session, "_LONG_MESSAGE_BYTES", 100)
    monkeypatch.setattr(applying, "MOST_INLINE", 3)
    process.register()
    process.register("other")
    yield process
    for name in ("r", "other"):
        process.allocation.DeregisterReplica(pb.DeregisterReplicaRequest(replica=name))


class Held:
    """The next long step waits in its thread."""

    def __init__(self, monkeypatch):
        self.began, self.go_on = threading.Event(), threading.Event()
        apply = Replica.apply

        def wait(replica, step):
            if threading.current_thread().name == "kvplane long steps":
                self.began.set()
                assert self.go_on.wait(WAIT_S)
            return apply(replica, step)

        monkeypatch.setattr(Replica, "apply", wait)


@pytest.fixture
def held(monkeypatch, service):
    held = Held(monkeypatch)
    yield held
    held.go_on.set()


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


def test_a_session_that_breaks_off_in_a_long_step_finds_it_applied(service, held):
    stream = service.open()
    send(stream, 1, ADMIT)
    assert held.began.wait(WAIT_S)
    stream.vanish()
    until(lambda: service.in_loop(lambda: not service.app.registry.get("r").host.lease_left_ns))
    held.go_on.set()
    again = service.open(epoch=stream.opened.epoch)
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
    assert stream.receive().result.seq == 1
    assert isinstance(stream.end(), OtherWriter)
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
