"""Recurrent states: copies of those that a step reads, the convolution, and the scan of Mamba-2, by matrix products.

The scan goes through a row chunk by chunk, S.chunk tokens each. Within a chunk the recurrence is written as products
(Dao and Gu, "Transformers are SSMs", 2024): with s[i] = the sum of dt a up to token i, whose differences are summed,

    y[i]    = sum over j <= i of (C[i] . B[j]) exp(s[i] - s[j]) dt[j] v[j]  +  exp(s[i]) h C[i]  +  d v[i]
    h after = exp(s[n]) h + sum over j <= n of exp(s[n] - s[j]) dt[j] v[j] B[j]^T

A state is stored after any token n of a chunk by the second line. All states are read before any is written: a first
launch copies what other rows overwrite, and the inputs of convolutions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvplane_kernels.triton_ops.kernels.numbers import LOG2_E


@triton.jit
def is_written_elsewhere(block, write, begin, end, num_tokens, S: tl.constexpr):
    """Return whether a token outside begin .. end stores its state in the block."""
    found = begin * 0
    for start in range(0, num_tokens, S.scan):
        token = start + tl.arange(0, S.scan)
        outside = ((token < begin) | (token >= end)) & (token < num_tokens)
        target = tl.load(write + token, mask=outside, other=0)
        found = tl.maximum(found, tl.max((target == block).to(tl.int32)))
    return found


@triton.jit(do_not_specialize=["num_tokens"])
def hold_states(tokens, pages, held, num_tokens, S: tl.constexpr):
    """Copy the inputs of a row's convolution, and its state if another row overwrites it; store whether one does. The
    grid is (rows, pieces of S.piece elements).
    """
    row = tl.program_id(0)
    block = tl.load(tokens.read + row)
    place = tl.program_id(1) * S.piece + tl.arange(0, S.piece)
    inputs: tl.constexpr = S.channels * (S.width - 1)
    if inputs > 0:
        inside = place < inputs
        conv = pages.conv + block.to(tl.int64) * pages.conv_stride
        conv += (place % S.channels) * pages.channel_stride + (place // S.channels) * pages.token_stride
        old = tl.load(conv, mask=inside & (block != 0), other=0)
        tl.store(held.conv + row.to(tl.int64) * inputs + place, old, mask=inside)
    if S.state > 0:
        begin = tl.load(tokens.starts + row)
        end = tl.load(tokens.starts + row + 1)
        is_shared = begin * 0
        if block != 0:
            is_shared = is_written_elsewhere(block, tokens.write, begin, end, num_tokens, S)
        if tl.program_id(1) == 0:
            tl.store(held.is_shared + row, is_shared)
        if is_shared != 0:
            inside = place < S.state
            state = tl.load(pages.ssm + block.to(tl.int64) * pages.ssm_stride + place, mask=inside)
            tl.store(held.ssm + row.to(tl.int64) * S.state + place, state, mask=inside)


@triton.jit
def row_of(starts, token, num_rows, S: tl.constexpr):
    """Return the rows of tokens."""
    row = token * 0
    for start in range(0, num_rows, S.scan_rows):
        index = start + tl.arange(0, S.scan_rows)
        ends = tl.load(starts + index + 1, mask=index < num_rows, other=2147483647)
        row += tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), axis=1)
    return row


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def convolve_tokens(tokens, weights, held, out, num_tokens, num_rows, S: tl.constexpr):
    """Compute silu(conv(x)) of a tile of tokens and channels, float32 [tokens, channels]. The grid is (token tiles,
    channel tiles).
    """
    token = tl.program_id(0) * S.tokens + tl.arange(0, S.tokens)
    channel = tl.program_id(1) * S.columns + tl.arange(0, S.columns)
    row = row_of(tokens.starts, token, num_rows, S)
    real = token < num_tokens
    first = tl.load(tokens.starts + row, mask=real, other=0)
    mask = real[:, None] & (channel < S.channels)[None, :]
    total = tl.load(weights.bias + channel, mask=channel < S.channels, other=0).to(tl.float32)[None, :]
    total = tl.broadcast_to(total, (S.tokens, S.columns))
    width: tl.constexpr = S.width
    for tap in tl.static_range(width):
        source = token - (S.width - 1) + tap
        is_old = source < first
        x = tokens.x + source.to(tl.int64)[:, None] * tokens.x_stride + channel[None, :]
        new = tl.load(x, mask=mask & ~is_old[:, None], other=0).to(tl.float32)
        before = held.conv + row.to(tl.int64)[:, None] * (S.channels * (S.width - 1))
        before += (source - first + S.width - 1)[:, None] * S.channels + channel[None, :]
        old = tl.load(before, mask=mask & is_old[:, None], other=0).to(tl.float32)
        weight = tl.load(weights.conv + channel * S.width + tap, mask=channel < S.channels, other=0).to(tl.float32)
        total += (new + old) * weight[None, :]
    value = total / (1 + tl.exp2(-total * LOG2_E))
    tl.store(out + token.to(tl.int64)[:, None] * S.channels + channel[None, :], value, mask=mask)


@triton.jit
def next_kept(kept, index, after, S: tl.constexpr):
    """Return the first index above `after` whose state is stored; S.chunk if there is none."""
    return tl.min(tl.where(kept & (index > after), index, S.chunk))


@triton.jit
def at(values, index, place):
    """Return the element of a vector at a place."""
    return tl.sum(tl.where(index == place, values, 0))


@triton.jit
def keep_inputs(tokens, pages, held, S: tl.constexpr):
    """Store the last inputs of the convolution after each token whose state is stored, in the order of tokens. The grid
    is (rows, channel tiles).
    """
    row = tl.program_id(0)
    channel = tl.program_id(1) * S.columns + tl.arange(0, S.columns)
    begin = tl.load(tokens.starts + row)
    end = tl.load(tokens.starts + row + 1)
    index = tl.arange(0, S.chunk)
    inside = channel < S.channels
    taps: tl.constexpr = S.width - 1
    for start in range(begin, end, S.chunk):
        block = tl.load(tokens.write + start + index, mask=start + index < end, other=0)
        place = next_kept(block != 0, index, -1, S)
        while place < S.chunk:
            token = start + place
            target = pages.conv + at(block, index, place).to(tl.int64) * pages.conv_stride
            target += channel * pages.channel_stride
            for tap in tl.static_range(taps):
                source = token - (S.width - 2) + tap
                if source >= begin:
                    x = tl.load(tokens.x + source.to(tl.int64) * tokens.x_stride + channel, mask=inside)
                    tl.store(target, x, mask=inside)
                else:
                    before = held.conv + row.to(tl.int64) * (S.channels * (S.width - 1)) + channel
                    old = tl.load(before + (source - begin + S.width - 1) * S.channels, mask=inside)
                    tl.store(target, old, mask=inside)
                target += pages.token_stride
            place = next_kept(block != 0, index, place, S)


@triton.jit
def rounded(state, S: tl.constexpr):
    """Round a float32 state to bfloat16 in the interpreter, whose conversion truncates; elsewhere stores round."""
    if S.round_bfloat16:
        bits = state.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return bits.to(tl.float32, bitcast=True)
    else:
        return state


@triton.jit
def sums_until(g):
    """Return sums of logarithms of decays up to each token of a chunk, in two parts: multiples of 1/64, which are
    exact, and what is left, up to 1 for 64 tokens. So a difference of two sums keeps the digits of weak decays after
    strong ones. A decay of less than exp(-2048) is as good as 0.
    """
    g = tl.maximum(g, -2048.0)
    whole = tl.floor(g * 64.0) / 64.0
    return tl.cumsum(whole, axis=0), tl.cumsum(g - whole, axis=0)


@triton.jit
def decay_between(is_before, total, until):
    """Return the decay from tokens with the sums `total` to one with the sums `until`; 0 unless they are before it."""
    between = (until[0] - total[0]) + (until[1] - total[1])
    return tl.exp2(tl.where(is_before, between, float("-inf")) * LOG2_E)


@triton.jit
def grown(state, v, b, step, total, last, index, S: tl.constexpr):
    """Return the state after the chunk's tokens up to index `last`; `total` is the result of `sums_until`."""
    until = at(total[0], index, last), at(total[1], index, last)
    weight = decay_between(index <= last, total, until) * step
    more = tl.dot((v * weight[:, None]).T, b, input_precision=S.precision)
    return state * tl.exp2((until[0] + until[1]) * LOG2_E) + more


