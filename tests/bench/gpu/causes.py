"""An experiment: what slows decoding while the host link saves pages. `--only causes` runs it; docs/kernels.md has
predictions, and what follows from each outcome.

A figure is the speed of decoding next to some work in the background, relative to decoding alone: by which engine the
work is done, in which direction, by how many programs; how decoding divides its tokens; which stream has priority.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from kvplane_kernels.interface import AttentionPages, AttentionRule, GroupPages
from kvplane_kernels.triton_ops import attention, moves
from kvplane_kernels.triton_ops.backend import TritonOps
from kvplane_kernels.triton_ops.kernels import moves as kinds
from kvplane_kernels.triton_ops.launch import chip_of
from kvplane_kernels.triton_ops.link.buffers import BUFFER_BYTES
from tests.bench.gpu.decoding import GROUP, SIZE, batch_of, random_pages, running
from tests.bench.gpu.figures import Figure, Sizes
from tests.bench.gpu.limits import Limits, sent
from tests.bench.gpu.moving import pages_of
from tests.bench.gpu.timing import Clock, Work
from tests.bench.gpu.together import FRAGMENT_BYTES

PROGRAMS = (1, 2, 4, 8, 16)
MOST_TIMES = 256


class Decode:
    """One decode of equal rows, in any division of its tokens, and its duration alone as an engine divides them."""

    def __init__(self, clock: Clock, sizes: Sizes) -> None:
        batch, num_blocks = batch_of([sizes.context] * sizes.rows, 16, clock.device)
        room = random_pages((num_blocks, 2, 16, sizes.kv_heads, SIZE), torch.bfloat16, clock.device)
        query = torch.randn((sizes.rows, sizes.kv_heads * GROUP, SIZE), device=clock.device).bfloat16()
        pages = AttentionPages(room[:, 0], room[:, 1])
        self._call = attention.keys_and_values(query, pages, batch, AttentionRule(SIZE**-0.5))
        self.clock, self.chip = clock, chip_of(clock.device)
        self.alone = clock.seconds_as_called(self.by(self.chip.multiprocessors))

    def by(self, multiprocessors: int) -> Work:
        """The decode, divided as for a device with this number of multiprocessors."""
        return running(attention.launches(self._call, replace(self.chip, multiprocessors=multiprocessors)))

    def during(self, name: str, background: Work, work: Work | None = None) -> Figure:
        """The figure of a decode while the background work is repeated for twice as long as decodes take alone."""
        once, most = self.clock.seconds_as_called(background), MOST_TIMES if self.clock.device.type == "cuda" else 1
        times = min(most, math.ceil(2 * self.clock.runs * self.alone / once))

        def repeated() -> None:
            for _ in range(times):
                background()

        taken = self.clock.seconds_during(work or self.by(self.chip.multiprocessors), repeated)
        return Figure(f"decode during {name}", self.alone / taken, "decode alone", self.alone / taken)


def fragments(clock: Clock, sizes: Sizes) -> tuple[GroupPages, list[int], torch.Tensor]:
    """Pages of 4 KiB, blocks in random order, and rows on the host for them."""
    group = pages_of(clock, 2 * sizes.link_bytes, FRAGMENT_BYTES, layers=1)
    blocks = (torch.randperm(group.layers[0].shape[0] - 1) + 1).tolist()
    rows = torch.empty((len(blocks), FRAGMENT_BYTES), dtype=torch.uint8, pin_memory=clock.device.type == "cuda")
    return group, blocks, rows


def engines(clock: Clock, sizes: Sizes, limits: Limits) -> Iterator[Figure]:
    """Copies of the copy engines alone, of contiguous memory in both directions; the same by single batched copies."""
    decode, is_gpu = Decode(clock, sizes), clock.device.type == "cuda"
    count = min(sizes.link_bytes, BUFFER_BYTES)
    near = [torch.empty(count, dtype=torch.uint8, device=clock.device) for _ in range(2)]
    far = [torch.empty(count, dtype=torch.uint8, pin_memory=is_gpu) for _ in range(2)]
    other: torch.cuda.Stream | None = torch.cuda.Stream(clock.device) if is_gpu else None

    def both_ways() -> None:
        sent(near[0], far[0])
        with torch.cuda.stream(other):
            sent(far[1], near[1])

    yield decode.during("copies to the host by a copy engine", lambda: sent(near[0], far[0]))
    yield decode.during("copies to the device by a copy engine", lambda: sent(far[0], near[0]))
    yield decode.during("copies both ways by copy engines", both_ways)
    group, blocks, rows = fragments(clock, sizes)
    link = TritonOps().link_of(group)
    if link.batched is not None:
        yield decode.during("saves by batched copies", partial(link.batched.save, group, blocks, rows))


def programs(clock: Clock, sizes: Sizes, limits: Limits) -> Iterator[Figure]:
    """Gathers on the device alone, by several numbers of programs: nothing is copied to the host."""
    decode, (group, blocks, _) = Decode(clock, sizes), fragments(clock, sizes)
    count = min(len(blocks), BUFFER_BYTES // FRAGMENT_BYTES)
    buffer = torch.empty((count, FRAGMENT_BYTES), dtype=torch.uint8, device=clock.device)
    ids, table = moves.on_device(blocks[:count], clock.device), moves.LayerTable.of(group)
    for number in PROGRAMS:
        gather = moves.move_launch(table, moves.Move(int(kinds.GATHER), ids, staging=buffer, background=True))
        yield decode.during(f"gathers by {number} programs", replace(gather, grid=(number,)).run)


def spans(clock: Clock, sizes: Sizes, limits: Limits) -> Iterator[Figure]:
    """Decodes that leave 4 multiprocessors free, or are divided more finely, alone and during saves; saves as they are
    at the begin and at the end, since this figure was not stable.
    """
    decode, (group, blocks, rows) = Decode(clock, sizes), fragments(clock, sizes)
    buffered, whole = TritonOps().link_of(group).buffered, decode.chip.multiprocessors
    saves, loads = (partial(way, group, blocks, rows) for way in (buffered.save, buffered.load))
    yield decode.during("saves", saves)
    yield decode.during("loads", loads)
    for name, number in (("4 multiprocessors left free", max(1, whole - 4)), ("half spans", 2 * whole)):
        work = decode.by(number)
        ratio = decode.alone / clock.seconds_as_called(work)
        yield Figure(f"decode alone, {name}", ratio, "decode alone", ratio)
        yield decode.during(f"saves, {name}", saves, work)
    yield decode.during("saves, again", saves)


def priorities(clock: Clock, sizes: Sizes, limits: Limits) -> Iterator[Figure]:
    """Decodes on a stream with priority over that of the gathers of saves."""
    decode, (group, blocks, rows) = Decode(clock, sizes), fragments(clock, sizes)
    saves = partial(TritonOps().link_of(group).buffered.save, group, blocks, rows)
    first: torch.cuda.Stream | None = None
    if clock.device.type == "cuda":
        first = torch.cuda.Stream(clock.device, priority=-1)
    with torch.cuda.stream(first):
        yield decode.during("saves, with priority", saves)


PARTS = (engines, programs, spans, priorities)
