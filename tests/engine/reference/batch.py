"""The rows of a launch as tensors: which tokens it computes, and which pages each row reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, getitem, itemgetter
from typing import TypeVar

import torch
from torch import Tensor

from kvplane_kernels.columns import column
from kvplane_kernels.interface import Batch, HostTables

Count = TypeVar("Count", int, Tensor)
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
        counts = column(map(len, map(attrgetter("tokens"), rows)))
        self._ends = column(map(attrgetter("start"), rows)) + counts
        self._outputs = column(map(attrgetter("num_outputs"), rows))
        self._starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        self._row = torch.repeat_interleave(counts)
        token = torch.arange(len(self._row))
        self._positions = token + (self._ends - self._starts[1:])[self._row]
        outputs = self._starts[1:] - self._outputs
        self.tokens = self._on_device(column(chain.from_iterable(map(attrgetter("tokens"), rows))))
        self.positions = self._on_device(self._positions)
        self.outputs = self._on_device((token >= outputs[self._row]).nonzero().flatten())
        self.query_start = self._on_device(self._starts.int())
        self.is_decode = bool((counts == 1).all())
        self._attention: dict[int, tuple[Tensor, Batch]] = {}
        self._states: dict[int, tuple[Tensor, Tensor]] = {}

    def attention(self, group: int, block_size: int) -> tuple[Tensor, Batch]:
        """Return, for a group of attention layers, the slot to write each token to and the pages that each row attends
        to.

        The slots are int64 [tokens], block id * block_size + offset in the block.
        """
        if group not in self._attention:
            lengths = self._ends
            table = self._table(group, -(-lengths // block_size))
            block = table[self._row, self._positions // block_size].long()
            slots = block * block_size + self._positions % block_size
            host = HostTables(table, lengths, self._starts)
            queries = None if self.is_decode else self.query_start
            batch = Batch(self._on_device(table), self._on_device(lengths.int()), queries, host=host)
            self._attention[group] = self._on_device(slots), batch
        return self._attention[group]

    def states(self, group: int, block_size: int) -> tuple[Tensor, Tensor]:
        """Return, for a group of state layers, the block to read each row's state from and the block to write each
        token's state to.

        Both tensors are int32: [rows] and [tokens]. A block of 0 means that there is no state to read, or that the
        state is not stored.
        """
        if group not in self._states:
            read = column(map(itemgetter(group), map(attrgetter("states"), self.rows))).int()
            self._states[group] = self._on_device(read), self._on_device(self._kept_states(group, block_size))
        return self._states[group]

    def _kept_states(self, group: int, block_size: int) -> Tensor:
        """Return, for each token, the block that receives the state after it, int32; 0 = the state is not stored.

        The state after a row's last token is stored in that token's block. If drafts are rejected, an earlier token
        with logits becomes the last accepted one. Its state is stored in one of the following blocks, nearest first:

            table     .. | run  | spec | spec |       (two drafts; 0, 1 or 2 of them are rejected)
            state of     | last | last-1 | last-2 |
        """
        kept = self._outputs.clamp(min=1)
        running = state_index(self._ends, block_size)
        behind = torch.arange(int(kept.max()))
        token = self._starts[1:, None] - 1 - behind
        blocks = torch.zeros(len(self._row), dtype=torch.int32)
        blocks[token[behind < kept[:, None]]] = self._blocks(group, running, running + kept)
        return blocks

    def _table(self, group: int, used: Tensor) -> Tensor:
        """Return the first `used` blocks of each row in a group, on the host, int32 [rows, most blocks]; then 0."""
        table = torch.zeros((len(self.rows), int(used.max())), dtype=torch.int32)
        table[torch.arange(table.shape[1]) < used[:, None]] = self._blocks(group, torch.zeros_like(used), used)
        return table

    def _blocks(self, group: int, begin: Tensor, end: Tensor) -> Tensor:
        """Return blocks begin .. end of each row in a group, row after row, int32 [blocks]."""
        tables = map(itemgetter(group), map(attrgetter("tables"), self.rows))
        return column(chain.from_iterable(map(getitem, tables, map(slice, begin.tolist(), end.tolist())))).int()

    def _on_device(self, values: Tensor) -> Tensor:
        return values.to(self._device, non_blocking=True)


def state_index(num_tokens: Count, block_size: int) -> Count:
    """Return the index in a block table of the block with the state after `num_tokens` tokens; -1 for 0 tokens."""
    return -(-num_tokens // block_size) - 1
