"""A batch in the form that FlashInfer reads: the concatenated blocks of all rows, each from the start of its window.

The indices contain only blocks that are attended to: none that left the window, and never the null block. Positions
still count from the end of a row, as the window does.

        table        | 0  0  7  4  9  |      seq_len 70, block 16, window 20, one query: tokens 50..69
        indices               4  9           (tokens 48..69; the window cuts off 48 and 49)
        last_page_len            6
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvplane_worker.ops.interface import Batch


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The rows of a batch as columns, int32 on the host (`empty`: int64).

    Attributes:
        query_start: [rows + 1], index of each row's first query, and the number of queries.
        indptr: [rows + 1]: the blocks of row r are indices[indptr[r] : indptr[r + 1]].
        indices: [blocks]: the blocks of all rows, concatenated.
        lengths: [rows]: number of tokens in the row's blocks; at least 1.
        last_page_len: [rows]: tokens in the last block.
        empty: [n]: indices of the queries that have no token to attend to; their result must be set to 0. The rows of
            these queries, and rows without queries, get one block of another row, because FlashInfer requires a block
            in every row.
    """

    query_start: Tensor
    indptr: Tensor
    indices: Tensor
    lengths: Tensor
    last_page_len: Tensor
    empty: Tensor


def paged_rows(batch: Batch, block_size: int, window: int) -> PagedRows | str:
    """Convert a batch, or return why FlashInfer does not support it. `block_size` and `window` are in tokens.

    Waits for the device unless the batch has host tables.
    """
    host = batch.on_host()
    table, seq_lens, starts = host.block_table, host.seq_lens, host.query_start
    queries = starts.diff()
    works = (seq_lens > 0) & (queries > 0)
    if not works.any():
        return "no row has both tokens and queries"
    oldest = (seq_lens - queries - window + 1).clamp(min=0) if window else torch.zeros_like(seq_lens)
    first, end = oldest // block_size, -(-seq_lens // block_size)
    column = torch.arange(table.shape[1])
    attended = works[:, None] & (column >= first[:, None]) & (column < end[:, None])
    blocks = table[attended]
    if not blocks.all():
        return "a null block is inside the attended range"
    return columns(blocks, torch.where(works, seq_lens - first * block_size, 0), starts, block_size)


def columns(blocks: Tensor, lengths: Tensor, starts: Tensor, block_size: int) -> PagedRows:
    """Build the columns for rows of `lengths` tokens (0 = a row without work) from the concatenated `blocks`."""
    works = lengths > 0
    counts = -(-lengths // block_size)
    borrowed = torch.where(works, counts, 1)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), borrowed.cumsum(0)])
    indices = blocks[0].repeat(int(indptr[-1]))
    indices[works.repeat_interleave(borrowed)] = blocks
    lengths = lengths.clamp(min=1)
    idle = (~works).repeat_interleave(starts.diff()).nonzero().flatten()
    last = (lengths - 1) % block_size + 1
    return PagedRows(starts.int(), indptr.int(), indices.int(), lengths.int(), last.int(), idle)
