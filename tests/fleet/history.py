"""What the processes of a fleet did, in lines of JSON, and the rules that every history keeps.

Each process appends to a file of its own, so that what it did survives its death. Times are those of CLOCK_MONOTONIC,
which all processes of a machine share and no change of the date moves. Nothing here comes from the product.

    grants      an epoch of a replica is granted once, by one service to one engine life; what is asked for after that
                gets a higher one
    pages       after an engine life has claimed the pages, no step of an older one that began later is carried out;
                none is carried out of a life that is older than the owner that the pages name
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar


@dataclass(frozen=True)
class Granted:
    """A session was opened.

    Attributes:
        holder: process id and number of the session.
        service: address of the service that granted the epoch.
        began_ns, ended_ns: before it was asked for, and when the answer had arrived.
    """

    replica: str
    epoch: int
    holder: str
    service: str
    began_ns: int
    ended_ns: int


@dataclass(frozen=True)
class Wrote:
    """An engine claimed the pages of a worker, or carried out the orders of a step on them.

    Attributes:
        memory: incarnation of the pages.
        began_ns, ended_ns: when it began, and when it had ended.
        owner: epoch that owned the pages when it began: a service claims them for a rival, which writes nothing.
    """

    replica: str
    epoch: int
    memory: int
    began_ns: int
    ended_ns: int
    owner: int = 0


Event = TypeVar("Event", Granted, Wrote)
KINDS: Mapping[str, type[Granted] | type[Wrote]] = {"granted": Granted, "wrote": Wrote}


class Notes:
    """The file of one process."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / f"{os.getpid()}-{time.monotonic_ns()}.jsonl", os.O_WRONLY | os.O_CREAT)

    def add(self, event: Granted | Wrote) -> None:
        """Append a line by one write, so that a kill leaves it out or whole."""
        (kind,) = (name for name, one in KINDS.items() if isinstance(event, one))
        os.write(self._file, json.dumps({"kind": kind, **asdict(event)}).encode() + b"\n")


def read(folder: Path) -> list[Granted | Wrote]:
    """All events, by file. A last line that was cut short is left out."""
    events = list[Granted | Wrote]()
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_bytes().split(b"\n")[:-1]:
            content = json.loads(line)
            events.append(KINDS[content.pop("kind")](**content))
    return events


def violations(events: Iterable[Granted | Wrote]) -> list[str]:
    """What breaks a rule, in words."""
    seen = list(events)
    grants = [one for one in seen if isinstance(one, Granted)]
    writes = [one for one in seen if isinstance(one, Wrote)]
    return [
        *_granted_twice(grants),
        *(f"{late} was granted" for late in _late(grants, lambda one: (one.replica, 0))),
        *(f"{late} wrote" for late in _late(writes, lambda one: (one.replica, one.memory))),
        *(f"epoch {one.epoch} of {one.replica} wrote pages of {one.owner}" for one in writes if one.owner > one.epoch),
    ]


def failovers(events: Iterable[Granted | Wrote]) -> int:
    """How many times the epochs of a replica continued at another service."""
    grants = sorted((one for one in events if isinstance(one, Granted)), key=lambda one: one.epoch)
    last, moves = dict[str, str](), 0
    for one in grants:
        moves += last.get(one.replica, one.service) != one.service
        last[one.replica] = one.service
    return moves


def _granted_twice(grants: Sequence[Granted]) -> list[str]:
    by_epoch = defaultdict[tuple[str, int], set[tuple[str, str]]](set)
    for one in grants:
        by_epoch[one.replica, one.epoch].add((one.service, one.holder))
    return [
        f"epoch {epoch} of {replica} was granted {len(holders)} times: {sorted(holders)}"
        for (replica, epoch), holders in sorted(by_epoch.items())
        if len(holders) > 1
    ]


def _late(events: Sequence[Event], place_of: Callable[[Event], tuple[str, int]]) -> list[str]:
    """Events of an epoch that began after one of a newer epoch had ended at the same place."""
    found, newest = list[str](), dict[tuple[str, int], Event]()
    by_end = sorted(events, key=lambda one: one.ended_ns)
    at = 0
    for one in sorted(events, key=lambda one: one.began_ns):
        while at < len(by_end) and by_end[at].ended_ns <= one.began_ns:
            ended = by_end[at]
            place = place_of(ended)
            if place not in newest or newest[place].epoch < ended.epoch:
                newest[place] = ended
            at += 1
        before = newest.get(place_of(one))
        if before is not None and before.epoch > one.epoch:
            late_ms = (one.began_ns - before.ended_ns) / 1e6
            found.append(f"{late_ms:.1f} ms after epoch {before.epoch}, epoch {one.epoch} of {one.replica}")
    return found
