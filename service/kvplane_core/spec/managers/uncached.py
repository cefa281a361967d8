"""Blocks that are never cached: of cross attention, which hold the encoder's tokens and are allocated once, of ring
buffers, and of recurrent state in mode "none".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvplane_core.face.interface import Need
from kvplane_core.face.keys import NULL_BLOCK
from kvplane_core.spec.managers.base import GroupManager
from kvplane_core.spec.managers.questions import RequestProgress


class CrossAttentionManager(GroupManager):
    """Manages a group of cross attention. The encoder's output does not grow and is never shared between requests."""

    def blocks_needed(self, need: Need, hit: Sequence[int]) -> int:
        """Return the blocks for the encoder tokens; all are needed at the first allocation."""
        encoder = replace(need, num_slots=need.num_encoder, num_main=need.num_encoder, total_computed=0)
        return super().blocks_needed(encoder, ())

    def blocks_to_extend(self, slot: int, num_slots: int, num_main: int) -> int:
        """Return 0: the encoder's output does not grow."""
        return 0

    def blocks_alone(self, num_tokens: int, num_encoder: int) -> int:
        """Return the number of blocks for the encoder tokens."""
        return self._blocks_for(num_encoder)

    def adopt(self, slot: int, hit: Sequence[int], local_computed: int, total_computed: int) -> None:
        """Do nothing: there is never a hit."""
        assert not hit, "cross attention is never looked up"

    def allocate_external(self, slot: int, local_computed: int, total_computed: int) -> None:
        """Do nothing: external tokens are decoder tokens, which have no block in this group."""
        return

    def allocate(self, slot: int, num_slots: int, num_main: int, num_encoder: int) -> list[int]:
        """Extend the table to the encoder tokens; returns the new blocks."""
        return super().allocate(slot, num_encoder, num_encoder, num_encoder)

    def normalize_table(self, table: list[int], at: RequestProgress) -> list[int] | None:
        """Return the table if it has no null block, else None.

        Any length is accepted, because the number of encoder tokens is not known here.
        """
        return table if NULL_BLOCK not in table else None


class RingManager(GroupManager):
    """Manages a group of ring buffers: scratch memory, for example of sparse indexers (vLLM's circular buffer)."""

    def blocks_needed(self, need: Need, hit: Sequence[int]) -> int:
        """Return 1 for a request without a block, else 0."""
        return 0 if self.table[need.slot] else 1

    def blocks_to_extend(self, slot: int, num_slots: int, num_main: int) -> int:
        """Return 1 for a request without a block, else 0."""
        return 0 if self.table[slot] else 1

    def adopt(self, slot: int, hit: Sequence[int], local_computed: int, total_computed: int) -> None:
        """Do nothing: there is never a hit."""
        assert not hit, "a ring is never looked up"

    def allocate_external(self, slot: int, local_computed: int, total_computed: int) -> None:
        """Allocate the request's one block, which also serves external tokens."""
        self.allocate(slot, 0, 0, 0)

    def allocate(self, slot: int, num_slots: int, num_main: int, num_encoder: int) -> list[int]:
        """Allocate the request's one block at the first call; later calls return no block."""
        return [] if self.table[slot] else self._extend(self.table[slot], 1)

    def blocks_alone(self, num_tokens: int, num_encoder: int) -> int:
        """Return 1."""
        return 1

    def normalize_table(self, table: list[int], at: RequestProgress) -> list[int] | None:
        """Return the table if it has exactly one block, else None."""
        return table if len(table) == 1 and table[0] != NULL_BLOCK else None


class UncachedStateManager(GroupManager):
    """Manages states in mode "none": never cached; a request has one block for its state, and one per draft token."""

    takes_states = True

    def blocks_needed(self, need: Need, hit: Sequence[int]) -> int:
        """Return the number of new blocks for the state and the draft states."""
        extra = self.block_size * self.spec.speculative_blocks
        return super().blocks_needed(replace(need, num_slots=need.num_slots + extra), hit)

    def blocks_to_extend(self, slot: int, num_slots: int, num_main: int) -> int:
        """Return the number of blocks that a running request needs for `num_slots` tokens and the draft states."""
        extra = self.block_size * self.spec.speculative_blocks
        return super().blocks_to_extend(slot, num_slots + extra, num_main)

    def blocks_alone(self, num_tokens: int, num_encoder: int) -> int:
        """Return the most blocks that a request holds at once: its state and the draft states."""
        return super().blocks_alone(num_tokens, num_encoder) + self.spec.speculative_blocks

    def allocate(self, slot: int, num_slots: int, num_main: int, num_encoder: int) -> list[int]:
        """Extend the table to the state and the draft states; returns the new blocks."""
        extra = self.block_size * self.spec.speculative_blocks
        return super().allocate(slot, num_slots + extra, num_main, num_encoder)

    def can_rewind(self, slot: int, num_computed: int) -> bool:
        """Whether at most as many tokens are computed again as there are draft states: older states are lost."""
        return self.requests.computed[slot] - num_computed <= self.spec.speculative_blocks

    def skipped_tokens(self, num_computed: int) -> int:
        """Return the number of computed tokens less one: only the state of the last token is needed."""
        return num_computed - 1
