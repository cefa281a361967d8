"""The kernels that a plan needs on an absent chip, and those that a random walk of batches would compile later.

    python -m tests.kernels.variants 300        a line per kernel of the warm-up, then what the walk would add

Runs without the interpreter. A kernel is identified as Triton does it: by the types of its arguments, the numbers that
it was specialised for, and its constants. It compiles the kernels that write and move, with --all the whole warm-up;
then one more, outside the warm-up, which must be counted.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import triton

from kvplane_kernels.interface import (
    PAGE_OPERATIONS,
    AttentionRule,
    Batch,
    LatentPages,
    LayerAttention,
    LayerLatents,
    LayerStates,
    StatePages,
    StateRows,
)
from kvplane_kernels.triton_ops import attention, compiles, moves, writes
from kvplane_kernels.triton_ops.kernels.moves import CHECKED_GATHER, CHECKSUM, COPY, GATHER, SCATTER, ZERO
from kvplane_kernels.triton_ops.launch import Launch
from tests.kernels.compiled import CHIPS, NoDevice, group, keys_values

ARCH = 90
CHIP = CHIPS[ARCH]
KV_HEADS, Q_HEADS, SIZE = 8, 64, 128
CHEAP = ("write_tokens", "move_pages")
ENGINE = ("copy_pages", "zero_pages")
RULES = (AttentionRule(0.1), AttentionRule(0.1, window=128), AttentionRule(0.1, chunk=8192))


def layers() -> list[LayerAttention]:
    """A plan with three kinds of attention."""
    pages = keys_values(torch.bfloat16, 16, KV_HEADS, SIZE)
    return [LayerAttention(pages, Q_HEADS, torch.bfloat16, rule) for rule in RULES]


def latents() -> LayerLatents:
    """A plan with latent attention."""
    return LayerLatents(LatentPages(torch.empty((8, 64, 576), dtype=torch.bfloat16)), 16, torch.bfloat16, 512)


def key_of(launch: Launch) -> tuple[str, ...]:
    """The name of a launch's kernel, and the key under which Triton would look for its code."""
    *_, binder = launch.kernel.device_caches[ARCH]
    _, specialisation, options = binder(*launch.arguments, **launch.constants, **launch.options, debug=False)
    return launch.kernel.__name__, str(specialisation), str(options)


def steps(count: int, seed: int) -> Iterator[Launch]:
    """The launches of a random walk of serving steps: rows come and go, tables grow, steps mix decodes and chunks."""
    rng, rows, width = random.Random(seed), 1, 1
    for _ in range(count):
        rows = min(256, max(1, rows + rng.randrange(-rows, rows + 2)))
        width = rng.choice([width + 1, width, rng.randrange(1, 4096)])
        queries = rng.choice(
            [[1] * rows, [4] * rows, [rng.choice([1, 1, 1, rng.randrange(2, 600)]) for _ in range(rows)]]
        )
        yield from step(rng, queries, width)


def step(rng: random.Random, queries: list[int], width: int) -> Iterator[Launch]:
    tokens, aligned = sum(queries), rng.randrange(4)
    starts = None
    if max(queries) > 1:
        starts = torch.tensor([0] * (aligned + 1) + queries, dtype=torch.int32).cumsum(0).int()[aligned:]
    lengths = torch.ones(aligned + len(queries), dtype=torch.int32)[aligned:]  # a slice at any address
    table = torch.zeros((1, width), dtype=torch.int32).expand(len(queries), width)
    table = torch.as_strided(table, table.shape, (width, 1)) if len(queries) == 1 else table.contiguous()
    batch = Batch(table, lengths, starts)
    for layer in layers():
        query = torch.empty((tokens, Q_HEADS, SIZE), dtype=torch.bfloat16)
        yield from attention.launches(attention.keys_and_values(query, layer.pages, batch, layer.rule), CHIP)
        new = torch.empty((tokens, KV_HEADS, SIZE), dtype=torch.bfloat16)
        k, v = (writes.Written(new, part, None) for part in (layer.pages.k, layer.pages.v))
        yield writes.write_launch(k, v, torch.zeros(tokens, dtype=torch.int64), CHIP)
    yield from latent_step(tokens, batch)
    ids = torch.ones(rng.randrange(1, 40), dtype=torch.int32)
    moved = moves.LayerTable.of(pages())
    yield moves.move_launch(moved, moves.Move(int(ZERO), ids))
    yield moves.move_launch(moved, moves.Move(int(COPY), ids, ids))


