"""The requests of a recording, as a workload for pools of other sizes.

A recording has what each request asked: its blocks by hash, its outputs, and the step that announced it. What another
pool would hit follows from these alone: the engine of `replay` runs them again, and the core decides.

A request arrives before the step that was the next one when it arrived (`News.waited`), on the clock of the cost model:
recorded steps take the time that it computes for them. How long an engine without work waited is not recorded: here
the mean time between two arrivals while it had work. An engine life begins when the requests of the one before it end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvplane.base.step import UNLIMITED, End, News, Part, Step, StepResult
from kvplane.session.rows import FactRow, NewsRow
from kvplane.v1.admin_pb2 import RecordedLife
from kvplane_core.face.interface import ReplicaCore
from kvplane_tools.replay.from_log import counters_of
from kvplane_tools.replay.plan import NS_PER_SECOND, CostModel, EngineConfig
from kvplane_tools.replay.requests import ReplayedRequest

_ENDS = (End.FREE, End.HELD)


@dataclass(slots=True)
class RecordedRequest:
    """One request of a recording.

    Attributes:
        arrival_s: by which requests are ordered; in `Recorded` without the time in which the engine had no work.
        idle_times: how often the engine had had no work.
        num_prompt: known tokens when it was announced.
        hashes: block hashes, each with the number of tokens at which it was reported.
        num_outputs: number of its outputs.
        life: number of its engine life.
        is_counted: whether its admission counted as a look-up; see `News.skip_reading`.
    """

    name: str
    arrival_s: float
    idle_times: int
    num_prompt: int
    hashes: list[tuple[int, bytes]]
    life: int
    domain: str = ""
    is_counted: bool = True
    hint: int = 0
    num_outputs: int = 0

    @property
    def num_tokens(self) -> int:
        """Known tokens at its end."""
        return self.num_prompt + self.num_outputs

    def live(self, hint_values: int) -> ReplayedRequest:
        """Return the request to run, in a pool that knows this many hints."""
        return _Live(self, hint_values)


class _Live(ReplayedRequest):
    """A recorded request that runs."""

    __slots__ = ("_at", "_recorded")

    def __init__(self, recorded: RecordedRequest, hint_values: int) -> None:
        super().__init__(recorded.name, recorded.arrival_s, "", recorded.num_prompt, recorded.num_outputs)
        self._recorded, self._at = recorded, 0
        self.hint = recorded.hint if recorded.hint < hint_values else 0

    def news_row(self) -> NewsRow:
        one = self._recorded
        return NewsRow(
            self.slot,
            num_tokens=one.num_prompt,
            hashes=self._due(),
            request_id=one.name,
            domain=one.domain,
            skip_reading=not one.is_counted,
            max_tokens=one.num_tokens,
            hint=self.hint,
        )

    def content(self, num_appended: int) -> FactRow:
        return FactRow(self.slot, num_tokens=num_appended, hashes=self._due())

    def _due(self) -> list[bytes]:
        """Return the hashes that are complete and were not sent."""
        first, hashes = self._at, self._recorded.hashes
        while self._at < len(hashes) and hashes[self._at][0] <= self.num_tokens:
            self._at += 1
        return [digest for _, digest in hashes[first : self._at]]


class Recorded:
    """Follows the replay of a recording; `requests` are those of it in order of arrival.

    Attributes:
        counts_before: what the replica had counted when each request was announced.
        keeps_keys: by number of engine life, whether it began with the keys of the one before it.
    """

    def __init__(self, cost: CostModel) -> None:
        self._requests: list[RecordedRequest] = []
        self.counts_before: list[dict[str, int]] = []
        self.keeps_keys = [True]
        self.cost = cost
        self._replica: ReplicaCore | None = None
        self._live: dict[int, RecordedRequest] = {}
        self._clock_s = 0.0  # without the time in which the engine had no work
        self._began: list[tuple[float, int]] = []  # of each step: the time, and how often the engine had had no work
        self._idle_times = self._busy_arrivals = 0
        self._most_rows = self._most_running = self._most_tokens = 0

    @property
    def requests(self) -> list[RecordedRequest]:
        """The requests, in order of arrival."""
        idle_s = self._clock_s / max(1, self._busy_arrivals)
        return [replace(one, arrival_s=one.arrival_s + idle_s * one.idle_times) for one in self._requests]

    @property
    def config(self) -> EngineConfig:
        """The limits of the engine that was recorded, as far as its steps show."""
        limits = EngineConfig()
        return EngineConfig(
            self._most_running or limits.max_running,
            self._most_tokens or limits.token_budget,
            max(self._most_rows, limits.admit_rows),
        )

    def begin_life(self, replica: ReplicaCore, life: RecordedLife) -> None:
        """Begin with the requests that the replica has."""
        if not life.state:
            self.keeps_keys.append(bool(life.stamp_table) and not life.memory_is_new)
        requests = replica.requests
        self._replica, before = replica, self._live
        self._live = {}
        for slot in requests.slots():
            if slot in before and before[slot].name == requests.request_id[slot]:
                self._live[slot] = before[slot]  # an image inside the recording
                continue
            known = requests.num_tokens[slot]
            hashes = [(known, digest) for digest in requests.hashes(slot)]
            one = RecordedRequest(
                requests.request_id[slot], self._clock_s, self._idle_times, known, hashes, len(self.keeps_keys) - 1
            )
            self._add(slot, one)

    def counts(self) -> dict[str, int]:
        """Return what the replica has counted."""
        return counters_of(self._replica) if self._replica is not None else {}

    def _add(self, slot: int, one: RecordedRequest) -> None:
        self._live[slot] = one
        self._requests.append(one)
        self.counts_before.append(self.counts())

    def follow(self, step: Step, result: StepResult) -> None:
        """Read a step and its result."""
        if not step.part:
            self._began.append((self._clock_s, self._idle_times))
        for part, answer in zip(step.parts, result.parts, strict=True):
            self._facts(part)
            if part.news.slot:
                self._news(part.news)
            self._note_limits(part)
            decoding = answer.granted.count(1)
            computed = sum(answer.granted) + sum(answer.admit_granted) - decoding
            self._clock_s += self.cost.step_ns(computed, decoding) / NS_PER_SECOND

    def _note_limits(self, part: Part) -> None:
        self._most_rows = max(self._most_rows, len(part.admit.slot))
        if part.admit.max_running != UNLIMITED:
            self._most_running = max(self._most_running, part.admit.max_running)
        if part.budget.tokens != UNLIMITED:
            self._most_tokens = max(self._most_tokens, part.budget.tokens)

    def _digest_size(self) -> int:
        assert self._replica is not None, "a recording begins with a life"
        return self._replica.digest_size

    def _news(self, news: News) -> None:
        size, first = self._digest_size(), 0
        if not self._live:
            self._idle_times += 1
            self._began[-1] = self._clock_s, self._idle_times
        self._busy_arrivals += len(news.slot) - (not self._live)
        last = len(self._began) - 1
        for row, slot in enumerate(news.slot):
            num_tokens, count = news.num_tokens[row], news.num_hashes[row] if news.num_hashes else 0
            digests = [news.hashes[at : at + size] for at in range(first, first + count * size, size)]
            first += count * size
            one = RecordedRequest(
                news.request_id[row] if news.request_id else "",
                *self._began[max(0, last - (news.waited[row] if news.waited else 0))],
                num_tokens,
                [(num_tokens, digest) for digest in digests],
                len(self.keeps_keys) - 1,
                news.domain[row] if news.domain else "",
                not (news.skip_reading and news.skip_reading[row]),
                news.hint[row] if news.hint else 0,
            )
            self._add(slot, one)

    def _facts(self, part: Part) -> None:
        facts, size, first = part.facts, self._digest_size(), 0
        for row, slot in enumerate(facts.slot):
            one = self._live.get(slot)
            count = facts.num_hashes[row] if facts.num_hashes else 0
            if one is not None:
                one.num_outputs += facts.appended[row] if facts.appended else 0
                starts = range(first, first + count * size, size)
                one.hashes += [(one.num_tokens, facts.hashes[at : at + size]) for at in starts]
                if facts.end and facts.end[row] in _ENDS:
                    del self._live[slot]
            first += count * size
