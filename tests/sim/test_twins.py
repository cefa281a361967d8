"""The simulation catches every twin within the seeds that run here."""

from __future__ import annotations

import pytest

from tests.sim.campaign import FIRST_SEED, seeds_until_caught

SEEDS = 120


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FIRST_SEED)
def test_a_twin_is_caught(name):
    number, _ = seeds_until_caught(name, (FIRST_SEED[name], *range(1, SEEDS + 1)))
    assert number, f"{name} survives {SEEDS} seeds"
