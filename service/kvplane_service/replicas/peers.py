"""What the host tiers of the replicas of a namespace hold, and what is sent of it to the others.

    steps of A: host tier ─▶ holders of each key ─▶ rows in the next step of B (section `peers`)
    workers of A: memory  ─▶ range of slots      ─▶ workers of B map it, and report it: from then on B gets rows of A

All replicas of a namespace number the slots of all host tiers in the same way: a host tier has a range from the time
at which its workers register until the memory of one of them is new. What is sent proves nothing: a reader verifies the
seal of each slot. Nothing is sent to a replica whose cache was reset, and nothing of it to others, until it is
registered again: its weights may have changed.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

from kvplane.base.groups import NULL_BLOCK, Medium, ReplicaSpec, TierKind
from kvplane.base.sections import Peers
from kvplane.base.step import CacheEvent, Step
from kvplane.base.worker import PeerArena, WorkerState
from kvplane_core.face.keys import Key
from kvplane_service.decisions.sent import step_with

if TYPE_CHECKING:
    from kvplane_service.replicas.host_state import HostState
    from kvplane_service.replicas.workers import WorkerRoster

MOST_ROWS = 2048  # that are added to one step


@dataclass(slots=True)
class Sent:
    """What was sent to a replica.

    Attributes:
        epoch: the engine life that it was sent to.
        by_key: slot and version by key.
        at_slot: the same, by slot.
        waiting: keys whose holders have changed since.
        offered: keys in the step that is being applied, which waited before.
        readable: replicas whose host tier its workers can read.
    """

    epoch: int = 0
    by_key: dict[Key, tuple[int, int]] = field(default_factory=dict)
    at_slot: dict[int, Key] = field(default_factory=dict)
    waiting: dict[Key, None] = field(default_factory=dict)
    offered: list[Key] = field(default_factory=list)
    readable: frozenset[str] = frozenset()


@dataclass(slots=True)
class Member:
    """A replica of a namespace.

    Attributes:
        host, spec, num_ranks: the replica.
        workers: returns its workers, by rank.
        first: where its range begins; -1 = it has none.
        memory: incarnation of its host tier on each rank, of that range.
        held: key and version of each slot of its host tier.
        changed: slots that may hold something else by now; None = all.
        sent: what was sent to it.
    """

    host: HostState
    spec: ReplicaSpec
    num_ranks: int
    workers: WorkerRoster
    first: int = -1
    memory: tuple[bytes, ...] = ()
    held: dict[int, tuple[Key, int]] = field(default_factory=dict)
    changed: set[int] | None = None
    sent: Sent = field(default_factory=Sent)

    @property
    def reads(self) -> bool:
        """Whether it has a tier of peers."""
        return any(tier.kind is TierKind.PEERS for tier in self.spec.tiers)

    @property
    def num_slots(self) -> int:
        """Slots of its host tier."""
        return self.spec.tiers[0].num_blocks

    def note(self, events: Iterable[CacheEvent]) -> None:
        """Note what a step of it changed in its tiers."""
        for event in events:
            if event.tier is Medium.HOST and self.changed is not None:
                self.changed.update(event.blocks)

    def note_all(self) -> None:
        """Note that anything may have changed."""
        self.changed = None


class Namespace:
    """The replicas whose slots have equal meaning.

    Attributes:
        name: differs from that of every other namespace, also of another process.
    """

    def __init__(self) -> None:
        self.name = secrets.token_bytes(16)
        self._members: dict[str, Member] = {}
        self._has_readers = False
        self._holders: dict[Key, dict[str, tuple[int, int]]] = {}  # by name: slot of the range, and version

    def __len__(self) -> int:
        return len(self._members)

    def join(self, member: Member) -> None:
        """Add a replica."""
        self._members[member.host.name] = member
        self._has_readers |= member.reads

    def leave(self, name: str) -> None:
        """Remove a replica."""
        member = self._members.get(name)
        if member is not None:
            self._hold(member, {})
            del self._members[name]
            self._has_readers = any(one.reads for one in self._members.values())

    def note(self, member: Member, of_parts: Iterable[Sequence[CacheEvent]]) -> None:
        """Note what the parts of a step changed in the tiers of a member."""
        if not self._has_readers:
            member.changed = None
            return
        for events in of_parts:
            if events:
                member.note(events)

    # -- workers -----------------------------------------------------------------------------------------------------

    def arenas(self, name: str, rank: int) -> list[PeerArena]:
        """Return the host tiers of the other replicas on this rank that a worker of this replica may read."""
        self._place_all()
        found = []
        for other in self._others(name):
            infos = {one.rank: one for one in other.workers.alive()}
            if other.first >= 0 and rank in infos:
                info = infos[rank]
                found.append(PeerArena(other.first, other.num_slots, info.address, other.memory[rank], info.nixl_arena))
        return found

    def _others(self, name: str) -> Iterator[Member]:
        me = self._members.get(name)
        if me is not None and me.reads:
            most = me.spec.tiers[-1].num_blocks
            yield from (one for one in self._members.values() if one is not me and one.first + one.num_slots <= most)

    def _place_all(self) -> None:
        """Give each host tier a range, another one if the memory of a rank is new."""
        for member in self._members.values():
            infos = [one for one in member.workers.alive() if one.state is not WorkerState.STARTING]
            memory = tuple(one.host_incarnation for one in infos)
            is_whole = [one.rank for one in infos] == list(range(member.num_ranks)) and all(memory)
            if is_whole and memory != member.memory:
                self._hold(member, {})
                member.first, member.memory = -1, memory
                member.first = self._free_range(member.num_slots)
                member.note_all()

    def _free_range(self, size: int) -> int:
        """Return the start of the first gap of this size."""
        first = 0
        for start, end in sorted((one.first, one.first + one.num_slots) for one in self._members.values()):
            if start < 0:
                continue
            if start - first >= size:
                break
            first = max(first, end)
        return first

    # -- keys --------------------------------------------------------------------------------------------------------

    def with_news(self, name: str, step: Step) -> Step:
        """Return the step of a replica with what was not sent to it yet; the step itself if there is nothing. Call
        `was_sent` when it was applied, and before the next call.
        """
        me = self._members.get(name)
        if me is None or not me.reads or not step.parts:
            return step
        for one in self._members.values():
            self._read(one)
        if _had_reset(me.host):
            return step
        if me.sent.epoch != me.host.epoch:
            me.sent = Sent(me.host.epoch, waiting=dict.fromkeys(self._holders))
        rows = self._rows(me)
        if not rows.slot and not rows.gone:
            me.sent.offered.clear()
            return step
        first, *others = step.parts
        return step_with(step, [replace(first, peers=rows), *others], step.traceparent)

    def was_sent(self, name: str, step: Step) -> None:
        """Record that a step with news was applied."""
        if name not in self._members:
            return  # it was removed meanwhile
        rows, sent = step.parts[0].peers, self._members[name].sent
        sent.offered.clear()
        size = len(rows.hashes) // max(1, len(rows.slot))
        for slot in rows.gone:
            key = sent.at_slot.pop(slot, None)
            if key is not None:
                sent.by_key.pop(key, None)
        for at, slot in enumerate(rows.slot):
            key = rows.domain[at], rows.group[at], rows.hashes[at * size : (at + 1) * size]
            before = sent.at_slot.get(slot)
            if before is not None:
                sent.by_key.pop(before, None)
            moved = sent.by_key.get(key)
            if moved is not None:
                sent.at_slot.pop(moved[0], None)
            sent.by_key[key], sent.at_slot[slot] = (slot, rows.version[at]), key

    def _rows(self, me: Member) -> Peers:
        """Return what is sent to a replica next: as many rows as a step takes."""
        sent, rows = me.sent, Peers()
        sent.waiting.update(dict.fromkeys(sent.offered))  # a step that was refused
        mapped = _mapped(me)
        others = (one for one in self._others(me.host.name) if one.first >= 0)
        readable = frozenset(one.host.name for one in others if set(one.memory) <= mapped)
        if readable != sent.readable:
            sent.readable = readable
            sent.waiting.update(dict.fromkeys(self._holders))
        sent.offered.clear()
        for key in list(islice(sent.waiting, MOST_ROWS)):
            holders = self._holders.get(key, {})
            found = next((at for name, at in holders.items() if name in readable), None)
            before = sent.by_key.get(key)
            del sent.waiting[key]
            sent.offered.append(key)
            if found is None:
                if before is not None and sent.at_slot.get(before[0]) == key:
                    rows.gone.append(before[0])
            elif found != before:
                rows.slot.append(found[0])
                rows.version.append(found[1])
                rows.group.append(key[1])
                rows.hashes += key[2]
                rows.domain.append(key[0])
        return rows

    def _read(self, member: Member) -> None:
        """Read what has changed in the host tier of a replica."""
        if not member.host.is_readable:
            return
        if not member.host.is_live or member.first < 0 or _had_reset(member.host):
            if member.held:
                self._hold(member, {})
            member.changed = None
            return
        if member.changed is not None and not member.changed:
            return
        first, core = member.spec.num_blocks, member.host.replica
        slots = range(member.num_slots) if member.changed is None else sorted(member.changed)
        held = {} if member.changed is None else dict(member.held)
        for slot in slots:
            held.pop(slot, None)
        found = core.entries([first + slot for slot in slots])
        size, at = found.digest_size, 0
        for run in found.runs:
            for row in range(at, at + run.count):
                key = run.domain, run.group, bytes(found.digests[row * size : (row + 1) * size])
                held[found.block[row] - first] = key, found.stamp[row]
            at += run.count
        member.changed = set()
        self._hold(member, held)

    def _hold(self, member: Member, held: dict[int, tuple[Key, int]]) -> None:
        """Record what a host tier holds now."""
        name, before, member.held = member.host.name, member.held, held
        for slot in before.keys() | held.keys():
            old, new = before.get(slot), held.get(slot)
            if old == new:
                continue
            if old is not None and self._holders.get(old[0], {}).get(name) == (member.first + slot, old[1]):
                del self._holders[old[0]][name]
                self._changed(old[0])
            if new is not None:
                self._holders.setdefault(new[0], {})[name] = member.first + slot, new[1]
                self._changed(new[0])

    def _changed(self, key: Key) -> None:
        if not self._holders.get(key, True):
            del self._holders[key]
        for one in self._members.values():
            if one.reads:
                one.sent.waiting[key] = None


def _mapped(member: Member) -> set[bytes]:
    """Return the memories that the workers of all ranks of a replica have mapped: each one that of its rank."""
    return {incarnation for worker in member.workers.alive() for incarnation in worker.mapped}


def _had_reset(host: HostState) -> bool:
    """Whether the cache of a replica was reset: the null block has the stamp of the last reset, in the core, or in the
    memory with which the engine began, where a reset outlives the service.
    """
    return host.memory_had_reset or host.replica.entries([NULL_BLOCK]).unkeyed_stamp[0] != 0
