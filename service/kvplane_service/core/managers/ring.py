"""A ring buffer: one block per request, overwritten in place, never cached."""

from __future__ import annotations

from collections.abc import Sequence

from kvplane_service.core.keys import NULL_BLOCK
from kvplane_service.core.managers.base import FOREVER, GroupManager
from kvplane_service.core.managers.questions import Need, Query, RequestProgress


class RingManager(GroupManager):
    """Scratch memory, for example of sparse indexers (vLLM's circular buffer)."""

    def blocks_needed(self, need: Need, hit: Sequence[int]) -> int:
        """One, once."""
        return 0 if self.table[need.slot] else 1

    def blocks_to_extend(self, slot: int, num_slots: int, num_main: int) -> int:
        """One, once."""
        return 0 if self.table[slot] else 1

    def adopt(self, slot: int, hit: Sequence[int], local_computed: int, total_computed: int) -> None:
        """Nothing to adopt."""
        assert not hit, "a ring is never looked up"

    def allocate_external(self, slot: int, local_computed: int, total_computed: int) -> None:
        """The same block serves external tokens."""
        self.allocate(slot, 0, 0, 0)

    def allocate(self, slot: int, num_slots: int, num_main: int, num_encoder: int) -> list[int]:
        """One block, at the first call."""
        del num_slots, num_main, num_encoder
        return [] if self.table[slot] else self._extend(self.table[slot], 1)

    def register_blocks(self, slot: int, num_tokens: int, boundaries: Sequence[int]) -> None:
        """Never cached: the page is overwritten."""
        return

    def blocks_alone(self, num_tokens: int, num_encoder: int) -> int:
        """One."""
        return 1

    def normalize_table(self, table: list[int], at: RequestProgress) -> list[int] | None:
        """See GroupManager.normalize_table; the table has exactly one block."""
        del at
        return table if len(table) == 1 and table[0] != NULL_BLOCK else None

    def find(self, query: Query) -> tuple[list[list[int]], int]:
        """Never found."""
        return [[] for _ in query.groups], 0

    def alloc_bound(self, slot: int) -> int:
        """The one block is enough."""
        return FOREVER if self.table[slot] else 0

    def register_bound(self, slot: int) -> int:
        """Never cached."""
        return FOREVER
