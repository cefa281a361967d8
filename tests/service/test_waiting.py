"""The number of waiting requests that engines report, and what operators see of the model and of the last use."""

from __future__ import annotations

import asyncio

import pytest

import kvplane
from kvplane import aio
from kvplane.base.errors import InvalidArgument
from kvplane.v1 import allocation_pb2 as pb
from kvplane_service.config import Config
from kvplane_service.telemetry.collector import ServiceCollector
from tests.client.mini_engine import HYBRID
from tests.client.test_mirror import engine_on
from tests.service.rig import SPEC, refusal, running, until

LEASE_MS = 900  # a heartbeat each 0.3 s


@pytest.fixture
def service():
    with running(Config(listen="127.0.0.1:0", lease_ms=LEASE_MS)) as service:
        yield service


def waiting(service, name="r") -> int | None:
    described = service.describe(name)
    listed = [one for one in service.allocation.ListReplicas(pb.ListReplicasRequest()).replicas if one.replica == name]
    assert len(listed) == 1
    fields = "waiting_requests", "model_name", "running_requests"
    assert [getattr(listed[0], field) for field in fields] == [getattr(described, field) for field in fields]
    assert listed[0].HasField("waiting_requests") == described.HasField("waiting_requests")
    return described.waiting_requests if described.HasField("waiting_requests") else None


def reported(service) -> int | None:
    """What the engine of "r" has reported, while it may report more."""
    return service.app.registry.get("r").host.waiting_requests


def metric(service) -> list[float]:
    collected = service.in_loop(lambda: list(ServiceCollector(service.app.registry).collect()))
    return [sample.value for one in collected if one.name == "kvplane_waiting_requests" for sample in one.samples]


def test_what_no_engine_has_reported_is_absent_and_not_zero(service):
    service.register()
    stream = service.open()
    stream.send(heartbeat={})
    stream.step()
    assert waiting(service) is None
    assert metric(service) == []


def test_a_heartbeat_reports_it_and_one_without_it_changes_nothing(service):
    service.register()
    stream = service.open()
    for sent, shown in (
        ({"waiting_requests": 7}, 7),
        ({}, 7),
        ({"waiting_requests": 0}, 0),
        ({"waiting_requests": 3}, 3),
    ):
        stream.send(heartbeat=sent)
        stream.step()  # is answered after the heartbeat was read
        assert waiting(service) == shown
        assert metric(service) == [shown]


def test_it_ends_with_the_session(service):
    service.register()
    stream = service.open()
    stream.send(heartbeat={"waiting_requests": 7})
    stream.step()
    again = service.open(epoch=stream.opened.epoch, life_nonce=stream.nonce)
    assert waiting(service) is None
    again.send(heartbeat={"waiting_requests": 2})
    again.step()
    assert waiting(service) == 2
    again.vanish()
    until(lambda: service.state() == "LAPSED")
    assert waiting(service) is None


def test_a_blocking_client_reports_it(service):
    with kvplane.connect(service.address) as client:
        client.register_replica("r", HYBRID, model_name="a model")
        with client.session("r") as session:
            assert session.waiting_requests is None
            session.waiting_requests = 5
            until(lambda: reported(service) == 5)
            session.waiting_requests = 0
            until(lambda: reported(service) == 0)
            assert waiting(service) == 0
    assert service.describe().model_name == "a model"


def test_an_asyncio_client_reports_it(service):
    async def engine():
        async with aio.connect(service.address) as client:
            await client.register_replica("r", HYBRID)
            async with await client.session("r") as session:
                session.waiting_requests = 5
                await asyncio.to_thread(until, lambda: reported(service) == 5)

    asyncio.run(asyncio.wait_for(engine(), 20))


def test_a_mirror_reports_it_between_its_steps(service):
    with engine_on(service) as engine:
        for count in (4, 0):
            engine.sender.waiting_requests = count

            def advanced(count=count):
                engine.advance(1)  # it is never idle, so that no heartbeat is due for the lease
                return reported(service) == count

            until(lambda: "r" in service.app.registry)
            until(advanced)
        engine.check(service)


@pytest.mark.parametrize("name", ["x" * 257, "a\nb", "\x1b[31m"])
def test_a_model_name_that_cannot_be_shown_is_refused(service, name):
    with refusal(InvalidArgument, "model_name"):
        service.allocation.RegisterReplica(pb.RegisterReplicaRequest(replica="r", spec=SPEC, model_name=name))


def test_the_last_use_is_counted_from_the_last_message(service):
    service.register()
    assert service.describe().last_seen_ms < 20_000
    stream = service.open()
    assert service.describe().last_seen_ms == 0
    stream.vanish()
    until(lambda: service.describe().last_seen_ms > 50)
    described = service.describe()
    assert described.age_ms >= described.last_seen_ms
