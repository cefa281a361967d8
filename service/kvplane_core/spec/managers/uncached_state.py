"""Recurrent state that is not cached (mode "none"): a request has one block for its state, and one per draft token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvplane_core.face.interface import Need
from kvplane_core.spec.managers.base import GroupManager


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
