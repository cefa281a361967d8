"""Figures of batches as they are served: prefill, mixed and draft batches, few rows, other shapes, states, the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from kvplane_kernels.cudnn_ops.entry import CudnnEntry
from kvplane_kernels.interface import (
    AttentionPages,
    AttentionRule,
    Batch,
    DeltaInputs,
    PagedOps,
    ScanInputs,
    StateInputs,
    StatePages,
    StateRows,
    StateWeights,
)
from kvplane_kernels.triton_ops import attention
from kvplane_kernels.triton_ops.backend import TritonOps
from tests.bench.gpu.decoding import batch_of, random_pages, runner
from tests.bench.gpu.figures import Figure, Sizes
from tests.bench.gpu.limits import Limits, host_seconds
from tests.bench.gpu.timing import Clock

PAGE, DRAFTS, WINDOW = 16, 3, 128


@dataclass(frozen=True)
class Heads:
    """Heads of a layer: of pages, query heads for each of them, elements."""

    kv: int
    group: int = 8
    size: int = 128


@dataclass(frozen=True)
class Rows:
    """Lengths of rows, and numbers of their last tokens that are queries; none = one each."""

    lengths: list[int]
    queries: list[int] | None = None

    @property
    def attended(self) -> int:
        """Pairs of a query and a token to which it attends."""
        pairs = zip(self.lengths, self.queries or [1] * len(self.lengths), strict=True)
        return sum(count * length - count * (count - 1) // 2 for length, count in pairs)


def mixed_rows(clock: Clock, sizes: Sizes, limits: Limits) -> Iterator[Figure]:
    heads, lengths = Heads(sizes.kv_heads), [sizes.context] * sizes.rows
    chunk = Rows([sizes.context], [sizes.context // 16])
    mixed = Rows([sizes.context] * sizes.rows, [sizes.context // 16] + [1] * (sizes.rows - 1))
    decodes, name = (
        seconds(clock, heads, Rows(lengths[1:])),
        f"a chunk of {sizes.context // 16} with {sizes.rows - 1} decodes",
    )
    for how, took in (("", served_seconds), (" by Triton", seconds)):
        together = (took(clock, heads, chunk) + decodes) / took(clock, heads, mixed)
        yield Figure(f"{name}{how}", together, "both alone", together, 1.0)


def shapes(clock: Clock, sizes: Sizes, limits: Limits) -> Iterator[Figure]:
    heads, lengths = Heads(sizes.kv_heads), [sizes.context] * sizes.rows
    several = Rows(lengths, [DRAFTS + 1] * sizes.rows)
    for name, of, rows, goal in (
        (f"{DRAFTS} drafts per row", heads, several, 0.85),
        ("1 row", heads, Rows([sizes.context // 4]), None),
        ("8 rows", heads, Rows([sizes.context // 4] * 8), None),
        ("one head of pages", Heads(1), Rows(lengths), 0.85),
        ("heads of 64", Heads(sizes.kv_heads, size=64), Rows(lengths), 0.85),
        ("heads of 256", Heads(sizes.kv_heads, group=2, size=256), Rows(lengths), 0.85),
    ):
        rate = 4 * sum(rows.lengths) * of.kv * of.size / seconds(clock, of, rows)
        context = f"{len(rows.lengths)} x {rows.lengths[0]} tokens"
        yield Figure(f"{name}, {context}", rate, limits.read.name, rate / limits.read.value, goal)


def windows(clock: Clock, sizes: Sizes, limits: Limits) -> Iterator[Figure]:
    heads, lengths = Heads(sizes.kv_heads), [sizes.context] * sizes.rows
    rule = AttentionRule(0.1, WINDOW, sinks=torch.zeros(heads.kv * heads.group, device=clock.device))
    read = 4 * min(WINDOW, sizes.context) * sizes.rows * heads.kv * heads.size
    rate = read / seconds(clock, heads, Rows(lengths), rule)
    yield Figure(f"window of {WINDOW} with sinks, {sizes.rows} rows", rate, limits.read.name, rate / limits.read.value)


def prefill(clock: Clock, sizes: Sizes, limits: Limits) -> Iterator[Figure]:
    """One row from its first token on, as parts of a matrix product and of torch's attention on a dense cache; by the
    backend that an engine uses, and by Triton's kernel.
    """
    heads, size = Heads(sizes.kv_heads), min(8192, sizes.context)
    a = torch.randn((size, size), device=clock.device).bfloat16()
    product = 2 * size**3 / clock.seconds(lambda: a @ a)
    for tokens, count in ((sizes.context, sizes.context), (4 * sizes.context, sizes.context // 16)):
        rows = Rows([tokens], [count])
        flop = 4 * rows.attended * heads.kv * heads.group * heads.size
        other = flop / clock.seconds(dense(clock, heads, tokens, count))
        name = f"prefill bfloat16, {count} of {tokens} tokens"
        for how, goal, took in (("", 0.9, served_seconds), (" by Triton", None, seconds)):
            rate = flop / took(clock, heads, rows)
            yield Figure(f"{name}{how}", rate, "a matrix product", rate / product, unit="FLOP/s")
            yield Figure(f"{name}{how}, and a dense cache", rate, "torch SDPA", rate / other, goal, unit="FLOP/s")


def dense(clock: Clock, heads: Heads, tokens: int, count: int) -> Callable[[], Tensor]:
    """Torch's attention on a dense cache: causal where all tokens are queries; else all queries attend to all."""
    q = torch.randn((1, heads.kv * heads.group, count, heads.size), device=clock.device).bfloat16()
    k, v = (torch.randn((1, heads.kv, tokens, heads.size), device=clock.device).bfloat16() for _ in range(2))
    return lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=count == tokens, enable_gqa=True)


