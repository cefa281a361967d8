"""Requests inside the engine: `LiveRequest`, from trace entry to last token; `SlotTable`, the announced requests."""

from __future__ import annotations

from kvplane.base.hashing import TOKEN_BYTES, HashScheme, RequestHasher
from kvplane_replay.workloads import TraceRequest

NO_SLOT = -1


class LiveRequest:
    """A request inside the engine.

    The prompt is hashed shortly before its admission and never stored as tokens. Generated tokens are hashed block by
    block.

    Attributes:
        trace: its entry in the workload.
        slot: its number at the service; NO_SLOT before it is announced.
        num_prompt: prompt tokens.
        num_tokens: prompt and generated tokens at its end.
        admitted: it has run before, so its next admission is a resumption.
    """

    __slots__ = ("_hasher", "_output", "_prompt_hashes", "admitted", "num_prompt", "num_tokens", "slot", "trace")

    def __init__(self, trace: TraceRequest, max_output: int) -> None:
        self.trace = trace
        self.slot = NO_SLOT
        self.num_prompt = len(trace.prompt)
        self.num_tokens = self.num_prompt + min(trace.output_tokens, max_output)
        self.admitted = False
        self._hasher: RequestHasher | None = None
        self._prompt_hashes = b""
        self._output = b""

    def hash_prompt(self, scheme: HashScheme) -> None:
        """Hash the prompt's full blocks; does nothing when they are hashed."""
        if self._hasher is None:
            self._hasher = RequestHasher(scheme)
            self._prompt_hashes = self._hasher.append(self.trace.prompt.packed())

    def take_prompt_hashes(self) -> bytes:
        """The hashes of the prompt. Returns them once and frees them: from then on the service stores them."""
        assert self._hasher is not None, "hash_prompt comes first"
        hashes, self._prompt_hashes = self._prompt_hashes, b""
        return hashes

    def hash_generated(self, known_tokens: int) -> bytes:
        """The hashes that became complete when the request grew to `known_tokens`."""
        assert self._hasher is not None, "hash_prompt comes first"
        self._output = self._output or self.trace.output.packed()
        start = (self._hasher.num_tokens - self.num_prompt) * TOKEN_BYTES
        return self._hasher.append(self._output[start : (known_tokens - self.num_prompt) * TOKEN_BYTES])


class SlotTable:
    """The announced requests, in columns by slot. The last released slot is reused first, so that numbers stay small.

    Attributes:
        requests: the request in the slot; None when it is free.
        known: known tokens, prompt and generated so far.
        computed: computed tokens.
        hash_due: number of known tokens at which the next block hash becomes complete.
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
        """Assign a slot to the request, with its prompt known and nothing computed."""
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
        """The request in the slot, which must not be free."""
        request = self.requests[slot]
        assert request is not None, f"slot {slot} is free"
        return request

    def release(self, slot: int) -> LiveRequest:
        """Free the slot; returns the request that was in it."""
        request = self.holder(slot)
        self.requests[slot] = None
        request.slot = NO_SLOT
        self._free.append(slot)
        return request

    def hash_if_due(self, slot: int) -> bytes:
        """The hash of the block that the slot's known tokens just completed; b"" when none was completed."""
        if self.known[slot] < self.hash_due[slot]:
            return b""
        self.hash_due[slot] += self._block_size
        return self.holder(slot).hash_generated(self.known[slot])

    def _grow(self) -> None:
        self._free.append(len(self.requests))
        self.requests.append(None)
        for column in (self.known, self.computed, self.hash_due):
            column.append(0)
