"""The rows of a launch as tensors: which tokens it computes, and which pages each row reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvplane_worker.ops.interface import Batch

NO_STATE = 0  # the null block: before the first token the state is zero


@dataclass(frozen=True, slots=True)
class Row:
    """The tokens of one request in a launch.

    Attributes:
        tokens: ids of the tokens to compute.
        start: position of the first of these tokens in the request.
        num_outputs: number of last tokens for which logits are needed.
        tables: block ids of each group, in token order.
        states: maps a group of state layers to the block with the state before `start`; NO_STATE at position 0.
    """

    tokens: list[int]
    start: int
    num_outputs: int
    tables: Sequence[Sequence[int]]
    states: dict[int, int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)


class Launch:
    """The rows of one forward pass, as tensors for the paged operations.

    Attributes:
        tokens: int64 [tokens], token ids in the order of the rows.
        positions: int64 [tokens], position of each token in its request.
        outputs: int64 [outputs], indices in `tokens` of the tokens for which logits are needed.
        query_start: int32 [rows + 1], index in `tokens` of each row's first token, and the number of tokens.
        is_decode: whether every row has exactly one token.
    """

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        self.rows = rows
        self._device = device
        starts = [0]
        for row in rows:
            starts.append(starts[-1] + len(row.tokens))
        outputs = [at for row, end in zip(rows, starts[1:], strict=True) for at in range(end - row.num_outputs, end)]
        self.tokens = self._ints([token for row in rows for token in row.tokens])
        self.positions = self._ints([at for row in rows for at in range(row.start, row.end)])
        self.outputs = self._ints(outputs)
        self.query_start = self._ints(starts, torch.int32)
        self.is_decode = all(len(row.tokens) == 1 for row in rows)
        self._attention: dict[int, tuple[Tensor, Batch]] = {}
        self._states: dict[int, tuple[Tensor, Tensor]] = {}

    def attention(self, group: int, block_size: int) -> tuple[Tensor, Batch]:
        """Return, for a group of attention layers, the slot to write each token to and the pages that each row attends
        to.

        The slots are int64 [tokens], block id * block_size + offset in the block.
        """
        if group not in self._attention:
            slots = [
                row.tables[group][at // block_size] * block_size + at % block_size
                for row in self.rows
                for at in range(row.start, row.end)
            ]
            lengths = self._ints([row.end for row in self.rows], torch.int32)
            queries = None if self.is_decode else self.query_start
            batch = Batch(self._table(group, block_size), lengths, queries)
            self._attention[group] = self._ints(slots), batch
        return self._attention[group]

    def states(self, group: int, block_size: int) -> tuple[Tensor, Tensor]:
        """Return, for a group of state layers, the block to read each row's state from and the block to write each
        token's state to.

        Both tensors are int32: [rows] and [tokens]. A block of 0 means that there is no state to read, or that the
        state is not stored.
        """
        if group not in self._states:
            read = [row.states[group] for row in self.rows]
            write = [block for row in self.rows for block in kept_states(row, group, block_size)]
            self._states[group] = self._ints(read, torch.int32), self._ints(write, torch.int32)
        return self._states[group]

    def _table(self, group: int, block_size: int) -> Tensor:
        used = [row.tables[group][: -(-row.end // block_size)] for row in self.rows]
        width = max(map(len, used))
        return self._ints([[*blocks, *[0] * (width - len(blocks))] for blocks in used], torch.int32)

    def _ints(self, values: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)


def kept_states(row: Row, group: int, block_size: int) -> list[int]:
    """Return, for each token of the row, the block that receives the state after it; 0 = the state is not stored.

    The state after the last token is stored in that token's block. If drafts are rejected, an earlier token with logits
    becomes the last accepted one. Its state is stored in one of the following blocks, nearest first:

        table     .. | run  | spec | spec |       (two drafts; 0, 1 or 2 of them are rejected)
        state of     | last | last-1 | last-2 |
    """
    running = state_index(row.end, block_size)
    last = max(row.num_outputs, 1)
    kept = [0] * (len(row.tokens) - last)
    return kept + [row.tables[group][running + behind] for behind in range(last - 1, -1, -1)]


def state_index(num_tokens: int, block_size: int) -> int:
    """Return the index in a block table of the block with the state after `num_tokens` tokens; -1 for 0 tokens."""
    return -(-num_tokens // block_size) - 1
