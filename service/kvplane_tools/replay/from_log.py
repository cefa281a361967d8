"""Replays of recordings of decisions, bit for bit in a pool of the recorded size."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kvplane import wire
from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import ReplicaSpec
from kvplane.base.hashing import HashScheme
from kvplane.base.step import AdmitStatus, Step, StepResult
from kvplane.v1.admin_pb2 import RecordedDecision, RecordedLife
from kvplane_core.face import loader
from kvplane_core.face.interface import ReplicaCore
from kvplane_service.decisions.recording import Frames, result_digest, step_of

_FIRST_EPOCH = 1


class Follower(Protocol):
    """What follows the replay of a recording."""

    def begin_life(self, replica: ReplicaCore, life: RecordedLife) -> None:
        """An engine life begins; the replica has begun it."""

    def follow(self, step: Step, result: StepResult) -> None:
        """A step was applied."""


@dataclass(slots=True)
class Outcome:
    """The outcome of replaying a recording.

    Attributes:
        replica: name of the replica.
        version: version of the service that recorded.
        spec: of the replica.
        from_now: whether the recording begins with the state of a replica that was in use.
        decisions: number of steps, or parts of steps.
        identical: number of decisions with exactly the recorded result.
        first_difference: the first step with another result, as "epoch/seq"; "" if there is none.
        is_cut: whether the file ends inside a decision, which is then skipped.
        counts: what the replica counted in the recording.
    """

    replica: str
    version: str
    spec: ReplicaSpec
    from_now: bool = False
    decisions: int = 0
    identical: int = 0
    first_difference: str = ""
    is_cut: bool = False
    counts: dict[str, int] = field(default_factory=dict)


def replay_log(path: Path, follower: Follower | None = None) -> Outcome:
    """Replay a recording, which `follower` follows.

    Raises:
        NotFound, InvalidArgument: the file is missing or damaged (see `Frames`).
        KvplaneError: the replica refuses a step that was applied when it was recorded.
    """
    file = Frames(path)
    frames = iter(file)
    first = next(frames, None)
    if first is None or first.WhichOneof("entry") != "header":
        raise InvalidArgument(
            f"{path} does not begin with the header of a recording", field="--log", remedy="record it again"
        )
    outcome = Outcome(first.header.replica, first.header.version, wire.decode_spec(first.header.spec))
    replayed = _Replayed(outcome, first.header.step_version or 1)
    for frame in frames:
        if frame.WhichOneof("entry") == "decision":
            step, result = replayed.decide(frame.decision)
            if follower is not None:
                follower.follow(step, result)
        else:
            replayed.begin_life(frame.life)
            if follower is not None:
                follower.begin_life(replayed.replica, frame.life)
    outcome.counts, outcome.is_cut = replayed.counts(), file.is_cut
    return outcome


class _Replayed:
    """A replica to which the recorded steps are applied."""

    def __init__(self, outcome: Outcome, step_version: int) -> None:
        self.replica = loader.new_replica(outcome.spec)
        self.replica.begin_epoch(_FIRST_EPOCH)
        if step_version == 1:
            self.replica.store_empty_ranges()
        self._digest_size = HashScheme.of(outcome.spec).digest.size
        self._outcome = outcome
        self._step_version = step_version
        self._never_fits = 0  # number of requests
        self._too_long: set[int] = set()  # slots of these requests while they are known
        self._before: dict[str, int] = {}  # counters of the state that the recording begins with

    def begin_life(self, life: RecordedLife) -> None:
        if life.state:
            self.replica = loader.load_replica(self.replica.spec, life.state)
            if not self._outcome.decisions:
                self._outcome.from_now, self._before = True, self._counters()
        else:
            stamps, busy = array("Q", life.stamp_table), array("I", life.busy_blocks)
            self.replica.begin_epoch(life.epoch, stamps, busy, life.memory_is_new)
        self.replica.take_events()

    def decide(self, recorded: RecordedDecision) -> tuple[Step, StepResult]:
        step, outcome = step_of(recorded, self._digest_size, self._step_version), self._outcome
        outcome.decisions += 1
        result = self.replica.apply(step)
        self._note_too_long(step, result)
        if result_digest(result, tuple(part.events for part in result.parts)) == recorded.result_digest:
            outcome.identical += 1
        elif not outcome.first_difference:
            outcome.first_difference = f"{step.epoch}/{step.seq}"
        return step, result

    def _note_too_long(self, step: Step, result: StepResult) -> None:
        for part, answer in zip(step.parts, result.parts, strict=True):
            self._too_long.difference_update(part.news.slot)
            for slot, status in zip(part.admit.slot, answer.admit_status, strict=True):
                if status == AdmitStatus.NEVER_FITS and slot not in self._too_long:
                    self._too_long.add(slot)
                    self._never_fits += 1

    def counts(self) -> dict[str, int]:
        """Return what the replica counted since the recording began."""
        return {name: count - self._before.get(name, 0) for name, count in self._counters().items()}

    def _counters(self) -> dict[str, int]:
        return {**counters_of(self.replica), "never_fits": self._never_fits}


def counters_of(replica: ReplicaCore) -> dict[str, int]:
    """Return the counters of a replica that a replay prints."""
    names = ("steps", "admitted", "ended", "preempted", "refused", "queried_tokens", "hit_tokens", "granted_tokens")
    evicted = sum(group.evicted_blocks for group in replica.group_counters())
    return {**{name: getattr(replica.counters, name) for name in names}, "evicted_keys": evicted}
