"""The gated delta rule: S = exp(g) S; u = beta (v - S k); S = S + u k^T; y = S q, for each token and head.

S is [value_size, key_size]. Within a chunk of tokens the rule is matrix products (the UT transform: Yang et al.,
"Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024, and "Gated Delta Networks", 2025).
With G[i] = the sum of g up to token i, and S before the chunk,

    A[i, j] = beta[i] exp(G[i] - G[j]) (k[i] . k[j]) for j < i, otherwise 0
    u       = (I + A)^-1 diag(beta) (v - diag(exp(G)) K S^T)
    y[i]    = exp(G[i]) S q[i] + sum over j <= i of exp(G[i] - G[j]) (q[i] . k[j]) u[j]
    S after = exp(G[n]) S + sum over j <= n of exp(G[n] - G[j]) u[j] k[j]^T

The inverse and the products of queries and keys depend on no state: a launch of their own computes them for all chunks
at once. A row's depth is its tokens / S.chunk. A state is stored after any token n of a chunk by the last line. Rows of
up to S.short tokens are decodes: their tokens are taken one by one.

With a gate per element of a key (S.by_key; Kimi Team, "Kimi Linear", 2025), G is a vector, S decays by columns, and A
has the products of k[i] exp(G[i] - G[r]) and k[j] exp(G[r] - G[j]). These factors are at most 1 if token r is between j
and i, whatever the gates are. So each pair of tokens has such a token: tokens of two strips the first one of the later
strip; within a strip, the first token of the later one of two neighbouring blocks of 1, 2, 4 ... tokens, in which the
two are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvplane_kernels.triton_ops.kernels.numbers import LOG2_E
from kvplane_kernels.triton_ops.kernels.states import at, decay_between, grown, next_kept, rounded, sums_until


@triton.jit
def row_of_chunk(starts, number, num_rows, S: tl.constexpr):
    """Return the row that has a chunk. The chunks of row r have numbers from starts[r] // S.chunk + r on; a row of n
    tokens from token s on has at most (s + n) // S.chunk - s // S.chunk + 1 of them, so no two rows share a number.
    """
    row = number * 0
    for start in range(0, num_rows, S.scan_rows):
        index = start + tl.arange(0, S.scan_rows)
        ends = tl.load(starts + index + 1, mask=index < num_rows, other=0)
        is_before = (index < num_rows) & (ends // S.chunk + index + 1 <= number)
        row += tl.sum(is_before.to(tl.int32))
    return row


@triton.jit
def inverse_of(a, S: tl.constexpr):
    """Return (I + a)^-1 of a block that is zero on and above its diagonal, by blocks of twice the size in each step:

    [[P, 0], [R, Q]]^-1 = [[P^-1, 0], [-Q^-1 R P^-1, Q^-1]]
    """
    i, j = tl.arange(0, S.strip)[:, None], tl.arange(0, S.strip)[None, :]
    inverse = tl.where(i == j, 1.0, tl.where((i == j + 1) & (i % 2 == 1), -a, 0.0))
    for power in tl.range(1, S.levels, num_stages=1):
        is_below = ((i >> power) == (j >> power) + 1) & ((i >> power) % 2 == 1)
        between = tl.dot(inverse, tl.where(is_below, a, 0.0), input_precision=S.precision)
        inverse -= tl.dot(between, inverse, input_precision=S.precision)
    return inverse


@triton.jit
def sums_of(gates, is_summed, S: tl.constexpr):
    """Return exponents [sums, columns] with base 2: of each sum, the gates [tokens, columns] of the tokens that
    `is_summed` [sums, tokens] marks.
    """
    return tl.dot(tl.where(is_summed, 1.0, 0.0), gates, input_precision=S.precision) * LOG2_E


@triton.jit
def gates_of(inputs, line, head, column, inside, S: tl.constexpr):
    """Return the gates of columns of a state, [tokens, columns]."""
    place = line[:, None] * inputs.strides[3] + (head * S.key_size + column)[None, :]
    return tl.load(inputs.g + place, mask=inside, other=0).to(tl.float32)


@triton.jit
def rows_at(total, index, place):
    """Return the rows [1, columns] of sums [tokens, columns] up to a token; 0 before the first one."""
    is_there = (index == place)[:, None]
    whole, rest = tl.where(is_there, total[0], 0.0), tl.where(is_there, total[1], 0.0)
    return tl.sum(whole, axis=0)[None, :], tl.sum(rest, axis=0)[None, :]


@triton.jit
def multiply_strip(inputs, held, head, start, end, strip, S: tl.constexpr):
    """Store rows of A and of the products of queries and keys, S.strip tokens from `strip` on; one gate per head."""
    index = tl.arange(0, S.chunk)
    place = strip + tl.arange(0, S.strip)
    line, of_row = (start + index).to(tl.int64), (start + place).to(tl.int64)
    real, real_row = start + index < end, start + place < end
    n = tl.arange(0, S.part_k)
    of_keys = tl.full([S.strip, S.chunk], 0.0, tl.float32)
    of_queries = tl.full([S.strip, S.chunk], 0.0, tl.float32)
    for first in tl.range(0, S.key_size, S.part_k, num_stages=1):
        in_k = (first + n < S.key_size)[None, :]
        key = ((head // S.group) * S.key_size + first + n)[None, :]
        at_row = inputs.k + of_row[:, None] * inputs.strides[1] + key
        of_row_q = inputs.q + of_row[:, None] * inputs.strides[0] + key
        k = tl.load(inputs.k + line[:, None] * inputs.strides[1] + key, mask=real[:, None] & in_k, other=0)
        k_row = tl.load(at_row, mask=real_row[:, None] & in_k, other=0).to(tl.float32)
        q_row = tl.load(of_row_q, mask=real_row[:, None] & in_k, other=0).to(tl.float32)
        turned = k.to(tl.float32).T
        of_keys = tl.dot(k_row, turned, of_keys, input_precision=S.precision_k)
        of_queries = tl.dot(q_row, turned, of_queries, input_precision=S.precision_k)
    g = tl.load(inputs.g + line * inputs.strides[3] + head, mask=real, other=0).to(tl.float32)
    beta = tl.load(inputs.beta + of_row * inputs.strides[4] + head, mask=real_row, other=0).to(tl.float32)
    is_same, is_past = index[None, :] == place[:, None], index[None, :] <= place[:, None]
    whole, rest = sums_until(g)
    until = (
        tl.sum(tl.where(is_same, whole[None, :], 0.0), axis=1)[:, None],
        tl.sum(tl.where(is_same, rest[None, :], 0.0), axis=1)[:, None],
    )
    decay = decay_between(is_past, (whole[None, :], rest[None, :]), until)
    row = (of_row[:, None] * S.heads + head) * S.chunk + index[None, :]
    tl.store(held.products + row, of_queries * decay, mask=real_row[:, None])
    a = tl.where(is_past & ~is_same, of_keys * decay * beta[:, None], 0.0)
    tl.store(held.inverse + row, a, mask=real_row[:, None])


@triton.jit
def multiply_strip_by_key(inputs, held, head, start, end, strip, S: tl.constexpr):
    """The same with a gate per element of a key."""
    index, within, n = tl.arange(0, S.chunk), tl.arange(0, S.strip), tl.arange(0, S.part_k)
    line, of_row = (start + index).to(tl.int64), (start + strip + within).to(tl.int64)
    real, real_row = start + index < end, start + strip + within < end
    i, j = within[:, None], within[None, :]
    far_keys = tl.full([S.strip, S.chunk], 0.0, tl.float32)
    far_queries = tl.full([S.strip, S.chunk], 0.0, tl.float32)
    near_keys = tl.full([S.strip, S.strip], 0.0, tl.float32)
    near_queries = tl.full([S.strip, S.strip], 0.0, tl.float32)
    for first in tl.range(0, S.key_size, S.part_k, num_stages=1):
        column = first + n
        in_k = (column < S.key_size)[None, :]
        inside, inside_row = real[:, None] & in_k, real_row[:, None] & in_k
        key = ((head // S.group) * S.key_size + column)[None, :]
        at_row = inputs.k + of_row[:, None] * inputs.strides[1] + key
        of_row_q = inputs.q + of_row[:, None] * inputs.strides[0] + key
        k = tl.load(inputs.k + line[:, None] * inputs.strides[1] + key, mask=inside, other=0).to(tl.float32)
        k_row = tl.load(at_row, mask=inside_row, other=0).to(tl.float32)
        q_row = tl.load(of_row_q, mask=inside_row, other=0).to(tl.float32)
        g_row = gates_of(inputs, of_row, head, column, inside_row, S)
        total = sums_until(gates_of(inputs, line, head, column, inside, S))
        far = (k * decay_between((index < strip)[:, None], total, rows_at(total, index, strip - 1))).T
        since = tl.exp2(tl.cumsum(g_row, axis=0) * LOG2_E)
        far_keys = tl.dot(k_row * since, far, far_keys, input_precision=S.precision)
        far_queries = tl.dot(q_row * since, far, far_queries, input_precision=S.precision_y)
        for level in tl.range(0, S.levels, num_stages=1):
            is_later = (i >> level) % 2 == 1
            is_summed = (i >> level == j >> level) & tl.where(is_later, j <= i, j > i)
            decay = tl.exp2(sums_of(g_row, is_summed, S))
            later, earlier = tl.where(is_later, decay, 0.0), (k_row * tl.where(is_later, 0.0, decay)).T
            is_next = is_later & (i >> level == (j >> level) + 1)
            of_keys = tl.dot(k_row * later, earlier, input_precision=S.precision)
            of_queries = tl.dot(q_row * later, earlier, input_precision=S.precision_y)
            near_keys += tl.where(is_next, of_keys, 0.0)
            near_queries += tl.where(is_next, of_queries, 0.0)
        near_queries += tl.where(i == j, tl.sum(q_row * k_row, axis=1)[:, None], 0.0)
    beta = tl.load(inputs.beta + of_row * inputs.strides[4] + head, mask=real_row, other=0).to(tl.float32)[:, None]
    row = (of_row[:, None] * S.heads + head) * S.chunk
    is_far = real_row[:, None] & ((index < strip) | (index >= strip + S.strip))[None, :]
    tl.store(held.products + row + index[None, :], far_queries, mask=is_far)
    tl.store(held.inverse + row + index[None, :], far_keys * beta, mask=is_far)
    tl.store(held.products + row + strip + j, near_queries, mask=real_row[:, None])
    tl.store(held.inverse + row + strip + j, near_keys * beta, mask=real_row[:, None])


@triton.jit
def invert_strip(inputs, held, head, start, end, strip, S: tl.constexpr):
    """Compute S.strip rows of a chunk's matrices, from row `strip` on. The rows of the inverse before them are done:

    (I + A)^-1 [strip] = (I + A[strip, strip])^-1 (I[strip] - sum over earlier rows j of A[strip, j] (I + A)^-1 [j])
    """
    if S.by_key:
        multiply_strip_by_key(inputs, held, head, start, end, strip, S)
    else:
        multiply_strip(inputs, held, head, start, end, strip, S)
    tl.debug_barrier()  # parts of it are read again, by other threads
    index, within = tl.arange(0, S.chunk), tl.arange(0, S.strip)
    of_row, real_row = (start + strip + within).to(tl.int64), start + strip + within < end
    row = (of_row[:, None] * S.heads + head) * S.chunk
    rest = tl.where(index[None, :] == (strip + within)[:, None], 1.0, 0.0)
    for before in tl.range(0, strip, S.strip, num_stages=1):
        done = ((start + before + within).to(tl.int64)[:, None] * S.heads + head) * S.chunk + index[None, :]
        part = tl.load(held.inverse + row + (before + within)[None, :], mask=real_row[:, None], other=0)
        rest -= tl.dot(part, tl.load(held.inverse + done), input_precision=S.precision)
    diagonal = tl.load(held.inverse + row + (strip + within)[None, :], mask=real_row[:, None], other=0)
    inverse = tl.dot(inverse_of(diagonal, S), rest, input_precision=S.precision)
    tl.debug_barrier()
    tl.store(held.inverse + row + index[None, :], inverse, mask=real_row[:, None])
    tl.debug_barrier()


@triton.jit(do_not_specialize=["num_rows"])
def invert_chunks(tokens, inputs, held, num_rows, S: tl.constexpr):
    """Compute the matrices of a chunk that depend on no state, one row of S.chunk elements per token: (I + A)^-1, and
    the products of queries and keys with their decays. The grid is (chunks, heads).
    """
    number = tl.program_id(0)
    head = tl.program_id(1)
    row = row_of_chunk(tokens.starts, number, num_rows, S)
    if row < num_rows:
        begin = tl.load(tokens.starts + row)
        end = tl.load(tokens.starts + row + 1)
        start = begin + (number - begin // S.chunk - row) * S.chunk
        if (end - begin > S.short) & (start < end):
            for strip in tl.range(0, tl.minimum(S.chunk, end - start), S.strip, num_stages=1):
                invert_strip(inputs, held, head, start, end, strip, S)


@triton.jit
def step_tokens(tokens, inputs, pages, y, begin, end, state, head, S: tl.constexpr):
    """Take the tokens of a row one by one; `state` is [S.padded_v, S.padded_k]."""
    part = tl.program_id(2) * S.padded_v + tl.arange(0, S.padded_v)
    column = tl.arange(0, S.padded_k)
    in_k, in_v = column < S.key_size, part < S.value_size
    key = (head // S.group) * S.key_size + column
    place = (head * S.value_size + part)[:, None] * S.key_size + column[None, :]
    for passed in range(0, end - begin):
        line = begin.to(tl.int64) + passed
        q = tl.load(inputs.q + line * inputs.strides[0] + key, mask=in_k, other=0).to(tl.float32)
        k = tl.load(inputs.k + line * inputs.strides[1] + key, mask=in_k, other=0).to(tl.float32)
        value = inputs.v + line * inputs.strides[2] + head * S.value_size + part
        v = tl.load(value, mask=in_v, other=0).to(tl.float32)
        beta = tl.load(inputs.beta + line * inputs.strides[4] + head).to(tl.float32)
        if S.by_key:
            gate = inputs.g + line * inputs.strides[3] + head * S.key_size + column
            g = tl.load(gate, mask=in_k, other=0).to(tl.float32)[None, :]
        else:
            g = tl.load(inputs.g + line * inputs.strides[3] + head).to(tl.float32)
        state = state * tl.exp2(g * LOG2_E)
        new = beta * (v - tl.sum(state * k[None, :], axis=1))
        state += new[:, None] * k[None, :]
        out = tl.sum(state * q[None, :], axis=1)
        tl.store(y + (line * S.heads + head) * S.value_size + part, out, mask=in_v)
        target = tl.load(tokens.write + line)
        if target != 0:
            store = pages.ssm + target.to(tl.int64) * pages.ssm_stride + place
            tl.store(store, rounded(state, S), mask=in_v[:, None] & in_k[None, :])


@triton.jit
def part_of_state(pages, held, row, read, is_running, place, inside, S: tl.constexpr):
    """Return elements of the state before a chunk, float32: in `held` where it is running, otherwise in pages."""
    size: tl.constexpr = S.heads * S.value_size * S.key_size
    if is_running:
        state = tl.load(held.ssm + row.to(tl.int64) * size + place, mask=inside, other=0)
    else:
        source = pages.ssm + read.to(tl.int64) * pages.ssm_stride
        state = tl.load(source + place, mask=inside & (read != 0), other=0).to(tl.float32)
    return state


@triton.jit
def store_part(pages, held, row, block, kept, place, after, inside, S: tl.constexpr):
    """Store elements of a state after token `kept` of a chunk: in its block, and in `held` after the last token."""
    size: tl.constexpr = S.heads * S.value_size * S.key_size
    if block != 0:
        store = pages.ssm + block.to(tl.int64) * pages.ssm_stride + place
        tl.store(store, rounded(after, S), mask=inside)
    if kept == S.chunk - 1:
        tl.store(held.ssm + row.to(tl.int64) * size + place, after, mask=inside)


@triton.jit
def grown_by_key(state, new, k, gates, last, index, S: tl.constexpr):
    """Return the state after the chunk's tokens up to index `last`, where columns have their own gates."""
    total = sums_until(gates)
    until = rows_at(total, index, last)
    kept = k * decay_between((index <= last)[:, None], total, until)
    return state * tl.exp2((until[0] + until[1]) * LOG2_E) + tl.dot(new.T, kept, input_precision=S.precision)


