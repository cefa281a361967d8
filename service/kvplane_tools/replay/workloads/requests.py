"""The requests of a workload, with tokens that stand for their text.

Serving traces contain no text, only lengths and ids of shared content. In a replay, equal content must become equal
tokens and different content different tokens, for any block size. So a text is a range of a *stream*: an unbounded
sequence of tokens that is a fixed function of the stream's number.

    position      0        1        2        3        4     ...
    token         0    mark + s     2    mark + s     4              stream s; generated text: 2^31 more

Two adjacent tokens identify stream and position, so two blocks of two tokens or more are equal only if they are the
same range of the same stream. Hash id h of a trace whose ids represent n tokens each is the range [h * n, (h + 1) * n).
Consecutive ids form one range; an incomplete one is shortened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, islice, pairwise
from operator import sub

POSITIONS = 1 << 30  # number of tokens of a stream
STREAMS = 1 << 30
_STREAM_MARK = 1 << 30
_GENERATED = 1 << 31

# A chunk of a stream is one large integer of 32-bit lanes: two multiplications for all its tokens (5.5 ns a token)
# instead of one interpreter step per token (21 ns). No lane overflows, because positions are below 2^30.
_CHUNK = 1024
_EVEN_LANES = sum(1 << 64 * pair for pair in range(_CHUNK // 2))
_ODD_LANES = _EVEN_LANES << 32
_RAMP = sum(2 * pair << 64 * pair for pair in range(_CHUNK // 2))


@dataclass(frozen=True, slots=True)
class Span:
    """The positions `[start, stop)` of a stream of prompt text, or of a stream of generated text."""

    stream: int
    start: int
    stop: int
    generated: bool = False

    def __post_init__(self) -> None:
        assert 0 <= self.stream < STREAMS
        assert 0 <= self.start <= self.stop <= POSITIONS

    def packed(self) -> bytes:
        """Return the tokens, four little-endian bytes each."""
        base = _GENERATED if self.generated else 0
        odd = (base + _STREAM_MARK + self.stream) * _ODD_LANES + _RAMP
        first = self.start - self.start % 2
        lanes = [odd + (base + at) * _EVEN_LANES for at in range(first, self.stop, _CHUNK)]
        tokens = b"".join(chunk.to_bytes(4 * _CHUNK, "little") for chunk in lanes)
        return tokens[4 * (self.start - first) : 4 * (self.stop - first)]


@dataclass(frozen=True, slots=True)
class TokenSource:
    """A text as ranges of streams. Its tokens are computed on demand."""

    spans: tuple[Span, ...] = ()

    def __len__(self) -> int:
        """Return the number of tokens."""
        return sum(span.stop - span.start for span in self.spans)

    def __add__(self, other: TokenSource) -> TokenSource:
        """Return the concatenation of the two texts."""
        return TokenSource(self.spans + other.spans)

    def packed(self) -> bytes:
        """Return the tokens, four little-endian bytes each. A prompt of 100,000 tokens takes about 0.5 ms."""
        return b"".join([span.packed() for span in self.spans])


def text_of_ids(ids: Sequence[int], tokens_per_id: int, num_tokens: int, stream: int = 0) -> TokenSource:
    """Return the first `num_tokens` tokens of the contents with these hash ids. Only the last content may be
    incomplete.
    """
    missing = len(ids) * tokens_per_id - num_tokens
    assert 0 <= missing < tokens_per_id or not ids
    steps = enumerate(map(sub, islice(ids, 1, None), ids), 1)
    ends = [0, *(at for at, step in steps if step != 1), len(ids)]
    pieces = [(ids[a] * tokens_per_id, (ids[b - 1] + 1) * tokens_per_id) for a, b in pairwise(ends) if a < b]
    spans = [Span(stream, start, stop) for start, stop in pieces]
    if missing:
        spans[-1] = Span(stream, spans[-1].start, spans[-1].stop - missing)
    return TokenSource(tuple(spans))


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a workload.

    Attributes:
        name: name of the request, unique in the workload.
        arrival_s: seconds since the start of the workload, by which requests are ordered.
        session: name of its conversation; "" if the trace has none.
        prompt: 1 token or more.
        output: the tokens that the model generates. They occur in no other request, except in later prompts of the same
            session if the workload includes them.
        hint: what an engine knows of the next request of the session when this one ends, see `News.hint`; 0 = nothing.
    """

    name: str
    arrival_s: float
    session: str
    prompt: TokenSource
    output: TokenSource
    hint: int = 0

    @property
    def output_tokens(self) -> int:
        """The number of tokens to generate; may be 0."""
        return len(self.output)


def overlay(starts_s: Iterable[float], sessions: Iterator[list[TraceRequest]]) -> Iterator[TraceRequest]:
    """Yield the requests of all sessions in order of arrival; at equal times, first those of the earlier session.

    Session k is read when the time `starts_s[k]` is reached, before which the session has no request, so that only
    active sessions are in memory. The iterator ends with `sessions`. An error of `sessions` is raised after all
    requests that arrive before the start of the session that caused it.
    """
    starts, order = iter(starts_s), count()
    waiting: list[tuple[float, int, TraceRequest]] = []
    start = next(starts, None)
    while True:
        while start is not None and (not waiting or start <= waiting[0][0]):
            requests = next(sessions, None)
            start = None if requests is None else next(starts, None)
            for request in requests or ():
                heappush(waiting, (request.arrival_s, next(order), request))
        if not waiting:
            return
        yield heappop(waiting)[2]
