"""Reading logs at the start of a service and after an adoption: a log that cannot be read delays no other one."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvplane.base.errors import Unavailable
from kvplane.base.session import OpenRequest
from kvplane_service.config import Config
from kvplane_service.runtime.reports import StoreState
from kvplane_service.runtime.rota import Busy
from kvplane_service.store.errors import StoreUnavailable
from kvplane_service.store.interface import StoredChunk
from kvplane_service.store.memory import MemoryStore
from tests.store.test_ownership import LEASE_MS, Clock, Net, Service


class PartlyReadable(MemoryStore):
    """The logs of the replicas `unreadable` cannot be read."""

    def __init__(self, clock):
        super().__init__(clock)
        self.unreadable: set[str] = set()
        self.error: Exception = StoreUnavailable("this key does not answer")

    def load(self, log):
        if log.replica in self.unreadable:
            raise self.error
        yield from super().load(log)


@pytest.fixture
async def net():
    net = Net(PartlyReadable(Clock()))
    first = await net.service("a:1")
    for name in "abc":
        await first.register(name)
    return net


async def restarted(net: Net) -> Service:
    again = Service(net, Config(listen="a:1", store="redis://unused", owner_lease_ms=LEASE_MS))
    await again.keeper.start(net.awaited)
    return again


async def loaded(service: Service, *names: str) -> None:
    reads = [task for task, name in service.keeper._loads.tasks.items() if name in names]
    await asyncio.gather(*reads)


def recovering(service: Service, name: str):
    stored = service.registry.get(name).host.recovering
    assert stored is not None
    return stored


def report(service: Service, name: str):
    return service.keeper.report(service.registry.get(name))


async def test_one_unreadable_log_delays_no_other_replica(net, caplog):
    net.store.unreadable = {"a"}
    service = await restarted(net)
    await service.keeper.load()
    await loaded(service, "b", "c")
    assert [recovering(service, name).loading for name in "abc"] == [True, False, False]
    await service.register("new")
    assert await service.writer.write_all()
    assert "new" in net.store.records_by_name
    with pytest.raises(Unavailable, match="a is recovering"):
        service.open("a")
    service.open("b")
    net.clock.now_ms += 7000
    assert not service.keeper.is_there
    assert report(service, "a").state is StoreState.DEGRADED
    assert "a have not been readable for 7 s: this key does not answer" in report(service, "a").problem
    assert (report(service, "b").state, report(service, "b").problem) == (StoreState.OK, "")
    assert caplog.text.count("the entries of a cannot be read") == 1
    net.store.unreadable.clear()
    await loaded(service, "a")
    assert service.keeper.is_there
    assert report(service, "a").state is StoreState.OK
    service.open("a")


async def test_a_store_that_hangs_after_its_records_were_read_delays_no_start(net):
    net.store.unreadable = set("abc")
    service = await restarted(net)
    await service.keeper.load()
    assert [recovering(service, name).loading for name in "abc"] == [True] * 3
    net.store.unreadable.clear()
    await loaded(service, *"abc")
    assert service.keeper.is_there


async def test_a_read_that_is_refused_as_busy_is_retried(net):
    """The executor refuses each call of a read once: to decode a page, and to sort the chunks."""
    service = await restarted(net)
    refused = 0

    async def busy_once(call):
        nonlocal refused
        refused += 1
        if refused % 2:
            raise Busy("1025 calls run or wait")
        return call()

    service.keeper._runtime = replace(service.keeper._runtime, offload=busy_once)
    await service.keeper.load()
    await loaded(service, *"abc")
    assert refused > 3
    assert [recovering(service, name).loading for name in "abc"] == [False] * 3
    for name in "abc":
        service.open(name)


async def test_an_adoption_that_is_refused_as_busy_recovers(net):
    second = await net.service("b:1")
    net.dead.add("a:1")
    net.store.error, net.store.unreadable = Busy("1025 calls run or wait"), {"a"}
    await second.ownership.ensure_local("a")
    await second.keeper._loads.wait()
    assert second.keeper._loads.failures > 0
    assert recovering(second, "a").loading
    net.store.unreadable.clear()
    await second.idle()
    second.open("a")


async def test_a_read_that_ends_with_a_bug_is_named_and_reaches_the_supervision(net):
    second = await net.service("b:1")
    supervised = asyncio.ensure_future(second.keeper.supervise_loads())
    net.dead.add("a:1")
    net.store.error, net.store.unreadable = IndexError("a bug"), {"a"}
    await second.ownership.ensure_local("a")
    with pytest.raises(IndexError, match="a bug"):
        await supervised
    assert not recovering(second, "a").loading
    host = second.registry.get("a").host
    with pytest.raises(Unavailable, match=r"a cannot recover: reading its entries .* failed: IndexError: a bug"):
        host.check_open(OpenRequest("a", 5))
    assert not second.keeper.is_there
    await second.adopt("b")
    second.open("b")


async def test_a_deregistered_replica_is_read_no_more(net):
    net.store.unreadable = {"a"}
    service = await restarted(net)
    await service.keeper.load()
    service.registry.remove("a")
    await loaded(service, "a")
    assert service.keeper.is_there


async def test_a_log_that_stays_unreadable_is_given_up_and_its_replica_begins_empty(net, caplog):
    net.store.unreadable = {"a"}
    service = await restarted(net)
    await service.keeper.load()
    with pytest.raises(Unavailable, match="a is recovering"):
        service.open("a")
    net.clock.now_ms += Config().store_load_ms
    await loaded(service, "a")
    assert "a begins without stored entries: the entries of a have not been readable for 60 s" in caplog.text
    assert recovering(service, "a").refused == {"not read in time": 1}
    service.open("a")
    assert service.keeper.is_there
    net.store.unreadable.clear()
    assert await service.writer.write_all()
    assert report(service, "a").state is StoreState.OK


async def test_a_log_that_never_ends_is_given_up(net):
    service = await restarted(net)
    endless = net.store.load

    def load(log):
        yield from endless(log)
        while log.replica == "a":
            net.clock.now_ms += 10_000
            yield StoredChunk(1, b"")

    net.store.load = load
    await service.keeper.load()
    await loaded(service, *"abc")
    assert recovering(service, "a").refused == {"not read in time": 1}
    assert not recovering(service, "b").refused
    for name in "abc":
        service.open(name)
