"""Replicas that change their owner while writes and loads are under way."""

from __future__ import annotations

import asyncio
from copy import deepcopy

import pytest

from kvplane.base.errors import Unavailable
from kvplane_service.registry import Registration, UnknownReplica
from kvplane_service.replicas.host import ReplicaState
from kvplane_service.store.registration import unpack_record
from tests.client.lasting import HYBRID
from tests.store.test_ownership import Net, Service, pair, stopped_and_replaced
from tests.twins import weakened


@pytest.fixture
async def net():
    return Net()


async def about_to_drain(net: Net) -> tuple[Service, Service]:
    """The first service, still with a replica of the second one, is about to drain; both have entries to write."""
    first, second = await stopped_and_replaced(net)
    await first.register("other")
    first.open("other")
    first.publish(range(40), "other")
    first.publish(range(80, 120))
    second.publish(range(200, 240))
    return first, second


async def test_a_drain_leaves_a_log_that_another_process_writes(net):
    first, second = await about_to_drain(net)
    before = deepcopy(net.store.logs)
    await first.ownership.leave(())
    assert net.owner("other") == ("a:1", True), "the other replicas are released"
    record = unpack_record(net.store.records_by_name["r"])
    assert (record.process, record.released) == (second.keeper.process, False)
    stored = {log.replica for log in net.store.logs}
    assert stored == {"r", "other"}
    assert all(net.store.logs[log] == chunks for log, chunks in before.items() if log.replica == "r")
    await second.idle()
    await first.writer.write_all()
    assert net.store.logs[record.log] != before[record.log], "the second one continues"


async def test_a_drain_that_expects_an_engine_fails(net):
    first, _ = await about_to_drain(net)
    with weakened("release fails on the log of another process"), pytest.raises(UnknownReplica):
        await first.ownership.leave(())
    assert not net.owner("other")[1]


async def adopted_twice(net: Net, monkeypatch) -> Service:
    """A service that gave up a replica during the load of its entries, and adopts it again before the load ends."""
    first, second = await pair(net)
    first.open()
    first.publish(range(40))
    await first.ownership.leave(())
    load, may_end = net.awaited.load, asyncio.Event()

    async def load_slowly(log):
        await may_end.wait()
        async for page in load(log):
            yield page

    monkeypatch.setattr(net.awaited, "load", load_slowly)
    await second.ownership.ensure_local("r")
    await asyncio.sleep(0)
    second.keeper.give_up("r", Unavailable("another service owns it"))
    await second.ownership.ensure_local("r")
    may_end.set()
    await asyncio.gather(*second.keeper._loads.tasks, return_exceptions=True)
    return second


async def test_a_replica_that_is_adopted_again_during_its_load_recovers(net, monkeypatch):
    second = await adopted_twice(net, monkeypatch)
    recovering = second.registry.get("r").host.recovering
    assert recovering is not None
    assert recovering.rows > 0
    second.open()
    assert second.state() is ReplicaState.LIVE


async def test_a_load_that_is_known_by_its_name_only_ends_that_of_a_later_adoption(net, monkeypatch):
    with weakened("loads known by name"):
        second = await adopted_twice(net, monkeypatch)
    with pytest.raises(Unavailable, match="is recovering"):
        second.open()


async def test_a_replica_that_is_registered_again_during_its_release_stays(net):
    first, second = await pair(net)
    put = net.store.put_record

    def put_record(replica, record):
        net.store.put_record = put
        put(replica, record)
        first.registry.register("r", Registration(HYBRID))

    net.store.put_record = put_record
    await first.ownership.release("r")
    await first.idle()
    assert (first.state(), net.owner()) == (ReplicaState.IDLE, ("a:1", False))
    first.registry.remove("r")
    await first.idle()
    assert not net.store.records_by_name
    assert second.state() is None
