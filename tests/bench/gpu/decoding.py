"""Figures of attention: GQA 8, heads of 128, as parts of reading the pages that it needs."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn import functional

from kvplane_kernels.interface import AttentionPages, AttentionRule, Batch, LatentPages
from kvplane_kernels.triton_ops import attention
from kvplane_kernels.triton_ops.launch import Launch, chip_of
from tests.bench.gpu.figures import Figure, Sizes
from tests.bench.gpu.limits import Limits
from tests.bench.gpu.timing import Clock, Work

GROUP, SIZE = 8, 128
LATENT, VALUE = 576, 512
GOALS = {torch.bfloat16: 0.90, torch.float8_e4m3fn: 0.85}


def even_rows(clock: Clock, sizes: Sizes, limits: Limits) -> Iterator[Figure]:
    even = [sizes.context] * sizes.rows
    for dtype in GOALS:
        by_page = {page: decode_rate(clock, (dtype, page, sizes.kv_heads), even) for page in (16, 64, 128)}
        for page in (16, 64):
            name = f"decode {short(dtype)}, {sizes.rows} x {sizes.context} tokens, pages of {page}"
            yield Figure(name, by_page[page], limits.read.name, by_page[page] / limits.read.value, GOALS[dtype])
        ratio = by_page[16] / by_page[128]
        yield Figure(f"decode {short(dtype)}, pages of 16", by_page[16], "pages of 128", ratio, 0.97)


def skewed_rows(clock: Clock, sizes: Sizes, limits: Limits) -> Iterator[Figure]:
    skewed = [sizes.long_context] + [sizes.context // 4] * (sizes.rows - 1)
    rate = decode_rate(clock, (torch.bfloat16, 16, sizes.kv_heads), skewed)
    name = f"decode bfloat16, one row of {sizes.long_context}, others of {sizes.context // 4} tokens"
    yield Figure(name, rate, limits.read.name, rate / limits.read.value, 0.65)


def latents(clock: Clock, sizes: Sizes, limits: Limits) -> Iterator[Figure]:
    rate = latent_rate(clock, [sizes.context] * sizes.rows)
    name = f"MLA decode, 16 heads, {sizes.rows} x {sizes.context} tokens"
    yield Figure(name, rate, limits.read.name, rate / limits.read.value, 0.85)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def batch_of(lengths: list[int], page: int, device: torch.device) -> tuple[Batch, int]:
    """Rows with blocks in random order, and the number of blocks."""
    columns = [-(-length // page) for length in lengths]
    table = torch.zeros((len(lengths), max(columns)), dtype=torch.int32)
    blocks = iter((torch.randperm(sum(columns)) + 1).int().split(columns))
    for row, count in enumerate(columns):
        table[row, :count] = next(blocks)
    return Batch(table.to(device), torch.tensor(lengths, dtype=torch.int32, device=device)), sum(columns) + 1


def random_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device).to(dtype)


def decode_rate(clock: Clock, pages_of: tuple[torch.dtype, int, int], lengths: list[int]) -> float:
    """Bytes of keys and values per second. `pages_of`: type, tokens per page, heads."""
    dtype, _, kv_heads = pages_of
    num_bytes = 2 * sum(lengths) * kv_heads * SIZE * dtype.itemsize
    return num_bytes / clock.seconds(decoder(clock.device, pages_of, lengths))


def decoder(device: torch.device, pages_of: tuple[torch.dtype, int, int], lengths: list[int]) -> Work:
    """One decode of rows of these lengths."""
    dtype, page, kv_heads = pages_of
    batch, num_blocks = batch_of(lengths, page, device)
    room = random_pages((num_blocks, 2, page, kv_heads, SIZE), dtype, device)
    scale = torch.full((kv_heads,), 0.5, device=device) if dtype.itemsize == 1 else None
    query = torch.randn((len(lengths), kv_heads * GROUP, SIZE), device=device).bfloat16()
    pages = AttentionPages(room[:, 0], room[:, 1], scale, scale)
    return runner(attention.keys_and_values(query, pages, batch, AttentionRule(SIZE**-0.5)), device)


def latent_rate(clock: Clock, lengths: list[int]) -> float:
    batch, num_blocks = batch_of(lengths, 64, clock.device)
    pages = random_pages((num_blocks, 64, LATENT), torch.bfloat16, clock.device)
    query = torch.randn((len(lengths), 16, LATENT), device=clock.device).bfloat16()
    decode = attention.latent(query, LatentPages(pages), batch, LATENT**-0.5, VALUE)
    return sum(lengths) * LATENT * 2 / clock.seconds(runner(decode, clock.device))


def runner(call: attention.Call, device: torch.device) -> Work:
    return running(attention.launches(call, chip_of(device)))


def running(launches: Iterable[Launch]) -> Work:
    """The work of running launches in order."""

    def both() -> None:
        for launch in launches:
            launch.run()

    return both


def peers(clock: Clock, sizes: Sizes, limits: Limits) -> Iterator[Figure]:
    """Torch on contiguous caches, unlike any paged cache; and its paged attention where it has one."""
    shape = (sizes.rows, sizes.kv_heads, sizes.context, SIZE)
    k, v = (torch.randn(shape, device=clock.device).bfloat16() for _ in range(2))
    q = torch.randn((sizes.rows, sizes.kv_heads * GROUP, 1, SIZE), device=clock.device).bfloat16()

    def dense() -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    rate = 2 * k.numel() * 2 / clock.seconds(dense)
    yield Figure("peer: torch SDPA, dense cache", rate, limits.read.name, rate / limits.read.value)


def varlen_peer(clock: Clock, sizes: Sizes, limits: Limits) -> Iterator[Figure]:
    if clock.device.type == "cuda" and has_paged_varlen():
        rate = paged_varlen(clock, sizes)
        yield Figure("peer: torch varlen_attn, pages of 64", rate, limits.read.name, rate / limits.read.value)


def has_paged_varlen() -> bool:
    """Torch 2.13 has a block table there; earlier ones have not."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "block_table" in inspect.signature(varlen_attn).parameters


def paged_varlen(clock: Clock, sizes: Sizes) -> float:
    from torch.nn.attention.varlen import varlen_attn

    page, lengths = 64, [sizes.context] * sizes.rows
    batch, num_blocks = batch_of(lengths, page, clock.device)
    k, v = (random_pages((num_blocks, page, sizes.kv_heads, SIZE), torch.bfloat16, clock.device) for _ in range(2))
    q = torch.randn((sizes.rows, sizes.kv_heads * GROUP, SIZE), device=clock.device).bfloat16()
    starts = torch.arange(sizes.rows + 1, dtype=torch.int32, device=clock.device)
    given: dict[str, Any] = {"block_table": batch.block_table, "seqused_k": batch.seq_lens, "enable_gqa": True}

    def work() -> object:
        return varlen_attn(q, k, v, starts, None, 1, sizes.context, **given)

    return 2 * sum(lengths) * sizes.kv_heads * SIZE * 2 / clock.seconds(work)


PARTS = (even_rows, skewed_rows, latents, peers, varlen_peer)
