"""A service whose store was away meanwhile: another one adopted its replica, served the engine, and released it."""

from __future__ import annotations

from copy import deepcopy

import pytest

from kvplane_service.replicas.host import ReplicaState
from kvplane_service.store.errors import StoreUnavailable
from tests.store.test_ownership import LEASE_MS, Net, Service, net, pair
from tests.twins import weakened

__all__ = ["net"]  # a fixture


class Away:
    """The store of one service, which does not answer it."""

    def __getattr__(self, name):
        async def ask(*_):
            raise StoreUnavailable("away", field="store", remedy="wait")

        return ask


def nothing(_: Service) -> None:
    """The engine leaves before the store is away."""


def a_prompt(service: Service) -> None:
    """Keys are published that the store does not get."""
    service.publish(range(200, 240))


def an_engine_life(service: Service) -> None:
    """The engine begins another life, with an epoch that the store does not get."""
    service.open()
    service.publish(range(200, 240))


DONE = [nothing, a_prompt, an_engine_life]


async def released_elsewhere(net: Net, done) -> tuple[Service, Service]:
    """Returns a service whose store answers again, and the one that has released the replica."""
    first, second = await pair(net)
    first.open()
    first.publish(range(40))
    await first.idle()
    store, first.writer.store = first.writer.store, Away()
    done(first)
    host = first.registry.get("r").host
    assert host._session is not None
    host.lost(host._session.nonce)
    await first.writer.write_all()
    net.clock.now_ms += LEASE_MS
    await second.adopt()
    second.open()
    for start in (40, 120, 160):
        second.publish(range(start, start + 40))
        await second.idle()
    first.writer.store = store
    return first, second


async def return_of(first: Service) -> None:
    for _ in range(3):
        await first.writer.write_all()
        await first.ownership.beat()


@pytest.mark.parametrize("done", DONE)
async def test_a_service_whose_store_came_back_overwrites_no_log_that_another_released(net, done):
    first, second = await released_elsewhere(net, done)
    await second.ownership.leave(())
    before = deepcopy(net.store.logs)
    await return_of(first)
    assert (net.store.logs, net.owner(), first.state()) == (before, ("b:1", True), None)
    await first.adopt()
    recovering = first.registry.get("r").host.recovering
    assert recovering is not None
    assert recovering.rows > 3, "what the other one has stored"


@pytest.mark.parametrize("done", DONE)
async def test_nor_one_that_another_still_writes(net, done):
    first, second = await released_elsewhere(net, done)
    before = deepcopy(net.store.logs)
    await return_of(first)
    assert (net.store.logs, net.owner(), first.state()) == (before, ("b:1", False), None)
    assert second.state() is ReplicaState.LIVE


async def test_one_with_the_engine_writes_its_log_again(net):
    first, second = await released_elsewhere(net, nothing)
    await second.ownership.leave(())
    first.open()
    first.publish(range(300, 340))
    await return_of(first)
    await first.idle()
    assert (net.owner(), first.state()) == (("a:1", False), ReplicaState.LIVE)


async def test_a_service_that_does_not_look_overwrites_the_log():
    with weakened("a service that comes back is the owner"):
        net = Net()
        first, second = await released_elsewhere(net, an_engine_life)
        await second.ownership.leave(())
        before = deepcopy(net.store.logs)
        await return_of(first)
        assert net.store.logs != before
