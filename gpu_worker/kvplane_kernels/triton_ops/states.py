"""Recurrent states: kernel arguments, and the launches of convolutions and of steps of Mamba-2. No launch depends on
values on the device.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvplane_kernels.interface import StateInputs, StatePages, StateRows, StateWeights
from kvplane_kernels.triton_ops.kernels import states as kernels
from kvplane_kernels.triton_ops.kernels.arguments import (
    ConvolutionShape,
    ConvolutionWeights,
    HeldStates,
    StateBlocks,
    StateMemory,
    StateShape,
    StateTokens,
    StateVectors,
    power_of_two,
)
from kvplane_kernels.triton_ops.launch import Chip, Launch

TAKEN = (torch.float32, torch.bfloat16, torch.float16)
MAX_STATE = 256
MAX_WIDTH = 8
# Tokens of a chunk: products need 16; where rows are longer, 64.
CHUNK, CHUNK_OF_DECODES = 64, 16
# Elements of a head per program, and columns of its state per product: small, so that operands of long chunks fit into
# registers. Decodes load a state at once.
HEAD_TILE, HEAD_TILE_OF_DECODES = 16, 32
# Where warp groups multiply, twice as fast as 16 elements, in spite of some accesses of local memory. Where products
# are accumulated in tensor memory it needs none of these, and 16 elements need 8.
LARGE_HEAD_TILE = 64
PART, PART_OF_DECODES = 32, MAX_STATE
# One warp group for products of 64 rows: Triton 3.6 gives two of them a layout of 128 rows, and then reads shared
# memory outside its bounds.
SCAN_WARPS, SCAN_WARPS_OF_DECODES = 4, 8
# y of bfloat16 has 8 bits, products of 11 bits are enough.
FULL_PRECISION, SOME_PRECISION = "tf32x3", "tf32"


def refusal(pages: StatePages, inputs: StateInputs) -> str:
    """Return why no kernel supports these states and inputs; "" if one does."""
    why = refused_types(pages.ssm, inputs.x, inputs.dt) or refused_convolution(pages.conv, inputs.x)
    if not why and pages.ssm.shape[3] > MAX_STATE:
        return f"states of {pages.ssm.shape[3]} elements"
    return why


def refused_types(states: Tensor, *inputs: Tensor) -> str:
    """Return why no kernel reads these states and inputs [tokens, ...]; "" if one does."""
    types = {one.dtype for one in (states, *inputs)}
    if not types.issubset(TAKEN):
        return f"no kernel advances states of {states.dtype} by {', '.join(sorted(map(str, types)))}"
    if not states[0].is_contiguous():
        return "the states of a block are not contiguous"
    if not all(one[:1].is_contiguous() for one in inputs):
        return "the elements of a token are not contiguous"
    return ""


def refused_convolution(conv: Tensor, x: Tensor) -> str:
    """Return why no kernel convolves these inputs; "" if one does."""
    if conv.dtype not in TAKEN or x.dtype != conv.dtype:
        return f"no kernel convolves {x.dtype} after {conv.dtype}"
    if conv.shape[2] >= MAX_WIDTH:
        return f"a convolution of {conv.shape[2] + 1} tokens"
    if not (conv[0].is_contiguous() or conv[0].T.is_contiguous()):
        return "the last inputs of a block are not contiguous"
    return "" if x.stride(1) == 1 else "the elements of a token are not contiguous"


def memory_of(conv: Tensor | None, states: Tensor | None) -> StateMemory:
    """Return the pages of an operation as kernels take them."""
    memory = StateMemory()
    if conv is not None:
        by_block, by_channel, by_token = conv.stride()
        memory = StateMemory(conv, by_block, by_channel, by_token)
    return memory if states is None else memory._replace(ssm=states, ssm_stride=states.stride(0))


def held_of(conv: Tensor | None, states: Tensor | None, rows: int) -> HeldStates:
    """Return memory for copies of what rows read."""
    held = HeldStates()
    if conv is not None:
        held = held._replace(conv=conv.new_empty((rows, conv.shape[2], conv.shape[1])))
    if states is not None:
        held = held._replace(
            is_shared=states.new_empty((rows,), dtype=torch.int32),
            ssm=states.new_empty((rows, *states.shape[1:]), dtype=torch.float32),
        )
    return held


def blocks_of(rows: StateRows) -> StateBlocks:
    """Return the tensors of rows as kernels take them."""
    return StateBlocks(rows.query_start, rows.read_block, rows.write_block)


def hold(rows: StateRows, memory: StateMemory, held: HeldStates) -> Launch:
    """Return the launch that copies what rows read, before any is written."""
    count, num_tokens = rows.read_block.shape[0], rows.write_block.shape[0]
    shape = shape_of_pages(memory)
    largest = max(shape.channels * (shape.width - 1), shape.state)
    grid = (count, -(-largest // shape.piece))
    return Launch(kernels.hold_states, grid, (blocks_of(rows), memory, held, num_tokens), {"S": shape})


def shape_of_pages(memory: StateMemory) -> ConvolutionShape:
    """Return the compile-time constants of kernels that hold, convolve and keep inputs."""
    shape = ConvolutionShape(state=0 if memory.ssm is None else memory.ssm[0].numel())
    if memory.conv is None:
        return shape
    return ConvolutionShape(memory.conv.shape[1], memory.conv.shape[2] + 1, shape.state)


def convolve(
    conv: Tensor, rows: StateRows, x: Tensor, weight: Tensor, bias: Tensor, chip: Chip
) -> tuple[Tensor, Iterator[Launch]]:
    """Return memory for silu(conv(x)), and the launches that compute it and keep the last inputs."""
    u = x.new_empty(x.shape, dtype=torch.float32 if chip.interpreted else x.dtype)
    memory, held = memory_of(conv, None), held_of(conv, None, rows.read_block.shape[0])
    tokens = StateTokens(*blocks_of(rows), x, x.stride(0))
    first, last = convolutions(tokens, memory, held, ConvolutionWeights(weight.contiguous(), bias.contiguous()), u)
    return u, iter((hold(rows, memory, held), first, last))


def convolutions(
    tokens: StateTokens, memory: StateMemory, held: HeldStates, weights: ConvolutionWeights, u: Tensor
) -> tuple[Launch, Launch]:
    """Return the launch that convolves, and the one that keeps the last inputs."""
    count, rows, shape = tokens.x.shape[0], tokens.read.shape[0], shape_of_pages(memory)
    tiles = -(-shape.channels // shape.columns)
    grid, given = (-(-count // shape.tokens), tiles), (tokens, weights, held, u, count, rows)
    keep = Launch(kernels.keep_inputs, (rows, tiles), (tokens, memory, held), {"S": shape})
    return Launch(kernels.convolve_tokens, grid, given, {"S": shape}), keep


def shape_of(pages: StatePages, inputs: StateInputs, chip: Chip) -> StateShape:
    """Return the compile-time constants of a step."""
    _, heads, head_size, state_size = pages.ssm.shape
    is_long = inputs.x.shape[0] > CHUNK_OF_DECODES * inputs.read_block.shape[0] and not chip.interpreted
    in_parts = is_long or chip.interpreted
    tile = LARGE_HEAD_TILE if chip.has_warp_groups or chip.has_tensor_memory else HEAD_TILE
    return StateShape(
        heads=heads,
        head_size=head_size,
        state_size=state_size,
        chunk=CHUNK if is_long else CHUNK_OF_DECODES,
        padded_v=min(tile if in_parts else HEAD_TILE_OF_DECODES, power_of_two(head_size)),
        part_n=min(PART if in_parts else PART_OF_DECODES, power_of_two(state_size)),
        round_bfloat16=chip.interpreted and pages.ssm.dtype == torch.bfloat16,
        precision=FULL_PRECISION,
        precision_y=SOME_PRECISION if inputs.x.dtype == torch.bfloat16 else FULL_PRECISION,
    )


def launches(
    pages: StatePages, inputs: StateInputs, weights: StateWeights, chip: Chip
) -> tuple[Tensor, Iterator[Launch]]:
    """Return memory for y, and the launches of a step."""
    shape = shape_of(pages, inputs, chip)
    x, rows = inputs.x, inputs.read_block.shape[0]
    y = x.new_empty((x.shape[0], shape.heads, shape.head_size), dtype=torch.float32 if chip.interpreted else x.dtype)
    u = x.new_empty(x.shape, dtype=torch.float32)
    memory, held = memory_of(pages.conv, pages.ssm), held_of(pages.conv, pages.ssm, rows)
    tokens = StateTokens(*blocks_of(inputs), x, x.stride(0), inputs.dt, inputs.dt.stride(0))
    taps = ConvolutionWeights(weights.conv_weight.contiguous(), weights.conv_bias.contiguous())
    vectors = StateVectors(weights.a.contiguous(), weights.d.contiguous())
    convolve, keep = convolutions(tokens, memory, held, taps, u)

    def all_of() -> Iterator[Launch]:
        yield hold(inputs, memory, held)
        yield convolve
        parts = -(-shape.head_size // shape.padded_v)
        warps = SCAN_WARPS if shape.chunk == CHUNK else SCAN_WARPS_OF_DECODES
        scanned = (tokens, vectors, u, memory, held, y)
        yield Launch(kernels.scan_rows, (rows, shape.heads, parts), scanned, {"S": shape}, warps)
        yield keep

    return y, all_of()
