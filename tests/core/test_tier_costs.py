"""A hit is loaded from tiers if that takes less time than to compute it; times are facts, so decisions repeat."""

from __future__ import annotations

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.step import Cache
from kvplane.base.values import WhyDeclined
from kvplane_core.face import setup
from kvplane_core.face.state import export_state
from kvplane_core.spec.loading import load_state
from tests.core.builders import GRANTED, compared, digests, full
from tests.core.test_tiers import DISK, HOST, Mover

TEXT = "aaaabbbbcccc"  # three blocks of four tokens


@pytest.fixture(autouse=True)
def small_pools(monkeypatch):
    monkeypatch.setattr(setup, "AHEAD_SHARE", 1)


def evicted(*tiers) -> Mover:
    engine = Mover(full(), tiers=tiers)
    engine.save(TEXT)
    assert engine.outside(TEXT + "x") == 0
    return engine


@pytest.mark.parametrize(
    ("costs", "is_loaded"),
    [
        ([], True),
        ([100, 0], True),
        ([0, 10**9], True),
        ([100, 399], True),  # 3 blocks: 1197 ns; 12 tokens: 1200 ns
        ([100, 400], False),
        ([100, 10**9], False),
    ],
)
def test_a_hit_is_loaded_if_that_is_faster(costs, is_loaded):
    engine = evicted(HOST)
    if costs:
        engine.cache(costs_ns=costs)
    asked = engine.ask(3, TEXT + "x")
    assert bool(asked.result.admit_job and asked.result.admit_job[0]) is is_loaded
    assert engine.tiers.counters.too_slow == (not is_loaded)
    declined = asked.result.declined
    assert list(declined.row) == [0] * (not is_loaded)
    if not is_loaded:
        assert (declined.why, declined.tier, declined.hit) == ([WhyDeclined.TOO_SLOW], [0], [12])
        assert (declined.load_ns, declined.compute_ns) == ([3 * costs[1]], [12 * costs[0]])
        assert asked.status == GRANTED
        assert asked.hit == 0


def test_a_load_waits_for_those_before_it():
    engine = evicted(HOST)
    other = "ddddeeeeffff"
    engine.save(other)
    assert engine.outside(TEXT + "x") == engine.outside(other + "x") == 0
    engine.cache(costs_ns=[100, 250])
    first = engine.ask(3, TEXT + "x")
    assert first.result.admit_job[0]
    assert not any(engine.ask(4, other + "x").result.admit_job)
    assert engine.tiers.counters.too_slow == 1


def test_without_a_tier_that_is_too_slow_the_nearer_one_is_loaded():
    """The last block of the prompt is on the disk alone."""
    engine = evicted(HOST, DISK)
    host, disk = engine.tiers.each
    last = next(row for row in engine.tiers.each[0].in_order() if row[0][2] == digests(engine.spec, TEXT)[2])
    key, version = last[0], host.version[last[1]]
    host.drop(key)
    slot = disk.take_slot()
    assert slot is not None
    disk.store(key, slot, version)
    engine.tiers.take_events()
    engine.replica = compared(engine.replica)
    engine.cache(costs_ns=[100, 10, 10**9])
    asked = engine.ask(3, TEXT + "x")
    assert asked.hit == 8
    assert set(asked.result.orders.load_tier) == {0}
    declined = asked.result.declined
    assert (declined.why, declined.tier, declined.hit) == ([WhyDeclined.TOO_SLOW], [1], [12])
    engine.cache(costs_ns=[100, 10, 10])
    assert engine.tiers.counters.too_slow == 0


def test_costs_are_part_of_the_state():
    engine = evicted(HOST)
    engine.cache(costs_ns=[100, 400])
    copy = load_state(engine.replica.spec, export_state(engine.replica))
    assert copy.coordinator.tiers.costs_ns == [100, 400]


@pytest.mark.parametrize(
    ("costs", "tiers"), [([1], (HOST,)), ([1, 2, 3], (HOST,)), ([1, 2], ()), ([1, 1 << 40], (HOST,))]
)
def test_costs_of_other_tiers_are_refused(costs, tiers):
    engine = Mover(full(), tiers=tiers)
    with pytest.raises(InvalidArgument) as refused:
        engine.cache(costs_ns=costs)
    assert refused.value.field == "parts[0].cache.costs_ns"
    assert Cache(costs_ns=[1]).costs_ns
