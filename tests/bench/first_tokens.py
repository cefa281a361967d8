"""`python -m tests.bench.first_tokens`: time to the first token by prompt length, computed and loaded.

Prompts of each length are computed on an idle reference engine, which saves them as they are executed, and asked again
when its device has nothing of them: loaded from the host, from the disk, or by another engine from the first one's host
tier (peers). Then the same prompts are asked of an engine that weighs: it states what it has measured in its steps
(`Cache.costs_ns` from `TierJobs.costs_ns`), and the table says which lengths it loads. All of it is of this machine and
model: the reference model is small, and computes a token in less time than a large one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import median

import torch

from kvplane.base.groups import SavePolicy, TierKind, TierSpec
from kvplane.base.layer_spec import DType
from kvplane.base.step import RowFlag
from tests.bench.machine import machine_line
from tests.engine.reference.config import BOS, AttentionLayer, ModelConfig
from tests.engine.reference.request import Request
from tests.engine.stress import tuned
from tests.engine.world import Pool, World
from tests.peers.site import Site

LENGTHS = (32, 64, 128, 256, 512, 1024, 2048)
SOURCES = (TierKind.HOST, TierKind.DISK, TierKind.PEERS)
BLOCK, CHUNK, IDLE_STEPS = 16, 512, 40
LAYER = AttentionLayer(kv_heads=4, block_size=BLOCK)
MODEL = ModelConfig((LAYER,) * 4, width=256, q_heads=8, head_size=32, hidden=512, num_ranks=1, dtype=DType.FLOAT32)


@dataclass(frozen=True)
class Row:
    """Seconds to the first token of a prompt of this length.

    Attributes:
        is_loaded: whether an engine that weighs loads it.
    """

    length: int
    computed_s: float
    loaded_s: float
    is_loaded: bool


@dataclass(frozen=True)
class Table:
    """What was measured of one source, with the costs that an engine states in its steps."""

    source: TierKind
    rows: Sequence[Row]
    token_ns: int
    block_ns: int

    @property
    def crossover(self) -> int:
        """The shortest length from which on loading was faster at every length; 0 = none."""
        slower = [row.length for row in self.rows if row.loaded_s >= row.computed_s]
        return next((row.length for row in self.rows if row.length > max(slower, default=0)), 0)


class Asked:
    """Engines with one source of loads: who computes, and who loads."""

    def __init__(self, source: TierKind, longest: int, weighs: bool) -> None:
        slots = 4 * len(LENGTHS) * longest // BLOCK
        tiers: tuple[TierSpec, ...] = (TierSpec(source, slots, save=SavePolicy.THROUGH),)
        if source is TierKind.PEERS:
            tiers = (replace(tiers[0], kind=TierKind.HOST), TierSpec(TierKind.PEERS, 2 * slots))
        pool = Pool(
            MODEL,
            num_blocks=longest // BLOCK + 16,
            max_model_len=longest + 64,
            max_batched_tokens=CHUNK,
            tiers=tiers,
        )
        config = tuned(token_budget=CHUNK, num_drafts=0, admit_flags=RowFlag.LOAD, weighs_loads=weighs)
        self.worlds = Site(2, pool, config).worlds if source is TierKind.PEERS else [World(pool, config)] * 2
        self.costs: list[int] = []

    def ask(self, world: World, prompt: list[int]) -> tuple[float, int]:
        """Return the seconds to the first token, and the tokens that were loaded."""
        engine, before = world.engine, world.engine.counts.loaded_tokens
        request = Request("q", prompt, max_new_tokens=1)
        began_s = time.perf_counter()
        engine.add(request)
        while not request.output:
            engine.step()
        took_s = time.perf_counter() - began_s
        assert engine._jobs is not None
        idle = 0
        while idle < IDLE_STEPS:  # everything is saved, reported, and known to the other engine
            engine.step()
            idle = 0 if engine.has_work or engine._jobs.num_moving else idle + 1
        return took_s, engine.counts.loaded_tokens - before

    def passes(self, rng: Random, lengths: Sequence[int]) -> list[tuple[float, float, int]]:
        """Compute prompts, then ask the engine that loads for them; returns seconds of both, and loaded tokens."""

        def drawn(length: int) -> list[int]:
            return [BOS, *(rng.randrange(256) for _ in range(length))]

        prompts = [drawn(length) for length in lengths]
        computes, loads = self.worlds
        computed = [self.ask(computes, prompt) for prompt in prompts]
        assert not any(loaded for _, loaded in computed)
        longest = max(lengths)
        for _ in range(2 + loads.pool.num_blocks // (longest // BLOCK)):  # the device has nothing of them any more
            self.ask(loads, drawn(longest))
        again = [self.ask(loads, prompt) for prompt in prompts]
        engine = loads.engine
        assert engine._jobs is not None
        self.costs = engine._jobs.costs_ns(round(engine._token_ns), len(loads.pool.tiers))
        return [(first, second, loaded) for (first, _), (second, loaded) in zip(computed, again, strict=True)]

    def close(self) -> None:
        """Stop the movers."""
        computes, loads = self.worlds
        for world in (computes,) if computes is loads else (computes, loads):
            world.check()


def measure(source: TierKind, lengths: Sequence[int], rounds: int) -> Table:
    """Measure one source."""
    rng, longest = Random(1), max(lengths)
    with tempfile.TemporaryDirectory() as folder:
        before, tempfile.tempdir = tempfile.tempdir, folder
        try:
            plain, weighs = (Asked(source, longest, is_weighed) for is_weighed in (False, True))
        finally:
            tempfile.tempdir = before
        plain.passes(rng, lengths)  # the first pass also warms up
        found = [plain.passes(rng, lengths) for _ in range(rounds)]
        for once in found:
            assert [loaded for *_, loaded in once] == [length // BLOCK * BLOCK for length in lengths]
        weighs.passes(rng, lengths)  # measures what a token and a block cost
        decided = weighs.passes(rng, lengths)
        rows = [
            Row(length, median(one[at][0] for one in found), median(one[at][1] for one in found), decided[at][2] > 0)
            for at, length in enumerate(lengths)
        ]
        table = Table(source, rows, weighs.costs[0], weighs.costs[-1])
        for one in (plain, weighs):
            one.close()
    return table


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.first_tokens", description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="of prompts, ascending")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    head = f"`python -m tests.bench.first_tokens`, medians of {given.rounds} rounds."
    print("# Time to the first token, computed and loaded", "", head, "", machine_line(), sep="\n", flush=True)
    for source in SOURCES:
        table = measure(source, given.lengths, given.rounds)
        print(f"\n## {source.name.capitalize()}\n")
        print("| prompt, tokens | computed, ms | loaded, ms | an engine that weighs |", "|---|---|---|---|", sep="\n")
        for row in table.rows:
            words = "loads" if row.is_loaded else "computes"
            print(f"| {row.length:,} | {row.computed_s * 1e3:.1f} | {row.loaded_s * 1e3:.1f} | {words} |")
        at = f"from {table.crossover:,} tokens on" if table.crossover else "at no length"
        print(
            f"\nLoading is faster {at}. Costs: a token {table.token_ns:,} ns, a block {table.block_ns:,} ns.",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
