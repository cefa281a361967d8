"""The simulation sees each rule broken: every weakened twin is caught within the seeds that are run here."""

from __future__ import annotations

import pytest

from tests.sim.campaign import seeds_until_caught
from tests.sim.test_runs import SEEDS
from tests.twins import TWINS

# The first seed that catches it, so that it is not looked for each time; where that changed, all are run. README.md.
FIRST_SEED = {
    "no stamp check": 1,
    "no restamp on key moves": 15,
    "sealed check removed": 3,
    "fencing removed": 3,
    "incarnation ignored": 92,
    "one rank unchecked": 13,
    "publication before execution": 1,
    "orders run twice": 1,
    "lease expiry frees pages": 2,
    "resume forgets held pages": 5,
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TWINS)
def test_a_twin_is_caught(name):
    number, _ = seeds_until_caught(name, (FIRST_SEED[name], *range(1, 2 * SEEDS + 1)))
    assert number, f"{name} survives {2 * SEEDS} seeds"
