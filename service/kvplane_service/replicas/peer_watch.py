"""What another service is sent of the replicas of a namespace: those that lend their host tier, and what it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kvplane.base.sections import Peers
from kvplane.base.worker import PeerArena, PeerNews
from kvplane_service.replicas.lenders import Member

MOST_ROWS = 4096  # of one message
# An empty message so often says that the service lives; one that is silent for longer hangs, or its host is gone.
# gRPC's pings say less: its own threads answer them, also for a process whose event loop does nothing any more.
BEAT_S, SILENT_S = 2.0, 10.0
LOOK_S = 0.05  # between two looks for what has changed


class PeerWatch:
    """What one stream has been sent of, and what has changed since."""

    def __init__(self) -> None:
        self._sent: dict[str, tuple[PeerArena, ...]] = {}
        self._changed: dict[str, dict[int, None]] = {}

    def note(self, name: str, slots: Iterable[int]) -> None:
        """Note that slots of a replica hold something else."""
        self._changed.setdefault(name, {}).update(dict.fromkeys(slots))

    def news(self, members: Mapping[str, Member]) -> Iterator[PeerNews]:
        """Return what was not sent yet. What changes while the caller sends a message is in a later one."""
        lenders = {name: (one, arenas) for name, one in members.items() if (arenas := one.of_all_ranks())}
        for name in [one for one in self._sent if one not in lenders]:
            del self._sent[name]
            yield PeerNews(name, is_gone=True)
        for name in self._changed.keys() - lenders.keys():
            del self._changed[name]
        for member, arenas in lenders.values():
            yield from self._of(member, arenas)

    def _of(self, member: Member, arenas: tuple[PeerArena, ...]) -> Iterator[PeerNews]:
        name, sent = member.name, self._sent.get(member.name)
        if arenas != sent:
            self._sent[name] = arenas
            if sent is None or [one.incarnation for one in sent] != [one.incarnation for one in arenas]:
                self._changed[name] = dict.fromkeys(member.held)
            yield PeerNews(name, arenas=arenas)
        slots = list(self._changed.pop(name, ()))
        for at in range(0, len(slots), MOST_ROWS):
            yield PeerNews(name, rows=_rows(member, slots[at : at + MOST_ROWS]))


def _rows(member: Member, slots: Iterable[int]) -> Peers:
    rows, hashes = Peers(), list[bytes]()
    for slot in slots:
        held = member.held.get(slot)
        if held is None:
            rows.gone.append(slot)
            continue
        (domain, group, digest), version = held
        rows.slot.append(slot)
        rows.version.append(version)
        rows.group.append(group)
        rows.domain.append(domain)
        hashes.append(digest)
    rows.hashes = b"".join(hashes)
    return rows
