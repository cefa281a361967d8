"""Recurrent states: kernel arguments, and the launches of a step. No launch depends on values on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kvplane_worker.ops.interface import StateInputs, StatePages, StateWeights
from kvplane_worker.ops.triton_ops.kernels import states as kernels
from kvplane_worker.ops.triton_ops.kernels.arguments import (
    HeldStates,
    StateMemory,
    StateShape,
    StateTokens,
    StateVectors,
    power_of_two,
)
from kvplane_worker.ops.triton_ops.launch import Chip, Launch

TAKEN = (torch.float32, torch.bfloat16, torch.float16)
MAX_STATE = 256
MAX_WIDTH = 8
# Tokens of a chunk: products need 16; where rows are longer, 64.
CHUNK, CHUNK_OF_DECODES = 64, 16
# Elements of a head per program, and columns of its state per product: small, so that operands of long chunks fit into
# registers. Decodes load a state at once.
HEAD_TILE, HEAD_TILE_OF_DECODES = 16, 32
PART, PART_OF_DECODES = 32, MAX_STATE
TILE_TOKENS, TILE_COLUMNS, PIECE = 16, 256, 4096
SCAN_WARPS = 8
# y of bfloat16 has 8 bits, products of 11 bits are enough.
FULL_PRECISION, SOME_PRECISION = "tf32x3", "tf32"


def refusal(pages: StatePages, inputs: StateInputs) -> str:
    """Return why no kernel supports these states and inputs; "" if one does."""
    types = {inputs.x.dtype, inputs.dt.dtype, pages.conv.dtype, pages.ssm.dtype}
    if not types.issubset(TAKEN) or inputs.x.dtype != pages.conv.dtype:
        return f"no kernel advances states of {pages.ssm.dtype} by {inputs.x.dtype}"
    if pages.ssm.shape[3] > MAX_STATE or pages.conv.shape[2] >= MAX_WIDTH:
        return f"states of {pages.ssm.shape[3]} elements or a convolution of {pages.conv.shape[2] + 1} tokens"
    if not (pages.conv[0].is_contiguous() and pages.ssm[0].is_contiguous()):
        return "the states of a block are not contiguous"
    if inputs.x.stride(1) != 1 or inputs.dt.stride(1) != 1:
        return "the elements of a token are not contiguous"
    return ""


def shape_of(pages: StatePages, inputs: StateInputs, chip: Chip) -> StateShape:
    """Return the compile-time constants of a step."""
    _, heads, head_size, state_size = pages.ssm.shape
    is_long = inputs.x.shape[0] > CHUNK_OF_DECODES * inputs.read_block.shape[0] and not chip.interpreted
    in_parts = is_long or chip.interpreted
    return StateShape(
        heads=heads,
        head_size=head_size,
        state_size=state_size,
        width=pages.conv.shape[2] + 1,
        chunk=CHUNK if is_long else CHUNK_OF_DECODES,
        padded_v=min(HEAD_TILE if in_parts else HEAD_TILE_OF_DECODES, power_of_two(head_size)),
        part_n=min(PART if in_parts else PART_OF_DECODES, power_of_two(state_size)),
        round_bfloat16=chip.interpreted and pages.ssm.dtype == torch.bfloat16,
        tokens=TILE_TOKENS,
        columns=TILE_COLUMNS,
        piece=PIECE,
        precision=FULL_PRECISION,
        precision_y=SOME_PRECISION if inputs.x.dtype == torch.bfloat16 else FULL_PRECISION,
    )


def launches(
    pages: StatePages, inputs: StateInputs, weights: StateWeights, chip: Chip
) -> tuple[Tensor, Iterator[Launch]]:
    """Return memory for y, and the launches of a step."""
    shape = shape_of(pages, inputs, chip)
    x, rows = inputs.x, inputs.read_block.shape[0]
    count = x.shape[0]
    dtype = torch.float32 if chip.interpreted else x.dtype
    y = x.new_empty((count, shape.heads, shape.head_size), dtype=dtype)
    u = x.new_empty((count, shape.channels), dtype=torch.float32)
    held = HeldStates(
        x.new_empty((rows,), dtype=torch.int32),
        pages.conv.new_empty((rows, *pages.conv.shape[1:])),
        pages.ssm.new_empty((rows, *pages.ssm.shape[1:]), dtype=torch.float32),
    )
    tokens = StateTokens(
        inputs.query_start, inputs.read_block, inputs.write_block, x, x.stride(0), inputs.dt, inputs.dt.stride(0)
    )
    memory = StateMemory(pages.conv, pages.conv.stride(0), pages.ssm, pages.ssm.stride(0))
    vectors = StateVectors(
        weights.conv_weight.contiguous(), weights.conv_bias.contiguous(), weights.a.contiguous(), weights.d.contiguous()
    )
    constants, shared = {"S": shape}, {"S": replace(shape, chunk=CHUNK)}
    largest = max(shape.channels * (shape.width - 1), shape.heads * shape.head_size * shape.state_size)
    tiles = -(-shape.channels // shape.columns)

    def all_of() -> Iterator[Launch]:
        yield Launch(kernels.hold_states, (rows, -(-largest // PIECE)), (tokens, memory, held, count), shared)
        grid = (-(-count // shape.tokens), tiles)
        yield Launch(kernels.convolve_tokens, grid, (tokens, vectors, held, u, count, rows), shared)
        parts = -(-shape.head_size // shape.padded_v)
        scanned = (tokens, vectors, u, memory, held, y)
        yield Launch(kernels.scan_rows, (rows, shape.heads, parts), scanned, constants, SCAN_WARPS)
        yield Launch(kernels.keep_inputs, (rows, tiles), (tokens, memory, held), shared)

    return y, all_of()
