"""The argument checks that all backends share. They raise InvalidArgument before anything is written.

Each launch checks shapes, types, devices and host-side ids: this takes microseconds and does not wait for a device. The
values in device tensors are not checked; the caller ensures that these values are valid. `check_scales` reads scales
once, when pages are set up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import isfinite
from typing import NoReturn

import torch
from torch import Tensor

from kvplane.base.errors import InvalidArgument
from kvplane_kernels.interface import (
    AttentionPages,
    AttentionRule,
    Batch,
    DeltaInputs,
    GroupPages,
    LatentPages,
    ScanInputs,
    StateInputs,
    StatePages,
    StateRows,
    StateWeights,
)

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
EIGHT_BIT = (torch.float8_e4m3fn, torch.float8_e5m2)
ANY = -1  # a size that is not compared
ON_HOST = torch.empty(0, device="cpu")


def refuse(field: str, message: str, remedy: str) -> NoReturn:
    """Raise InvalidArgument for `field`, an argument of an operation."""
    raise InvalidArgument(message, field=field, remedy=remedy)


def expect(field: str, tensor: Tensor, shape: tuple[int, ...], dtypes: Sequence[torch.dtype], like: Tensor) -> None:
    """Raise InvalidArgument for a tensor of another shape or type, or on another device than `like`.

    The size `ANY` in `shape` matches every size.
    """
    if tensor.dim() != len(shape) or any(w not in (ANY, n) for w, n in zip(shape, tensor.shape, strict=True)):
        wanted = ", ".join("any" if size == ANY else str(size) for size in shape)
        refuse(field, f"the shape is {list(tensor.shape)}, expected [{wanted}]", "give a tensor of that shape")
    if tensor.dtype not in dtypes:
        expected = " or ".join(map(name_of, dtypes))
        refuse(field, f"the type is {name_of(tensor.dtype)}, expected {expected}", "convert the tensor")
    if tensor.device != like.device:
        where = f"the tensor is on {tensor.device}, the other arguments are on {like.device}"
        refuse(field, where, "move it to that device")


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a type without its module."""
    return str(dtype).removeprefix("torch.")


def check_pages(pages: AttentionPages) -> None:
    """Raise InvalidArgument unless keys and values have the same type and matching shapes.

    Scales must be given for 8-bit pages, and must not be given for other pages.
    """
    expect("pages.k", pages.k, (ANY,) * 4, (*FLOATS, *EIGHT_BIT), pages.k)
    expect("pages.v", pages.v, (*pages.k.shape[:3], ANY), (pages.k.dtype,), pages.k)
    for field, scale in (("pages.k_scale", pages.k_scale), ("pages.v_scale", pages.v_scale)):
        check_scale(field, scale, pages.k, pages.k.shape[2])


def check_scale(field: str, scale: Tensor | None, pages: Tensor, heads: int) -> None:
    """Raise InvalidArgument unless 8-bit pages have a scale for all heads or one for each, and others have none."""
    if (scale is None) == (pages.dtype in EIGHT_BIT):
        remedy = "give None" if scale is not None else "give float32 [1] or [kv_heads]"
        found = "is missing, but 8-bit pages need one" if scale is None else "is given, but these pages need none"
        refuse(field, f"the scale of {name_of(pages.dtype)} pages {found}", remedy)
    if scale is not None:
        sizes = (1,) if scale.shape == (1,) else (heads,)
        expect(field, scale, sizes, (torch.float32,), pages)


def check_scales(pages: AttentionPages) -> None:
    """Raise InvalidArgument for a scale that is zero, negative, infinite or NaN. Waits for the device; the caller calls
    this once per layer, when the pages are set up.
    """
    check_pages(pages)
    for field, scale in (("pages.k_scale", pages.k_scale), ("pages.v_scale", pages.v_scale)):
        if scale is None:
            continue
        bad = [value for value in scale.tolist() if not 0 < value < float("inf")]
        if bad:
            refuse(field, f"a scale is {bad[0]}, expected a finite number above 0", "compute the scales again")


def partners(pages: Tensor) -> tuple[torch.dtype, ...]:
    """Return the element types that queries and new tokens may have with these pages."""
    return FLOATS if pages.dtype in EIGHT_BIT else (pages.dtype,)


