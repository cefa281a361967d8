"""Cross attention: blocks hold the encoder's tokens; they are allocated once and never shared."""

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
        del at
        return table if NULL_BLOCK not in table else None
