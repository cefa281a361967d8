"""Tiers that are smaller than what is evicted next: blocks are not copied in circles, which leave nothing to hit."""

from __future__ import annotations

from collections import deque
from copy import copy

import pytest

from kvplane.base.groups import TierKind, TierSpec
from kvplane.base.step import Cache, End, Part, PartResult, RowFlag, Step
from kvplane.session.rows import AdmitRow, FactRow, NewsRow, RunRow, part_of
from tests.core.builders import full, new_replica, replica_spec
from tests.core.specification import specification_of

POOL, BLOCKS, SIZE = 150, 6, 4  # blocks of the pool, and of a prompt; tokens of a block


class Laps:
    """An engine that asks for the same prompts in turn, one at a time.

    Attributes:
        latency: steps until a mover has ended a job.
    """

    def __init__(self, host: int, disk: int, prompts: int, latency: int = 1) -> None:
        sizes = ((TierKind.HOST, host), (TierKind.DISK, disk))
        tiers = tuple(TierSpec(kind, slots) for kind, slots in sizes if slots)
        spec = replica_spec(full(), num_blocks=POOL, tiers=tiers, max_model_len=SIZE * (BLOCKS + 4))
        self.replica = new_replica(spec)
        self.prompts, self.latency = prompts, latency
        self._moving = deque[tuple[int, int]]()
        self._seq = self._asked = 0

    @property
    def counts(self):
        return copy(specification_of(self.replica).tiers.counters)

    def lap(self) -> None:
        """Ask for each prompt once."""
        for _ in range(self.prompts):
            tokens = [*[self._asked % self.prompts + 1] * SIZE * BLOCKS, 0]
            self._asked += 1
            result = self._step(part_of(NewsRow(0, tokens), AdmitRow(0, flags=RowFlag.LOAD)))
            if result.admit_job:
                for _ in range(self.latency + 1):
                    self._step(Part())
                self._step(part_of(RunRow(0)))
            self._step(part_of(FactRow(0, end=End.FREE)))

    def _step(self, part: Part) -> PartResult:
        self._seq += 1
        ended = list[int]()
        while self._moving and self._moving[0][0] < self._seq:
            ended.append(self._moving.popleft()[1])
        part.cache = Cache(jobs_done=ended)
        (result,) = self.replica.apply(Step(self.replica.epoch, self._seq, [part], 0, True, self._seq - 1)).parts
        orders = result.orders
        jobs = dict.fromkeys([*orders.load_job, *orders.save_job, *orders.move_job])
        self._moving += [(self._seq + self.latency - 1, job) for job in jobs]
        return result


def test_a_host_smaller_than_the_pool_has_what_left_the_device():
    engine = Laps(host=POOL // 3, disk=0, prompts=28)  # 18 blocks more than the pool has
    for _ in range(2):
        engine.lap()
    before = engine.counts
    engine.lap()
    after = engine.counts
    assert after.loads - before.loads > engine.prompts * 0.9
    assert after.saved - before.saved <= engine.prompts * BLOCKS, "no block is saved twice before it is evicted"


@pytest.mark.parametrize(("host", "disk"), [(0, 40), (POOL * 2, 40)], ids=["alone", "behind a host"])
def test_a_small_disk_is_written_once_per_block(host, disk):
    engine = Laps(host, disk, prompts=100)
    for _ in range(2):
        engine.lap()
    before = engine.counts
    engine.lap()
    after = engine.counts
    assert after.saved + after.moved - before.saved - before.moved <= engine.prompts * BLOCKS * (2 if host else 1)


def test_movers_that_were_slow_once_fill_the_disk_when_they_are_fast_again():
    engine = Laps(host=45, disk=600, prompts=60, latency=30)
    engine.lap()
    engine.latency = 1
    for _ in range(3):
        engine.lap()
    before = engine.counts
    engine.lap()
    after = engine.counts
    assert after.loads - before.loads == engine.prompts
    assert after.saved - before.saved <= engine.prompts
