"""The requests of a workload in the form that `kvplane.scheduling` runs."""

from __future__ import annotations

from kvplane.base.hashing import TOKEN_BYTES, HashScheme, RequestHasher
from kvplane.scheduling import Request
from kvplane.session.rows import FactRow, NewsRow
from kvplane_tools.replay.workloads import TraceRequest


class ReplayedRequest(Request):
    """A request whose outputs are known and that sends hashes instead of tokens.

    Attributes:
        num_prompt: number of prompt tokens.
        arrival_s, session: as in `TraceRequest`.
    """

    __slots__ = ("_num_tokens", "arrival_s", "num_prompt", "session")

    def __init__(self, name: str, arrival_s: float, session: str, num_prompt: int, num_outputs: int) -> None:
        super().__init__(name, (), num_outputs)
        self.arrival_s, self.session = arrival_s, session
        self.num_prompt = self._num_tokens = num_prompt

    def __post_init__(self) -> None:
        """Keep no token ids, and accept a request that generates no token, which a workload may contain."""
        self.tokens = []

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the prompt and of those generated so far."""
        return self._num_tokens

    @property
    def max_tokens(self) -> int:
        """The number of tokens of the prompt and of the output that the workload states."""
        return self.num_prompt + self.max_new_tokens

    @property
    def is_done(self) -> bool:
        """Whether the request has its last token."""
        return self._num_tokens >= self.max_tokens

    def append(self, token: int) -> None:
        """Append the next token of the stated output, whichever token was sampled."""
        self._num_tokens += 1

    def hash_prompt(self) -> None:
        """Hash the prompt's full blocks, if they are not hashed yet."""


class LiveRequest(ReplayedRequest):
    """A request of a trace.

    Its prompt is hashed shortly before its admission and never stored as tokens. Generated tokens are hashed when they
    complete a block.

    Attributes:
        trace: the request in the workload.
    """

    __slots__ = (
        "_hash_due",
        "_hasher",
        "_hint_values",
        "_output",
        "_prompt_hashes",
        "_scheme",
        "trace",
    )

    def __init__(self, trace: TraceRequest, max_output: int, scheme: HashScheme, hint_values: int = 0) -> None:
        outputs = min(trace.output_tokens, max_output)
        super().__init__(trace.name, trace.arrival_s, trace.session, len(trace.prompt), outputs)
        self.trace, self._hint_values = trace, hint_values
        self._scheme = scheme
        self._hasher: RequestHasher | None = None
        self._prompt_hashes = self._output = b""
        size, lookahead = scheme.block_size, scheme.lookahead
        # Known tokens at which the next block hash is complete.
        self._hash_due = (max(0, self.num_prompt - lookahead) // size + 1) * size + lookahead

    def hash_prompt(self) -> None:
        """Hash the prompt's full blocks, if they are not hashed yet."""
        if self._hasher is None:
            self._hasher = RequestHasher(self._scheme)
            self._prompt_hashes = self._hasher.append(self.trace.prompt.packed())

    def news_row(self) -> NewsRow:
        """Return the row of a step that announces the request. The request's hashes are then freed, since the service
        stores them.
        """
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
        """Append the next token; with the last one the engine knows its hint."""
        super().append(token)
        if self.is_done and self.trace.hint < self._hint_values:
            self.hint = self.trace.hint

    def content(self, num_appended: int) -> FactRow:
        """Return the row of a step that reports the last `num_appended` tokens, with the hashes of the blocks that
        became full.
        """
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