@triton.jit
def scan_rows(tokens, weights, inputs, pages, held, y, S: tl.constexpr):
    """Advance one head's state over a row's tokens. The grid is (rows, heads, tiles of S.padded_v elements of a head).

    inputs is the result of `convolve_tokens`; y is [tokens, heads, head_size]. A chunk goes through the state in parts
    of S.part_n columns, so that the operands of a product fit into registers; between chunks the state is in `held`.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(tokens.starts + row)
    end = tl.load(tokens.starts + row + 1)
    read = tl.load(tokens.read + row)
    is_shared = tl.load(held.is_shared + row) != 0
    index = tl.arange(0, S.chunk)
    part = tl.program_id(2) * S.padded_v + tl.arange(0, S.padded_v)
    n = tl.arange(0, S.part_n)
    size: tl.constexpr = S.heads * S.head_size * S.state_size
    running = held.ssm + row.to(tl.int64) * size
    source = pages.ssm + read.to(tl.int64) * pages.ssm_stride
    a = tl.load(weights.a + head).to(tl.float32)
    d = tl.load(weights.d + head).to(tl.float32)
    b_start: tl.constexpr = S.heads * S.head_size
    for start in range(begin, end, S.chunk):
        token = start + index
        real = token < end
        line = inputs + token.to(tl.int64)[:, None] * S.channels
        in_v = real[:, None] & (part < S.head_size)[None, :]
        values = line + (head * S.head_size + part)[None, :]
        step = tl.load(tokens.dt + token.to(tl.int64) * tokens.dt_stride + head, mask=real, other=0).to(tl.float32)
        total = sums_until(step * a)
        block = tl.load(tokens.write + token, mask=real, other=0)
        wanted = (block != 0) | ((index == S.chunk - 1) & (start + S.chunk < end))
        is_running = is_shared | (start > begin)
        old = tl.full([S.chunk, S.padded_v], 0.0, tl.float32)
        scores = tl.full([S.chunk, S.chunk], 0.0, tl.float32)
        for first in tl.range(0, S.state_size, S.part_n, num_stages=1):
            column = first + n
            in_n = real[:, None] & (column < S.state_size)[None, :]
            b = tl.load(line + (b_start + column)[None, :], mask=in_n, other=0)
            c = tl.load(line + (b_start + S.state_size + column)[None, :], mask=in_n, other=0)
            inside = (part < S.head_size)[:, None] & (column < S.state_size)[None, :]
            place = (head * S.head_size + part)[:, None] * S.state_size + column[None, :]
            if is_running:
                state = tl.load(running + place, mask=inside, other=0)
            else:
                state = tl.load(source + place, mask=inside & (read != 0), other=0).to(tl.float32)
            tl.debug_barrier()  # a row may store into the block that it read
            scores = tl.dot(c, b.T, scores, input_precision=S.precision_y)
            old = tl.dot(c, state.T, old, input_precision=S.precision_y)
            kept = next_kept(wanted, index, -1, S)
            while kept < S.chunk:
                v = tl.load(values, mask=in_v, other=0)
                new = grown(state, v, b, step, total, kept, index, S)
                target = at(block, index, kept)
                if target != 0:
                    store = pages.ssm + target.to(tl.int64) * pages.ssm_stride + place
                    tl.store(store, rounded(new, S), mask=inside)
                if kept == S.chunk - 1:
                    tl.store(running + place, new, mask=inside)
                kept = next_kept(wanted, index, kept, S)
        before, after = (total[0][None, :], total[1][None, :]), (total[0][:, None], total[1][:, None])
        weight = decay_between(index[:, None] >= index[None, :], before, after) * step[None, :]
        v = tl.load(values, mask=in_v, other=0)
        mixed = tl.dot(scores * weight, v, input_precision=S.precision_y)
        mixed += old * tl.exp2((total[0] + total[1]) * LOG2_E)[:, None] + d * v
        out = y + (token.to(tl.int64)[:, None] * S.heads + head) * S.head_size + part[None, :]
        tl.store(out, mixed, mask=in_v)
        tl.debug_barrier()  # the next chunk reads what other threads stored
