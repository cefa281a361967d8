"""One request of the engine, from its trace entry to its last generated token."""

from __future__ import annotations

from kvplane.base.hashing import TOKEN_BYTES, HashScheme, RequestHasher
from kvplane_replay.workloads import TraceRequest

NO_SLOT = -1


class LiveRequest:
    """A request inside the engine.

    The prompt is hashed when its turn comes near and never kept as tokens; what it generates is hashed a block at
    a time.

    Attributes:
        trace: its entry in the workload.
        slot: the number that the service knows it by, NO_SLOT before it is announced.
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
        """Hash the prompt's full blocks, unless that is done."""
        if self._hasher is None:
            self._hasher = RequestHasher(scheme)
            self._prompt_hashes = self._hasher.append(self.trace.prompt.packed())

    def take_prompt_hashes(self) -> bytes:
        """The hashes of the prompt, given away once: the service keeps them from here on."""
        assert self._hasher is not None, "hash_prompt comes first"
        hashes, self._prompt_hashes = self._prompt_hashes, b""
        return hashes

    def hash_generated(self, known_tokens: int) -> bytes:
        """The hashes that became complete when the request grew to `known_tokens`."""
        assert self._hasher is not None, "hash_prompt comes first"
        self._output = self._output or self.trace.output.packed()
        start = (self._hasher.num_tokens - self.num_prompt) * TOKEN_BYTES
        return self._hasher.append(self._output[start : (known_tokens - self.num_prompt) * TOKEN_BYTES])
