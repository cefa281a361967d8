"""A replica's digests find entries that differ from its own, whatever planted them, and its entries repair them."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from kvplane.base.events import GroupDigest
from kvplane.blocking.client import connect
from kvplane_fleet.faults import Fault
from kvplane_fleet.fleet import Fleet, following
from kvplane_fleet.follow import replica_source
from kvplane_fleet.follow.replica_source import ReplicaSource
from kvplane_fleet.index import Index
from kvplane_fleet.places import Place
from kvplane_fleet.settings import PlaceSettings
from kvplane_fleet.wire.events import Batch, GroupFormat, Removed, Stored, Tier
from kvplane_tools.cli.child import ServiceChild
from tests.router.fleets import content, finished, keys_in
from tests.router.test_replicas import KINDS, WITHIN_S, Replicas

PLANTS = {
    "a key too many": lambda index, cell, keys: index.add(cell, [7]),
    "a key too few": lambda index, cell, keys: index.remove(cell, keys[:1]),
    "a copy too many": lambda index, cell, keys: index.add(cell, keys[:1]),
    "another key": lambda index, cell, keys: (index.remove(cell, keys[:1]), index.add(cell, [keys[0] ^ 1 << 90])),
    "none": lambda index, cell, keys: index.clear(cell),
}


@pytest.fixture(scope="module")
def replicas():
    with ServiceChild() as service, connect(service.address) as client, ExitStack() as stack:
        path = next(one for one in KINDS if one.name.startswith("hybrid"))
        yield service.address, Replicas(path, client, stack).names[-1]


async def test_planted_differences_are_found_by_the_next_digest_and_repaired(replicas, monkeypatch):
    monkeypatch.setattr(replica_source, "DIGEST_PERIOD_S", 1)
    address, name = replicas
    fleet = Fleet()
    async with following(fleet, [PlaceSettings(name, service=address)]):
        await asyncio.wait_for(fleet.wait_until_current(), WITHIN_S)
        place, source = fleet.followed[name].place, fleet.followed[name].source
        assert isinstance(source, ReplicaSource)
        await until(lambda: not source.partial and place.comparisons > 0)
        assert not place.faults.counts
        before = content(place)
        for number, plant in enumerate(PLANTS.values(), 1):
            cell, keys = next((cell, [*keys_in(fleet.index, cell)]) for cell in place.cells.values() if place.entries)
            plant(fleet.index, cell, keys)
            assert content(place) != before
            compared = place.comparisons
            await until(lambda compared=compared: place.comparisons > compared)
            assert place.faults.counts == {Fault.ENTRIES_DIFFER: number}
            await until(lambda: content(place) == before)
        compared = place.comparisons
        await until(lambda: place.comparisons > compared)
        assert place.faults.counts == {Fault.ENTRIES_DIFFER: len(PLANTS)}


async def until(condition):
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110 - waits for what another task does with a socket
            await asyncio.sleep(0.02)


def test_digests_are_compared_by_group_and_count_copies():
    index = Index()
    place = Place(PlaceSettings("a", service="x"), index)
    form = GroupFormat("full_attention", 16, 0)
    stored = [Stored(0, Tier.DEVICE, [5, 1 << 100], form, key_bytes=16), Stored(0, Tier.HOST, [9], form, key_bytes=16)]
    finished(place.applying_batch(Batch(1.0, [*stored, Stored(0, Tier.DEVICE, [5], form, key_bytes=16)])))
    assert place.agrees([GroupDigest(0, 3, 10 + (1 << 100)), GroupDigest(1, 0, 0)])
    assert not place.agrees([GroupDigest(0, 3, 10 + (1 << 100)), GroupDigest(1, 1, 4)])
    assert not place.agrees([GroupDigest(0, 2, 5 + (1 << 100))])
    finished(place.applying_batch(Batch(1.0, [Removed(0, Tier.DEVICE, [5, 6], 16)])))
    assert place.agrees([GroupDigest(0, 2, 5 + (1 << 100))])
