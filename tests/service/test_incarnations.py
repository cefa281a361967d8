"""Keys of one page memory never live on another one, whatever sessions state and however often the service restarts.

The stamps of all memories here are equal, as when a service lost its store: only the incarnations distinguish them.
"""

from __future__ import annotations

from random import Random

import pytest

from kvplane.base.step import End
from kvplane.session.rows import AdmitRow, FactRow, NewsRow, part_of
from kvplane_service.replicas.recovery import Recovering
from kvplane_service.replicas.stamps import Contents
from tests.core.specification import specification_of
from tests.service.hosts import Engine, HostWorld
from tests.twins import weakened

DRAWN = 999  # what the registration draws for a memory without a number
UNKNOWN, FIRST, SECOND = 0, 111, 222


class Lives:
    """One replica over engine lives and restarts of its service.

    Attributes:
        known: incarnation of the memory of the keys, as far as any session has stated it.
    """

    def __init__(self) -> None:
        self.world = HostWorld()
        self.known = UNKNOWN
        self.stamps: list[int] = []
        self.has_keys = False

    def begin(self, incarnation: int) -> None:
        """Begin a life, and check what it keeps."""
        may_keep = UNKNOWN in (incarnation, self.known) or incarnation == self.known
        engine = Engine(self.world.host, incarnation=incarnation, stamp_table=self.stamps)
        kept = engine.opened.kept_keys
        assert bool(kept) == (self.has_keys and may_keep), f"{kept} keys of {self.known} on {incarnation}"
        self.known = incarnation or self.known
        engine.step(part_of(NewsRow(0, [7] * 65), AdmitRow(0)))
        engine.step(part_of(FactRow(0, end=End.FREE)))
        engine.step(part_of())
        self.stamps, self.has_keys = list(specification_of(self.world.host.replica).coordinator.pool.stamp), True

    def restart(self) -> None:
        """Another service, with what a store has of this one."""
        entries, epoch = specification_of(self.world.host.replica).entries(), self.world.host.epoch
        self.world, self.known = HostWorld(), self.known or DRAWN
        self.world.host.recover(Recovering(epoch, Contents(self.known, 0), loading=False, entries=[entries]))


def run(seed: int) -> None:
    rng, lives = Random(seed), Lives()
    for _ in range(12):
        lives.begin(rng.choice([UNKNOWN, UNKNOWN, FIRST, SECOND]))
        if rng.random() < 0.4:
            lives.restart()


@pytest.mark.parametrize("seed", range(20))
def test_no_key_of_one_memory_lives_on_another(seed):
    run(seed)


def test_a_session_without_an_incarnation_leaves_the_stored_one():
    lives = Lives()
    lives.begin(FIRST)
    lives.restart()
    lives.begin(UNKNOWN)
    lives.begin(SECOND)


def test_a_service_that_forgets_the_stored_incarnation_is_found():
    with weakened("stored incarnation forgotten"), pytest.raises(AssertionError, match="keys of"):
        run(2)
