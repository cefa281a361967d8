"""What every workload yields: requests in order of arrival, and the merging of sessions that makes that
order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from kvplane_replay.workloads.tokens import TokenSource


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a workload.

    Attributes:
        name: unique in the workload.
        arrival_s: since the workload's start; requests come in this order.
        session: name of the conversation that it belongs to, "" when the trace has no such notion.
        prompt: 1 token or more.
        output: what the model is going to generate; generated text occurs nowhere else, but in later prompts
            of its own session where the workload says so.
    """

    name: str
    arrival_s: float
    session: str
    prompt: TokenSource
    output: TokenSource

    @property
    def output_tokens(self) -> int:
        """Tokens to be generated; may be 0."""
        return len(self.output)


def overlay(starts_s: Iterable[float], sessions: Iterator[list[TraceRequest]]) -> Iterator[TraceRequest]:
    """The requests of all sessions in order of arrival; at equal times, the session that started first goes
    first.

    Session k is asked for only when time has come to `starts_s[k]`, before which it has no request, so that
    memory holds the sessions that have started and not ended. Ends when `sessions` does. What `sessions`
    raises comes through after every request that arrives before the start of the session at fault.
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
