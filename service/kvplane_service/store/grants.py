"""Grant each replica to one service at a time: a grant is the right to begin epochs of the replica.

All grants are in one small table that services replace by compare-and-set (`OwnerTable`): which processes are there,
with a number that each raises when it renews (its *beat*), and which of them has each replica.

    renew     raise the beat, take what is free and registered here, drop what has left     several times per lease
    take      the same for one replica, when a client asks for it
    check     whether this process has a replica now, by its own clock: asked before an epoch begins

Only monotonic clocks count, and none is compared with another one. A process holds its grants for 2/3 of a lease from
when it *sent* a renewal that succeeded. Another process drops it from the table after it has seen the same beat for a
whole lease of its own clock, counted from when the beat was first *read*. The third that is left covers clocks of
different speed. A dropped process finds out when it reads the table.

A table may be lost: a Lease is deleted, a primary fails before it replicates. The next one has another number, and is
*incomplete* for a lease: what was granted before may still hold, so nothing is granted except to processes that still
hold it. A table that went back (an epoch or beat below what was seen) counts as lost too.

The epoch of a table is at least that of each grant, and each epoch that a service reports. It is a lower bound for the
next one and never the only one: the stamp tables of the workers state the epoch that owns the pages.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from kvplane.base.errors import Unavailable
from kvplane.base.stamps import MAX_EPOCH
from kvplane_service.store.errors import STORE_ERRORS, StoreForeign, StoreFull, StoreUnavailable
from kvplane_service.store.interface import OwnerTable, Stored
from kvplane_service.store.writer import Runtime

MAX_TABLE_BYTES = 200_000  # all annotations of a Kubernetes object have 256 KiB
_FORMAT = 1
_ATTEMPTS = 8
_PAUSE_S = 0.02
_NS_PER_MS = 10**6
_FIELD = "ownership"

_log = logging.getLogger(__name__)


class NotGranted(Unavailable):
    """This service may not begin an epoch of the replica: it does not have the grant, or did not renew it in time. Its
    reason is that of Unavailable, so that clients try again.
    """


class Member(NamedTuple):
    """A service process: the address at which clients reach it, and the number of its latest renewal."""

    address: str
    beat: int


class Grant(NamedTuple):
    """The process that has a replica, and the epoch that the table had when it was granted."""

    process: int
    epoch: int


@dataclass
class Table:
    """The table of owners.

    Attributes:
        index: names the index store that has the records of the replicas.
        number: random number of the table, u64. Another number: the table before was lost.
        is_complete: every grant that is not in the table has ended.
        epoch: at least that of each grant.
        services: members by process.
        replicas: grants by name.
    """

    index: str
    number: int
    is_complete: bool = False
    epoch: int = 0
    services: dict[int, Member] = field(default_factory=dict)
    replicas: dict[str, Grant] = field(default_factory=dict)

    def pack(self) -> bytes:
        """Serialize the table. Raises StoreFull if it is longer than MAX_TABLE_BYTES."""
        services = [[process, *member] for process, member in self.services.items()]
        replicas = [[name, *grant] for name, grant in self.replicas.items()]
        head = {"format": _FORMAT, "index": self.index, "number": self.number, "complete": self.is_complete}
        content = {**head, "epoch": self.epoch, "services": services, "replicas": replicas}
        raw = json.dumps(content, separators=(",", ":")).encode()
        if len(raw) > MAX_TABLE_BYTES:
            what = f"the table of owners would have {len(raw)} bytes, with {len(replicas)} replicas"
            raise StoreFull(
                f"{what}; at most {MAX_TABLE_BYTES}", field=_FIELD, remedy="use a table per group of services"
            )
        return raw

    @classmethod
    def unpack(cls, raw: bytes) -> Table | None:
        """Parse a table; None if it is not one, or refers to a process that it does not have."""
        try:
            content = json.loads(raw[: MAX_TABLE_BYTES + 1])
            services = {_number(process): Member(str(at), _number(beat)) for process, at, beat in content["services"]}
            grants = ((str(name), _number(process), _number(epoch)) for name, process, epoch in content["replicas"])
            replicas = {name: Grant(process, epoch) for name, process, epoch in grants}
            head = str(content["index"]), _number(content["number"]), content["complete"] is True
            table = cls(*head, _number(content["epoch"], MAX_EPOCH // 2), services, replicas)
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        is_whole = content["format"] == _FORMAT and all(grant.process in services for grant in replicas.values())
        return table if is_whole else None

    def without(self, ended: Collection[int]) -> Table:
        """Return a copy without some processes and without what they were granted."""
        services = {process: member for process, member in self.services.items() if process not in ended}
        replicas = {name: grant for name, grant in self.replicas.items() if grant.process not in ended}
        return replace(self, services=services, replicas=replicas)


@dataclass(frozen=True)
class Identity:
    """One service process: its address, its random number (u64), and the name of its index store."""

    address: str
    process: int
    index: str


class Grants:
    """What this process was granted, and when that ends by its own clock."""

    def __init__(
        self, table: OwnerTable, me: Identity, lease_ms: int, runtime: Runtime, draw: Callable[[], int]
    ) -> None:
        """`draw` returns a random u64."""
        self._table, self._me, self._draw, self._runtime = table, me, draw, runtime
        self._lease_ns = lease_ms * _NS_PER_MS
        self._changing = asyncio.Lock()
        self._held: dict[str, int] = {}
        self._until_ns = self._read_ns = runtime.clock()
        self._beat = self._acknowledged = 0  # the latest that was sent, and of which the answer arrived
        self._newest = Table(me.index, 0)  # as it was read or written last
        self._since_ns = 0  # when the number of that table was first read
        self._beats: dict[int, tuple[int, int]] = {}  # of other processes: the number, and when it was first read
        self._problem = ""

    # -- by this process's clock, without a call ---------------------------------------------------------------------

    def check(self, name: str) -> None:
        """Raise NotGranted unless this process has the replica now."""
        if name not in self._held:
            what = f"this service has not been granted {name}"
        elif not self._is_valid():
            what = f"this service could not renew its grant of {name} in time"
        else:
            return
        what += f" ({self._problem})" if self._problem else ""
        remedy = f"try again; check what `{_FIELD}` names if this lasts"
        raise NotGranted(what, field="replica", remedy=remedy)

    def epoch_of(self, name: str) -> int:
        """Return the epoch of the grant of a replica, 0 if this process does not have it."""
        return self._held.get(name, 0)

    def _is_valid(self) -> bool:
        return self._runtime.clock() < self._until_ns

    def owner_of(self, name: str) -> str:
        """Return the address of the other process that has a replica, as the table was within 1/3 of a lease; "" if
        that is not known.
        """
        grant = self._newest.replicas.get(name)
        is_recent = self._runtime.clock() - self._read_ns < self._lease_ns // 3
        if grant is None or grant.process == self._me.process or not is_recent:
            return ""
        return self._newest.services[grant.process].address

    # -- with the table ------------------------------------------------------------------------------------------------

    async def renew(self, epochs: Mapping[str, int], moving: Collection[str] = ()) -> dict[str, str]:
        """Renew, take the replicas that are keys of `epochs` if they are free, and drop all others except `moving`.
        `epochs` has the latest epoch of each. Returns the replicas that other processes have, with their addresses.

        Raises STORE_ERRORS.
        """
        lost: dict[str, str] = {}

        def edit(table: Table) -> None:
            lost.clear()
            mine = [name for name, grant in table.replicas.items() if grant.process == self._me.process]
            for name in mine:
                if name not in epochs and name not in moving:
                    del table.replicas[name]
            table.epoch = max(table.epoch, *(epoch for epoch in epochs.values() if epoch < MAX_EPOCH // 2), 0)
            for name in epochs:
                if not self._claim(table, name) and name in table.replicas:
                    lost[name] = table.services[table.replicas[name].process].address

        await self._change(edit)
        return lost

    async def prepare(self) -> None:
        """Wait until the table is complete: at most a lease, after it was created or lost. Raises STORE_ERRORS."""
        ends_ns = self._runtime.clock() + 2 * self._lease_ns
        while self._runtime.clock() < ends_ns:
            await self.renew({})
            if self._newest.is_complete:
                return
            await self._runtime.sleep(self._lease_ns / 1e9 / 10)

    async def take(self, name: str) -> str:
        """Take a replica if it is free. Returns "" if this process has it now, otherwise the address of the process
        that has it.

        Raises:
            NotGranted: it may still be granted to a process of a table that was lost.
            STORE_ERRORS: the table cannot be read or replaced.
        """
        if name in self._held and self._is_valid():
            return ""
        owner = self.owner_of(name)

        def edit(table: Table) -> None:
            nonlocal owner
            owner = ""
            if self._claim(table, name):
                return
            if name in table.replicas:
                owner = table.services[table.replicas[name].process].address
            else:
                left_s = self._lease_ns / 1e9
                what = f"{name} may still be granted to a service, as the table of owners is not a lease old"
                raise NotGranted(what, field="replica", remedy=f"try again within {left_s:g} s")

        if not owner:
            await self._change(edit)
        return owner

    def _claim(self, table: Table, name: str) -> bool:
        """Enter this process for a replica that is free. Returns whether it has it."""
        grant = table.replicas.get(name)
        if grant is not None:
            return grant.process == self._me.process
        if table.is_complete:
            table.epoch += 1
            table.replicas[name] = Grant(self._me.process, table.epoch)
        elif name in self._held and self._is_valid():
            table.replicas[name] = Grant(self._me.process, self._held[name])
            table.epoch = max(table.epoch, self._held[name])
        return name in table.replicas

    async def _change(self, edit: Callable[[Table], None]) -> None:
        try:
            async with self._changing:
                await self._attempt(edit)
        except STORE_ERRORS as error:
            if not self._problem:
                _log.warning("the table of owners cannot be used; no epoch begins once the grants end: %s", error)
            self._problem = str(error)
            raise
        if self._problem:
            _log.info("the table of owners can be used again")
        self._problem = ""

    async def _attempt(self, edit: Callable[[Table], None]) -> None:
        for attempt in range(_ATTEMPTS):
            stored = await self._table.read()
            table = self._look_at(stored)
            edit(table)
            self._beat += 1
            table.services[self._me.process] = Member(self._me.address, self._beat)
            raw, sent_ns = table.pack(), self._runtime.clock()
            if await self._table.replace(stored.version, raw):
                self._acknowledged, self._until_ns = self._beat, sent_ns + self._lease_ns * 2 // 3
                granted = ((name, grant) for name, grant in table.replicas.items() if grant.process == self._me.process)
                self._held = {name: grant.epoch for name, grant in granted}
                self._note(table, self._runtime.clock())
                return
            await self._runtime.sleep(_PAUSE_S * self._runtime.jitter() * (1 << attempt))
        what = f"other services replaced the table at each of {_ATTEMPTS} attempts"
        raise StoreUnavailable(what, field=_FIELD, remedy="use fewer services per table, or a longer owner_lease_ms")

    def _note(self, table: Table, now_ns: int) -> None:
        """Record a table that was read or written: no process sees an older one, unless tables are lost."""
        if table.number != self._newest.number:
            self._since_ns = now_ns
            self._beats.clear()
        self._newest, self._read_ns = table, now_ns

    def _look_at(self, stored: Stored) -> Table:
        """Return the table to edit: the stored one without processes that have ended, or a new one if it was lost."""
        table = Table.unpack(stored.raw) if stored.version is not None else None
        if table is None and stored.raw:
            _log.warning("the table of owners is damaged, and is written again")
        elif table is not None and table.index == self._me.index and self._went_back(table):
            _log.warning("the table of owners went back, as after a failover or from a backup, and is written again")
            table = None
        now_ns = self._runtime.clock()
        if table is None:
            return self._new_table()
        self._note(table, now_ns)
        ended = self._ended(table, now_ns)
        for process in ended:
            _log.info("the service at %s has not renewed its grants, which end", table.services[process].address)
        table = table.without(ended)
        if table.index != self._me.index:
            return self._replaced(table)
        table.is_complete = table.is_complete or now_ns - self._since_ns >= self._lease_ns
        return table

    def _new_table(self) -> Table:
        return Table(self._me.index, self._draw(), epoch=self._newest.epoch)

    def _went_back(self, table: Table) -> bool:
        """Return True if the table is older than one that this process has seen, or than its own latest renewal."""
        mine = table.services.get(self._me.process)
        if mine is not None and mine.beat < self._acknowledged:
            return True
        if table.number == self._newest.number:
            return table.epoch < self._newest.epoch
        # A new table is incomplete for a lease after the last read of the one before it.
        return table.is_complete and self._newest.number != 0 and self._runtime.clock() - self._read_ns < self._lease_ns

    def _ended(self, table: Table, now_ns: int) -> list[int]:
        """Return the other processes whose beat has been the same for a lease."""
        before, self._beats = self._beats, {}
        for process, member in table.services.items():
            if process != self._me.process:
                beat, since_ns = before.get(process, (-1, 0))
                self._beats[process] = (member.beat, since_ns if beat == member.beat else now_ns)
        return [one for one, (_, since_ns) in self._beats.items() if now_ns - since_ns >= self._lease_ns]

    def _replaced(self, table: Table) -> Table:
        """Return a new table instead of one of another store, whose services have ended. Raises StoreForeign."""
        if not table.services:
            return self._new_table()
        there = ", ".join(sorted(member.address for member in table.services.values())[:3])
        what = f"the table of owners is that of services with another store: {there}"
        raise StoreForeign(what, field=_FIELD, remedy="name another table, or stop these services; nothing was changed")


def _number(value: Any, below: int = 1 << 64) -> int:  # noqa: ANN401 - what JSON holds
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(f"{value!r} is not a number below {below}")
    return value
