"""A ring buffer: each request has one block, which is overwritten in place and never cached."""

from __future__ import annotations

from collections.abc import Sequence

from kvplane_core.face.interface import Need
from kvplane_core.face.keys import NULL_BLOCK
from kvplane_core.spec.managers.base import GroupManager
from kvplane_core.spec.managers.questions import RequestProgress


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
        del num_slots, num_main, num_encoder
        return [] if self.table[slot] else self._extend(self.table[slot], 1)

    def blocks_alone(self, num_tokens: int, num_encoder: int) -> int:
        """Return 1."""
        return 1

    def normalize_table(self, table: list[int], at: RequestProgress) -> list[int] | None:
        """Return the table if it has exactly one block, else None."""
        del at
        return table if len(table) == 1 and table[0] != NULL_BLOCK else None