def state_layers() -> list[LayerStates]:
    """Layers of every kind with states."""
    conv = torch.zeros((8, 3, 768), dtype=torch.bfloat16).mT
    ssm = {"state_step": torch.zeros((8, 8, 64, 128)), "selective_scan": torch.zeros((8, 768, 16))}
    ssm["gated_delta_rule"] = torch.zeros((8, 2, 128, 128))
    layers = [LayerStates(StatePages(conv, states), torch.bfloat16, operation) for operation, states in ssm.items()]
    return [*layers, replace(layers[-1], gates_of_keys=True)]


def state_steps(count: int, seed: int) -> Iterator[Launch]:
    """The launches of a random walk of steps of layers with states."""
    rng = random.Random(seed)
    for _ in range(count):
        rows = rng.choice([1, 7, 64])
        queries = rng.choice([[1] * rows, [4] * rows, [*[1] * rows, rng.randrange(2, 600)]])
        starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0).int()
        blocks = StateRows(starts, torch.zeros(len(queries)).int(), torch.zeros(sum(queries)).int())
        for layer in state_layers():
            yield from compiles.calls_of(layer, blocks, CHIP)


def latent_step(tokens: int, batch: Batch) -> Iterator[Launch]:
    layer = latents()
    query = torch.empty((tokens, layer.q_heads, 576), dtype=torch.bfloat16)
    yield from attention.launches(attention.latent(query, layer.pages, batch, 0.1, layer.value_size), CHIP)
    row = torch.empty((tokens, 1, 576), dtype=torch.bfloat16)
    new = writes.Written(row, layer.pages.rows.unsqueeze(2), None)
    yield writes.write_launch(new, None, torch.zeros(tokens, dtype=torch.int64), CHIP)


def transfers(count: int, seed: int) -> Iterator[Launch]:
    """The launches of a random walk of a worker's calls: any number of blocks, from and to any rows of a buffer."""
    rng = random.Random(seed)
    moved, width = moves.LayerTable.of(pages()), pages().bytes_per_block
    room = torch.empty((64, width), dtype=torch.uint8)
    for _ in range(count):
        first, blocks = rng.randrange(24), rng.randrange(1, 40)
        ids, sums = torch.ones(blocks, dtype=torch.int32), torch.zeros(blocks, dtype=torch.int64)
        rows = room[first : first + blocks]
        for kind in (GATHER, SCATTER):
            for background in (False, True):
                yield moves.move_launch(moved, moves.Move(int(kind), ids, staging=rows, background=background))
        yield moves.move_launch(moved, moves.Move(int(CHECKED_GATHER), ids, staging=rows, sums=sums))
        yield moves.move_launch(moved, moves.Move(int(CHECKSUM), ids, sums=sums))
        yield moves.move_launch(moved, moves.Move(int(COPY), ids, ids))
        yield moves.move_launch(moved, moves.Move(int(ZERO), ids))


def pages() -> Any:
    """The pages of a group, as wide as those of `layers`."""
    return group(2 * 16 * KV_HEADS * SIZE * 2)


def names(keys: Iterable[tuple[str, ...]]) -> dict[str, int]:
    return dict(Counter(name for name, *_ in keys))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.variants", description=__doc__)
    parser.add_argument("steps", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--all", action="store_true", help="compile the whole warm-up")
    given = parser.parse_args()
    triton.runtime.driver.set_active(NoDevice(ARCH))
    planned = list(compiles.launches_of([pages()], ENGINE, layers(), CHIP))
    warmed = {key_of(launch) for launch in planned}
    of_latents = {key_of(launch) for launch in compiles.launches_of([], (), [latents()], CHIP)}
    later = {key_of(launch) for launch in steps(given.steps, given.seed)} - warmed - of_latents
    of_worker = {key_of(launch) for launch in compiles.launches_of([pages()], PAGE_OPERATIONS, (), CHIP)}
    later |= {key_of(launch) for launch in transfers(given.steps // 10, given.seed)} - of_worker
    done = compiles.warm_up(planned if given.all else [one for one in planned if one.kernel.__name__ in CHEAP])
    before = dict(compiles.WATCH.late)
    compiles.move_of(pages(), int(CHECKSUM)).compile()
    result: dict[str, Any] = {"planned": names(warmed), "worker": names(of_worker), "later": names(later)}
    result["latents"] = names(of_latents)
    of_states = {key_of(launch) for launch in compiles.launches_of([], (), state_layers(), CHIP)}
    result["states"] = names(of_states)
    result["later"] |= names({key_of(launch) for launch in state_steps(given.steps // 10, given.seed)} - of_states)
    result |= {
        "cpu_s": done.cpu_s,
        "compiled": dict(Counter(done.kernels)),
        "late": [before, dict(compiles.WATCH.late)],
    }
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
