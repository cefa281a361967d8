"""The paths from a recording to the allocator: in process, or over gRPC in a session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvplane.base.groups import ReplicaSpec
from kvplane.base.step import Part, PartResult, Step
from kvplane_core.face.inspect import check, take_snapshot
from tests.core.compared import new_replica
from tests.core.specification import specification_of

CHECK_EVERY = 50


@dataclass(frozen=True)
class PathPart:
    """A part of the step under way; `last` ends the step."""

    part: Part
    last: bool = False


@dataclass(frozen=True)
class Seen:
    """The allocator's state in the terms of a recording."""

    free_blocks: list[int]
    distinct_keys: int
    keyed_blocks: list[int]
    usage: float
    tables: dict[int, list[list[int]]]  # by slot and group, of requests with blocks


class Path(Protocol):
    """Carries parts to a replica."""

    messages: int

    def send(self, parts: list[PathPart]) -> list[PartResult]:
        """Apply the parts in order; one result each."""
        ...

    def free_order(self) -> list[int]:
        """Free blocks in eviction order, now."""
        ...

    def snapshot(self) -> Seen:
        """The state now."""
        ...

    def close(self) -> None:
        """Release the replica."""
        ...


class InProcessPath:
    """Calls the core directly; checks its invariants after every `check_every` parts."""

    def __init__(self, spec: ReplicaSpec, check_every: int = CHECK_EVERY) -> None:
        self.replica = new_replica(spec)
        self._check_every = check_every
        self._seq, self._part = 1, 0
        self.messages = 0

    def send(self, parts: list[PathPart]) -> list[PartResult]:
        """See Path."""
        results = []
        for one in parts:
            step = Step(0, self._seq, [one.part], self._part, one.last, executed_through=self._seq - 1)
            results.extend(self.replica.apply(step).parts)
            self._seq, self._part = (self._seq + 1, 0) if one.last else (self._seq, self._part + 1)
            self.messages += 1
            if self.messages % self._check_every == 0:
                check(self.replica)
        return results

    def free_order(self) -> list[int]:
        """See Path."""
        return list(specification_of(self.replica).coordinator.pool.free)

    def snapshot(self) -> Seen:
        """See Path."""
        seen = take_snapshot(specification_of(self.replica))
        blocks = sorted({one.block for one in seen.keys})
        tables = {one.slot: [list(table) for table in one.tables] for one in seen.requests if one.running}
        return Seen(list(seen.free_blocks), seen.distinct_keys, blocks, seen.usage, tables)

    def close(self) -> None:
        """See Path."""
