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
    "state of rejected drafts": ("checkpoints and drafts", 1),
    "checkpoint of rejected drafts": ("checkpoints and drafts", 5),
    "copy of an evicted state": ("states, hits inside blocks", 12),
    "skipped blocks released during a load": ("prompt and window", 1),
    "load before launches": ("window and full", 1),
    "load behind writers only": ("checkpoints inside chunks", 4),
    "load into a block of the hit": ("checkpoints inside chunks", 174),
    "load before stamps": ("checkpoints inside chunks", 9),
    "zero after load": ("states, drafts and windows", 1),
    "new life during a load": ("chunks and full", 1),
    "failed orders forgotten": ("checkpoints, hits inside blocks", 9),
    "image loses blocks behind the computed tokens": ("prompt and window", 45),
    "limit of a hit counts what is left out": ("checkpoints and drafts", 1),
    "withdrawn keys stay away": ("prompt and window", 5),
}


def test_every_field_of_the_contract_has_a_permission():
    table = cells()
    assert {(name,) for name in fields()} <= set(table)
    assert len(table) == len(fields()) + len(ACTS) ** 2


def test_random_steps_reach_most_permissions():
    counts, broken = run_seeds(range(1, 6))
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
