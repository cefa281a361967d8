"""Services that are granted replicas: no two have one at a time, in a campaign, and what they do with grants."""

from __future__ import annotations

from contextlib import nullcontext
from random import Random

import pytest

from kvplane.base.errors import Moved, Unavailable
from kvplane.base.session import OpenRequest
from kvplane_service.replicas.host import ReplicaState
from kvplane_service.store.errors import StoreFull
from kvplane_service.store.grants import Grants, Identity, NotGranted, Table
from kvplane_service.store.keeper import Keeper
from kvplane_service.store.owners import GrantedOwners, Owners
from kvplane_service.store.writer import Runtime
from tests.store.granting import Access, WildTable, play
from tests.store.test_ownership import LEASE_MS, Net, Service
from tests.store.test_restart import NONCES, inline
from tests.twins import weakened

SEEDS = range(1, 10)


def test_no_replica_is_granted_twice():
    worlds = [play(seed) for seed in SEEDS]
    assert [world.doubles for world in worlds] == [[]] * len(worlds)
    assert sum(world.failovers for world in worlds) >= 200
    faults = sum((world.faults for world in worlds), type(worlds[0].faults)())
    assert min(faults[kind] for kind in ("stop", "kill", "cut", "lose", "delete", "slow")) >= 10


@pytest.mark.parametrize(
    ("twin", "seed", "planted"),
    [
        ("", 1, {"compares": False}),
        ("", 1, {"has_wall_clocks": True}),
        ("a lost table is complete", 1, {}),
        ("owners are dropped early", 2, {}),
        ("grants held for a lease", 2, {}),
    ],
)
def test_a_planted_fault_grants_a_replica_twice(twin, seed, planted):
    with weakened(twin) if twin else nullcontext():
        assert play(seed, **planted).doubles


class NoAnswer:
    """A table, as long as it answers."""

    def __init__(self, net: GrantedNet, address: str) -> None:
        self._net, self._access = net, Access(net.table, address)

    async def read(self):
        self._net.asked += 1
        return await self._access.read()

    async def replace(self, version, raw):
        return await self._access.replace(version, raw)


