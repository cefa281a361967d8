"""A drain: health turns unhealthy first, sessions are asked to end, and remaining ones are ended after the grace."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvplane.base.errors import Unavailable
from kvplane.v1 import allocation_pb2 as pb
from kvplane.v1 import events_pb2
from kvplane_service.config import Config
from kvplane_service.replicas import applying
from tests.service.rig import WAIT_S, Stream, column, held_thread, refusal, running, until

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def service():
    with running(Config(listen="127.0.0.1:0", drain_grace_ms=60_000)) as service:
        service.register()
        yield service


def drain(service):
    """Begin to drain; a future of its end."""
    return asyncio.run_coroutine_threadsafe(service.app.drain(), service.loop)


def health(service, name: str) -> int:
    stub = health_pb2_grpc.HealthStub(service.channel)
    return stub.Check(health_pb2.HealthCheckRequest(service=name)).status


def test_drain_notifies_sessions_and_waits_for_them(service):
    stream = service.open()
    done = drain(service)
    notice = stream.receive()
    assert notice.draining.grace_ms == 60_000
    assert stream.step().result.seq == 1
    assert not done.done()
    stream.close()
    assert stream.end() is None
    done.result(WAIT_S)


def test_drain_is_not_ready_but_alive(service):
    stream = service.open()
    done = drain(service)
    stream.receive()
    assert [health(service, name) for name in ("", "readiness", "kvplane.v1.Allocation")] == [NOT_SERVING] * 3
    assert health(service, "liveness") == SERVING
    stream.close()
    done.result(WAIT_S)


def test_drain_refuses_new_work_and_allows_reads(service):
    stream = service.open()
    done = drain(service)
    stream.receive()
    other = Stream(service.channel)
    other.send(open={"replica": "r", "nonce": 1})
    assert isinstance(other.end(), Unavailable)
    with refusal(Unavailable):
        service.register("new")
    with refusal(Unavailable):
        next(service.events.Subscribe(events_pb2.SubscribeRequest(replica="r")))
    assert service.state() == "LIVE"
    stream.close()
    done.result(WAIT_S)


def test_drain_ends_remaining_sessions_with_a_reason():
    with running(Config(listen="127.0.0.1:0", drain_grace_ms=50)) as service:
        service.register()
        stream = service.open()
        done = drain(service)
        error = stream.end()
        assert isinstance(error, Unavailable)
        assert "has drained" in error.message
        done.result(WAIT_S)
        assert service.app.registry.get("r").host.state.value == "lapsed"


def test_drain_does_not_wait_for_unresponsive_clients():
    with running(Config(listen="127.0.0.1:0", drain_grace_ms=50)) as service:
        for name in ("gone", "deaf"):
            service.register(name)
        service.open("gone").vanish()
        deaf = service.open("deaf")
        news = {"slot": column(0), "num_tokens": column(400), "tokens": column(*range(400))}
        deaf.step({"news": news, "admit": {"slot": column(0)}})
        deaf.step()
        many = {"peek": {"slot": column(*[0] * 500), "with_blocks": True}}  # an answer of 60 kB
        for seq in range(3, 80):
            header = {"epoch": deaf.opened.epoch, "seq": seq, "executed_through": seq - 1}
            deaf.send(step={**header, "parts": [many]})
        drain(service).result(WAIT_S)


def test_drain_ends_subscriptions(service):
    events = service.events.Subscribe(events_pb2.SubscribeRequest(replica="r"), timeout=WAIT_S)
    log = service.app.registry.get("r").host.events
    until(lambda: bool(service.in_loop(lambda: len(log._subscribers))))
    done = drain(service)
    with refusal(Unavailable) as caught:
        next(events)
    assert "is draining" in caught[0].message
    done.result(WAIT_S)


def test_a_drained_service_answers_no_more(service):
    drain(service).result(WAIT_S)
    with pytest.raises(grpc.RpcError) as raised:
        service.allocation.ListReplicas(pb.ListReplicasRequest())
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


def test_drain_waits_for_a_long_call_and_answers_it(service, monkeypatch):
    monkeypatch.setattr(applying, "MOST_INLINE_NS", 150)
    request = pb.AllocateSlotsRequest(header={"replica": "r"}, request_id="a", content={"token_ids": range(40)})
    with held_thread() as held:
        call = service.allocation.AllocateSlots.future(request)
        assert held.began.wait(WAIT_S)
        done = drain(service)
        until(lambda: service.app.about.draining)  # read here: the service may refuse a new call already
        assert not done.done()
        held.go_on.set()
        assert call.result(WAIT_S).granted_tokens == 40
        done.result(WAIT_S)


def test_drain_does_not_wait_for_a_long_call_beyond_its_grace(monkeypatch):
    monkeypatch.setattr(applying, "MOST_INLINE_NS", 150)
    request = pb.AllocateSlotsRequest(header={"replica": "r"}, request_id="a", content={"token_ids": range(40)})
    with running(Config(listen="127.0.0.1:0", drain_grace_ms=50)) as service, held_thread() as held:
        service.register()
        call = service.allocation.AllocateSlots.future(request)
        assert held.began.wait(WAIT_S)
        drain(service).result(WAIT_S)
        assert call.exception(WAIT_S) is not None
        held.go_on.set()
        until(lambda: not service.in_loop(lambda: service.app.registry.get("r").host.steps.is_aside))
