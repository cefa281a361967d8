"""Operators change caches while engines run, and what they and the engines evict is damaged in tiers."""

from __future__ import annotations

from tests.core.tier_engine import small_pools
from tests.sim.campaign import quiet
from tests.sim.world import World


def test_operators_are_answered_on_split_pages():
    with quiet():
        world = World(22)
        assert world.sites["b"].spec.blocks_per_state > 1
        assert world.run().findings == []
    assert all(operator.done["EvictBlocks"] > 5 for operator in world.operators)


def test_slots_that_hold_what_was_evicted_are_damaged():
    with quiet(), small_pools():
        world = World(11, tiers=True)
        assert world.run().findings == []
    assert sum(site.evictions.damaged for site in world.sites.values()) > 5
