"""The selective scan of Mamba-1: h = exp(dt A) h + dt x B, for each channel and each of its elements.

Every channel and element has its own decay, so no two of them share the matrix of decays between the tokens of a chunk:
that matrix would be multiplied with one vector, and tensor cores have nothing to do (Mamba-2 has one decay per head for
this reason). So a chunk is an associative scan of pairs (Gu and Dao, "Mamba", 2023),

    (decay, value) then (decay', value') = (decay decay', decay' value + value'),

of S.chunk tokens x S.columns channels, once for each element of a state. A row's depth is its tokens / S.chunk scans of
depth log2 S.chunk. Rows of up to S.short tokens are decodes: their tokens are taken one by one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvplane_kernels.triton_ops.kernels.numbers import LOG2_E
from kvplane_kernels.triton_ops.kernels.states import at, next_kept, rounded


@triton.jit
def then(decay, value, next_decay, next_value):
    """Return the pair of two steps of a recurrence, one after the other."""
    return decay * next_decay, next_decay * value + next_value


@triton.jit
def step_tokens(tokens, inputs, pages, y, begin, end, state, a, d, channel, S: tl.constexpr):
    """Take the tokens of a row one by one."""
    n = tl.arange(0, S.padded_n)
    is_real = channel < S.channels
    inside = is_real[:, None] & (n < S.state_size)[None, :]
    place = channel[:, None] * S.state_size + n[None, :]
    for passed in range(0, end - begin):
        line = begin.to(tl.int64) + passed
        x = tl.load(inputs.x + line * inputs.strides[0] + channel, mask=is_real, other=0).to(tl.float32)
        dt = tl.load(inputs.dt + line * inputs.strides[1] + channel, mask=is_real, other=0).to(tl.float32)
        b = tl.load(inputs.b + line * inputs.strides[2] + n, mask=n < S.state_size, other=0).to(tl.float32)
        c = tl.load(inputs.c + line * inputs.strides[3] + n, mask=n < S.state_size, other=0).to(tl.float32)
        state = state * tl.exp2(dt[:, None] * a) + (dt * x)[:, None] * b[None, :]
        out = tl.sum(state * c[None, :], axis=1) + d * x
        tl.store(y + line * S.channels + channel, out, mask=is_real)
        target = tl.load(tokens.write + line)
        if target != 0:
            store = pages.ssm + target.to(tl.int64) * pages.ssm_stride + place
            tl.store(store, rounded(state, S), mask=inside)


@triton.jit
def scan_chunks(tokens, inputs, pages, y, begin, end, state, a, d, channel, S: tl.constexpr):
    """Take the tokens of a row in chunks. Elements of a state are taken one by one: for each, all tokens of the chunk
    and all channels of the program are scanned together.
    """
    index = tl.arange(0, S.chunk)
    n = tl.arange(0, S.padded_n)
    is_real = channel < S.channels
    for start in range(begin, end, S.chunk):
        token = start + index
        real = token < end
        inside = real[:, None] & is_real[None, :]
        line = token.to(tl.int64)[:, None]
        x = tl.load(inputs.x + line * inputs.strides[0] + channel[None, :], mask=inside, other=0).to(tl.float32)
        dt = tl.load(inputs.dt + line * inputs.strides[1] + channel[None, :], mask=inside, other=0).to(tl.float32)
        block = tl.load(tokens.write + token, mask=real, other=0)
        added = dt * x
        out = d[None, :] * x
        for element in tl.range(0, S.state_size, num_stages=1):
            is_element = n == element
            old = tl.sum(tl.where(is_element[None, :], state, 0.0), axis=1)
            rate = tl.sum(tl.where(is_element[None, :], a, 0.0), axis=1)
            b = tl.load(inputs.b + token.to(tl.int64) * inputs.strides[2] + element, mask=real, other=0).to(tl.float32)
            c = tl.load(inputs.c + token.to(tl.int64) * inputs.strides[3] + element, mask=real, other=0).to(tl.float32)
            decay = tl.exp2(dt * rate[None, :])
            value = added * b[:, None] + tl.where(index[:, None] == 0, decay * old[None, :], 0.0)
            _, new = tl.associative_scan((decay, value), 0, then)
            out += new * c[:, None]
            kept = next_kept(block != 0, index, -1, S)
            while kept < S.chunk:
                store = pages.ssm + at(block, index, kept).to(tl.int64) * pages.ssm_stride
                one = tl.sum(tl.where(index[:, None] == kept, new, 0.0), axis=0)
                tl.store(store + channel * S.state_size + element, rounded(one, S), mask=is_real)
                kept = next_kept(block != 0, index, kept, S)
            last = tl.sum(tl.where(index[:, None] == S.chunk - 1, new, 0.0), axis=0)
            state = tl.where(is_element[None, :], last[:, None], state)
        tl.store(y + line * S.channels + channel[None, :], out, mask=inside)
        tl.debug_barrier()  # a later chunk may store into the same block


@triton.jit
def scan_channels(tokens, inputs, pages, held, y, S: tl.constexpr):
    """Advance the states of S.columns channels over a row's tokens; y is [tokens, channels]. The grid is (rows, tiles
    of channels).
    """
    row = tl.program_id(0)
    channel = tl.program_id(1) * S.columns + tl.arange(0, S.columns)
    begin = tl.load(tokens.starts + row)
    end = tl.load(tokens.starts + row + 1)
    read = tl.load(tokens.read + row)
    n = tl.arange(0, S.padded_n)
    is_real = channel < S.channels
    inside = is_real[:, None] & (n < S.state_size)[None, :]
    place = channel[:, None] * S.state_size + n[None, :]
    if tl.load(held.is_shared + row) != 0:
        state = tl.load(held.ssm + row.to(tl.int64) * (S.channels * S.state_size) + place, mask=inside, other=0)
    else:
        source = pages.ssm + read.to(tl.int64) * pages.ssm_stride + place
        state = tl.load(source, mask=inside & (read != 0), other=0).to(tl.float32)
    a = tl.load(inputs.a + place, mask=inside, other=0).to(tl.float32) * LOG2_E
    d = tl.load(inputs.d + channel, mask=is_real, other=0).to(tl.float32)
    tl.debug_barrier()  # a row may store into the block that it read
    if S.chunk > 0:
        if end - begin > S.short:
            scan_chunks(tokens, inputs, pages, y, begin, end, state, a, d, channel, S)
        else:
            step_tokens(tokens, inputs, pages, y, begin, end, state, a, d, channel, S)
    else:
        step_tokens(tokens, inputs, pages, y, begin, end, state, a, d, channel, S)
