"""A request of a trace inside the engine."""

from __future__ import annotations

from kvplane.base.hashing import TOKEN_BYTES, HashScheme, RequestHasher
from kvplane.scheduling import Request
from kvplane.session.rows import FactRow, NewsRow
from kvplane_replay.workloads import TraceRequest


class LiveRequest(Request):
    """A request that sends hashes: its prompt is hashed shortly before its admission and never stored as tokens.

    Generated tokens are hashed when they complete a block.

    Attributes:
        trace: its entry in the workload.
        num_prompt: prompt tokens.
    """

    __slots__ = ("_hash_due", "_hasher", "_num_tokens", "_output", "_prompt_hashes", "_scheme", "num_prompt", "trace")

    def __init__(self, trace: TraceRequest, max_output: int, scheme: HashScheme) -> None:
        super().__init__(trace.name, (), min(trace.output_tokens, max_output))
        self.trace = trace
        self.num_prompt = self._num_tokens = len(trace.prompt)
        self._scheme = scheme
        self._hasher: RequestHasher | None = None
        self._prompt_hashes = self._output = b""
        size, lookahead = scheme.block_size, scheme.lookahead
        # Known tokens at which the next block hash is complete.
        self._hash_due = (max(0, self.num_prompt - lookahead) // size + 1) * size + lookahead

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, and those generated so far."""
        return self._num_tokens

    @property
    def max_tokens(self) -> int:
        """Tokens of the prompt, and those that it generates."""
        return self.num_prompt + self.max_new_tokens

    @property
    def is_done(self) -> bool:
        """Whether the last token is generated."""
        return self._num_tokens >= self.max_tokens

    def __post_init__(self) -> None:
        """A trace may ask for no token; the prompt is not kept as token ids."""
        self.tokens = []

    def hash_prompt(self) -> None:
        """Hash the prompt's full blocks; does nothing when they are hashed."""
        if self._hasher is None:
            self._hasher = RequestHasher(self._scheme)
            self._prompt_hashes = self._hasher.append(self.trace.prompt.packed())

    def news_row(self) -> NewsRow:
        """Announces the prompt. The hashes are given once and freed: from then on the service stores them."""
        self.hash_prompt()
        hashes, self._prompt_hashes = self._digests(self._prompt_hashes), b""
        return NewsRow(
            self.slot,
            num_tokens=self.num_prompt,
            hashes=hashes,
            request_id=self.request_id,
            max_tokens=self.max_tokens,
        )

    def append(self, token: int) -> None:
        """A token of the trace's output joins the request, whatever was sampled."""
        del token
        self._num_tokens += 1

    def content(self, num_appended: int) -> FactRow:
        """The row that appends tokens at the service, with the hashes of the blocks that they complete."""
        if self._num_tokens < self._hash_due:
            return FactRow(self.slot, num_tokens=num_appended)
        assert self._hasher is not None, "the prompt is hashed when the request is announced"
        self._hash_due += self._scheme.block_size
        self._output = self._output or self.trace.output.packed()
        start = self._hasher.num_tokens - self.num_prompt
        fresh = self._output[start * TOKEN_BYTES : (self._num_tokens - self.num_prompt) * TOKEN_BYTES]
        return FactRow(self.slot, num_tokens=num_appended, hashes=self._digests(self._hasher.append(fresh)))

    def _digests(self, raw: bytes) -> list[bytes]:
        size = self._scheme.digest.size
        return [raw[start : start + size] for start in range(0, len(raw), size)]