def check_write_kv(pages: AttentionPages, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Raise InvalidArgument unless the keys and values of new tokens have the heads and head sizes of the pages."""
    check_pages(pages)
    expect("key", key, (ANY, *pages.k.shape[2:]), partners(pages.k), pages.k)
    expect("value", value, (key.shape[0], *pages.v.shape[2:]), (key.dtype,), pages.k)
    expect("slots", slots, (key.shape[0],), (torch.int64,), pages.k)


def check_latent_pages(pages: LatentPages) -> None:
    """Raise InvalidArgument unless latent pages have three dimensions, and 8-bit ones, and no others, one scale."""
    expect("pages.rows", pages.rows, (ANY,) * 3, (*FLOATS, *EIGHT_BIT), pages.rows)
    check_scale("pages.scale", pages.scale, pages.rows, 1)


def check_write_latent(pages: LatentPages, latent: Tensor, slots: Tensor) -> None:
    """Raise InvalidArgument unless latent rows have the row size and type of the pages."""
    check_latent_pages(pages)
    expect("latent", latent, (ANY, pages.rows.shape[2]), partners(pages.rows), pages.rows)
    expect("slots", slots, (latent.shape[0],), (torch.int64,), pages.rows)


def check_batch(batch: Batch, queries: int, like: Tensor) -> None:
    """Raise InvalidArgument unless table, lengths and query starts, also those on the host, have the same number of
    rows.

    Without query starts, there must be one query per row.
    """
    expect("batch.block_table", batch.block_table, (ANY, ANY), (torch.int32,), like)
    rows = batch.block_table.shape[0]
    expect("batch.seq_lens", batch.seq_lens, (rows,), (torch.int32,), like)
    if (host := batch.host) is not None:
        expect("batch.host.block_table", host.block_table, (rows, ANY), (torch.int32,), ON_HOST)
        expect("batch.host.seq_lens", host.seq_lens, (rows,), (torch.int64,), ON_HOST)
        expect("batch.host.query_start", host.query_start, (rows + 1,), (torch.int64,), ON_HOST)
    if batch.tree is not None:
        if batch.query_start is None:
            refuse("batch.tree", "it is given without batch.query_start", "give batch.query_start, or None")
        expect("batch.tree", batch.tree, (queries,), (torch.int64,), like)
    if batch.query_start is not None:
        expect("batch.query_start", batch.query_start, (rows + 1,), (torch.int32,), like)
    elif queries != rows:
        refuse("query", f"there are {queries} queries for {rows} rows", "give one query per row, or batch.query_start")


def check_one_query_per_row(batch: Batch) -> None:
    """Raise InvalidArgument if the batch of a decode has `query_start`: a decode has one query per row."""
    if batch.query_start is not None:
        refuse(
            "batch.query_start",
            "it is given to a decode, which has one query per row",
            "give None, or call prefill_attention",
        )


def check_rule(rule: AttentionRule, q_heads: int, like: Tensor) -> None:
    """Raise InvalidArgument if both window and chunk are set, if the scale or the soft cap is not a finite number, if
    the soft cap is below 0, or if the number of sinks or slopes is not the number of query heads.
    """
    check_factor("rule.scale", rule.scale)
    if not 0 <= rule.soft_cap < float("inf"):
        refuse("rule.soft_cap", f"the soft cap is {rule.soft_cap}", "give a finite number above 0, or 0 for no cap")
    for field, tokens in (("rule.window", rule.window), ("rule.chunk", rule.chunk)):
        if tokens < 0:
            refuse(field, f"{tokens} tokens are below 0", "give a number of tokens, or 0 for all tokens")
    if rule.window and rule.chunk:
        both = f"the chunk is {rule.chunk} and the window {rule.window} tokens, but only one may be set"
        refuse("rule.chunk", both, "set one of them to 0")
    for field, numbers in (("rule.sinks", rule.sinks), ("rule.slopes", rule.slopes)):
        if numbers is not None:
            expect(field, numbers, (q_heads,), (torch.float32,), like)


def check_factor(field: str, scale: float) -> None:
    """Raise InvalidArgument unless the factor of attention scores is a finite number."""
    if not isfinite(scale):
        refuse(field, f"the scale is {scale}", "give a finite number")


def check_lse(lse: Tensor | None, query: Tensor) -> None:
    """Raise InvalidArgument unless the memory for log-sum-exps is contiguous, with one number per query and head."""
    if lse is None:
        return
    expect("lse", lse, (query.shape[0], query.shape[1]), (torch.float32,), query)
    if not lse.is_contiguous():
        refuse("lse", f"the strides are {list(lse.stride())}", "give a contiguous tensor")


def check_attention(query: Tensor, pages: AttentionPages, batch: Batch, rule: AttentionRule) -> None:
    """Raise InvalidArgument unless queries have the head size of the keys, and their number of heads is a multiple of
    the keys' number of heads.
    """
    check_pages(pages)
    expect("query", query, (ANY, ANY, pages.k.shape[3]), partners(pages.k), pages.k)
    q_heads, kv_heads = query.shape[1], pages.k.shape[2]
    if not kv_heads:
        refuse("pages.k", "the pages have no heads", "give pages with at least one head")
    if q_heads % kv_heads or not q_heads:
        problem = f"{q_heads} query heads are not a multiple of {kv_heads} key-value heads"
        refuse("query", problem, "give a multiple of the pages' heads")
    check_batch(batch, query.shape[0], pages.k)
    check_rule(rule, q_heads, pages.k)


def check_mla(query: Tensor, pages: LatentPages, batch: Batch, scale: float, value_size: int) -> None:
    """Raise InvalidArgument unless queries have the size and type of the latent rows, the scale is a finite number, and
    values fit into a row.
    """
    check_latent_pages(pages)
    size = pages.rows.shape[2]
    expect("query", query, (ANY, ANY, size), partners(pages.rows), pages.rows)
    if not query.shape[1]:
        refuse("query", "the queries have no heads", "give queries of at least one head")
    check_batch(batch, query.shape[0], pages.rows)
    check_factor("scale", scale)
    if not 0 < value_size <= size:
        problem = f"values have {value_size} elements, a latent row has {size}"
        refuse("value_size", problem, f"give 1 to {size}")


def check_state(pages: StatePages, inputs: StateInputs, weights: StateWeights) -> None:
    """Raise InvalidArgument unless the shapes and types of state pages, tokens and weights fit together."""
    expect("pages.ssm", pages.ssm, (ANY,) * 4, FLOATS, pages.ssm)
    num_blocks, heads, head_size, state_size = pages.ssm.shape
    channels = heads * head_size + 2 * state_size
    expect("pages.conv", pages.conv, (num_blocks, channels, ANY), FLOATS, pages.ssm)
    expect("inputs.x", inputs.x, (ANY, channels), FLOATS, pages.ssm)
    check_state_rows("inputs", inputs, inputs.x)
    expect("inputs.dt", inputs.dt, (inputs.x.shape[0], heads), FLOATS, pages.ssm)
    expect("weights.conv_weight", weights.conv_weight, (channels, pages.conv.shape[2] + 1), FLOATS, pages.ssm)
    expect("weights.conv_bias", weights.conv_bias, (channels,), FLOATS, pages.ssm)
    expect("weights.a", weights.a, (heads,), FLOATS, pages.ssm)
    expect("weights.d", weights.d, (heads,), FLOATS, pages.ssm)


def check_state_rows(field: str, rows: StateRows, x: Tensor) -> None:
    """Raise InvalidArgument unless rows and blocks fit to the tokens x [tokens, ...]."""
    expect(f"{field}.read_block", rows.read_block, (ANY,), (torch.int32,), x)
    expect(f"{field}.query_start", rows.query_start, (rows.read_block.shape[0] + 1,), (torch.int32,), x)
    expect(f"{field}.write_block", rows.write_block, (x.shape[0],), (torch.int32,), x)


def check_convolution(conv: Tensor, rows: StateRows, x: Tensor, weight: Tensor, bias: Tensor) -> None:
    """Raise InvalidArgument unless states, tokens and weights of a convolution have the same channels."""
    expect("conv", conv, (ANY,) * 3, FLOATS, conv)
    channels = conv.shape[1]
    expect("x", x, (ANY, channels), (conv.dtype,), conv)
    check_state_rows("rows", rows, x)
    expect("weight", weight, (channels, conv.shape[2] + 1), FLOATS, conv)
    expect("bias", bias, (channels,), FLOATS, conv)


def check_scan(states: Tensor, inputs: ScanInputs, a: Tensor, d: Tensor) -> None:
    """Raise InvalidArgument unless states, tokens and weights of a selective scan fit together."""
    expect("states", states, (ANY,) * 3, FLOATS, states)
    channels, state_size = states.shape[1:]
    expect("inputs.x", inputs.x, (ANY, channels), FLOATS, states)
    check_state_rows("inputs", inputs, inputs.x)
    tokens = inputs.x.shape[0]
    expect("inputs.dt", inputs.dt, (tokens, channels), FLOATS, states)
    for name in ("b", "c"):
        expect(f"inputs.{name}", getattr(inputs, name), (tokens, state_size), FLOATS, states)
    expect("a", a, (channels, state_size), FLOATS, states)
    expect("d", d, (channels,), FLOATS, states)


def check_delta_rule(states: Tensor, inputs: DeltaInputs) -> None:
    """Raise InvalidArgument unless states and tokens of a gated delta rule fit together, with a gate per head or per
    element of a key, and heads are a multiple of the keys' heads.
    """
    expect("states", states, (ANY,) * 4, FLOATS, states)
    heads, value_size, key_size = states.shape[1:]
    expect("inputs.v", inputs.v, (ANY, heads, value_size), FLOATS, states)
    check_state_rows("inputs", inputs, inputs.v)
    tokens = inputs.v.shape[0]
    expect("inputs.k", inputs.k, (tokens, ANY, key_size), FLOATS, states)
    key_heads = inputs.k.shape[1]
    if not key_heads or heads % key_heads:
        refuse("inputs.k", f"{heads} heads are not a multiple of {key_heads} heads of keys", "give a divisor of heads")
    expect("inputs.q", inputs.q, tuple(inputs.k.shape), FLOATS, states)
    of_keys = (key_size,) if inputs.g.dim() == 3 else ()
    expect("inputs.g", inputs.g, (tokens, heads, *of_keys), FLOATS, states)
    expect("inputs.beta", inputs.beta, (tokens, heads), FLOATS, states)


def check_group(group: GroupPages) -> None:
    """Raise InvalidArgument unless a group has layers, as uint8 tensors with equal numbers of blocks on one device."""
    if not group.layers:
        refuse("group.layers", "the group has no layer", "give the pages of at least one layer")
    first = group.layers[0]
    for index, layer in enumerate(group.layers):
        expect(f"group.layers[{index}]", layer, (first.shape[0], ANY), (torch.uint8,), first)


def check_blocks(group: GroupPages, field: str, blocks: Sequence[int], written: bool) -> None:
    """Raise InvalidArgument for a block id outside the pool, and for a write to the null block."""
    if not blocks:
        return
    num_blocks, lowest = group.layers[0].shape[0], 1 if written else 0
    for block in (min(blocks), max(blocks)):
        if not lowest <= block < num_blocks:
            what = (
                "block 0 is the null block, which is never written"
                if block == 0
                else f"block {block} is outside the pool"
            )
            refuse(field, what, f"give ids from {lowest} to {num_blocks - 1}")


def check_copies(group: GroupPages, src: Sequence[int], dst: Sequence[int]) -> None:
    """Raise InvalidArgument unless sources and targets of copies are in the pool and there are as many sources as
    targets.
    """
    check_group(group)
    if len(src) != len(dst):
        refuse("dst", f"there are {len(dst)} targets for {len(src)} sources", "give one target for each source")
    check_blocks(group, "src", src, written=False)
    check_blocks(group, "dst", dst, written=True)


def check_staging(group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
    """Raise InvalidArgument unless staging has one row of bytes per block, on the pages' device or in host memory."""
    like = staging if staging.device.type == "cpu" else group.layers[0]
    expect("staging", staging, (len(blocks), group.bytes_per_block), (torch.uint8,), like)


def check_named_once(blocks: Sequence[int]) -> None:
    """Raise InvalidArgument if a block is listed twice."""
    if len(set(blocks)) != len(blocks):
        twice = Counter(blocks).most_common(1)[0][0]
        refuse("blocks", f"block {twice} is listed more than once", "list each block once")
