"""Counters of the metrics that the core does not keep: a fold over the decision log, cheap enough for the
step's path.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from kvplane.base.step import AdmitStatus, CacheEvent, End, EventKind, Part, PartResult, RemoveReason
from kvplane.base.trace import is_sampled
from kvplane_service.core.cache_events import runs_of
from kvplane_service.decisions.log import Decision, Entry

STEP_BOUNDS_NS = tuple(
    us * 1000 for us in (25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000, 1_000_000)
)


class Preemption(StrEnum):
    """Why a request was preempted."""

    OUT_OF_BLOCKS = "out_of_blocks"  # a running request needed them
    TAKEN_BACK = "taken_back"  # its step failed, or it had adopted keys that were withdrawn
    WENT_BACK = "went_back"  # rejected drafts, or a failed load, reset it to before the states or windows it holds
    ENGINE = "engine"  # the engine requested it


REFUSALS = {
    AdmitStatus.REFUSED: "out_of_blocks",
    AdmitStatus.NEVER_FITS: "never_fits",
    AdmitStatus.DEFERRED: "deferred",
    AdmitStatus.STALE_HIT: "stale_hit",
    AdmitStatus.NO_ROOM: "no_room",
}
REMOVALS = {reason: reason.name.lower() for reason in RemoveReason if reason is not RemoveReason.NONE}


class Example(NamedTuple):
    """The exemplar of a histogram bucket; `traceparent` is "" when its trace is not recorded."""

    epoch: int
    seq: int
    took_ns: int
    traceparent: str


class StepTimes:
    """Histogram of the core's time per decision; the last bucket is unbounded.

    Attributes:
        counts: by bucket, not cumulative.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(STEP_BOUNDS_NS) + 1)
        self.sum_ns = 0
        # By bucket, the latest step of a recorded trace, otherwise the latest; as numbers, because a decision is large.
        self._latest: list[tuple[int, int, int, str] | None] = [None] * (len(STEP_BOUNDS_NS) + 1)
        self._is_traced = [False] * (len(STEP_BOUNDS_NS) + 1)

    def add(self, decision: Decision) -> None:
        """Count a decision."""
        step, took_ns = decision.step, decision.took_ns
        traceparent = step.traceparent
        bucket = bisect_left(STEP_BOUNDS_NS, took_ns)
        self.counts[bucket] += 1
        self.sum_ns += took_ns
        if traceparent and is_sampled(traceparent):
            self._is_traced[bucket] = True
            self._latest[bucket] = step.epoch, step.seq, took_ns, traceparent
        elif not self._is_traced[bucket]:
            self._latest[bucket] = step.epoch, step.seq, took_ns, ""

    def examples(self) -> list[Example | None]:
        """By bucket, the latest step with a recorded trace, otherwise the latest; None for an empty bucket."""
        return [Example(*one) if one is not None else None for one in self._latest]


class Tally:
    """Counts of one replica since it was registered; follows its decision log.

    Attributes:
        refusals: admissions not granted, by AdmitStatus, without NOT_REACHED.
        removals: keys removed from blocks, by RemoveReason; not counted for a reset.
        preemptions: preempted requests, by reason.
        lives: engine lives begun.
    """

    def __init__(self) -> None:
        self.refusals: dict[AdmitStatus, int] = dict.fromkeys(REFUSALS, 0)
        self.removals: dict[RemoveReason, int] = dict.fromkeys(REMOVALS, 0)
        self.preemptions = dict.fromkeys(Preemption, 0)
        self.lives = 0
        self.step_times = StepTimes()

    def add(self, entry: Entry) -> None:
        """Fold one entry of the log."""
        if not isinstance(entry, Decision):
            self.lives += 1
            self._count_removals(entry.events)
            return
        self.step_times.add(entry)
        for part, result, events in zip(entry.step.parts, entry.result.parts, entry.events, strict=True):
            if result.admit_status:
                self._count_refusals(result)
            if events:
                self._count_removals(events)
            if result.preempted or part.facts.end:
                self._count_preemptions(part, result)

    def _count_refusals(self, result: PartResult) -> None:
        for status in REFUSALS:
            self.refusals[status] += result.admit_status.count(int(status))

    def _count_removals(self, events: Sequence[CacheEvent]) -> None:
        for run in runs_of(events):
            if run.kind is EventKind.REMOVED:
                self.removals[run.reason] += len(run.hashes)

    def _count_preemptions(self, part: Part, result: PartResult) -> None:
        self.preemptions[Preemption.TAKEN_BACK] += result.taken_back - result.went_back
        self.preemptions[Preemption.WENT_BACK] += result.went_back
        self.preemptions[Preemption.OUT_OF_BLOCKS] += len(result.preempted) - result.taken_back
        self.preemptions[Preemption.ENGINE] += part.facts.end.count(int(End.PREEMPTED))
