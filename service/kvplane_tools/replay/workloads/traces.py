"""Readers of public serving traces, in the formats Mooncake and Weka. They yield requests in order of arrival.

Mooncake: a line is a request with `timestamp` in ms, `input_length`, `output_length`, and `hash_ids`, one per 512
prompt tokens; the last id may represent fewer. An id represents the prefix that ends there and is the same in the whole
file.

Weka (Claude Code traces, callanjfox/kv-cache-tester): a line is a session, `requests` with `t` in seconds, `in` and
`out` tokens, and `hash_ids`, one per *full* block of `block_size` prompt tokens. Ids are local to the session, so each
session has its own stream. The trace does not identify the last, incomplete block: its tokens are unique to the request
and are never a cache hit. A sub-agent is an entry with its own `requests`, which use the ids of the session; their
times count from the entry if the first of these times is smaller than the entry's own time, otherwise from the start of
the session. Sessions have no common clock: they start at equal distances. `stop` is optional; it is a request's hint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from itertools import chain, count
from pathlib import Path
from types import TracebackType

from kvplane.base.errors import InvalidArgument
from kvplane_tools.replay.workloads.fields import (
    MooncakeRequest,
    WekaAgent,
    WekaRequest,
    WekaSession,
    parse,
    read,
)
from kvplane_tools.replay.workloads.lines import Line, TraceLines, malformed
from kvplane_tools.replay.workloads.requests import POSITIONS, Span, TokenSource, TraceRequest, overlay, text_of_ids

MOONCAKE_TOKENS_PER_ID = 512
DEFAULT_SPACING_S = 60.0
WEKA_HINTS = 7  # the stop reason: 1 tool use, 2 end of the turn, 3 any other; 3 more in a sub-agent


class TraceKind(Enum):
    """The format of a trace file."""

    MOONCAKE = "mooncake"
    WEKA = "weka"


class TraceFile:
    """A trace file, which can be iterated over once.

    Attributes:
        kind: format, detected from the first line.
        size_bytes: size of the file, as stored.
    """

    def __init__(self, path: Path, session_spacing_s: float = DEFAULT_SPACING_S) -> None:
        """Open the file and read its first line. `session_spacing_s` is the time between sessions without a common
        clock.

        Raises:
            MalformedTrace: the first line is damaged, or in no known format.
            NotFound, InvalidArgument, FailedPrecondition: the file cannot be opened; see `TraceLines`.
        """
        if not session_spacing_s >= 0:
            raise InvalidArgument(f"it is {session_spacing_s} s, but must be 0 or more", field="session_spacing_s")
        with ExitStack() as if_refused:
            self._lines = TraceLines(path)
            if_refused.callback(self._lines.close)
            first = next(self._lines, None)
            if first is None:
                raise malformed(str(path), 1, "the file is empty")
            self.kind = _kind_of(first)
            if_refused.pop_all()
        self.size_bytes = self._lines.size_bytes
        lines = chain([first], self._lines)
        self._requests = (
            read_mooncake(lines) if self.kind is TraceKind.MOONCAKE else read_weka(lines, session_spacing_s)
        )

    @property
    def bytes_read(self) -> int:
        """The number of bytes of the stored file that were read so far."""
        return self._lines.bytes_read

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yield the requests in order of arrival. Raises MalformedTrace at a malformed line; requests before it are
        valid.
        """
        return self._requests

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def _kind_of(first: Line) -> TraceKind:
    record = parse(first)
    if "requests" in record:
        return TraceKind.WEKA
    if "hash_ids" in record:
        return TraceKind.MOONCAKE
    raise first.malformed("it is neither a Mooncake request (with hash_ids) nor a Weka session (with requests)")


def read_mooncake(lines: Iterable[Line]) -> Iterator[TraceRequest]:
    """Yield the requests in the order of the file, which is the order of arrival.

    Raises:
        MalformedTrace: a line is not a request, or is earlier than the line before.
    """
    latest_s = 0.0
    for line in lines:
        request = _mooncake_request(line)
        if request.arrival_s < latest_s:
            raise line.malformed(
                f"timestamp: {request.arrival_s} s is before that of the previous request, {latest_s} s"
            )
        latest_s = request.arrival_s
        yield request


