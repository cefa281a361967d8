"""Reader of Weka's Claude Code traces (callanjfox/kv-cache-tester).

A line is a session: `requests` with `t` in seconds, `in` and `out` tokens, and `hash_ids`, one per *full*
block of `block_size` prompt tokens. Ids mean something inside their session only, so each session reads its
own stream. What
the last, partial block holds is not told: those tokens are the request's own, and hit nothing.

A sub-agent is an entry with `requests` of its own, which share the ids of the session. Their times count from
the entry when the first of them is smaller than the entry's own, otherwise from the start of the session.

Sessions have no common clock: they are laid over one another at equal distances.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from kvplane_replay.workloads.fields import Record, parse
from kvplane_replay.workloads.lines import Line
from kvplane_replay.workloads.requests import TraceRequest, overlay
from kvplane_replay.workloads.tokens import POSITIONS, Span, TokenSource, text_of_ids

DEFAULT_SPACING_S = 60.0


def read_weka(lines: Iterable[Line], spacing_s: float = DEFAULT_SPACING_S) -> Iterator[TraceRequest]:
    """The requests of all sessions in order of arrival; session k, in file order from 0, starts at `k *
    spacing_s`.

    Raises:
        MalformedTrace: when time comes to the start of the first session that is malformed.
    """
    sessions = (_Session(k, k * spacing_s).read(parse(line)) for k, line in enumerate(lines))
    return overlay((k * spacing_s for k in count()), sessions)


@dataclass(slots=True)
class _Session:
    """A session being read; `own_tokens` is the length, so far, of the text that no one else has."""

    number: int
    start_s: float
    own_tokens: int = 0

    def read(self, record: Record) -> list[TraceRequest]:
        name = record.text("id")
        if "hash_id_scope" in record and record.text("hash_id_scope") != "local":
            raise record.malformed("hash_id_scope: only local ids can be replayed")
        block_size = record.count("block_size", least=1)
        requests = []
        for at, (time, entry) in enumerate(_flattened(record)):
            requests.append(self._request(f"{name}/{at}", name, time, entry, block_size))
        return sorted(requests, key=lambda request: request.arrival_s)

    def _request(self, name: str, session: str, time: float, entry: Record, block_size: int) -> TraceRequest:
        num_tokens = entry.count("in", least=1)
        ids = entry.ids("hash_ids", block_size)
        full, partial = divmod(num_tokens, block_size)
        if len(ids) != full:
            raise entry.malformed(
                f"hash_ids: {len(ids)} ids, but {num_tokens} tokens in have {full} full blocks"
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


def _flattened(session: Record) -> Iterator[tuple[float, Record]]:
    """Requests with seconds since the session's start; those of a sub-agent in the place of its entry."""
    for entry in session.records("requests"):
        time = entry.time("t")
        if "requests" not in entry:
            yield time, entry
            continue
        nested = entry.records("requests")
        offset = time if nested and nested[0].time("t") < time else 0.0
        yield from ((offset + request.time("t"), request) for request in nested)