@cache
def served(device: torch.device) -> PagedOps:
    """The backend that an engine uses for attention."""
    return TritonOps() if CudnnEntry.unfit(device) else CudnnEntry()


def served_seconds(clock: Clock, heads: Heads, rows: Rows) -> float:
    query, pages, batch = layer(clock, heads, rows)
    batch, rule = replace(batch, host=batch.on_host()), AttentionRule(heads.size**-0.5)
    return clock.seconds(lambda: served(clock.device).prefill_attention(query, pages, batch, rule))


def layer(clock: Clock, heads: Heads, rows: Rows) -> tuple[Tensor, AttentionPages, Batch]:
    """Queries, pages and the batch of rows."""
    batch, num_blocks = batch_of(rows.lengths, PAGE, clock.device)
    room = random_pages((num_blocks, 2, PAGE, heads.kv, heads.size), torch.bfloat16, clock.device)
    counts = rows.queries or [1] * len(rows.lengths)
    query = torch.randn((sum(counts), heads.kv * heads.group, heads.size), device=clock.device).bfloat16()
    if rows.queries:
        starts = torch.tensor([0, *counts]).cumsum(0).int().to(clock.device)
        batch = Batch(batch.block_table, batch.seq_lens, starts)
    return query, AttentionPages(room[:, 0], room[:, 1]), batch


def seconds(clock: Clock, heads: Heads, rows: Rows, rule: AttentionRule | None = None) -> float:
    query, pages, batch = layer(clock, heads, rows)
    call = attention.keys_and_values(query, pages, batch, rule or AttentionRule(heads.size**-0.5))
    return clock.seconds(runner(call, clock.device))


