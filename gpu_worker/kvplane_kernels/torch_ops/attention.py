"""Attention on paged keys and values in PyTorch: gather the pages that the block table lists, mask, and multiply.

Slots after the end of a row and the null block's page may contain any bytes. The logits of such slots are masked, and
their values are set to 0 as well, because 0 x NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvplane_kernels.interface import AttentionPages, AttentionRule, Batch, LatentPages
from kvplane_kernels.torch_ops.write import bits

# Most elements of gathered pages or logits at a time.
PIECE_ELEMENTS = 1 << 26


@dataclass(frozen=True, slots=True)
class Context:
    """The gathered keys and values of some rows.

    Attributes:
        k, v: [rows, tokens, kv_heads, size] in the type of the sums; v is 0 where `present` is False.
        position: [rows, tokens]: position of the token in its sequence.
        present: [rows, tokens]: whether the token belongs to the row and its block is not the null block.
        seen: [rows, queries, tokens]: whether the tree of drafts permits the token; None = there is no tree.
    """

    k: Tensor
    v: Tensor
    position: Tensor
    present: Tensor
    seen: Tensor | None = None


def attention(
    query: Tensor, pages: AttentionPages, batch: Batch, rule: AttentionRule, lse: Tensor | None = None
) -> Tensor:
    """Compute attention for any number of queries per row.

    query is [queries, q_heads, head_size]; the result is [queries, q_heads, head_size_v]. Log-sum-exps are written to
    `lse`, [queries, q_heads], if it is given.
    """
    compute = decode if batch.query_start is None else prefill
    out, sums = compute(query, pages, batch, rule)
    if lse is not None:
        lse.copy_(sums)
    return out


def decode(query: Tensor, pages: AttentionPages, batch: Batch, rule: AttentionRule) -> tuple[Tensor, Tensor]:
    """Compute attention for one query per row, several rows at a time. Does not wait for the device.

    query is [rows, q_heads, head_size]; the results are [rows, q_heads, head_size_v], and log-sum-exps [rows, q_heads].
    """
    columns = columns_of_a_query(rule, pages.k.shape[1], batch.block_table.shape[1])
    elements = columns * pages.k.shape[1] * pages.k.shape[2] * (pages.k.shape[3] + pages.v.shape[3])
    rows_at_once = max(1, PIECE_ELEMENTS // max(1, elements))
    out, lse = results_for(query, pages)
    for start in range(0, query.shape[0], rows_at_once):
        rows = slice(start, start + rows_at_once)
        last = batch.seq_lens[rows].long() - 1
        block_size = pages.k.shape[1]
        first_column = first_attended(rule, last) // block_size
        column = first_column[:, None] + torch.arange(columns, device=query.device)
        context = gathered(pages, batch.block_table[rows], column, last, query.dtype)
        found, sums = attended(query[rows, None], context, last[:, None], rule)
        out[rows], lse[rows] = found[:, 0], sums[:, 0]
    return out, lse


def results_for(query: Tensor, pages: AttentionPages) -> tuple[Tensor, Tensor]:
    """Return memory for the results of queries, and for their log-sum-exps."""
    return query.new_empty((*query.shape[:2], pages.v.shape[3])), query.new_empty(query.shape[:2], dtype=torch.float32)


def columns_of_a_query(rule: AttentionRule, block_size: int, max_blocks: int) -> int:
    """Return the most blocks that one query can attend to."""
    extent = rule.window or rule.chunk
    return min(max_blocks, (extent + block_size - 2) // block_size + 1) if extent else max_blocks


def prefill(query: Tensor, pages: AttentionPages, batch: Batch, rule: AttentionRule) -> tuple[Tensor, Tensor]:
    """Compute attention for different numbers of queries per row: many rows at a time, padded to the longest of them.

    query is [queries, q_heads, head_size]; the results are [queries, q_heads, head_size_v], and log-sum-exps. Waits for
    the device unless the batch has host tables.
    """
    assert batch.query_start is not None
    host = batch.on_host()
    starts, lengths = host.query_start, host.seq_lens
    out, lse = results_for(query, pages)
    for rows, first, count in pieces(starts.diff(), lengths, query.shape[1]):
        begin, width = starts[:-1][rows] + first, int(count.max())
        offset = torch.arange(width)[None]
        used = offset < count[:, None]
        index = torch.where(used, begin[:, None] + offset, begin[:, None])
        end = lengths[rows] - starts.diff()[rows] + first
        position = torch.where(used, end[:, None] + offset, -1)
        column = columns_of(rule, end, position.amax(1), pages.k.shape[1])
        column = column[:, : batch.block_table.shape[1]]  # none in the table of a batch without tokens
        rows, index, used, position, column, end = (
            part.to(query.device) for part in (rows, index, used, position, column, end)
        )
        context = gathered(pages, batch.block_table[rows], column, position.amax(1), query.dtype)
        if batch.tree is not None:
            first_query = (end - first)[:, None]
            context = replace(context, seen=branches(batch.tree[index], context.position - first_query))
        found, sums = attended(query[index], context, position, rule)
        out[index[used]], lse[index[used]] = found[used], sums[used].to(lse.dtype)
    return out, lse


def pieces(counts: Tensor, lengths: Tensor, q_heads: int) -> Iterator[tuple[Tensor, int, Tensor]]:
    """Yield (rows, number of their first query, numbers of queries): rows of similar size, up to PIECE_ELEMENTS logits.

    `counts` and `lengths` are int64 on the host. Rows with more queries than fit are in several pieces.
    """
    sizes = list(zip(counts.tolist(), lengths.tolist(), strict=True))
    order = sorted((row for row, (queries, _) in enumerate(sizes) if queries), key=sizes.__getitem__)
    while order:
        least, (queries, tokens) = sizes[order[0]][0], sizes[order[0]]
        taken = 1
        for row in order[1:]:
            wider = sizes[row][0], max(tokens, sizes[row][1])
            if wider[0] > 2 * least or (taken + 1) * wider[0] * wider[1] * q_heads > PIECE_ELEMENTS:
                break
            taken, (queries, tokens) = taken + 1, wider
        rows, order = torch.tensor(order[:taken]), order[taken:]
        at_once = max(1, PIECE_ELEMENTS // max(1, taken * tokens * q_heads))
        for first in range(0, queries, at_once):
            some = rows[counts[rows] > first]
            yield some, first, (counts[some] - first).clamp(max=at_once)


def columns_of(rule: AttentionRule, first: Tensor, last: Tensor, block_size: int) -> Tensor:
    """Return the columns of the table, [rows, columns], to which queries from position `first` to `last` attend."""
    low = first_attended(rule, first.clamp(min=0)) // block_size
    width = int((last.clamp(min=0) // block_size - low).max()) + 1
    return low[:, None] + torch.arange(width)


def branches(tree: Tensor, index: Tensor) -> Tensor:
    """Return the mask [rows, queries, tokens] of the tokens that the masks `tree` [rows, queries] permit.

    `index` [rows, tokens] is the number of the token among the row's queries, negative before them.
    """
    index = index[:, None]
    return (index < 0) | ((tree[:, :, None] >> index.clamp(0, 63)) & 1).bool()


def mla_decode(
    query: Tensor, pages: LatentPages, batch: Batch, scale: float, value_size: int, lse: Tensor | None = None
) -> Tensor:
    """Compute latent attention as attention with one key-value head, whose values are the first elements of the keys.

    query is [queries, q_heads, latent_size]; the result is [queries, q_heads, value_size].
    """
    keys = pages.rows[:, :, None, :]
    shared = AttentionPages(keys, keys[..., :value_size], pages.scale, pages.scale)
    return attention(query, shared, batch, AttentionRule(scale), lse)


def first_attended(rule: AttentionRule, position: Tensor) -> Tensor:
    """Return the position of the earliest token that a query at `position` attends to."""
    if rule.window:
        return (position - rule.window + 1).clamp(min=0)
    if rule.chunk:
        return position.clamp(min=0) // rule.chunk * rule.chunk
    return torch.zeros_like(position)


def gathered(pages: AttentionPages, table: Tensor, column: Tensor, last: Tensor, dtype: torch.dtype) -> Context:
    """Gather the pages in the columns [rows, columns] of the table, up to each row's `last` token.

    Columns after the end of the table are clamped. This is safe: the clamped columns are also after `last`, so their
    tokens are masked.
    """
    block_size, max_blocks = pages.k.shape[1], table.shape[1]
    block = table.long().gather(1, column.clamp(max=max_blocks - 1))
    position = column[:, :, None] * block_size + torch.arange(block_size, device=table.device)
    present = ((block != 0)[:, :, None] & (position <= last[:, None, None])).flatten(1)
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    k, v = (
        scaled(bits(part)[block].view(part.dtype).flatten(1, 2).to(sums), scale)
        for part, scale in ((pages.k, pages.k_scale), (pages.v, pages.v_scale))
    )
    return Context(k, v.masked_fill_(~present[:, :, None, None], 0), position.flatten(1), present)


def scaled(values: Tensor, scale: Tensor | None) -> Tensor:
    """Return stored values [..., heads, size] multiplied by the scale."""
    return values if scale is None else values * scale[:, None]


def attended(query: Tensor, context: Context, position: Tensor, rule: AttentionRule) -> tuple[Tensor, Tensor]:
    """Compute attention of queries [rows, queries, q_heads, head_size] at `position` [rows, queries]. The result has
    the type of the queries; log-sum-exps are [rows, queries, q_heads].
    """
    rows, queries, q_heads, head_size = query.shape
    kv_heads = context.k.shape[2]
    grouped = query.to(context.k.dtype).reshape(rows, queries, kv_heads, -1, head_size)
    logits = rule.scale * torch.einsum("rqhgd,rthd->rhgqt", grouped, context.k)
    first, token = first_attended(rule, position)[:, :, None], context.position[:, None, :]
    if rule.soft_cap:
        logits = rule.soft_cap * torch.tanh(logits / rule.soft_cap)
    if rule.slopes is not None:
        slopes = rule.slopes.to(logits.dtype).reshape(1, kv_heads, -1, 1, 1)
        logits = logits + slopes * (token - position[:, :, None])[:, None, None]
    mask = context.present[:, None, :] & (token >= first) & (token <= position[:, :, None])
    if context.seen is not None:
        mask &= context.seen
    weights, lse = softmax(logits, mask[:, None, None], rule.sinks)
    out = torch.einsum("rhgqt,rthd->rqhgd", weights, context.v)
    return out.reshape(rows, queries, q_heads, -1).to(query.dtype), lse.permute(0, 3, 1, 2).flatten(2)


def softmax(logits: Tensor, mask: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return weights [rows, kv_heads, group, queries, tokens], 0 where the mask is False, and log-sum-exps [rows,
    kv_heads, group, queries]. Overwrites the logits.
    """
    logits = logits.masked_fill_(~mask, float("-inf"))
    rows, kv_heads, group, queries, tokens = logits.shape
    if sinks is not None:
        sink = sinks.to(logits.dtype).reshape(1, kv_heads, group, 1, 1).expand(rows, -1, -1, queries, -1)
        logits = torch.cat([logits, sink], -1)
    return logits.softmax(-1)[..., :tokens].masked_fill_(~mask, 0), logits.logsumexp(-1)