@triton.jit
def solved(held, of_chunk, real, rest, S: tl.constexpr):
    """Return the inverse of a chunk's matrix times `rest` [S.chunk, S.padded_v], as the sum of the products of two
    halves: the operands of one product leave too few registers.
    """
    half: tl.constexpr = S.chunk // 2
    early, late = tl.split(tl.permute(tl.reshape(rest, (2, half, S.padded_v)), (1, 2, 0)))
    columns = held.inverse + of_chunk + tl.arange(0, half)[None, :]
    new = tl.dot(tl.load(columns, mask=real, other=0), early, input_precision=S.precision)
    return tl.dot(tl.load(columns + half, mask=real, other=0), late, new, input_precision=S.precision)


@triton.jit
def scan_chunks(tokens, inputs, pages, held, y, begin, end, read, is_shared, S: tl.constexpr):
    """Take the tokens of a row in chunks. A chunk goes through the state twice, in parts of S.part_k columns: first for
    what keys and queries read, then for the states after its tokens. Between chunks the state is in `held`.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, S.chunk)
    part = tl.program_id(2) * S.padded_v + tl.arange(0, S.padded_v)
    n = tl.arange(0, S.part_k)
    key_start = (head // S.group) * S.key_size
    in_v = part < S.value_size
    for start in range(begin, end, S.chunk):
        token = start + index
        real = token < end
        line = token.to(tl.int64)
        is_running = is_shared | (start > begin)
        by_keys = tl.full([S.chunk, S.padded_v], 0.0, tl.float32)
        by_queries = tl.full([S.chunk, S.padded_v], 0.0, tl.float32)
        for first in tl.range(0, S.key_size, S.part_k, num_stages=1):
            column = first + n
            in_k = column < S.key_size
            inside = real[:, None] & in_k[None, :]
            key = (key_start + column)[None, :]
            place = (head * S.value_size + part)[:, None] * S.key_size + column[None, :]
            state = part_of_state(pages, held, row, read, is_running, place, in_v[:, None] & in_k[None, :], S)
            k = tl.load(inputs.k + line[:, None] * inputs.strides[1] + key, mask=inside, other=0).to(tl.float32)
            if S.by_key:
                gates = gates_of(inputs, line, head, column, inside, S)
                decay = tl.exp2(tl.cumsum(gates, axis=0) * LOG2_E)
                k = k * decay
            by_keys = tl.dot(k, state.T, by_keys, input_precision=S.precision)
            q = tl.load(inputs.q + line[:, None] * inputs.strides[0] + key, mask=inside, other=0).to(tl.float32)
            if S.by_key:
                q = q * decay
            by_queries = tl.dot(q, state.T, by_queries, input_precision=S.precision_y)
        if not S.by_key:
            g = tl.load(inputs.g + line * inputs.strides[3] + head, mask=real, other=0).to(tl.float32)
            total = sums_until(g)
            decay = tl.exp2((total[0] + total[1]) * LOG2_E)[:, None]
            by_keys, by_queries = by_keys * decay, by_queries * decay
        value = inputs.v + line[:, None] * inputs.strides[2] + (head * S.value_size + part)[None, :]
        v = tl.load(value, mask=real[:, None] & in_v[None, :], other=0).to(tl.float32)
        beta = tl.load(inputs.beta + line * inputs.strides[4] + head, mask=real, other=0).to(tl.float32)
        of_chunk = (line[:, None] * S.heads + head) * S.chunk
        new = solved(held, of_chunk, real[:, None], beta[:, None] * (v - by_keys), S)
        products = tl.load(held.products + of_chunk + index[None, :], mask=real[:, None], other=0)
        out = by_queries + tl.dot(products, new, input_precision=S.precision_y)
        target = y + (line[:, None] * S.heads + head) * S.value_size + part[None, :]
        tl.store(target, out, mask=real[:, None] & in_v[None, :])
        block = tl.load(tokens.write + token, mask=real, other=0)
        wanted = (block != 0) | ((index == S.chunk - 1) & (start + S.chunk < end))
        for first in tl.range(0, S.key_size, S.part_k, num_stages=1):
            column = first + n
            in_k = column < S.key_size
            inside = in_v[:, None] & in_k[None, :]
            key = inputs.k + line[:, None] * inputs.strides[1] + (key_start + column)[None, :]
            k = tl.load(key, mask=real[:, None] & in_k[None, :], other=0).to(tl.float32)
            place = (head * S.value_size + part)[:, None] * S.key_size + column[None, :]
            state = part_of_state(pages, held, row, read, is_running, place, inside, S)
            tl.debug_barrier()  # a row may store into the block that it read
            kept = next_kept(wanted, index, -1, S)
            while kept < S.chunk:
                if S.by_key:
                    gates = gates_of(inputs, line, head, column, real[:, None] & in_k[None, :], S)
                    after = grown_by_key(state, new, k, gates, kept, index, S)
                else:
                    after = grown(state, new, k, 1.0, total, kept, index, S)
                store_part(pages, held, row, at(block, index, kept), kept, place, after, inside, S)
                kept = next_kept(wanted, index, kept, S)
        tl.debug_barrier()  # the next chunk reads what other threads stored


@triton.jit
def advance_heads(tokens, inputs, pages, held, y, S: tl.constexpr):
    """Advance one head's state over a row's tokens; y is [tokens, heads, value_size]. The grid is (rows, heads, tiles
    of S.padded_v elements of a value).
    """
    row, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(tokens.starts + row)
    end = tl.load(tokens.starts + row + 1)
    read = tl.load(tokens.read + row)
    is_shared = tl.load(held.is_shared + row) != 0
    is_chunked = begin < 0
    if S.chunk > 0:
        is_chunked = end - begin > S.short
    if is_chunked:
        if S.chunk > 0:
            scan_chunks(tokens, inputs, pages, held, y, begin, end, read, is_shared, S)
    else:
        part = tl.program_id(2) * S.padded_v + tl.arange(0, S.padded_v)
        column = tl.arange(0, S.padded_k)
        inside = (part < S.value_size)[:, None] & (column < S.key_size)[None, :]
        place = (head * S.value_size + part)[:, None] * S.key_size + column[None, :]
        state = part_of_state(pages, held, row, read, is_shared, place, inside, S)
        tl.debug_barrier()  # a row may store into the block that it read
        step_tokens(tokens, inputs, pages, y, begin, end, state, head, S)
