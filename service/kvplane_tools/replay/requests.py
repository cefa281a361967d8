"""The requests of a trace in the form that `kvplane.scheduling` runs."""

from __future__ import annotations

from kvplane.base.hashing import TOKEN_BYTES, HashScheme, RequestHasher
from kvplane.scheduling import Request
from kvplane.session.rows import FactRow, NewsRow
from kvplane_tools.replay.workloads import TraceRequest


class LiveRequest(Request):
    """A request of a trace that sends hashes instead of tokens.

    Its prompt is hashed shortly before its admission and never stored as tokens. Generated tokens are hashed when they
    complete a block.

    Attributes:
        trace: the request in the workload.
        num_prompt: number of prompt tokens.
    """

    __slots__ = (
        "_hash_due",
        "_hasher",
        "_hint_values",
        "_num_tokens",
        "_output",
        "_prompt_hashes",
        "_scheme",
        "num_prompt",
        "trace",
    )

    def __init__(self, trace: TraceRequest, max_output: int, scheme: HashScheme, hint_values: int = 0) -> None:
        super().__init__(trace.name, (), min(trace.output_tokens, max_output))
        self.trace, self._hint_values = trace, hint_values
        self.num_prompt = self._num_tokens = len(trace.prompt)
        self._scheme = scheme
        self._hasher: RequestHasher | None = None
        self._prompt_hashes = self._output = b""
        size, lookahead = scheme.block_size, scheme.lookahead
        # Known tokens at which the next block hash is complete.
        self._hash_due = (max(0, self.num_prompt - lookahead) // size + 1) * size + lookahead

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the prompt and of those generated so far."""
        return self._num_tokens

    @property
    def max_tokens(self) -> int:
        """The number of tokens of the prompt and of the output that the trace states."""
        return self.num_prompt + self.max_new_tokens

    @property
    def is_done(self) -> bool:
        """Whether the request has its last token."""
        return self._num_tokens >= self.max_tokens

    def __post_init__(self) -> None:
        """Keep no token ids, and accept a request that generates no token, which a trace may contain."""
        self.tokens = []

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
        """Append the next token of the trace's output, whichever token was sampled."""
        del token
        self._num_tokens += 1
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
