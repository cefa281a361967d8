"""Which tokens a launch computes, and which pages its rows read and write, group by group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvplane_worker.ops.interface import Batch

NO_STATE = 0  # the null block: before the first token the state is zero


@dataclass(frozen=True, slots=True)
class Row:
    """One request's part of a launch.

    Attributes:
        tokens: to compute; the last `num_outputs` of them are asked for their logits.
        start: position of the first.
        tables: block ids by group, in token order.
        states: by state group: the block of the state before `start`, NO_STATE at position 0.
    """

    tokens: list[int]
    start: int
    num_outputs: int
    tables: Sequence[Sequence[int]]
    states: dict[int, int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The position behind the last token."""
        return self.start + len(self.tokens)


class Launch:
    """The rows of one forward pass as the tensors that operations take.

    Attributes:
        tokens, positions: int64 [tokens], rows one after the other.
        outputs: int64: the tokens that are asked for their logits, numbered through the launch.
        query_start: int32 [rows + 1].
        is_decode: every row has one token.
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
        """(slots to write the tokens to, pages that the rows attend to) in a group of attention layers."""
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
        """(block to read the state from, per row; block to keep it in, per token) in a group of state layers."""
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
    """Per token of the row, the block that keeps the state after it; 0 where none does.

    The state after the last token goes to the block of that token. The tokens before it that are asked for logits may
    turn out to be the last good ones; their states lie in the blocks behind it, nearest first:

        table     .. | run  | spec | spec |       (two drafts; 0, 1 or 2 of them are rejected)
        state of     | last | last-1 | last-2 |
    """
    running = state_index(row.end, block_size)
    last = max(row.num_outputs, 1)
    kept = [0] * (len(row.tokens) - last)
    return kept + [row.tables[group][running + behind] for behind in range(last - 1, -1, -1)]


def state_index(num_tokens: int, block_size: int) -> int:
    """Where a table keeps the state of so many tokens; -1 of none."""
    return -(-num_tokens // block_size) - 1
