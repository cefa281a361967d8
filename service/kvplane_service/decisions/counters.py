"""Counters for the metrics that the core does not keep. They are updated with each entry of the decision log, after
the step is answered.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from kvplane.base.step import AdmitStatus, Cache, CacheEvent, End, EventKind, Facts, Part, PartResult, RemoveReason
from kvplane.base.trace import is_sampled
from kvplane.base.values import RetainOutcome
from kvplane_core.face.cache_events import CacheEvents
from kvplane_service.decisions.log import Decision, Entry
from kvplane_service.decisions.sent import SentResult

STEP_BOUNDS_NS = tuple(
    us * 1000 for us in (25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000, 1_000_000)
)

_log = logging.getLogger(__name__)


class Preemption(StrEnum):
    """The reason for which a request was preempted (lost its blocks before its end)."""

    OUT_OF_BLOCKS = "out_of_blocks"  # another running request needed its blocks
    TAKEN_BACK = "taken_back"  # a step that computed it failed, or it used cached blocks whose keys were withdrawn
    WENT_BACK = "went_back"  # rejected drafts or a failed load set it to a position before the state or window it holds
    ENGINE = "engine"  # the engine asked for the preemption


REFUSALS = {
    AdmitStatus.REFUSED: "out_of_blocks",
    AdmitStatus.NEVER_FITS: "never_fits",
    AdmitStatus.DEFERRED: "deferred",
    AdmitStatus.STALE_HIT: "stale_hit",
    AdmitStatus.NO_ROOM: "no_room",
}
REASONS = tuple(RemoveReason)  # by number
REMOVALS = {reason: reason.name.lower() for reason in RemoveReason if reason is not RemoveReason.NONE}


class Example(NamedTuple):
    """The step shown as the exemplar (OpenMetrics: an example with its trace) of a histogram bucket; `traceparent` is
    "" if the step's trace is not recorded.
    """

    epoch: int
    seq: int
    took_ns: int
    traceparent: str


class StepTimes:
    """Histogram of the time that the core takes per decision, in nanoseconds; the last bucket has no upper bound.

    Attributes:
        counts: number of decisions in each bucket, not cumulative.
        sum_ns: sum of the times.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(STEP_BOUNDS_NS) + 1)
        self.sum_ns = 0
        # By bucket, what `examples` returns; as numbers, so that the large decision is not kept in memory.
        self._latest: list[tuple[int, int, int, str] | None] = [None] * (len(STEP_BOUNDS_NS) + 1)
        self._is_traced = [False] * (len(STEP_BOUNDS_NS) + 1)

    def add(self, decision: Decision) -> None:
        """Add the time of a decision to the histogram."""
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
        """Return one example per bucket of the histogram: the latest step with a recorded trace, or, if there is none,
        the latest step; None for an empty bucket.
        """
        return [Example(*one) if one is not None else None for one in self._latest]


class Tally:
    """Counts events of one replica since its registration; the replica's decision log passes every entry to `add`.

    Attributes:
        refusals: admission attempts that were not granted, by AdmitStatus. Rows with NOT_REACHED, which the service did
            not evaluate because the step's admissions had ended before them, are not counted.
        removals: cache keys (hashes of block contents) removed from their block, by RemoveReason. Keys removed by a
            reset of the cache are not counted.
        preemptions: preempted requests, by reason.
        retentions: prefixes that were to be retained or released, by RetainOutcome.
        hits_checked, mismatches: hits that a canary has compared, and blocks in which it found other content than
            their keys name.
        lives: number of engine lives (times of one epoch, in which one engine owns the page memory) begun.
        step_times: time of the core per decision.
    """

    def __init__(self, name: str = "") -> None:
        """`name`: of the replica, for the log."""
        self._name = name
        self.hits_checked = self.mismatches = 0
        self.refusals: dict[AdmitStatus, int] = dict.fromkeys(REFUSALS, 0)
        self.removals: dict[RemoveReason, int] = dict.fromkeys(REMOVALS, 0)
        self.preemptions = dict.fromkeys(Preemption, 0)
        self.retentions = dict.fromkeys(RetainOutcome, 0)
        self.lives = 0
        self.step_times = StepTimes()

    def add(self, entry: Entry) -> None:
        """Count the events of one entry of the decision log."""
        if not isinstance(entry, Decision):
            self.lives += 1
            self._count_removals(entry.events)
            return
        self.step_times.add(entry)
        for events in entry.events:
            if events:
                self._count_removals(events)
        if isinstance(entry.result, SentResult) and not entry.result.is_counted:
            return
        for part, result, events in zip(entry.step.parts, entry.result.parts, entry.events, strict=True):
            given = vars(result)  # what is missing is empty
            if given.get("admit_status"):
                self._count_refusals(result)
            cache: Cache | None = vars(part).get("cache")
            if cache is not None and (cache.hits_checked or cache.mismatched):
                self._count_canary(cache, entry, events)
            if "retained" in given:
                for outcome in result.retained.outcome:
                    self.retentions[RetainOutcome(outcome)] += 1
            facts: Facts | None = vars(part).get("facts")  # None also where they are packed: no request ends
            if given.get("preempted") or (facts is not None and facts.end):
                self._count_preemptions(part, result)

    def _count_canary(self, cache: Cache, decision: Decision, events: Sequence[CacheEvent]) -> None:
        """Count what a canary compared, and write a line for each block that it found to be wrong."""
        wrong = dict[int, list[str]]((block, []) for block in cache.mismatched)
        self.hits_checked += cache.hits_checked
        self.mismatches += len(wrong)
        for event in events if wrong else ():
            if event.kind is EventKind.REMOVED and event.reason is RemoveReason.DROPPED:
                for digest, block in zip(event.hashes, event.blocks, strict=True):
                    if block in wrong:
                        wrong[block].append(f"group {event.group}, key {digest.hex()}")
        for block, keys in wrong.items():
            named = self._name, block, "; ".join(keys) or "without a key", decision.step.seq, decision.step.epoch
            found = "canary: replica %s, block %d (%s) is not what its key names; evicted in step %d of life %d"
            _log.error(found + "; see kvplane explain %s --block %d", *named, self._name, block)

    def _count_refusals(self, result: PartResult) -> None:
        for status in REFUSALS:
            self.refusals[status] += result.admit_status.count(int(status))

    def _count_removals(self, events: Sequence[CacheEvent]) -> None:
        counts = events.removals() if isinstance(events, CacheEvents) else CacheEvents(events).removals()
        for reason, count in enumerate(counts):
            if count:
                self.removals[REASONS[reason]] += count

    def _count_preemptions(self, part: Part, result: PartResult) -> None:
        self.preemptions[Preemption.TAKEN_BACK] += result.taken_back - result.went_back
        self.preemptions[Preemption.WENT_BACK] += result.went_back
        self.preemptions[Preemption.OUT_OF_BLOCKS] += len(result.preempted) - result.taken_back
        self.preemptions[Preemption.ENGINE] += part.facts.end.count(int(End.PREEMPTED))
