"""What a service sends to replicas of the host tiers of others, and which others."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import TierKind, TierSpec
from kvplane_service.config import Config
from kvplane_service.registry import Entry, Registration, Registry
from kvplane_service.rpc.encode import encode_description
from kvplane_service.runtime.reports import StoreReport, StoreState
from kvplane_worker.tiers.seal import IDENTITY_BYTES
from tests.core.builders import full, replica_spec
from tests.engine.reference.request import Request
from tests.engine.stress import FULL
from tests.engine.world import World
from tests.peers.site import Site, pool_of, tiers_of

PROMPT = list(range(1, 100))


@pytest.fixture
def site():
    made = Site(2, pool_of(2, (FULL,)))
    yield made
    made.close()


def entry_of(site: Site, world: World) -> Entry:
    return site.registry.get(world.name)


def serve(world: World, name: str = "q") -> int:
    """Serve a prompt, and let the engine report what it saved; returns the tokens that were loaded."""
    before = world.engine.counts.loaded_tokens
    world.engine.add(Request(name, PROMPT, 2))
    while world.engine.has_work:
        world.engine.step()
    for _ in range(30):
        world.engine.step()
        time.sleep(0.002)
    return world.engine.counts.loaded_tokens - before


def test_a_replica_gets_what_its_workers_can_read(site: Site):
    first, second = site.worlds
    assert serve(first) == 0
    assert serve(second) == 96


def test_a_replica_whose_workers_have_mapped_nothing_gets_nothing(site: Site):
    first, second = site.worlds
    tiers_of(second, 0)[1].set_peers([])
    entry_of(site, second).workers.renew(site.info(second, 0))
    serve(first)
    assert serve(second) == 0
    assert tiers_of(second, 0)[1].counts.refused == 0
    site.connect()
    assert serve(second, "again") == 0, "the device has it"


@pytest.mark.parametrize("which", [0, 1], ids=["the reader", "the peer"])
def test_a_reset_ends_what_is_sent_and_read(site: Site, which: int):
    first, second = site.worlds
    serve(first)
    world = site.worlds[which]
    world.engine.change_weights(world.weights)
    serve(first, "again")
    assert serve(second) == 0


@pytest.mark.parametrize(("which", "loaded"), [(0, 0), (1, 0), (None, 96)], ids=["the reader", "the peer", "neither"])
def test_a_reset_is_remembered_by_a_new_service(site: Site, which: int | None, loaded: int):
    first, second = site.worlds
    if which is not None:
        world = site.worlds[which]
        world.engine.change_weights(world.weights)
    before, site.registry = site.registry, Registry(Config(), lambda: 0)
    for world in site.worlds:
        entry = before.get(world.name)
        site.registry.register(world.name, entry.registration)
        world.registry = site.registry
        world.engine = world.begin()
        site.registry.get(world.name).workers.register(site.info(world, 0))
    site.connect()
    serve(first)
    assert serve(second) == loaded


def test_a_peer_whose_engine_is_gone_is_forgotten(site: Site):
    first, second = site.worlds
    serve(first)
    assert first.host._session is not None
    first.host.close(first.host._session.nonce)
    assert serve(second) == 0


def test_replicas_of_other_owners_weights_or_plans_are_no_peers(site: Site):
    registration = entry_of(site, site.worlds[0]).registration
    assert isinstance(registration, Registration)
    others = [
        replace(registration, registered_by="another owner"),
        replace(registration, namespace_digest=b"other weights"),
        replace(registration, num_ranks=2),
        replace(registration, plans=()),
        replace(registration, spec=replace(registration.spec, hash_block_size=8)),
    ]
    names = [registration.namespace, *(one.namespace for one in others)]
    assert len(set(names)) == len(names)
    assert {len(one) for one in names} == {IDENTITY_BYTES}
    assert replace(registration, model_name="shown", nonce=5).namespace == registration.namespace
    assert replace(registration, spec=replace(registration.spec, tiers=())).namespace == b""


def test_ranges_of_new_memory_overlap_with_none(site: Site):
    first, second = site.worlds
    namespace = entry_of(site, first).namespace
    assert namespace is not None
    (one,) = namespace.arenas(second.name, 0)
    (other,) = namespace.arenas(first.name, 0)
    assert one.num_slots == other.num_slots == first.pool.tiers[0].num_blocks
    assert {one.first_slot, other.first_slot} == {0, one.num_slots}
    first.check()
    site.registry.remove(first.name)
    assert namespace.arenas(second.name, 0) == []
    site.worlds[0] = site.make(first.name)
    (again,) = namespace.arenas(second.name, 0)
    assert again.first_slot == one.first_slot
    assert again.incarnation != one.incarnation


def test_metadata_of_an_agent_goes_to_workers_that_may_read_its_memory_and_is_not_shown(site: Site):
    first, second = site.worlds
    entry = entry_of(site, first)
    entry.workers.renew(replace(site.info(first, 0), nixl_arena=b"metadata"))
    assert entry.namespace is not None
    (given,) = entry.namespace.arenas(second.name, 0)
    assert given.nixl_arena == b"metadata"
    assert entry.namespace.arenas("a replica of another namespace", 0) == []
    (shown,) = encode_description(entry, StoreReport(StoreState.OFF), []).workers
    assert (shown.host_incarnation, shown.nixl_arena) == (given.incarnation, b"")


def test_a_tier_of_peers_that_is_too_small_reads_no_peer_and_shows_it():
    pool = pool_of(1, (FULL,))
    site = Site(2, pool)
    first, second = site.worlds
    namespace = entry_of(site, first).namespace
    assert namespace is not None
    given = {one.name: len(namespace.arenas(one.name, 0)) for one in (first, second)}
    assert sorted(given.values()) == [0, 1]
    for one, other in ((first, second), (second, first)):
        shown = encode_description(entry_of(site, one), StoreReport(StoreState.OFF), []).peers
        assert [(peer.replica, peer.is_read) for peer in shown] == [(other.name, given[one.name] == 1)]
    site.close()


def test_tiers_of_peers_that_cannot_be_are_refused_by_name():
    peers, host = TierSpec(TierKind.PEERS, 5), TierSpec(TierKind.HOST, 5)
    for tiers in ((peers,), (host, TierSpec(TierKind.DISK, 5), peers), (host, replace(peers, retained_percent=5))):
        with pytest.raises(InvalidArgument, match="tiers"):
            replica_spec(full(), tiers=tiers).validate()
