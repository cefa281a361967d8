"""Figures of whole pages, of new tokens, and of the host link."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kvplane_kernels.interface import GroupPages
from kvplane_kernels.triton_ops import moves, writes
from kvplane_kernels.triton_ops.backend import TritonOps
from kvplane_kernels.triton_ops.kernels import moves as kinds
from kvplane_kernels.triton_ops.launch import chip_of
from kvplane_kernels.triton_ops.link.routes import Route
from tests.bench.gpu.figures import Figure, Sizes
from tests.bench.gpu.limits import Limits
from tests.bench.gpu.timing import Clock

LAYERS = 8
COPY_GOALS = {4 << 10: 0.85}
ENGINE_COPIES = 256


def pages_of(clock: Clock, num_bytes: int, page_bytes: int, layers: int = LAYERS) -> GroupPages:
    num_blocks = max(4, num_bytes // (page_bytes * layers))
    room = torch.randint(0, 256, (layers, num_blocks, page_bytes), dtype=torch.uint8, device=clock.device)
    return GroupPages(tuple(room))


def all_pages(clock: Clock, sizes: Sizes, limits: Limits) -> Iterator[Figure]:
    for page_bytes in sizes.page_bytes:
        yield from page_moves(clock, sizes, limits, page_bytes)


def all_writes(clock: Clock, sizes: Sizes, limits: Limits) -> Iterator[Figure]:
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        yield token_writes(clock, sizes, limits, dtype)


def all_links(clock: Clock, sizes: Sizes, limits: Limits) -> Iterator[Figure]:
    for page_bytes in sizes.page_bytes:
        yield from link(clock, sizes, limits, page_bytes)


def page_moves(clock: Clock, sizes: Sizes, limits: Limits, page_bytes: int) -> Iterator[Figure]:
    """Random pages, all in one launch, relative to a contiguous copy of the same number of bytes."""
    group = pages_of(clock, sizes.pool_bytes, page_bytes)
    table, num_blocks = moves.LayerTable.of(group), group.layers[0].shape[0]
    chosen = torch.randperm(num_blocks - 1)[: min(num_blocks - 1, 2 * sizes.moved_bytes // group.bytes_per_block)] + 1
    half = len(chosen) // 2
    source, target = (part.int().to(clock.device) for part in (chosen[:half], chosen[half : 2 * half]))
    staging = torch.empty((half, group.bytes_per_block), dtype=torch.uint8, device=clock.device)
    sums = torch.zeros(half, dtype=torch.int64, device=clock.device)
    moved, name, goal = half * group.bytes_per_block, f"{page_bytes >> 10} KiB pages", COPY_GOALS.get(page_bytes, 0.95)

    def rate(move: moves.Move, factor: int = 2) -> float:
        return factor * moved / clock.seconds(moves.move_launch(table, move).run)

    def figure(what: str, value: float, goal: float | None = goal) -> Figure:
        return Figure(f"{what}, {name}", value, limits.copy.name, value / limits.copy.value, goal)

    yield figure("copy", rate(moves.Move(int(kinds.COPY), source, targets=target)))
    gather = rate(moves.Move(int(kinds.GATHER), source, staging=staging))
    yield figure("gather", gather)
    yield figure("scatter", rate(moves.Move(int(kinds.SCATTER), source, staging=staging)))
    checked = rate(moves.Move(int(kinds.CHECKED_GATHER), source, staging=staging, sums=sums))
    yield Figure(f"gather with checksum, {name}", checked, "gather", checked / gather, 0.97)
    zeroes = rate(moves.Move(int(kinds.ZERO), source), 1)
    yield Figure(f"zero, {name}", zeroes, limits.fill.name, zeroes / limits.fill.value, 0.95)
    yield figure("peer: the copy engine, page by page", copy_engine(clock, group, chosen.tolist()), None)


def copy_engine(clock: Clock, group: GroupPages, blocks: list[int]) -> float:
    pairs = list(zip(blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :], strict=False))[:ENGINE_COPIES]
    layer = group.layers[0]

    def one_by_one() -> None:
        for source, target in pairs:
            layer[target].copy_(layer[source])

    return 2 * len(pairs) * layer.shape[1] / clock.seconds(one_by_one)


def token_writes(clock: Clock, sizes: Sizes, limits: Limits, dtype: torch.dtype) -> Figure:
    """Keys and values of 8 heads of 128, bfloat16 tokens, to random slots of pages of 16."""
    device, num_blocks = clock.device, sizes.tokens // 16 * 4 + 1
    room = torch.zeros((num_blocks, 2, 16, 8, 128), dtype=torch.uint8, device=device) if dtype.itemsize == 1 else None
    pages = torch.zeros((num_blocks, 2, 16, 8, 128), dtype=dtype, device=device) if room is None else room.view(dtype)
    scale = torch.full((8,), 0.5, device=device) if dtype.itemsize == 1 else None
    slots = (torch.randperm((num_blocks - 1) * 16)[: sizes.tokens] + 16).to(device)
    key, value = (torch.randn((sizes.tokens, 8, 128), device=device).bfloat16() for _ in range(2))
    k, v = writes.Written(key, pages[:, 0], scale), writes.Written(value, pages[:, 1], scale)
    launch = writes.write_launch(k, v, slots, chip_of(device))
    rate = 2 * key.numel() * (2 + dtype.itemsize) / clock.seconds(launch.run)
    name = f"write {sizes.tokens} tokens, {str(dtype).removeprefix('torch.')}"
    return Figure(name, rate, limits.copy.name, rate / limits.copy.value, 0.85)


def link(clock: Clock, sizes: Sizes, limits: Limits, page_bytes: int) -> Iterator[Figure]:
    """Blocks of one layer, so that a page is a fragment: by each route, by the one that the link chooses, and by a
    kernel that writes pinned memory itself.
    """
    group, ops = pages_of(clock, 4 * sizes.link_bytes, page_bytes, layers=1), TritonOps()
    count = min(sizes.link_bytes // page_bytes, group.layers[0].shape[0] - 1)
    blocks = (torch.randperm(group.layers[0].shape[0] - 1)[:count] + 1).tolist()
    rows = torch.empty((count, page_bytes), dtype=torch.uint8, pin_memory=clock.device.type == "cuda")
    chosen, name = ops.link_of(group), f"fragments of {page_bytes >> 10} KiB"
    ways: list[tuple[str, Route, float | None]] = [(f"{name}, as chosen", chosen, 0.95)]
    ways.append((f"{name}, by buffers and 4 multiprocessors", chosen.buffered, None))
    if chosen.batched is not None:
        ways.append((f"{name}, batched copies", chosen.batched, None))
    for way, route, goal in ways:
        for what, work, limit in (
            ("to the host", route.save, limits.to_host),
            ("to the device", route.load, limits.to_device),
        ):
            rate = count * page_bytes / clock.seconds_as_called(partial(work, group, blocks, rows))
            yield Figure(f"{what}, {way}", rate, limit.name, rate / limit.value, goal)
    direct = moves.Move(int(kinds.GATHER), moves.on_device(blocks, clock.device), staging=rows, background=True)
    rate = count * page_bytes / clock.seconds(moves.move_launch(moves.LayerTable.of(group), direct).run)
    name = f"peer: a kernel writes pinned memory, {name}"
    yield Figure(name, rate, limits.to_host.name, rate / limits.to_host.value)


PARTS = (all_pages, all_writes, all_links)
