"""The selective scan of Mamba-1: kernel arguments and launches, which depend on no values on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvplane_kernels.interface import ScanInputs
from kvplane_kernels.triton_ops import states as shared
from kvplane_kernels.triton_ops.kernels import selective_scan as kernels
from kvplane_kernels.triton_ops.kernels.arguments import ScanShape, ScanTokens, power_of_two
from kvplane_kernels.triton_ops.launch import Chip, Launch

# Tokens of a chunk. A batch with at most SHORT tokens more than rows is one of decodes: its kernel scans no chunks, and
# needs fewer registers.
CHUNK, SHORT = 64, 16
CHUNK_INTERPRETED, SHORT_INTERPRETED = 8, 3
# Channels of a program: as many as registers have room for while chunks are scanned. One warp scans a chunk: several
# would exchange parts of each scan through shared memory.
COLUMNS, COLUMNS_OF_DECODES = 16, 64
WARPS, WARPS_OF_DECODES = 1, 8


def refusal(states: Tensor, inputs: ScanInputs) -> str:
    """Return why no kernel supports these states and inputs; "" if one does."""
    why = shared.refused_types(states, inputs.x, inputs.dt, inputs.b, inputs.c)
    if not why and 1 in strides_of(inputs):
        return "tokens of one element"  # Triton 3.6 makes strides of 1 constants, and loses those in a tuple of a tuple
    return why or (f"states of {states.shape[2]} elements" if states.shape[2] > shared.MAX_STATE else "")


def strides_of(inputs: ScanInputs) -> tuple[int, int, int, int]:
    """Return the strides of a token in x, dt, b and c."""
    return inputs.x.stride(0), inputs.dt.stride(0), inputs.b.stride(0), inputs.c.stride(0)


def shape_of(states: Tensor, inputs: ScanInputs, chip: Chip) -> ScanShape:
    """Return the compile-time constants of a call."""
    chunk, short = (CHUNK_INTERPRETED, SHORT_INTERPRETED) if chip.interpreted else (CHUNK, SHORT)
    is_decode = inputs.x.shape[0] <= inputs.read_block.shape[0] + short
    return ScanShape(
        channels=states.shape[1],
        state_size=states.shape[2],
        padded_n=power_of_two(states.shape[2], 1),
        columns=COLUMNS_OF_DECODES if is_decode else COLUMNS,
        chunk=0 if is_decode else chunk,
        short=short,
        round_bfloat16=chip.interpreted and states.dtype == torch.bfloat16,
    )


def launches(states: Tensor, inputs: ScanInputs, a: Tensor, d: Tensor, chip: Chip) -> tuple[Tensor, Iterator[Launch]]:
    """Return memory for y, and the launches of a call."""
    shape, rows = shape_of(states, inputs, chip), inputs.read_block.shape[0]
    y = inputs.x.new_empty(inputs.x.shape, dtype=torch.float32 if chip.interpreted else inputs.x.dtype)
    memory, held = shared.memory_of(None, states), shared.held_of(None, states, rows)
    x, dt, b, c = inputs.x, inputs.dt, inputs.b, inputs.c
    tokens = ScanTokens(x, dt, b, c, strides_of(inputs), a.contiguous(), d.contiguous())
    grid = (rows, -(-shape.channels // shape.columns))
    given = (shared.blocks_of(inputs), tokens, memory, held, y)
    warps = WARPS if shape.chunk else WARPS_OF_DECODES
    scan = Launch(kernels.scan_channels, grid, given, {"S": shape}, warps)
    return y, iter((shared.hold(inputs, memory, held), scan))
