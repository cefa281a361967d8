"""Engines that decide themselves, and services that follow them: some seeds of `python -m tests.sim --mirrors`."""

from __future__ import annotations

import pytest

from tests.sim.campaign import MIRROR_TWINS, campaign, seeds_until_caught
from tests.sim.history import CaughtUp, Imaged, Mirrored, Viewed
from tests.sim.mirrored import MIRROR_KINDS
from tests.sim.world import World

SEEDS = range(1, 6)


@pytest.mark.timeout(300)
def test_mirrored_engines_break_no_rule():
    totals = campaign(SEEDS, mirrors=True)
    assert not totals.failed, "\n".join(
        f"python -m tests.sim --mirrors --seeds 1 --base {one.seed}: {one.findings[0]}" for one in totals.failed
    )
    assert set(totals.faults) >= set(MIRROR_KINDS), "each kind happened"


def test_services_follow_lag_and_get_images():
    world = World(2, mirrors=True)
    world.run()
    seen = {one.status for one in world.history.of(Viewed)}
    assert {"live", "diverged"} <= seen
    assert len({one.service for one in world.history.of(Imaged)}) > 2
    assert sum(1 for _ in world.history.of(Mirrored)) > 50
    assert [one.applied == one.newest for one in world.history.of(CaughtUp)] == [True]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("twin", MIRROR_TWINS)
def test_twin_of_a_mirror_is_caught(twin):
    number, _ = seeds_until_caught(twin, (MIRROR_TWINS[twin], *range(1, 31)), mirrors=True)
    assert number, f"{twin} survives 30 seeds"
