"""The replicas whose host tiers others read: those of this service, and those that other services describe."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol, TypeAlias

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import NULL_BLOCK, Medium, ReplicaSpec, TierKind
from kvplane.base.sections import Peers
from kvplane.base.stamps import MAX_COUNTER, MAX_EPOCH, Stamp
from kvplane.base.step import CacheEvent, EventKind
from kvplane.base.worker import PeerArena, WorkerState
from kvplane_core.face.interface import ReplicaCore
from kvplane_core.face.keys import Key
from kvplane_service.replicas.workers import WorkerRoster

MOST_READ = 4096  # slots at a time: some milliseconds

_MAX_VERSION = Stamp(0, MAX_EPOCH, MAX_COUNTER).pack()

Held: TypeAlias = tuple[Key, int]  # what a slot of a host tier holds: key and version


class LendingHost(Protocol):
    """What is read of a replica's host, see `HostState`."""

    replica: ReplicaCore
    epoch: int
    memory_had_reset: bool

    @property
    def is_live(self) -> bool:
        """Whether its engine is connected."""

    @property
    def is_readable(self) -> bool:
        """Whether the core may be read now."""


@dataclass(slots=True, eq=False)
class Sent:
    """What was sent to a replica.

    Attributes:
        epoch: the engine life that it was sent to.
        by_key: slot and version by key.
        at_slot: the same, by slot.
        waiting: keys whose holders have changed since.
        offered: keys in the step that is being applied, which waited before.
        readable: replicas whose host tier its workers can read, and where the range of each begins.
        looked_s: when it was last looked for what it can read, without a step of it.
        unknown: slots from this one on may hold what another service, or an earlier session, has sent.
    """

    epoch: int = 0
    by_key: dict[Key, tuple[int, int]] = field(default_factory=dict)
    at_slot: dict[int, Key] = field(default_factory=dict)
    waiting: dict[Key, None] = field(default_factory=dict)
    offered: list[Key] = field(default_factory=list)
    readable: frozenset[tuple[str, int]] = frozenset()
    looked_s: float = 0.0
    unknown: range = range(0)


@dataclass(slots=True, eq=False)
class Lender(ABC):
    """A replica whose host tier others may read.

    Attributes:
        name: of the replica; with that of its service, if that is another one.
        first: where its range begins; -1 = it has none.
        memory: incarnation of its host tier on each rank, of that range.
        held: what each slot of its host tier holds.
    """

    name: str
    first: int = field(default=-1, init=False)
    memory: tuple[bytes, ...] = field(default=(), init=False)
    held: dict[int, Held] = field(default_factory=dict, init=False)

    @property
    def replica(self) -> str:
        """Its name at its service."""
        return self.name

    @property
    def service(self) -> str:
        """Address of its service; "" = this one."""
        return ""

    @property
    @abstractmethod
    def num_slots(self) -> int:
        """Slots of its host tier."""

    @abstractmethod
    def lends(self) -> dict[int, PeerArena]:
        """Return the host tier of each rank whose worker is there."""


