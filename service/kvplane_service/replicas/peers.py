"""What the host tiers of the replicas of a namespace hold, and what is sent of it to the others.

    steps of A: host tier ─▶ holders of each key ─▶ rows in the next step of B (section `peers`)
    workers of A: memory  ─▶ range of slots      ─▶ workers of B map it, and report it: from then on B gets rows of A
    another service       ─▶ both, of its replicas (`peer_watch`)

All replicas of a namespace number the slots of all host tiers in the same way: a host tier has a range from the time
at which its workers register until the memory of one of them is new. What is sent proves nothing: a reader verifies the
seal of each slot. Nothing is sent to a replica whose cache was reset, and nothing of it to others, until it is
registered again: its weights may have changed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice

from kvplane.base.errors import InvalidArgument, LimitExceeded
from kvplane.base.sections import Peers
from kvplane.base.step import CacheEvent, Step
from kvplane.base.worker import MAX_PEERS, PeerArena, PeerNews
from kvplane_core.face.keys import Key
from kvplane_service.decisions.sent import step_with
from kvplane_service.replicas.lenders import Held, Lender, Member, RemoteMember, Sent, entries_of
from kvplane_service.replicas.peer_watch import PeerWatch

MOST_ROWS = 2048  # that are added to one step
HALF_ROWS = MOST_ROWS // 2
MAPPED_S = 0.5  # between two looks for memory that workers have mapped, of a replica without other news


class Namespace:
    """The replicas whose slots have equal meaning.

    Attributes:
        name: equal for the namespaces of services that follow each other; differs from that of every other one.
    """

    def __init__(self, name: bytes = b"") -> None:
        self.name = name or secrets.token_bytes(16)
        self._members: dict[str, Member] = {}
        self._remote: dict[str, RemoteMember] = {}
        self._watches: list[PeerWatch] = []
        self._read_s = 0.0  # when all members were read last
        self._is_read = False  # by a replica here, or by another service
        self._holders: dict[Key, dict[str, tuple[int, int]]] = {}  # by name: slot of its host tier, and version

    def __len__(self) -> int:
        return len(self._members)

    @property
    def has_readers(self) -> bool:
        """Whether a replica here has a tier of peers."""
        return any(one.reads for one in self._members.values())

    @property
    def digest_size(self) -> int:
        """Bytes of a digest of its keys; it has a replica."""
        return next(iter(self._members.values())).host.replica.digest_size

    def join(self, member: Member) -> None:
        """Add a replica."""
        self._members[member.name] = member
        self._set_read()

    def leave(self, name: str) -> None:
        """Remove a replica."""
        member = self._members.get(name)
        if member is not None:
            self._clear(member)
            del self._members[name]
            self._set_read()

    def _set_read(self) -> None:
        self._is_read = self.has_readers or bool(self._watches)

    def note(self, member: Member, of_parts: Iterable[Sequence[CacheEvent]]) -> None:
        """Note what the parts of a step changed in the tiers of a member."""
        if not self._is_read:
            member.note_all()
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
            arena = other.lends().get(rank)
            if arena is not None:
                found.append(replace(arena, first_slot=other.first, incarnation=other.memory[rank]))
        return found

    def peers_of(self, name: str) -> Iterator[tuple[Lender, bool]]:
        """Return the others, if a replica has a tier of peers, and whether it reads each: that tier has room for it,
        and the workers of all ranks can.
        """
        me, near = self._members[name], {one.name for one in self._others(name)}
        for one in self._all() if me.reads else ():
            if one is not me:
                yield one, one.name in near and set(one.memory) <= me.mapped

    def holders(self, name: str, key: Key) -> list[str]:
        """Return which of the replicas that one may read have a key, each as "REPLICA" or "REPLICA of SERVICE"."""
        have = self._holders.get(key, {})
        found = [one for one in self._others(name) if one.name in have]
        return [f"{one.replica} of {one.service}" if one.service else one.replica for one in found]

    def _others(self, name: str) -> Iterator[Lender]:
        """Return the replicas that one may read, and that its tier of peers has room for."""
        me = self._members.get(name)
        if me is not None and me.reads:
            most = me.spec.tiers[-1].num_blocks
            yield from (one for one in self._all() if one is not me and 0 <= one.first <= most - one.num_slots)

    def _all(self) -> Iterator[Lender]:
        return chain(self._members.values(), self._remote.values())

    def _place_all(self) -> None:
        """Give each host tier a range, another one if the memory of a rank is new."""
        lent = {name: one.lends() for name, one in self._members.items()}
        mine = {arena.incarnation for one in lent.values() for arena in one.values()}
        moved = [one for one in self._remote.values() if not mine.isdisjoint(one.incarnations)]
        for other in moved:
            other.first = -1  # it came here from the other service, which does not state it yet
        for name, member in self._members.items():
            memory = tuple(lent[name][rank].incarnation for rank in range(member.num_ranks) if rank in lent[name])
            if len(memory) == member.num_ranks and memory != member.memory:
                self._place(member, memory)
                member.note_all()
        for other in self._remote.values():
            if other.first < 0 and other not in moved:
                self._place(other, other.incarnations)

    def _place(self, lender: Lender, memory: tuple[bytes, ...]) -> None:
        if memory != lender.memory:
            self._clear(lender)
        lender.first, lender.memory = -1, memory
        lender.first = self._free_range(lender.num_slots)

    def _free_range(self, size: int) -> int:
        """Return the start of the first gap of this size."""
        first = 0
        for start, end in sorted((one.first, one.first + one.num_slots) for one in self._all()):
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
        rows = self.news_of(name) if step.parts else None
        if rows is None:
            return step
        first, *others = step.parts
        return step_with(step, [replace(first, peers=rows), *others], step.traceparent)

    def news_of(self, name: str, every_s: float = 0.0) -> Peers | None:
        """Return what was not sent to a replica yet; None if there is nothing. As `with_news`. `every_s`: for calls
        without a step: all replicas are read once in this time, for all who ask.
        """
        me, now_s = self._members.get(name), time.monotonic()
        if me is None or not me.reads:
            return None
        if now_s - self._read_s >= every_s:
            self._read_s = now_s
            for one in self._members.values():
                self._read(one)
        if every_s and not me.sent.waiting and not me.sent.unknown and now_s - me.sent.looked_s < MAPPED_S:
            return None
        me.sent.looked_s = now_s
        if me.had_reset:
            return None
        if me.sent.epoch != me.host.epoch:
            me.sent = Sent(me.host.epoch, waiting=dict.fromkeys(self._holders))
        rows = self._rows(me)
        if rows.slot or rows.gone:
            return rows
        me.sent.offered.clear()
        return None

    def continued(self, name: str) -> None:
        """Record that the state of a replica is that of its engine, to which others may have sent rows."""
        me = self._members.get(name)
        if me is not None and me.reads:
            known = me.spec.tiers[-1].num_blocks if me.host.replica.tiers.each[-1].num_held else 0
            me.sent = Sent(me.host.epoch, waiting=dict.fromkeys(self._holders), unknown=range(known))

    def was_sent(self, name: str, rows: Peers) -> None:
        """Record that a replica knows these news."""
        if name not in self._members:
            return  # it was removed meanwhile
        sent = self._members[name].sent
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
        mapped = me.mapped
        first = {one.name: one.first for one in self._others(me.name) if set(one.memory) <= mapped}
        readable = frozenset(first.items())
        if readable != sent.readable:
            sent.readable = readable
            sent.waiting.update(dict.fromkeys(self._holders))
        sent.offered.clear()
        rows.gone += [slot for slot in sent.unknown[:HALF_ROWS] if slot not in sent.at_slot]
        sent.unknown = sent.unknown[HALF_ROWS:]
        for key in list(islice(sent.waiting, MOST_ROWS - len(rows.gone))):
            holders = self._holders.get(key, {}).items()
            found = next(((first[name] + slot, version) for name, (slot, version) in holders if name in first), None)
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
        if member.host.is_readable:
            found = member.read()
            if found is None:
                self._clear(member)
            else:
                self._hold(member, found)

    def _clear(self, lender: Lender) -> None:
        self._hold(lender, dict.fromkeys(lender.held))

    def _hold(self, lender: Lender, found: Mapping[int, Held | None]) -> None:
        """Record what slots of a host tier hold now."""
        name, changed = lender.name, list[int]()
        for slot, new in found.items():
            old = lender.held.pop(slot, None)
            if new is not None:
                lender.held[slot] = new
            if old == new:
                continue
            changed.append(slot)
            if old is not None and self._holders.get(old[0], {}).get(name) == (slot, old[1]):
                del self._holders[old[0]][name]
                self._changed(old[0])
            if new is not None:
                self._holders.setdefault(new[0], {})[name] = slot, new[1]
                self._changed(new[0])
        for watch in self._watches if name in self._members else ():
            watch.note(name, changed)

    def _changed(self, key: Key) -> None:
        if not self._holders.get(key, True):
            del self._holders[key]
        for one in self._members.values():
            if one.reads:
                one.sent.waiting[key] = None

    # -- other services ----------------------------------------------------------------------------------------------

    @contextmanager
    def watched(self, watch: PeerWatch) -> Iterator[None]:
        """Note for another service what changes in the host tiers of the replicas here."""
        self._watches.append(watch)
        self._set_read()
        try:
            yield
        finally:
            self._watches.remove(watch)
            self._set_read()

    def news(self, watch: PeerWatch) -> Iterator[PeerNews]:
        """Return what another service was not sent yet, in messages of bounded size."""
        self._place_all()
        for member in self._members.values():
            self._read(member)
        yield from watch.news(self._members)

    def apply(self, service: str, news: PeerNews) -> None:
        """Record what another service says of a replica.

        Raises:
            InvalidArgument: it cannot be of this namespace.
            LimitExceeded: the services have more than MAX_PEERS replicas.
        """
        name = f"{service} {news.replica}"
        if news.is_gone:
            self._forget(name)
            return
        if news.arenas:
            self._check_ranks(news)
            known = self._remote.get(name)
            if known is not None and known.incarnations != tuple(one.incarnation for one in news.arenas):
                self._forget(name)
            if name not in self._remote:
                if len(self._remote) >= MAX_PEERS:
                    what = f"over {MAX_PEERS} replicas of other services"
                    raise LimitExceeded(what, field="replica", remedy="follow fewer services")
                self._remote[name] = RemoteMember(name, news.arenas)
            self._remote[name].arenas = news.arenas
            self._place_all()
        if name not in self._remote:
            raise InvalidArgument("rows came before the memory", field="arenas", remedy="say the memory first")
        other = self._remote[name]
        if self._has_room(other):
            num_groups = len(next(iter(self._members.values())).spec.groups)
            self._hold(other, entries_of(news.rows, other.num_slots, num_groups))

    def forget(self, service: str) -> None:
        """Forget what another service has said."""
        for name in [one for one in self._remote if one.startswith(f"{service} ")]:
            self._forget(name)

    def _forget(self, name: str) -> None:
        other = self._remote.get(name)
        if other is not None:
            self._clear(other)
            del self._remote[name]

    def _has_room(self, other: RemoteMember) -> bool:
        """Whether a replica here can read it; of one that none can, nothing is kept."""
        most = max((one.spec.tiers[-1].num_blocks for one in self._members.values() if one.reads), default=0)
        return other.first + other.num_slots <= most

    def _check_ranks(self, news: PeerNews) -> None:
        ranks = {one.num_ranks for one in self._members.values()}
        if ranks != {len(news.arenas)} or len({one.num_slots for one in news.arenas}) != 1:
            what = f"{len(news.arenas)} host tiers, of {sorted({one.num_slots for one in news.arenas})} slots"
            remedy = f"state one of each of {max(ranks, default=0)} ranks, with as many slots"
            raise InvalidArgument(what, field="arenas", remedy=remedy)
