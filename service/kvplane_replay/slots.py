"""The engine's requests that the service knows, in columns by slot."""

from __future__ import annotations

from kvplane_replay.request import NO_SLOT, LiveRequest


class SlotTable:
    """Hands out slots, the last released first, so that numbers stay small, and keeps one column per fact.

    Attributes:
        requests: who has the slot; None when it is free.
        known: tokens known, prompt and generated so far.
        computed: tokens computed.
        hash_due: known tokens at which the next block hash becomes complete.
    """

    __slots__ = ("_block_size", "_free", "_lookahead", "computed", "hash_due", "known", "requests")

    def __init__(self, hash_block_size: int, hash_lookahead: int) -> None:
        self.requests: list[LiveRequest | None] = []
        self.known: list[int] = []
        self.computed: list[int] = []
        self.hash_due: list[int] = []
        self._free: list[int] = []
        self._block_size = hash_block_size
        self._lookahead = hash_lookahead

    def take(self, request: LiveRequest) -> int:
        """Give the request a slot; its prompt is known, nothing is computed."""
        assert request.slot == NO_SLOT, "a request has one slot"
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self.requests[slot] = request
        self.known[slot] = request.num_prompt
        self.computed[slot] = 0
        full_blocks = max(0, request.num_prompt - self._lookahead) // self._block_size
        self.hash_due[slot] = (full_blocks + 1) * self._block_size + self._lookahead
        request.slot = slot
        return slot

    def holder(self, slot: int) -> LiveRequest:
        """Who has the slot."""
        request = self.requests[slot]
        assert request is not None, f"slot {slot} is free"
        return request

    def release(self, slot: int) -> LiveRequest:
        """Take the slot back and return who had it."""
        request = self.holder(slot)
        self.requests[slot] = None
        request.slot = NO_SLOT
        self._free.append(slot)
        return request

    def hash_if_due(self, slot: int) -> bytes:
        """The hash of the block that the slot's known tokens just completed, b"" when they did not."""
        if self.known[slot] < self.hash_due[slot]:
            return b""
        self.hash_due[slot] += self._block_size
        return self.holder(slot).hash_generated(self.known[slot])

    def _grow(self) -> None:
        self._free.append(len(self.requests))
        self.requests.append(None)
        for column in (self.known, self.computed, self.hash_due):
            column.append(0)