@dataclass(slots=True, eq=False)
class Member(Lender):
    """A replica of this service.

    Attributes:
        host, spec, num_ranks: the replica.
        workers: returns its workers, by rank.
        changed: slots that may hold something else by now; None = all.
        stored: blocks of its pool that have got a key, by step: it is shown when the step has been executed.
        sent: what was sent to it.
    """

    host: LendingHost
    spec: ReplicaSpec
    num_ranks: int
    workers: WorkerRoster
    changed: set[int] | None = None
    stored: deque[tuple[int, Sequence[int]]] = field(default_factory=deque)
    sent: Sent = field(default_factory=Sent)

    @property
    def reads(self) -> bool:
        """Whether it has a tier of peers."""
        return any(tier.kind is TierKind.PEERS for tier in self.spec.tiers)

    @property
    def _lends_pool(self) -> bool:
        """Whether its host tier is its pool: an engine that decides itself has what leaves its device there."""
        return self.spec.pool is Medium.HOST

    @property
    def num_slots(self) -> int:
        """Slots of its host tier, or blocks of its pool."""
        return self.spec.num_blocks if self._lends_pool else self.spec.tiers[0].num_blocks

    def lends(self) -> dict[int, PeerArena]:
        """Return the host tier of each rank whose worker has memory."""
        return {
            one.rank: PeerArena(0, self.num_slots, one.address, one.host_incarnation, one.nixl_arena)
            for one in self.workers.alive()
            if one.state is not WorkerState.STARTING and one.host_incarnation
        }

    def of_all_ranks(self) -> tuple[PeerArena, ...]:
        """Return the host tier of each rank; none unless all have the memory of its range."""
        lent = self.lends()
        arenas = tuple(lent[rank] for rank in range(self.num_ranks) if rank in lent)
        is_whole = self.first >= 0 and tuple(one.incarnation for one in arenas) == self.memory
        return arenas if is_whole else ()

    def note(self, events: Iterable[CacheEvent]) -> None:
        """Note what a step of it changed in its host tier."""
        lent = Medium.DEVICE if self._lends_pool else Medium.HOST  # as the core names it
        for event in events:
            if event.kind is EventKind.CLEARED:
                self.note_all()
            elif event.tier is lent and self._lends_pool and event.kind is EventKind.STORED:
                self.stored.append((self.host.replica.seq, event.blocks))
            elif event.tier is lent and self.changed is not None:
                self.changed.update(event.blocks)

    def note_all(self) -> None:
        """Note that anything may have changed."""
        self.changed = None
        self.stored.clear()

    @property
    def had_reset(self) -> bool:
        """Whether its cache was reset: the null block has the stamp of the last reset, in the core, or in the memory
        with which the engine began, where a reset outlives the service.
        """
        return self.host.memory_had_reset or self.host.replica.entries([NULL_BLOCK]).unkeyed_stamp[0] != 0

    @property
    def mapped(self) -> set[bytes]:
        """The memories that its workers of all ranks have mapped: each one that of its rank."""
        return {incarnation for worker in self.workers.alive() for incarnation in worker.mapped}

    def read(self) -> Mapping[int, Held | None] | None:
        """Return what slots hold that have changed, at most MOST_READ of them, since the loop waits; None: nothing can
        be read of it, or it must not be.
        """
        if not self.host.is_live or self.first < 0 or self.had_reset:
            self.note_all()
            return None
        if self.changed is None:
            self.changed = set(range(self.num_slots))
            if self._lends_pool:  # what steps in flight have stored is not shown yet
                self.stored.append((self.host.replica.seq, range(self.num_slots)))
        while self.stored and self.stored[0][0] <= self.host.replica.executed_through:
            self.changed.update(self.stored.popleft()[1])
        slots = sorted(islice(self.changed, MOST_READ))
        self.changed.difference_update(slots)
        found = dict[int, Held | None].fromkeys(slots)
        first = 0 if self._lends_pool else self.spec.num_blocks
        entries = self.host.replica.entries([first + slot for slot in slots]) if slots else None
        if entries is not None:
            size, at = entries.digest_size, 0
            for run in entries.runs:
                for row in range(at, at + run.count):
                    key = run.domain, run.group, bytes(entries.digests[row * size : (row + 1) * size])
                    found[entries.block[row] - first] = key, entries.stamp[row]
                at += run.count
        return found


@dataclass(slots=True, eq=False)
class RemoteMember(Lender):
    """A replica that another service describes.

    Attributes:
        arenas: its host tier on each rank.
    """

    arenas: tuple[PeerArena, ...]

    @property
    def replica(self) -> str:
        """Its name at its service."""
        return self.name.partition(" ")[2]

    @property
    def service(self) -> str:
        """Address of its service."""
        return self.name.partition(" ")[0]

    @property
    def num_slots(self) -> int:
        """Slots of its host tier."""
        return self.arenas[0].num_slots

    @property
    def incarnations(self) -> tuple[bytes, ...]:
        """What names the memory of each rank."""
        return tuple(one.incarnation for one in self.arenas)

    def lends(self) -> dict[int, PeerArena]:
        """Return the host tier of each rank."""
        return dict(enumerate(self.arenas))


def entries_of(rows: Peers, num_slots: int, num_groups: int) -> dict[int, Held | None]:
    """Return what slots hold now, by the rows of another service.

    Raises InvalidArgument for what no core accepts: the rows become part of a step, and must not be why the step of an
    engine here is refused.
    """
    size = len(rows.hashes) // max(1, len(rows.slot))
    for name, column, first, last in (
        ("slot", (*rows.slot, *rows.gone), 0, num_slots - 1),
        ("group", rows.group, 0, num_groups - 1),
        ("version", rows.version, 1, _MAX_VERSION),
    ):
        wrong = [
            value for value in (min(column, default=first), max(column, default=first)) if not first <= value <= last
        ]
        if wrong:
            remedy = f"send {first} to {last}: run the same version of kvplane on both services"
            raise InvalidArgument(f"{wrong[0]} is out of range", field=f"rows.{name}", remedy=remedy)
    found = dict[int, Held | None].fromkeys(rows.gone)
    for at, slot in enumerate(rows.slot):
        domain = rows.domain[at] if rows.domain else ""
        found[slot] = (domain, rows.group[at], rows.hashes[at * size : (at + 1) * size]), rows.version[at]
    return found
