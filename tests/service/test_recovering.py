"""A replica that recovers delays no other replica."""

from __future__ import annotations

import asyncio
import threading
from array import array
from concurrent.futures import ThreadPoolExecutor

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvplane.base.errors import LimitExceeded
from kvplane_service.config import Config
from kvplane_service.replicas.host import new_replica
from kvplane_service.replicas.recovery import Recovering
from kvplane_service.replicas.stamps import Contents
from kvplane_service.store.errors import StoreUnavailable
from kvplane_service.store.offloaded import Offloaded
from tests.service.hosts import spec_of
from tests.service.rig import SPEC, WAIT_S, column, core_class, running, until


def test_other_replicas_are_served_during_verification(tmp_path, monkeypatch):
    config = Config(listen="127.0.0.1:0", store=f"sqlite:{tmp_path / 'entries.db'}")
    with running(config) as service:
        service.register("a")
        service.open("a").step()
    begun, may_end, real = threading.Event(), threading.Event(), core_class().verify_entries

    def verify_entries(self, *given):
        begun.set()
        assert may_end.wait(WAIT_S)
        return real(self, *given)

    monkeypatch.setattr(core_class(), "verify_entries", verify_entries)
    with running(config) as service, ThreadPoolExecutor() as pool:
        until(lambda: not service.describe("a").store.loading)
        opening = pool.submit(service.open, "a", stamp_table=column(*[0] * SPEC.num_blocks, size=8))
        assert begun.wait(WAIT_S)
        service.register("b")
        stream = service.open("b")
        for _ in range(20):
            assert stream.step().WhichOneof("kind") == "result"
        assert (service.state("a"), opening.done()) == ("RECOVERING", False)
        may_end.set()
        assert opening.result(WAIT_S).opened.epoch > 1
        assert service.state("a") == "LIVE"


async def unreadable(log):
    raise StoreUnavailable("this log cannot be read")
    yield


def test_an_unreadable_log_delays_neither_readiness_nor_the_records_of_others(tmp_path, monkeypatch):
    config = Config(listen="127.0.0.1:0", store=f"sqlite:{tmp_path / 'entries.db'}")
    with running(config) as service:
        for name in ("a", "b", "c"):
            service.register(name)
    real = Offloaded.load
    monkeypatch.setattr(Offloaded, "load", lambda self, log: unreadable(log) if log.replica == "a" else real(self, log))
    with running(config) as service:
        health = health_pb2_grpc.HealthStub(service.channel)

        def serves(name):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name))
            return answer.status == health_pb2.HealthCheckResponse.SERVING

        until(lambda: serves("readiness"))
        until(lambda: not any(service.describe(name).store.loading for name in ("b", "c")))
        service.register("new")
        until(lambda: service.in_loop(lambda: service.app.keeper.is_recorded("new")))
        assert service.describe("a").store.loading
        assert "this log cannot be read" in service.describe("a").store.problem
        until(lambda: not serves("store"))
        monkeypatch.setattr(Offloaded, "load", real)
        until(lambda: not service.describe("a").store.loading)
        until(lambda: serves("store"))


def test_a_bug_in_a_read_ends_the_service(tmp_path, monkeypatch):
    config = Config(listen="127.0.0.1:0", store=f"sqlite:{tmp_path / 'entries.db'}", store_timeout_ms=30_000)
    with running(config) as service:
        service.register("a")
    monkeypatch.setattr(Offloaded, "load", lambda self, log: [][0])
    with running(config) as service:
        until(lambda: service.app.failed.done())
        assert "background task 'loads of replicas' ended: IndexError" in service.app.failed.result()


class ManualOffload:
    """Runs calls when the test allows it."""

    def __init__(self):
        self.calls = 0
        self.may_run = asyncio.Event()

    async def __call__(self, call):
        self.calls += 1
        await self.may_run.wait()
        return call()


def prove(recovering, replica, stamps, offload):
    return asyncio.ensure_future(recovering.prove_ahead(replica, stamps, offload))


async def test_repeated_verification_of_one_memory_runs_once():
    recovering, replica, offload = Recovering(1, Contents(1), loading=False), new_replica(spec_of()), ManualOffload()
    first = prove(recovering, replica, (7,) * 21, offload)
    await asyncio.sleep(0)
    first.cancel()
    again = [prove(recovering, replica, array("Q", [7] * 21), offload) for _ in range(3)]
    await asyncio.sleep(0)
    offload.may_run.set()
    await asyncio.gather(*again)
    assert offload.calls == 1
    await prove(recovering, replica, (7,) * 21, offload)
    assert offload.calls == 1, "what was found out is kept"
    await prove(recovering, replica, (8,) * 21, offload)
    assert offload.calls == 2, "another memory is another question"


async def test_failed_verification_is_raised_and_retried():
    recovering, replica, offload = Recovering(1, Contents(1), loading=False), new_replica(spec_of()), ManualOffload()
    offload.may_run.set()

    async def full(call):
        raise LimitExceeded("too many calls wait")

    with pytest.raises(LimitExceeded):
        await prove(recovering, replica, (7,) * 21, full)
    await prove(recovering, replica, (7,) * 21, offload)
    assert offload.calls == 1


def test_verifications_of_several_replicas_run_concurrently(tmp_path, monkeypatch):
    config = Config(listen="127.0.0.1:0", store=f"sqlite:{tmp_path / 'entries.db'}")
    with running(config) as service:
        for name in ("a", "b"):
            service.register(name)
            service.open(name).step()
    both, real = threading.Barrier(2, timeout=WAIT_S), core_class().verify_entries

    def verify_entries(self, *given):
        both.wait()
        return real(self, *given)

    monkeypatch.setattr(core_class(), "verify_entries", verify_entries)
    with running(config) as service, ThreadPoolExecutor() as pool:
        until(lambda: not any(service.describe(name).store.loading for name in ("a", "b")))
        stamps = column(*[0] * SPEC.num_blocks, size=8)
        openings = [pool.submit(service.open, name, stamp_table=stamps) for name in ("a", "b")]
        assert [one.result(WAIT_S).opened.epoch > 1 for one in openings] == [True, True]
