"""Replays of recordings of decisions: bit for bit in a pool of the recorded size, or as a what-if in another size.

In another pool other admissions are refused, and the engine that would react to these refusals is absent. So the
recorded steps are sent unchanged except for two things: requests that are refused or preempted here are retried with
every step, and references to block ids are removed. Outputs are the recorded ones, at the recorded steps.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvplane import wire
from kvplane.base.errors import InvalidArgument, KvplaneError
from kvplane.base.groups import ReplicaSpec
from kvplane.base.hashing import HashScheme
from kvplane.base.step import (
    UNCHANGED,
    Admit,
    AdmitStatus,
    Budget,
    Cache,
    CacheEvent,
    End,
    EventKind,
    Facts,
    OnRefusal,
    Part,
    Step,
    StepResult,
)
from kvplane.v1.admin_pb2 import RecordedDecision, RecordedLife
from kvplane_core.face import loader
from kvplane_service.decisions.ghost import GhostLru, MissCurve
from kvplane_service.decisions.log import Decision, Life
from kvplane_service.decisions.recording import Frames, result_digest, step_of

_FIRST_EPOCH = 1


@dataclass(slots=True)
class Outcome:
    """The outcome of replaying a recording.

    Attributes:
        replica: name of the replica.
        version: version of the service that recorded.
        num_blocks, recorded_blocks: blocks of the pool here, and when it was recorded.
        decisions: number of steps, or parts of steps.
        identical: number of decisions with exactly the recorded result.
        first_difference: the first step with another result, as "epoch/seq"; "" if there is none.
        not_applied: number of what-if steps that could not be applied.
        is_cut: whether the file ends inside a decision, which is then skipped.
        counts: the replica's counters at the end.
    """

    replica: str
    version: str
    num_blocks: int
    recorded_blocks: int
    decisions: int = 0
    identical: int = 0
    first_difference: str = ""
    not_applied: int = 0
    is_cut: bool = False
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def is_what_if(self) -> bool:
        """Whether the pool has another size than the recorded one."""
        return self.num_blocks != self.recorded_blocks


def replay_log(path: Path, num_blocks: int | None = None) -> Outcome:
    """Replay a recording in a pool of `num_blocks` blocks (None = the recorded number).

    Raises:
        NotFound, InvalidArgument: the file is missing or damaged (see `Frames`), or the pool is too small for the
            replica.
        KvplaneError: the recorded pool refuses a step that was applied when it was recorded.
    """
    return _replay(path, num_blocks).outcome


def curve_of(path: Path) -> tuple[ReplicaSpec, MissCurve | None]:
    """Replay a recording; return the spec of its replica, and what LRU pools of other sizes would have hit. Raises as
    `replay_log`.
    """
    replayed = _replay(path, None)
    return replayed.replica.spec, replayed.ghost.curve(replayed.replica)


def _replay(path: Path, num_blocks: int | None) -> _Replayed:
    file = Frames(path)
    frames = iter(file)
    first = next(frames, None)
    if first is None or first.WhichOneof("entry") != "header":
        raise InvalidArgument(
            f"{path} does not begin with the header of a recording", field="--log", remedy="record it again"
        )
    spec = wire.decode_spec(first.header.spec)
    outcome = Outcome(first.header.replica, first.header.version, num_blocks or spec.num_blocks, spec.num_blocks)
    replayed = _Replayed(replace(spec, num_blocks=outcome.num_blocks), outcome, first.header.step_version or 1)
    for frame in frames:
        if frame.WhichOneof("entry") == "decision":
            replayed.decide(frame.decision)
        else:
            replayed.begin_life(frame.life)
    outcome.counts, outcome.is_cut = replayed.counts(), file.is_cut
    return replayed


class _Replayed:
    """A replica to which the recorded steps are applied, and a ghost that follows it, except in a what-if."""

    def __init__(self, spec: ReplicaSpec, outcome: Outcome, step_version: int) -> None:
        self.replica = loader.new_replica(spec)
        self.replica.begin_epoch(_FIRST_EPOCH)
        self.ghost = GhostLru(self.replica)
        if step_version == 1:
            self.replica.store_empty_ranges()
        self._digest_size = HashScheme.of(spec).digest.size
        self.outcome = outcome
        self._step_version = step_version
        self._waiting: dict[int, None] = {}  # slots that a what-if retries, in order
        self._never_fits = 0  # number of requests
        self._too_long: set[int] = set()  # slots of these requests while they are known

    def begin_life(self, life: RecordedLife) -> None:
        if life.state:
            if self.outcome.is_what_if:
                raise InvalidArgument(
                    "the recording has an image of an engine, which fits only a pool of the recorded size",
                    field="--pool-blocks",
                    remedy="replay it with the recorded number of blocks",
                )
            self.replica = loader.load_replica(self.replica.spec, life.state)
        elif self.outcome.is_what_if:  # the recorded busy blocks are ids of another pool
            self.replica.begin_epoch(life.epoch, memory_is_new=True)
        else:
            stamps, busy = array("Q", life.stamp_table), array("I", life.busy_blocks)
            self.replica.begin_epoch(life.epoch, stamps, busy, life.memory_is_new)
        events = self.replica.take_events()
        self.ghost.add(Life(life.epoch, (), [CacheEvent(EventKind.CLEARED)] if life.state else events, 0))
        self._waiting.clear()

    def decide(self, recorded: RecordedDecision) -> None:
        step, outcome = step_of(recorded, self._digest_size, self._step_version), self.outcome
        outcome.decisions += 1
        if outcome.is_what_if:
            self._decide_what_if(step)
            return
        result = self.replica.apply(step)
        self._note_too_long(step, result)
        decision = Decision(step, result, tuple(part.events for part in result.parts), 0, recorded.took_ns)
        self.ghost.add(decision)
        if result_digest(result, decision.events) == recorded.result_digest:
            outcome.identical += 1
        elif not outcome.first_difference:
            outcome.first_difference = f"{step.epoch}/{step.seq}"

    def _decide_what_if(self, step: Step) -> None:
        for part in step.parts:
            self._waiting |= dict.fromkeys(part.resume.slot if part.resume is not None else ())
        step = replace(step, parts=[self._fitting(part) for part in step.parts])
        in_step = {slot for part in step.parts for slot in (*part.admit.slot, *_ended(part.facts))}
        retried = [slot for slot in self._waiting if slot not in in_step]
        if retried and step.last:
            budget = Budget(tokens=self.replica.spec.max_in_flight_tokens)
            step.parts.append(Part(admit=Admit(slot=retried, on_refusal=OnRefusal.STOP), budget=budget))
        try:
            result = self.replica.apply(step)
        except KvplaneError:
            self.outcome.not_applied += 1
            return
        self._note_waiting(step, result)

    def _note_waiting(self, step: Step, result: StepResult) -> None:
        self._note_too_long(step, result)
        requests = self.replica.requests
        admitting = [slot for part in step.parts for slot in part.admit.slot]
        preempted = [slot for part in result.parts for slot in part.preempted]
        for slot in dict.fromkeys([*self._waiting, *preempted, *admitting]):
            if requests.is_live(slot) and not requests.running[slot] and not requests.held[slot]:
                self._waiting[slot] = None
            else:
                self._waiting.pop(slot, None)

    def _note_too_long(self, step: Step, result: StepResult) -> None:
        for part, answer in zip(step.parts, result.parts, strict=True):
            self._too_long.difference_update(part.news.slot)
            for slot, status in zip(part.admit.slot, answer.admit_status, strict=True):
                if status == AdmitStatus.NEVER_FITS and slot not in self._too_long:
                    self._too_long.add(slot)
                    self._never_fits += 1

    def _fitting(self, part: Part) -> Part:
        """Return the part of a step without its references to blocks, and to slots with held blocks, of the recorded
        pool.
        """
        held = [slot for slot in part.cache.released if self.replica.count_held(slot)]
        cache = Cache(part.cache.failed_steps, [], held, part.cache.reset)
        return replace(part, facts=self._fitting_facts(part.facts), cache=cache, resume=None)

    def _fitting_facts(self, facts: Facts) -> Facts:
        if not (facts.computed or facts.commit):
            return facts
        return replace(
            facts,
            computed=[self._at_most(slot, count) for slot, count in zip(facts.slot, facts.computed, strict=False)],
            commit=[self._at_most(slot, count) for slot, count in zip(facts.slot, facts.commit, strict=False)],
        )

    def _at_most(self, slot: int, count: int) -> int:
        """Return the recorded count, limited to the number of tokens that the request has computed here."""
        if count == UNCHANGED or not self.replica.requests.is_live(slot):
            return UNCHANGED
        return min(count, self.replica.requests.computed[slot])

    def counts(self) -> dict[str, int]:
        """Return the counters of the replica."""
        counters = self.replica.counters
        names = ("steps", "admitted", "ended", "preempted", "refused", "queried_tokens", "hit_tokens", "granted_tokens")
        evicted = sum(group.evicted_blocks for group in self.replica.group_counters())
        values = {name: getattr(counters, name) for name in names}
        return {**values, "never_fits": self._never_fits, "evicted_keys": evicted}


def _ended(facts: Facts) -> list[int]:
    return [slot for slot, end in zip(facts.slot, facts.end, strict=False) if end in (End.FREE, End.HELD)]
