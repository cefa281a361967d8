"""`python -m tests.bench.hybrid_loads`: load time of ten long prompts from tiers, hybrid compared with uniform.

    cold pass   ten prompts of 131,072 tokens are computed one after another, on a device with room for about one
    hot pass    each comes back when the device has nothing of it, and is loaded: the time from the order to its end

The same prompts are served by a model that keeps windows as windows (hybrid) and by one of as many layers that all keep
the whole prompt (uniform), with the same scheduler, core and movers. Byte ratios are those of gpt-oss (2.0) and Gemma 3
27B (5.96) at this length; heads are narrower, so that ten prompts fit into a small machine (12 GB of memory, 15 GB of
disk). Nothing is computed: launches write the name of its content into each page, and each hit reads all pages of
the hit again. Loads of both models take turns; the figure is the median of their ratios, as a share of that of bytes.
What a load costs without its bytes is seen in the load of one block of each group, behind each pair.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

import torch

from kvplane.base.groups import SavePolicy, TierKind, TierSpec
from kvplane.base.layer_spec import DType
from kvplane.base.step import RowFlag, StepResult
from tests.bench.goals import HEAD, goal
from tests.bench.machine import machine_line
from tests.engine.faults import Fault
from tests.engine.reference.config import VOCABULARY, AttentionLayer, ModelConfig
from tests.engine.reference.engine import Engine
from tests.engine.reference.request import Request
from tests.engine.reference.scheduler import Scheduled
from tests.engine.stress import tuned
from tests.engine.world import Pool, World

PROMPTS, TOKENS, CHUNKS = 10, 131_072, 16
LEAST_SHARE, LEAST_TIMES_FIXED = 0.95, 10
POLL_S, IDLE_STEPS = 0.0002, 3


@dataclass(frozen=True)
class Shape:
    """A model: layers with full attention and with windows, and elements of two bytes of a token's key in a layer."""

    name: str
    full: int
    windows: int
    window: int
    block: int
    key_size: int

    def model(self, is_hybrid: bool) -> ModelConfig:
        """Return the model; uniform: every layer keeps all tokens."""
        whole = AttentionLayer(kv_heads=1, block_size=self.block)
        local = replace(whole, window=self.window) if is_hybrid else whole
        layers = (*[local] * self.windows, *[whole] * self.full)
        return ModelConfig(layers, q_heads=1, head_size=self.key_size, num_ranks=1, dtype=DType.BFLOAT16)


GPT_OSS, GEMMA = Shape("gpt-oss", 12, 12, 128, 256, 32), Shape("Gemma 3 27B", 10, 52, 1024, 512, 16)
# Bytes take at least LEAST_TIMES_FIXED as long as what a load costs without them; a disk that others use answers late.
CASES = (
    (GPT_OSS, TierKind.HOST),
    (GPT_OSS, TierKind.DISK),
    (replace(GEMMA, key_size=28), TierKind.HOST),
    (replace(GEMMA, key_size=32), TierKind.DISK),
)