class GrantedNet(Net):
    """Services on one index and one table of owners, which is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.asked = WildTable(Random(1), delay_s=0.0), 0

    def owners(self, keeper: Keeper, runtime: Runtime) -> Owners:
        me = Identity(keeper.owner, keeper.process, "index")
        table = NoAnswer(self, keeper.owner)
        return GrantedOwners(Grants(table, me, LEASE_MS, runtime, lambda: next(self.draws)), keeper)

    async def pass_lease(self, *renewing: Service) -> None:
        for _ in range(5):
            self.clock.now_ms += LEASE_MS // 3
            for service in renewing:
                await service.ownership.beat()

    async def pair(self) -> tuple[Service, Service]:
        first, second = await self.service("a:1"), await self.service("b:1")
        await self.pass_lease(first, second)
        await first.register()
        await first.ownership.ensure_granted("r")
        return first, second

    def answers(self, *addresses: str) -> None:
        """Only services at other addresses reach the table; calls of these are refused at once."""
        self.table.cut_off = set(addresses)


async def test_no_epoch_begins_in_the_first_lease_of_a_table():
    net = GrantedNet()
    first = await net.service("a:1")
    await first.register()
    with pytest.raises(NotGranted, match="not a lease old"):
        await first.ownership.ensure_granted("r")
    with pytest.raises(NotGranted, match="has not been granted"):
        first.open()
    assert first.state() is ReplicaState.IDLE
    await net.pass_lease(first)
    await first.ownership.ensure_granted("r")
    first.open()
    assert first.state() is ReplicaState.LIVE


def test_clients_repeat_what_was_not_granted():
    assert NotGranted.reason == Unavailable.reason


async def test_a_start_waits_while_the_table_is_new_and_not_without_it(monkeypatch):
    net = GrantedNet()
    first = await net.service("a:1")

    async def passes(seconds: float) -> None:
        net.clock.now_ms += round(seconds * 1000)

    owners = first.ownership._owners
    assert isinstance(owners, GrantedOwners)
    monkeypatch.setattr(owners._grants, "_runtime", Runtime(net.clock, passes, inline, lambda: 0.5))
    begun_ms = net.clock.now_ms
    await first.ownership.begin()
    assert LEASE_MS <= net.clock.now_ms - begun_ms < 2 * LEASE_MS
    begun_ms = net.clock.now_ms
    await first.ownership.begin()
    net.answers("a:1")
    await first.ownership.begin()
    assert net.clock.now_ms - begun_ms < LEASE_MS  # the calls without an answer take their time


async def test_a_service_that_ended_is_replaced_after_a_lease_and_gives_up():
    net = GrantedNet()
    first, second = await net.pair()
    with pytest.raises(Moved) as moved:
        await second.adopt()
    assert moved.value.metadata["address"] == "a:1"
    await net.pass_lease(second)
    await second.adopt()
    assert (second.state(), net.owner()) == (ReplicaState.RECOVERING, ("b:1", False))
    with pytest.raises(NotGranted, match="in time"):
        first.open()
    await first.ownership.beat()
    assert first.state() is None
    second.open()
    assert second.state() is ReplicaState.LIVE


async def test_of_two_that_register_a_replica_one_may_begin():
    net = GrantedNet()
    first, second = await net.pair()
    net.store.records_by_name.clear()  # not written yet
    await second.register()
    with pytest.raises(Moved):
        await second.ownership.ensure_granted("r")
    with pytest.raises(NotGranted):
        second.open()
    first.open()
    await second.ownership.beat()
    assert (first.state(), second.state()) == (ReplicaState.LIVE, None)


async def test_without_the_table_sessions_continue_and_none_begins():
    net = GrantedNet()
    first, _ = await net.pair()
    first.open()
    net.answers("a:1")
    await first.ownership.beat()
    first.open()  # what was granted holds for 2/3 of a lease
    net.clock.now_ms += LEASE_MS * 2 // 3 + 1
    first.publish(range(40))
    with pytest.raises(NotGranted, match="no answer"):
        first.open()
    with pytest.raises(NotGranted, match="no answer"):
        await first.ownership.ensure_granted("r")
    assert first.state() is ReplicaState.LIVE
    net.answers()
    await first.ownership.beat()
    first.open()


async def test_what_is_released_is_free_at_once():
    net = GrantedNet()
    first, second = await net.pair()
    await first.ownership.leave(())
    await second.adopt()
    assert net.owner() == ("b:1", False)
    await first.ownership.beat()
    with pytest.raises(Moved):
        await first.adopt()
    await second.ownership.leave(())
    await first.ownership.beat()
    with pytest.raises(Unavailable, match="shutting down"):
        await first.adopt()
    third = await net.service("c:1")
    await third.adopt()
    assert third.state() is ReplicaState.RECOVERING


async def test_a_replica_that_was_deregistered_is_free():
    net = GrantedNet()
    first, second = await net.pair()
    first.registry.remove("r")
    await first.ownership.beat()
    await second.register()
    await second.ownership.ensure_granted("r")


async def test_a_process_waits_for_the_one_before_it_at_its_address():
    net = GrantedNet()
    await net.pair()
    again = await net.service("a:1")
    assert again.state() is ReplicaState.RECOVERING
    with pytest.raises(Unavailable, match="an earlier process at this address"):
        await again.ownership.ensure_granted("r")
    await again.ownership.beat()
    assert again.state() is ReplicaState.RECOVERING, "no other service has it"
    await net.pass_lease(again)
    await again.ownership.ensure_granted("r")
    again.open()


async def test_epochs_stay_above_those_of_the_workers_when_the_table_is_lost():
    net = GrantedNet()
    first, _ = await net.pair()
    net.table.delete()
    await net.pass_lease(first)
    await net.pass_lease(first)
    await first.ownership.ensure_granted("r")

    def begin(owner_epoch: int) -> int:
        host = first.registry.get("r").host
        host.open(OpenRequest("r", next(NONCES), owner_epoch=owner_epoch))
        return host.epoch

    assert begin(50) == 51
    with weakened("owner epoch ignored"):
        assert begin(90) < 90


async def test_an_adopted_replica_begins_above_its_grant():
    net = GrantedNet()
    first, second = await net.pair()
    for _ in range(9):
        first.open()
    await first.ownership.beat()
    await net.pass_lease(second)
    await second.adopt()
    second.open()
    assert second.registry.get("r").host.epoch > 9


async def test_a_replica_that_comes_back_begins_above_the_epochs_of_others():
    """Its engine's session stayed while this service was cut off, and the workers that knew the epochs have gone."""
    net = GrantedNet()
    first, second = await net.pair()
    first.open()
    net.answers("a:1")
    await net.pass_lease(second)
    await second.adopt()
    second.open()
    await second.ownership.beat()
    second.open()
    others = second.registry.get("r").host.epoch
    await second.ownership.leave(())
    net.answers()
    await first.ownership.beat()
    assert first.state() is ReplicaState.LIVE
    await first.ownership.ensure_granted("r")
    first.open()
    begun = first.registry.get("r").host.epoch
    assert begun > others
    await first.ownership.ensure_granted("r")
    first.open()
    assert first.registry.get("r").host.epoch == begun + 1


