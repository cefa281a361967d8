"""The random engine uses every permission of the contract, and finds planted faults.

Whole campaigns are `python -m tests.core.page_campaign`.
"""

from __future__ import annotations

import pytest

from tests.core.page_campaign import PLANTED, run_seeds
from tests.core.permissions import ACTS, cells, fields
from tests.core.test_page_contents import run
from tests.twins import weakened

# A mix and a seed that find each planted fault.
FOUND = {
    "state of rejected drafts": ("states and drafts", 98),
    "load before launches": ("states and full", 1),
    "load behind writers only": ("checkpoints inside chunks", 15),
    "load into a block of the hit": ("states, hits inside blocks", 1),
    "load before stamps": ("states, drafts and windows", 4),
    "zero after load": ("states, drafts and windows", 2),
    "new life during a load": ("three sizes, hits inside blocks", 3),
    "failed orders forgotten": ("states and full", 73),
    "image loses blocks behind the computed tokens": ("prompt and window", 21),
    "limit of a hit counts what is left out": ("drafts, one group", 1),
}


def test_every_field_of_the_contract_has_a_permission():
    table = cells()
    assert {(name,) for name in fields()} <= set(table)
    assert len(table) == len(fields()) + len(ACTS) ** 2


def test_random_steps_reach_most_permissions():
    counts, broken = run_seeds(range(1, 9))
    assert broken == []
    reachable = [cell for cell, reason in cells().items() if not reason]
    assert sum(counts[cell] > 0 for cell in reachable) > len(reachable) * 0.7
    assert not [cell for cell, reason in cells().items() if reason and counts[cell]]


@pytest.mark.parametrize("twin", PLANTED)
def test_a_permission_twin_is_caught(twin):
    mix, seed = FOUND[twin]
    run(mix, seed)
    with weakened(twin), pytest.raises(AssertionError):
        run(mix, seed)
