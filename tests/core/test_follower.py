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


def run_all(mix: str) -> None:
    for seed in SEEDS:
        run(mix, seed)
