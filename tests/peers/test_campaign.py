"""Engines that read each other's host tiers answer as the dense model does, whatever their peers do.

`python -m tests.peers` is the large run.
"""

from __future__ import annotations

import pytest
import torch

from tests.peers import disaggregated
from tests.peers.campaign import HAS_NIXL, OF_TWO, OVER_NIXL, kinds, kinds_over_nixl, plants, run

REQUESTS, SEED, SEEDS = 24, 1, 6
REFUSED = ("wrong bytes", "another namespace", "another memory", "another slot", "gone", "confused")


@pytest.fixture(autouse=True)
def _one_thread():
    """Small matrices take longer on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


NEEDS_NIXL = pytest.mark.skipif(not HAS_NIXL, reason="NIXL is not installed: pip install '.[nixl]'")
ALL = [*kinds(), *(pytest.param(kind, marks=NEEDS_NIXL) for kind in kinds_over_nixl())]


@pytest.mark.parametrize("kind", ALL)
def test_no_token_differs_and_nothing_is_left(kind: str):
    outcome = run(kind, REQUESTS, SEED)
    assert (outcome.differing, outcome.wrong, outcome.leaks) == (0, [], [])
    assert outcome.report.requests == REQUESTS
    assert outcome.loads > 0
    kind = kind.removesuffix(OVER_NIXL).removesuffix(OF_TWO)
    if kind == "sound":
        assert outcome.loaded_held >= 0.95 * outcome.held > 0
    if kind == "stopped":
        assert outcome.late > 0
    if kind.partition(" of ")[0] in REFUSED:
        assert outcome.refused > 0
    elif " of " in kind:
        assert outcome.of_groups[0] > 0
        assert outcome.of_groups[1] > 0


@pytest.mark.parametrize("kind", disaggregated.KINDS)
def test_a_prompt_that_one_engine_computes_is_loaded_by_another_that_decodes(kind: str):
    outcome = disaggregated.run(kind, REQUESTS, SEED)
    assert (outcome.differing, outcome.wrong, outcome.leaks) == (0, [], [])
    assert outcome.report.requests == REQUESTS
    assert outcome.loads > 0
    if kind.startswith("sound"):
        assert outcome.loaded >= 0.95 * outcome.only_peers > 0


@pytest.mark.parametrize("name", plants())
def test_a_planted_fault_of_the_reader_is_found(name: str):
    assert any(not plants()[name](2 * REQUESTS, seed).is_good for seed in range(SEED, SEED + SEEDS))
