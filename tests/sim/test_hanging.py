"""Parts hang, and clients that do not depend on them are answered: some seeds of `python -m tests.sim --hangs`."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.campaign import campaign, seeds_until_caught
from tests.sim.hanging import HANGING
from tests.sim.history import Asked
from tests.sim.world import World

SEEDS = (1, 2, 4)


@pytest.mark.timeout(300)
def test_hanging_parts_break_no_rule():
    totals = campaign(SEEDS, hangs=True)
    assert not totals.failed, "\n".join(
        f"python -m tests.sim --hangs --seeds 1 --base {one.seed}: {one.findings[0]}" for one in totals.failed
    )
    assert set(totals.faults) >= set(HANGING), "each kind happened"


def test_bystanders_make_every_call():
    world = World(2, hangs=True)
    world.run()
    asked = Counter(one.what for one in world.history.of(Asked) if one.is_answered)
    assert {"registration", "new session", "unary call", "step"} <= set(asked)
    assert asked["step"] > 10


def test_calls_of_the_store_are_refused_and_one_log_is_unreadable():
    """Seeds in which both are met."""
    refused = Counter[str]()
    for seed in (3, 5):
        world = World(seed, hangs=True)
        world.run()
        refused += world.store.num_refused
    assert set(refused) == {"busy", "unreadable"}


@pytest.mark.parametrize(
    ("twin", "by"),
    [
        ("no deadline of the store", "nothing hung takes its neighbours along"),
        ("release fails on the log of another process", "sound"),
    ],
)
def test_twin_that_hangs_is_caught(twin, by):
    number, rule = seeds_until_caught(twin, (*SEEDS, 8), hangs=True)
    assert number
    assert rule == by
