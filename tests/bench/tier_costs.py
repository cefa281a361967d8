"""`python -m tests.bench.tier_costs`: what tiers cost where nothing comes back.

N3   blocks that were stored, compared with those that ever had a key (goal 1.02x)
N6   CPU time of decode steps on a replica with tiers that have nothing to move, compared with no tiers (goal 1.05x), on
     the core that a service uses (KVPLANE_CORE)
N8   CPU time per token of the reference engine without reuse: `behind`, compared with no tiers (goal 1.03x)
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import torch

from kvplane.base.groups import TierKind, TierSpec
from kvplane.base.step import Cache, End, EventKind, PartResult, RowFlag, Step
from kvplane.session.rows import AdmitRow, FactRow, NewsRow, RunRow, part_of
from kvplane_core.face.loader import new_replica
from tests.bench.goals import goal
from tests.core.builders import full, replica_spec, window
from tests.engine.reference.request import Request
from tests.engine.tiers import of
from tests.engine.world import World

ROUNDS = 9
NO_TIERS: tuple[TierSpec, ...] = ()
HOST = (TierSpec(TierKind.HOST, 20_000),)
PROMPTS, PROMPT_TOKENS = 100, 512
RUNNING, DECODES = 64, 300
REQUESTS, OUTPUT = 12, 24


def medians(first: Callable[[], float], second: Callable[[], float]) -> tuple[float, float, float]:
    """Medians of two measurements, in turn, and of the ratios of neighbours."""
    pairs = [(first(), second()) for _ in range(ROUNDS)]
    ratio = statistics.median(one / two for one, two in pairs)
    return statistics.median(one for one, _ in pairs), statistics.median(two for _, two in pairs), ratio


class Core:
    """A core, one step per call, whose movers do each job at once."""

    def __init__(self, tiers: tuple[TierSpec, ...], num_blocks: int) -> None:
        changes: dict[str, Any] = {"max_model_len": 4096, "max_in_flight_tokens": 1024, "tiers": tiers}
        self.replica = new_replica(replica_spec(full(16), window(128, 16), num_blocks=num_blocks, **changes))
        self.replica.begin_epoch(1)
        self.keyed = set[tuple[int, bytes]]()
        self._seq, self._saves = 0, list[int]()

    def step(self, *rows: Any) -> PartResult:
        """Apply a step; the one before it is executed."""
        self._seq += 1
        done, self._saves = self._saves, []
        part = part_of(*rows, cache=Cache(jobs_done=done))
        (result,) = self.replica.apply(Step(1, self._seq, [part], executed_through=self._seq - 1)).parts
        self._saves += result.orders.save_job
        return result

    def serve(self, number: int) -> None:
        """A prompt that no other one shares a block with, from beginning to end."""
        rng = Random(number)
        result = self.step(NewsRow(0, [rng.randrange(1 << 30) for _ in range(PROMPT_TOKENS)]), AdmitRow(0))
        for event in result.events:
            if event.kind is EventKind.STORED:
                self.keyed.update((event.group, digest) for digest in event.hashes)
        self.step(FactRow(0, end=End.FREE))


def stored() -> bool:
    """N3."""
    core = Core(HOST, 2001)
    for number in range(PROMPTS):
        core.serve(number)
    blocks = sum(use.stored for use in core.replica.tiers.each[0].uses)
    text = f"{blocks:,} blocks stored of {len(core.keyed):,} with a key"
    return goal("N3", text, blocks / len(core.keyed), most=1.02)


def decodes(tiers: tuple[TierSpec, ...]) -> float:
    """CPU seconds of steps in which requests get a token each."""
    core = Core(tiers, 8000)
    slots = range(RUNNING)
    core.step(*(NewsRow(slot, [slot * 1000 + at for at in range(64)]) for slot in slots))
    core.step(*map(AdmitRow, slots))
    began = time.process_time()
    for at in range(DECODES):
        core.step(*(FactRow(slot, [at]) for slot in slots), *map(RunRow, slots))
    return time.process_time() - began


def quiet() -> bool:
    """N6."""
    mine, other, ratio = medians(lambda: decodes(HOST), lambda: decodes(NO_TIERS))
    each = f"{mine / DECODES * 1e6:.0f} us, without tiers {other / DECODES * 1e6:.0f} us"
    return goal(
        "N6", f"CPU time of a step of {RUNNING} decoding requests with nothing to move: {each}", ratio, most=1.05
    )


def engine_s(tiers: tuple[TierSpec, ...], seed: int) -> float:
    """CPU seconds per token of the reference engine and its movers, on prompts that never come back."""
    mix, rng = of("window and full"), Random(seed)
    config = mix.config if tiers else replace(mix.config, admit_flags=RowFlag.NONE)
    world = World(replace(mix.pool, tiers=tiers), config)
    for number in range(REQUESTS):
        world.engine.add(Request(str(number), [1 + rng.randrange(200) for _ in range(200)], OUTPUT))
    began, tokens = time.process_time(), 0
    while world.engine.has_work:
        tokens += sum(len(one.output) + 200 for one in world.engine.step())
    took = time.process_time() - began
    world.check()
    return took / tokens


def without_reuse() -> bool:
    """N8."""
    mine, other, ratio = medians(lambda: engine_s(of("window and full").pool.tiers, 1), lambda: engine_s(NO_TIERS, 1))
    each = f"{mine * 1e6:.0f} us, without tiers {other * 1e6:.0f} us"
    return goal("N8", f"CPU time per token of the reference engine without reuse: {each}", ratio, most=1.03)


def main() -> int:
    """Print the figures; returns whether one misses its goal."""
    argparse.ArgumentParser(prog="python -m tests.bench.tier_costs", description=__doc__).parse_args()
    torch.set_num_threads(1)
    reached = [figure() for figure in (stored, quiet, without_reuse)]
    return not all(reached)


if __name__ == "__main__":
    sys.exit(main())