def _mooncake_request(line: Line) -> TraceRequest:
    record = read(MooncakeRequest, line)
    num_tokens, ids = record.input_length, record.hash_ids
    needed = -(-num_tokens // MOONCAKE_TOKENS_PER_ID)
    if len(ids) != needed:
        raise line.malformed(f"hash_ids: there are {len(ids)} ids, but input_length {num_tokens} needs {needed}")
    _check_ids(line, ids, MOONCAKE_TOKENS_PER_ID)
    return TraceRequest(
        name=f"line-{line.number}",
        arrival_s=record.timestamp / 1000,
        session="",
        prompt=text_of_ids(ids, MOONCAKE_TOKENS_PER_ID, num_tokens),
        output=TokenSource((Span(line.number, 0, record.output_length, generated=True),)),
    )


def _check_ids(line: Line, ids: Sequence[int], tokens_per_id: int) -> None:
    """Raise MalformedTrace for an id whose text does not fit into a stream."""
    limit = POSITIONS // tokens_per_id
    if ids and max(ids) >= limit:
        raise line.malformed(f"hash_ids: {max(ids)} is above {limit - 1}")


def read_weka(lines: Iterable[Line], spacing_s: float = DEFAULT_SPACING_S) -> Iterator[TraceRequest]:
    """Yield the requests of all sessions in order of arrival. Session k of the file, from 0, starts at `k * spacing_s`.

    Raises:
        MalformedTrace: a session is malformed; raised when its start is reached.
    """
    sessions = (_Session(line, k, k * spacing_s).read() for k, line in enumerate(lines))
    return overlay((k * spacing_s for k in count()), sessions)


@dataclass(slots=True)
class _Session:
    """The reader of one session. `own_tokens` is the number of tokens so far that occur only in this session."""

    line: Line
    number: int
    start_s: float
    own_tokens: int = 0

    def read(self) -> list[TraceRequest]:
        session = read(WekaSession, self.line)
        requests = [
            self._request(f"{session.id}/{at}", session, *one) for at, one in enumerate(_flattened(session.requests))
        ]
        return sorted(requests, key=lambda request: request.arrival_s)

    def _request(
        self, name: str, session: WekaSession, time: float, entry: WekaRequest, is_nested: bool
    ) -> TraceRequest:
        num_tokens, ids, block_size = entry.num_tokens, entry.hash_ids, session.block_size
        full, partial = divmod(num_tokens, block_size)
        if len(ids) != full:
            raise self.line.malformed(
                f"hash_ids: there are {len(ids)} ids, but {num_tokens} prompt tokens have {full} full blocks"
            )
        _check_ids(self.line, ids, block_size)
        known = text_of_ids(ids, block_size, full * block_size, self.number)
        return TraceRequest(
            name=name,
            arrival_s=self.start_s + time,
            session=session.id,
            prompt=known + self._own(partial),
            output=self._own(entry.out),
            hint=_hint(entry) + 3 * is_nested,
        )

    def _own(self, num_tokens: int) -> TokenSource:
        start, self.own_tokens = self.own_tokens, self.own_tokens + num_tokens
        if self.own_tokens > POSITIONS:
            raise self.line.malformed(f"out: the session generates more than {POSITIONS} tokens")
        return TokenSource((Span(self.number, start, self.own_tokens, generated=True),) if num_tokens else ())


def _hint(entry: WekaRequest) -> int:
    return {"tool_use": 1, "end_turn": 2}.get(entry.stop, 3) if isinstance(entry.stop, str) else 3


def _flattened(entries: Iterable[WekaRequest | WekaAgent]) -> Iterator[tuple[float, WekaRequest, bool]]:
    """Yield requests with seconds since the session's start, and whether they are those of a sub-agent. An entry that
    is a sub-agent is replaced by the sub-agent's requests.
    """
    for entry in entries:
        if isinstance(entry, WekaRequest):
            yield entry.t, entry, False
            continue
        nested = entry.requests
        offset = entry.t if nested and nested[0].t < entry.t else 0.0
        yield from ((offset + request.t, request, True) for request in nested)