class MeasuringEngine(Engine):
    """Computes nothing. What it writes into pages names their content; the pages of a hit are read again.

    Attributes:
        load_s: how long the last load took.
        verified: pages of layers that were read, and found right.
    """

    load_s, verified = 0.0, 0

    def _carry_out(self, answer: StepResult) -> None:
        (table,) = self._jobs._tables  # type: ignore[union-attr]
        ended, began_s = table.num_ended, time.perf_counter()
        super()._carry_out(answer)
        if answer.parts[0].orders.load_job:
            assert not answer.parts[0].orders.save_job, "a load alone is measured"
            while table.num_ended == ended:
                time.sleep(POLL_S)
            self.load_s = time.perf_counter() - began_s

    def _compute(self, scheduled: list[Scheduled]) -> None:
        for one in scheduled:
            if one.planned.is_admission:
                self._visit(one, 0, one.row.start, self._read)
            self._visit(one, one.row.start, one.row.end, self._write)
        outputs = sum(one.row.num_outputs for one in scheduled)
        self._scheduler.take(scheduled, torch.zeros(outputs, VOCABULARY))

    def _visit(self, one: Scheduled, start: int, end: int, act: object) -> None:
        """Visit the pages of some tokens in each layer."""
        (pages,) = self._model._pages
        for number, group in enumerate(self._session.spec.groups):
            table = one.row.tables[number]
            for index in range(start // group.block_size, -(-end // group.block_size)):
                for at, layer in enumerate(pages.group(number).layers if table[index] else ()):
                    name = one.request.prompt[0] << 32 | number << 24 | at << 16 | index
                    act(layer[table[index]].view(torch.int64), name)  # type: ignore[operator]

    def _read(self, page: torch.Tensor, name: int) -> None:
        assert bool((page == name).all()), f"page {name:x} holds {int(page[0]):x}"
        self.verified += 1

    def _write(self, page: torch.Tensor, name: int) -> None:
        page.fill_(name)


class Bench:
    """A model on an engine with one tier."""

    def __init__(self, shape: Shape, is_hybrid: bool, kind: TierKind, num_tokens: int, num_prompts: int) -> None:
        blocks = num_tokens // shape.block
        chunk = num_tokens // CHUNKS
        layers = shape.model(is_hybrid)
        groups = 1 + is_hybrid * -(-shape.windows // shape.full)
        running = groups * ((shape.window + chunk) // shape.block + 3)
        tier = TierSpec(kind, (num_prompts + 2) * (blocks + groups * (shape.window // shape.block + 2)))
        pool = Pool(
            layers,
            num_blocks=blocks + running + 8,
            max_model_len=num_tokens + 64,
            max_batched_tokens=chunk,
            tiers=(replace(tier, save=SavePolicy.THROUGH),),
        )
        config = tuned(token_budget=chunk, num_drafts=0, admit_flags=RowFlag.LOAD)
        self.world = World(pool, config, fault=Fault("none", "", engine=MeasuringEngine))
        self.slots = self.world.movers[0].tiers[0]

        pages, at = self.world.memory[0].pages, self.world.host.replica.spec.groups
        self.needed = {
            length: sum(
                pages.group(number).bytes_per_block * -(-min(length, group.window or length) // group.block_size)
                for number, group in enumerate(at)
            )
            for length in (num_tokens, shape.block)
        }

    @property
    def engine(self) -> MeasuringEngine:
        engine = self.world.engine
        assert isinstance(engine, MeasuringEngine)
        return engine

    def serve(self, number: int, num_tokens: int) -> tuple[float, int]:
        """Serve a prompt until nothing moves any more; returns the seconds and bytes of its load."""
        before, self.engine.load_s = self.slots.counts.loaded_bytes, 0.0
        request = Request(str(number), [number + 1] * (num_tokens + 1), max_new_tokens=1)
        self.engine.add(request)
        idle = 0
        while idle < IDLE_STEPS:
            self.engine.step()
            idle = 0 if self.engine.has_work or self.engine._jobs.num_moving else idle + 1  # type: ignore[union-attr]
        assert not request.error, request.error
        return self.engine.load_s, self.slots.counts.loaded_bytes - before

    def load(self, number: int, num_tokens: int) -> float:
        """Serve a prompt of which the device has nothing; returns the seconds of its load."""
        took_s, loaded = self.serve(number, num_tokens)
        assert loaded == self.needed[num_tokens], f"{loaded:,} bytes of {self.needed[num_tokens]:,} were loaded"
        return took_s


@contextmanager
def benches(shape: Shape, kind: TierKind, num_tokens: int, num_prompts: int) -> Iterator[list[Bench]]:
    """The hybrid and the uniform model, with files in a folder of their own."""
    with tempfile.TemporaryDirectory() as folder:
        before, tempfile.tempdir = tempfile.tempdir, folder
        try:
            made = [Bench(shape, is_hybrid, kind, num_tokens, num_prompts) for is_hybrid in (True, False)]
            yield made
            for one in made:
                one.world.check()
        finally:
            tempfile.tempdir = before


@dataclass(frozen=True)
class Passes:
    """What hot passes took, in seconds: loads of both models, and of a block of each group of the hybrid one."""

    hybrid_bytes: int
    uniform_bytes: int
    pairs: list[tuple[float, float]]
    single: list[float]


def play(shape: Shape, kind: TierKind, count: int, long: int, rounds: int) -> Passes:
    """Play a cold pass of this number of prompts, of `long` tokens, and hot passes."""
    short = shape.block
    with benches(shape, kind, long, count) as made:
        for number in range(count):
            for one in made:
                assert one.serve(number, long) == one.serve(count + number, short) == (0.0, 0), "a cold pass"
        hybrid, uniform = (one.needed[long] for one in made)
        found = Passes(hybrid, uniform, [], [])
        for number in range(count * rounds):
            found.pairs.append(tuple(one.load(number % count, long) for one in made))  # type: ignore[arg-type]
            found.single.append(made[0].load(count + number % count, short))
        assert all(one.engine.verified for one in made)
    return found


def measure(shape: Shape, kind: TierKind, given: argparse.Namespace) -> bool:
    """Print the figures of a model and a tier; returns whether they reach their goals."""
    found = play(shape, kind, given.prompts, given.tokens, given.rounds)
    by_bytes, by_time = found.uniform_bytes / found.hybrid_bytes, median(slow / fast for fast, slow in found.pairs)
    (fast, slow), single = (median(column) for column in zip(*found.pairs, strict=True)), median(found.single)
    text = (
        f"{shape.name}-like, {kind.name.lower()}: {found.uniform_bytes / 2**20:,.0f} and"
        f" {found.hybrid_bytes / 2**20:,.0f} MiB, {by_bytes:.2f}x; {slow * 1e3:,.0f} and {fast * 1e3:,.0f} ms,"
        f" {by_time:.2f}x; as a share of the ratio of bytes"
    )
    fixed = f"the hybrid load, in loads of a block of each group, {single * 1e3:.1f} ms"
    reached = [goal("time", text, by_time / by_bytes, least=LEAST_SHARE)]
    reached.append(goal("size", fixed, fast / single, least=LEAST_TIMES_FIXED))
    return all(reached)


def main() -> int:
    """Print the figures; returns whether one misses its goal."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.hybrid_loads", description=__doc__)
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=2, help="hot passes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    head = f"`python -m tests.bench.hybrid_loads`, {given.rounds} hot passes."
    print("# Hybrid and uniform loads", "", head, "", machine_line(), "", *HEAD, sep="\n", flush=True)
    reached = [measure(shape, kind, given) for shape, kind in CASES]
    return not all(reached)


if __name__ == "__main__":
    sys.exit(main())