async def test_an_engine_moves_to_the_service_that_was_granted_its_replica():
    """It would keep its session, and the other service would answer that it has no engine."""
    net = GrantedNet()
    first, second = await net.pair()
    first.open()
    net.answers("a:1")
    await net.pass_lease(second)
    await second.adopt()
    assert (first.state(), second.state()) == (ReplicaState.LIVE, ReplicaState.RECOVERING)
    net.answers()
    await first.ownership.beat()
    assert (first.state(), second.state()) == (None, ReplicaState.RECOVERING)
    second.open()


async def test_a_client_of_another_replica_costs_no_call():
    net = GrantedNet()
    _, second = await net.pair()
    await second.ownership.beat()
    asked = net.asked
    for _ in range(5):
        with pytest.raises(Moved):
            await second.adopt()
    assert net.asked == asked


async def test_a_table_that_went_back_grants_nothing_for_a_lease():
    """As after a failover of a primary that did not replicate, or a restored backup."""
    net = GrantedNet()
    first, second = await net.pair()
    old = net.table.raw
    await net.pass_lease(second)
    await second.adopt()
    net.table.raw, net.table.version = old, "restored"
    await second.ownership.beat()
    second.registry.get("r").host.may_begin()
    table = Table.unpack(net.table.raw)
    assert table is not None
    assert not table.is_complete
    await first.ownership.beat()
    assert (first.state(), second.state()) == (None, ReplicaState.RECOVERING)


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{}", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"format":2}',
        b'{"format":1,"index":"index","number":1,"complete":true,"epoch":-1,"services":[],"replicas":[]}',
        b'{"format":1,"index":"index","number":1,"complete":true,"epoch":1e9,"services":[],"replicas":[]}',
        b'{"format":1,"index":"index","number":1,"complete":true,"epoch":1,"services":[],"replicas":[["r",7,1]]}',
        b'{"format":1,"index":"index","number":1,"complete":true,"epoch":1,"services":[[1,"a",true]],"replicas":[]}',
    ],
)  # fmt: skip
async def test_a_damaged_table_counts_as_lost(raw):
    net = GrantedNet()
    first, _ = await net.pair()
    net.table.set(net.table.version, raw)
    await first.ownership.beat()
    first.registry.get("r").host.may_begin()
    table = Table.unpack(net.table.raw)
    assert table is not None
    assert not table.is_complete
    assert list(table.replicas) == ["r"]


async def test_a_table_has_a_limit():
    net = GrantedNet()
    first, _ = await net.pair()
    owners = first.ownership._owners
    assert isinstance(owners, GrantedOwners)
    before = net.table.raw
    with pytest.raises(StoreFull, match="at most"):
        await owners._grants.renew(dict.fromkeys((f"replica/{number:060}" for number in range(4000)), 0))
    assert net.table.raw == before
