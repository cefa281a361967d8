"""Cross attention: blocks by encoder tokens, allocated once, never shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvplane_service.core.keys import NULL_BLOCK
from kvplane_service.core.managers.base import FOREVER, GroupManager
from kvplane_service.core.managers.questions import Need, Query, RequestProgress


class CrossAttentionManager(GroupManager):
    """The encoder's output is fixed for the request, and differs between requests."""

    def blocks_needed(self, need: Need, hit: Sequence[int]) -> int:
        """Blocks for the encoder tokens, all at the first allocation."""
        encoder = replace(need, num_slots=need.num_encoder, num_main=need.num_encoder, total_computed=0)
        return super().blocks_needed(encoder, ())

    def blocks_to_extend(self, slot: int, num_slots: int, num_main: int) -> int:
        """None: the encoder's output does not grow."""
        return 0

    def blocks_alone(self, num_tokens: int, num_encoder: int) -> int:
        """See GroupManager.blocks_alone."""
        return self._blocks_for(num_encoder)

    def adopt(self, slot: int, hit: Sequence[int], local_computed: int, total_computed: int) -> None:
        """Nothing to adopt."""
        assert not hit, "cross attention is never looked up"

    def allocate_external(self, slot: int, local_computed: int, total_computed: int) -> None:
        """External tokens are decoder tokens."""
        return

    def allocate(self, slot: int, num_slots: int, num_main: int, num_encoder: int) -> list[int]:
        """See GroupManager.allocate; only encoder tokens count."""
        return super().allocate(slot, num_encoder, num_encoder, num_encoder)

    def register_blocks(self, slot: int, num_tokens: int, boundaries: Sequence[int]) -> None:
        """Never cached."""
        return

    def normalize_table(self, table: list[int], at: RequestProgress) -> list[int] | None:
        """See GroupManager.normalize_table. The number of encoder tokens is not known, so any length is accepted."""
        del at
        return table if NULL_BLOCK not in table else None

    def find(self, query: Query) -> tuple[list[list[int]], int]:
        """Never found."""
        return [[] for _ in query.groups], 0

    def alloc_bound(self, slot: int) -> int:
        """Decoder tokens need no block."""
        return FOREVER

    def register_bound(self, slot: int) -> int:
        """Never cached."""
        return FOREVER
