"""The page campaign fails when a follower of the events sees other keys than the published ones."""

from __future__ import annotations

import pytest

from tests.core.follower import WrongView
from tests.core.test_page_contents import MIXES, run
from tests.twins import weakened

SEEDS = range(1, 31)


@pytest.mark.parametrize("twin", ["a removal of a held key is swallowed", "withdrawn keys stay shown"])
@pytest.mark.parametrize("mix", MIXES)
def test_a_follower_catches_a_twin(twin, mix):
    with weakened(twin), pytest.raises(WrongView, match="shown, and not published"):
        run_all(mix)


@pytest.mark.parametrize("twin", ["held keys are read", "changes of blocks that are not read yet count"])
def test_who_reads_the_entries_catches_a_twin(twin):
    with weakened(twin), pytest.raises(WrongView, match="read"):
        run_all(next(iter(MIXES)))


def run_all(mix: str) -> None:
    for seed in SEEDS:
        run(mix, seed)
