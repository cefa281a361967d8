"""The random engine draws what the contract permits, and finds the faults that this is for.

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
    "state of rejected drafts": ("states, drafts and windows", 153),
    "load before launches": ("three sizes, hits inside blocks", 2),
    "load behind writers only": ("three sizes, hits inside blocks", 16),
    "load into a block of the hit": ("states and full", 10),
    "load before stamps": ("states, hits inside blocks", 13),
    "zero after load": ("states and full", 1),
    "new life during a load": ("three sizes, hits inside blocks", 3),
    "failed orders forgotten": ("states, drafts and windows", 7),
}


def test_every_field_of_the_contract_is_a_cell():
    table = cells()
    assert {(name,) for name in fields()} <= set(table)
    assert len(table) == len(fields()) + len(ACTS) ** 2


def test_a_few_seeds_reach_most_cells():
    counts, broken = run_seeds(range(1, 9))
    assert broken == []
    reachable = [cell for cell, reason in cells().items() if not reason]
    assert sum(counts[cell] > 0 for cell in reachable) > len(reachable) * 0.7
    assert not [cell for cell, reason in cells().items() if reason and counts[cell]]


@pytest.mark.parametrize("twin", PLANTED)
def test_a_planted_fault_is_found(twin):
    mix, seed = FOUND[twin]
    run(mix, seed)
    with weakened(twin), pytest.raises(AssertionError):
        run(mix, seed)
