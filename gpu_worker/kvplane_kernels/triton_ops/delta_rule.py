"""The gated delta rule: kernel arguments and launches, which depend on no values on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kvplane_kernels.interface import DeltaInputs
from kvplane_kernels.triton_ops import states as shared
from kvplane_kernels.triton_ops.kernels import delta_rule as kernels
from kvplane_kernels.triton_ops.kernels.arguments import DeltaShape, DeltaTokens, HeldChunks, power_of_two
from kvplane_kernels.triton_ops.launch import Chip, Launch

# Tokens of a chunk, rows of its inverse that are computed together, most tokens of a row that are taken one by one. A
# batch with at most SHORT tokens more than rows is one of decodes: its kernel has no chunks.
CHUNK, STRIP, SHORT = 64, 16, 16
INTERPRETED = 16, 8, 3
# Elements of a value per program, and columns of a state that one product takes.
VALUE_TILE, VALUE_TILE_OF_DECODES, PART = 16, 32, 32
# The same where warp groups multiply: twice as fast, in spite of some accesses of local memory.
VALUE_TILE_OF_GROUPS, PART_OF_GROUPS = 64, 64
# Columns of keys that are multiplied at once where each has a gate, whose sums take registers too.
PART_OF_GATES = 16
WARPS, WARPS_OF_DECODES = 4, 8


def refusal(states: Tensor, inputs: DeltaInputs) -> str:
    """Return why no kernel supports these states and inputs; "" if one does."""
    why = shared.refused_types(states, inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    return why or (f"keys of {states.shape[3]} elements" if states.shape[3] > shared.MAX_STATE else "")


def shape_of(states: Tensor, inputs: DeltaInputs, chip: Chip) -> DeltaShape:
    """Return the compile-time constants of a call."""
    _, heads, value_size, key_size = states.shape
    chunk, strip, short = INTERPRETED if chip.interpreted else (CHUNK, STRIP, SHORT)
    is_decode = inputs.v.shape[0] <= inputs.read_block.shape[0] + short
    by_key, tile, columns = inputs.g.dim() == 3, VALUE_TILE, PART
    if chip.has_warp_groups and not by_key:
        tile, columns = VALUE_TILE_OF_GROUPS, PART_OF_GROUPS
    is_exact = all(one.dtype != torch.float32 for one in (inputs.q, inputs.k))
    return DeltaShape(
        heads=heads,
        group=heads // inputs.k.shape[1],
        value_size=value_size,
        key_size=key_size,
        by_key=by_key,
        padded_v=min(VALUE_TILE_OF_DECODES if is_decode else tile, power_of_two(value_size)),
        padded_k=power_of_two(key_size),
        part_k=min(columns, power_of_two(key_size)),
        chunk=0 if is_decode else chunk,
        strip=strip,
        short=short,
        round_bfloat16=chip.interpreted and states.dtype == torch.bfloat16,
        precision=shared.FULL_PRECISION,
        precision_y=shared.SOME_PRECISION if inputs.v.dtype == torch.bfloat16 else shared.FULL_PRECISION,
        precision_k=shared.SOME_PRECISION if is_exact else shared.FULL_PRECISION,
    )


def launches(states: Tensor, inputs: DeltaInputs, chip: Chip) -> tuple[Tensor, Iterator[Launch]]:
    """Return memory for y, and the launches of a call."""
    shape, rows, count = shape_of(states, inputs, chip), inputs.read_block.shape[0], inputs.v.shape[0]
    y = inputs.v.new_empty(inputs.v.shape, dtype=torch.float32 if chip.interpreted else inputs.v.dtype)
    memory, held = shared.memory_of(None, states), shared.held_of(None, states, rows)
    q, k, v, g, beta = inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta
    tokens = DeltaTokens(q, k, v, g, beta, (q.stride(0), k.stride(0), v.stride(0), g.stride(0), beta.stride(0)))
    blocks, constants = shared.blocks_of(inputs), {"S": shape}
    matrices = [states.new_empty((count, shape.heads, shape.chunk), dtype=torch.float32) for _ in range(2)]
    chunks = HeldChunks(held.is_shared, held.ssm, *matrices)

    def all_of() -> Iterator[Launch]:
        yield shared.hold(inputs, memory, held)
        if shape.chunk:
            grid = (count // shape.chunk + rows, shape.heads)
            narrow = {"S": replace(shape, part_k=PART_OF_GATES)} if shape.by_key else constants
            yield Launch(kernels.invert_chunks, grid, (blocks, tokens, chunks, rows), narrow, WARPS)
        tiles = -(-shape.value_size // shape.padded_v)
        given = (blocks, tokens, memory, chunks, y)
        warps = WARPS if shape.chunk else WARPS_OF_DECODES
        yield Launch(kernels.advance_heads, (rows, shape.heads, tiles), given, constants, warps)

    return y, all_of()
