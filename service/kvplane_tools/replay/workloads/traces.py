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

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain, count
from pathlib import Path
from types import TracebackType

from kvplane.base.errors import InvalidArgument
from kvplane_tools.replay.workloads.fields import Record, parse
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
        record = parse(line)
        request = _mooncake_request(record, line.number)
        if request.arrival_s < latest_s:
            raise record.malformed(
                f"timestamp: {request.arrival_s} s is before that of the previous request, {latest_s} s"
            )
        latest_s = request.arrival_s
        yield request


def _mooncake_request(record: Record, number: int) -> TraceRequest:
    num_tokens = record.count("input_length", least=1)
    ids = record.ids("hash_ids", MOONCAKE_TOKENS_PER_ID)
    needed = -(-num_tokens // MOONCAKE_TOKENS_PER_ID)
    if len(ids) != needed:
        raise record.malformed(f"hash_ids: there are {len(ids)} ids, but input_length {num_tokens} needs {needed}")
    output = Span(number, 0, record.count("output_length"), generated=True)
    return TraceRequest(
        name=f"line-{number}",
        arrival_s=record.time("timestamp") / 1000,
        session="",
        prompt=text_of_ids(ids, MOONCAKE_TOKENS_PER_ID, num_tokens),
        output=TokenSource((output,)),
    )


def read_weka(lines: Iterable[Line], spacing_s: float = DEFAULT_SPACING_S) -> Iterator[TraceRequest]:
    """Yield the requests of all sessions in order of arrival. Session k of the file, from 0, starts at `k * spacing_s`.

    Raises:
        MalformedTrace: a session is malformed; raised when its start is reached.
    """
    sessions = (_Session(k, k * spacing_s).read(parse(line)) for k, line in enumerate(lines))
    return overlay((k * spacing_s for k in count()), sessions)


@dataclass(slots=True)
class _Session:
    """The reader of one session. `own_tokens` is the number of tokens so far that occur only in this session."""

    number: int
    start_s: float
    own_tokens: int = 0

    def read(self, record: Record) -> list[TraceRequest]:
        name = record.text("id")
        if "hash_id_scope" in record and record.text("hash_id_scope") != "local":
            scope = record.text("hash_id_scope")
            raise record.malformed(f"hash_id_scope: it is {scope!r}, but only ids of scope 'local' can be replayed")
        block_size = record.count("block_size", least=1)
        requests = []
        for at, (time, entry, is_nested) in enumerate(_flattened(record)):
            request = self._request(f"{name}/{at}", name, time, entry, block_size)
            requests.append(replace(request, hint=_hint(entry) + 3 * is_nested))
        return sorted(requests, key=lambda request: request.arrival_s)

    def _request(self, name: str, session: str, time: float, entry: Record, block_size: int) -> TraceRequest:
        num_tokens = entry.count("in", least=1)
        ids = entry.ids("hash_ids", block_size)
        full, partial = divmod(num_tokens, block_size)
        if len(ids) != full:
            raise entry.malformed(
                f"hash_ids: there are {len(ids)} ids, but {num_tokens} prompt tokens have {full} full blocks"
            )
        known = text_of_ids(ids, block_size, full * block_size, self.number)
        return TraceRequest(
            name=name,
            arrival_s=self.start_s + time,
            session=session,
            prompt=known + self._own(entry, partial),
            output=self._own(entry, entry.count("out")),
        )

    def _own(self, entry: Record, num_tokens: int) -> TokenSource:
        start, self.own_tokens = self.own_tokens, self.own_tokens + num_tokens
        if self.own_tokens > POSITIONS:
            raise entry.malformed(f"out: the session generates more than {POSITIONS} tokens")
        return TokenSource((Span(self.number, start, self.own_tokens, generated=True),) if num_tokens else ())


def _hint(entry: Record) -> int:
    return {"tool_use": 1, "end_turn": 2}.get(entry.optional("stop"), 3)


def _flattened(session: Record) -> Iterator[tuple[float, Record, bool]]:
    """Yield requests with seconds since the session's start, and whether they are those of a sub-agent. An entry that
    is a sub-agent is replaced by the sub-agent's requests.
    """
    for entry in session.records("requests"):
        time = entry.time("t")
        if "requests" not in entry:
            yield time, entry, False
            continue
        nested = entry.records("requests")
        offset = time if nested and nested[0].time("t") < time else 0.0
        yield from ((offset + request.time("t"), request, True) for request in nested)