def states(clock: Clock, sizes: Sizes, limits: Limits) -> Iterator[Figure]:
    """Steps of layers with states: decodes move states; prompts move tokens, since states stay on chip or in caches."""
    for count in (1, sizes.context // 16):
        rows, blocks = state_rows(sizes.rows, count, clock.device), sizes.rows + 1
        for make in (mamba_2, mamba_1, partial(gated_delta_rule, False), partial(gated_delta_rule, True)):
            name, moved, work = make(rows, blocks, sizes, clock.device)
            rate = moved / clock.seconds(work)
            what = f"{name}: {sizes.rows} rows of {count} tokens"
            yield Figure(what, rate, limits.copy.name, rate / limits.copy.value)


Work = tuple[str, int, Callable[[], Tensor]]


def state_rows(rows: int, count: int, device: torch.device) -> StateRows:
    """Rows of as many tokens each, whose last states are stored where they were read."""
    starts = torch.arange(0, rows * count + 1, count, dtype=torch.int32, device=device)
    write = torch.zeros(rows * count, dtype=torch.int32, device=device)
    write[count - 1 :: count] = torch.arange(1, rows + 1, dtype=torch.int32, device=device)
    return StateRows(starts, write[count - 1 :: count].contiguous(), write)


def mamba_2(rows: StateRows, blocks: int, sizes: Sizes, device: torch.device) -> Work:
    """A step of Mamba-2: name, bytes that it must move, and the work."""
    heads, size, state = 4 * sizes.kv_heads, 64, 128
    channels, tokens = heads * size + 2 * state, len(rows.write_block)
    conv = torch.randn((blocks, 3, channels), device=device).bfloat16().mT
    pages = StatePages(conv, torch.randn((blocks, heads, size, state), device=device))
    x = torch.randn((tokens, channels), device=device).bfloat16()
    dt = torch.rand((tokens, heads), device=device)
    inputs = StateInputs(rows.query_start, rows.read_block, rows.write_block, x, dt)
    weight, bias, a, d = (
        torch.randn(shape, device=device) for shape in ((channels, 4), (channels,), (heads,), (heads,))
    )
    weights, ops = StateWeights(weight, bias, -a.abs(), d), TritonOps()
    moved = 8 * (blocks - 1) * heads * size * state + 4 * tokens * channels
    name = f"states of Mamba-2, {heads} heads of {size} x {state}"
    return name, moved, lambda: ops.state_step(pages, inputs, weights)


def mamba_1(rows: StateRows, blocks: int, sizes: Sizes, device: torch.device) -> Work:
    """A convolution and a selective scan, without the projection between them."""
    channels, size, tokens = 512 * sizes.kv_heads, 16, len(rows.write_block)
    conv = torch.randn((blocks, 3, channels), device=device).bfloat16().mT
    states, ops = torch.randn((blocks, channels, size), device=device), TritonOps()
    x, dt = (torch.randn((tokens, channels), device=device).bfloat16() for _ in range(2))
    b, c = (torch.randn((tokens, size), device=device).bfloat16() for _ in range(2))
    weight, a, d = (torch.randn(shape, device=device) for shape in ((channels, 4), (channels, size), (channels,)))
    dt, a = dt.exp(), -a.exp()

    def work() -> Tensor:
        u = ops.convolve(conv, rows, x, weight, d)
        inputs = ScanInputs(rows.query_start, rows.read_block, rows.write_block, u, dt, b, c)
        return ops.selective_scan(states, inputs, a, d)

    moved = 8 * (blocks - 1) * channels * size + 10 * tokens * channels
    return f"states of Mamba-1, {channels} channels x {size}", moved, work


def gated_delta_rule(by_key: bool, rows: StateRows, blocks: int, sizes: Sizes, device: torch.device) -> Work:
    """A convolution and a gated delta rule, with a gate per head or per element of a key, without the normalisation
    between them.
    """
    heads, key_heads, size, tokens = 4 * sizes.kv_heads, 2 * sizes.kv_heads, 128, len(rows.write_block)
    channels, states = (2 * key_heads + heads) * size, torch.randn((blocks, heads, size, size), device=device)
    conv = torch.randn((blocks, 3, channels), device=device).bfloat16().mT
    x, weight = torch.randn((tokens, channels), device=device).bfloat16(), torch.randn((channels, 4), device=device)
    g = -torch.rand((tokens, heads, *[size] * by_key), device=device)
    beta = torch.rand((tokens, heads), device=device)
    q, k = (torch.randn((tokens, key_heads, size), device=device) for _ in range(2))
    q, k = (functional.normalize(part, dim=2).bfloat16() for part in (q, k))
    ops = TritonOps()

    def work() -> Tensor:
        u = ops.convolve(conv, rows, x, weight, weight[:, 0])
        v = u[:, 2 * key_heads * size :].view(tokens, heads, size)
        inputs = DeltaInputs(rows.query_start, rows.read_block, rows.write_block, q, k, v, g, beta)
        return ops.gated_delta_rule(states, inputs)

    moved = 8 * (blocks - 1) * heads * size**2 + 2 * tokens * (3 * channels + heads * size) + 4 * g.numel()
    gates = ", gates of keys" * by_key
    return f"states of a gated delta rule{gates}, {heads} heads of {size} x {size}", moved, work


def host(clock: Clock, sizes: Sizes, limits: Limits) -> Iterator[Figure]:
    """Time of the host per prepared call of attention."""
    query, pages, batch = layer(clock, Heads(sizes.kv_heads), Rows([PAGE] * sizes.rows))
    ops, rule = TritonOps(), AttentionRule(0.1)
    spent = host_seconds(clock, lambda: ops.decode_attention(query, pages, batch, rule))
    limit = f"two times the {limits.host_launch.name}"
    ratio = spent / limits.host_launch.value / 2
    yield Figure("host time of a decode call, seconds", spent, limit, ratio)


PARTS = (prefill, mixed_rows, shapes, windows, states, host)
