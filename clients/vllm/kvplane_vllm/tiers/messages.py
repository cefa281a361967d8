"""What the two halves of the connector send each other, with each step of vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvplane.base.job_table import JobsEnd


@dataclass(frozen=True, slots=True)
class Ready:
    """What a rank allocated at its start.

    Attributes:
        epoch: of the engine life that its memory begins.
        stamps: the stamp table of blocks and slots: what the disk has kept.
        has_tiers: whether it has the tier behind host memory that the options name: a disk, or peers.
        content: names what gives the bytes their meaning, on a disk for the next start, and for peers; b"" = nothing.
        disk: names what its file holds, another one whenever the file begins empty; 0 = there is none.
    """

    epoch: int
    stamps: Sequence[int]
    has_tiers: bool
    content: bytes
    disk: int = 0


class Copies(NamedTuple):
    """Blocks of one group that are copied between vLLM's pages and those in host memory, in pairs."""

    group: int
    device: Sequence[int]
    host: Sequence[int]


class PartOrders(NamedTuple):
    """The orders of one part of a step of the allocator: stamps of host blocks, then jobs of the disk
    (`kvplane.base.job_table.record_of`).
    """

    seq: int
    part: int
    blocks: Sequence[int]
    stamps: Sequence[int]
    jobs: bytes


class Seals(NamedTuple):
    """Blocks in host memory that peers may read from now on, a column each: see `kvplane_worker.tiers.seal.Content`."""

    blocks: Sequence[int]
    groups: Sequence[int]
    versions: Sequence[int]
    keys: Sequence[int]


NO_SEALS = Seals((), (), (), ())


@dataclass(slots=True)
class StepOrders:
    """What the workers do with a step of vLLM, to the workers.

    Attributes:
        epoch: of the engine life.
        parts: the orders of steps of the allocator.
        saves: copied while the step is computed: what earlier steps have.
        loads: by request, copied after the step has been computed; None = the load fails.
        overwritten: blocks that the step may zero, copy into, load into or compute: no save reads them any more when
            it begins.
        seals: of blocks that earlier steps have written.
    """

    epoch: int = 0
    parts: list[PartOrders] = field(default_factory=list)
    saves: list[Copies] = field(default_factory=list)
    loads: dict[str, list[Copies] | None] = field(default_factory=dict)
    overwritten: set[int] = field(default_factory=set)
    seals: Seals = NO_SEALS

    @property
    def seq(self) -> int:
        """The last step of the allocator that it has orders of; 0 = none, and there is nothing to do."""
        return self.parts[-1].seq if self.parts else 0


NO_ORDERS = StepOrders()  # of a step with which there is nothing to do


@dataclass(slots=True)
class Progress:
    """What has ended on each rank, to the scheduler.

    Attributes:
        executed: by rank, the step up to which all copies have ended.
        ends: by rank, ends of jobs of the disk since the last report.
        is_broken: whether a rank can save and load no more.
    """

    executed: Mapping[int, int]
    ends: Mapping[int, Sequence[JobsEnd]]
    is_broken: bool = False

    def with_(self, other: Progress) -> Progress:
        """Return what this and another report say."""
        executed = {**self.executed}
        for rank, seq in other.executed.items():
            executed[rank] = max(seq, executed.get(rank, 0))
        ends = {**self.ends}
        for rank, some in other.ends.items():
            ends[rank] = [*ends.get(rank, ()), *some]
        return Progress(executed, ends, self.is_broken or other.is_broken)
