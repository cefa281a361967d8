"""Replicas with tiers: some seeds of `python -m tests.sim --tiers`."""

from __future__ import annotations

import pytest

from tests.sim.campaign import TIER_TWINS, campaign, seeds_until_caught
from tests.sim.world import run


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seeds", [range(1, 3), pytest.param(range(3, 7), marks=pytest.mark.nightly)], ids=str)
def test_seeds_with_tiers_break_no_rule(seeds):
    totals = campaign(seeds, tiers=True)
    assert not totals.failed, "\n".join(
        f"python -m tests.sim --tiers --seeds 1 --base {one.seed}: {one.findings[0]}" for one in totals.failed
    )
    assert totals.loaded > 0


def test_equal_seeds_with_tiers_give_equal_runs():
    """Movers are on threads, which take turns."""
    assert run(3, tiers=True).digest == run(3, tiers=True).digest


@pytest.mark.timeout(300)
@pytest.mark.parametrize("twin", TIER_TWINS)
def test_a_twin_with_tiers_is_caught(twin):
    number, _ = seeds_until_caught(twin, (TIER_TWINS[twin], *range(1, 31)), tiers=True)
    assert number, f"{twin} survives 30 seeds"
