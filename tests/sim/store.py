"""A store with every permitted fault: delays, torn writes, lost writes, flipped bits, restores from old backups."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from kvplane_service.runtime.rota import Busy
from kvplane_service.store.errors import RecordRefused, StoreUnavailable
from kvplane_service.store.interface import ALIVE, LogName, StoredChunk
from kvplane_service.store.memory import MemoryStore
from kvplane_service.store.registration import pack_record, unpack_record

_LOOK_S = 0.05


@dataclass
class Access:
    """One service's access to the store.

    Attributes:
        owned: names of the replicas that it owns now.
        wrote: called for each finished write with the replica, whether the service owned it when the call was made, and
            the record (b"": a chunk).
    """

    store: WildStore
    address: str
    owned: Callable[[], Collection[str]]
    wrote: Callable[[str, bool, bytes], None]

    def offload(self, call: Callable[[], Any]) -> Awaitable[Any]:
        """Runs a store call as a task, with the replicas that the service owns now, not when the task starts."""
        return self._carry_out(call, self.owned())

    async def _carry_out(self, call: Callable[[], Any], owned: Collection[str]) -> Any:
        """Execute a call, with delays before and after."""
        store = self.store
        if store.is_busy(self.address):
            raise Busy("too many calls wait for the store")
        await asyncio.sleep(store.draw_delay())
        if store.is_away(self.address):
            await asyncio.sleep(2.0)  # the driver's timeout
        while store.hanging[self.address] > 0:  # noqa: ASYNC110 - all time is virtual
            await asyncio.sleep(_LOOK_S)
        outcome = store.do(call, self.address, lambda replica, raw: self.wrote(replica, replica in owned, raw))
        await asyncio.sleep(store.draw_delay())
        return outcome


class WildStore(MemoryStore):
    """The in-memory store with faults. Its content outlives the services.

    Attributes:
        away: it is unavailable.
        cut_off: addresses of services that it refuses.
        unreadable: names of replicas whose log cannot be read.
        busy: number of faults by address: the executor of these services refuses some calls.
        num_refused: number of calls that these two refused.
        num_unread: number of refused reads of a log, by replica.
        hanging: number of faults by address: it does not answer these services, and executes their calls later.
        damages: number of times its content was damaged.
        loses_answers: probability that a call is executed but fails.
        tears: probability that a chunk is stored in part.
        delay_s: maximum duration of a call.
    """

    def __init__(self, rng: Random, clock: Callable[[], int]) -> None:
        super().__init__(clock)
        self._rng = rng
        self.away = False
        self.cut_off = set[str]()
        self.hanging = Counter[str]()
        self.unreadable = Counter[str]()
        self.busy = Counter[str]()
        self.num_refused = Counter[str]()
        self.num_unread = Counter[str]()
        self.damages = 0
        self._caller = ""
        self._wrote: Callable[[str, bytes], None] = lambda replica, raw: None
        self.loses_answers = self.tears = 0.0
        self.delay_s = 0.005
        self._backup: tuple[dict[LogName, dict[int, bytes]], dict[str, bytes]] = ({}, {})

    def draw_delay(self) -> float:
        return self._rng.random() * self.delay_s

    def is_away(self, address: str) -> bool:
        """For the service at this address."""
        return self.away or address in self.cut_off

    def is_busy(self, address: str) -> bool:
        """Whether the executor of the service at this address refuses the next call."""
        refuses = self.busy[address] > 0 and self._rng.random() < 0.5
        self.num_refused["busy"] += refuses
        return refuses

    def do(self, call: Callable[[], Any], address: str, wrote: Callable[[str, bytes], None]) -> Any:
        """A call of the service at this address."""
        self._caller, self._wrote = address, wrote
        return call()

    # -- calls -------------------------------------------------------------------------------------------------------

    def append(self, log: LogName, chunk: StoredChunk, trim_below: int) -> int:
        self._answer()
        if self._rng.random() < self.tears:
            self.damages += 1
            chunk = StoredChunk(chunk.seq, chunk.raw[: self._rng.randrange(len(chunk.raw))])
        count = super().append(log, chunk, trim_below)
        self._wrote(log.replica, b"")
        self._lose_answer()
        return count

    def load(self, log: LogName) -> Iterator[StoredChunk]:
        self._answer()
        if self.unreadable[log.replica] > 0:
            self.num_refused["unreadable"] += 1
            self.num_unread[log.replica] += 1
            raise StoreUnavailable(f"the log of {log.replica} cannot be read")
        yield from super().load(log)

    def drop(self, log: LogName) -> None:
        self._answer()
        super().drop(log)

    def put_record(self, replica: str, record: bytes) -> None:
        self._answer()
        super().put_record(replica, record)
        self._wrote(replica, record)
        self._lose_answer()

    def get_record(self, replica: str) -> bytes | None:
        self._answer()
        return super().get_record(replica)

    def records(self) -> Iterator[tuple[str, bytes]]:
        self._answer()
        yield from super().records()

    def announce(self, service: str, lease_ms: int, lease: bytes = ALIVE) -> None:
        self._answer()
        super().announce(service, lease_ms, lease)

    def lease(self, service: str) -> bytes | None:
        self._answer()
        return super().lease(service)

    def _answer(self) -> None:
        if self.is_away(self._caller):
            raise StoreUnavailable("the store does not answer")

    def _lose_answer(self) -> None:
        if self._rng.random() < self.loses_answers:
            raise StoreUnavailable("the answer was lost")

    # -- what happens to it ------------------------------------------------------------------------------------------

    def back_up(self) -> None:
        """Save a copy."""
        self._backup = deepcopy((self.logs, self.records_by_name))

    def restore(self) -> None:
        """Restore the copy; empty if there is none."""
        self.damages += 1
        self.logs, self.records_by_name = deepcopy(self._backup)

    def empty(self) -> None:
        """An empty server answers instead."""
        self.damages += 1
        self.logs, self.records_by_name = {}, {}
        self.forget_leases()

    def forget_leases(self) -> None:
        """Drop all announcements of services."""
        self._leases.clear()

    def change_owner(self, replica: str, address: str) -> None:
        """Change the owner in a record."""
        raw = self.records_by_name.get(replica)
        try:
            record = unpack_record(raw) if raw else None
        except RecordRefused:
            return
        if record is not None:
            self.records_by_name[replica] = pack_record(replace(record, owner=address, released=False))

    def lose_tail(self) -> None:
        """Drop the last chunks of each log, as if they were never synced."""
        self.damages += 1
        for chunks in self.logs.values():
            for seq in sorted(chunks)[len(chunks) - self._rng.randint(0, len(chunks)) :]:
                del chunks[seq]

    def flip_bits(self) -> None:
        """Flip a bit in some chunks and records."""
        self.damages += 1
        for chunks in self.logs.values():
            for seq in self._rng.sample(sorted(chunks), min(2, len(chunks))):
                chunks[seq] = self._flipped(chunks[seq])
        for name in self._rng.sample(sorted(self.records_by_name), min(1, len(self.records_by_name))):
            self.records_by_name[name] = self._flipped(self.records_by_name[name])

    def reorder(self) -> None:
        """Swap the numbers of two chunks of each log."""
        self.damages += 1
        for chunks in self.logs.values():
            if len(chunks) > 1:
                one, other = self._rng.sample(sorted(chunks), 2)
                chunks[one], chunks[other] = chunks[other], chunks[one]

    def _flipped(self, raw: bytes) -> bytes:
        if not raw:
            return raw
        at = self._rng.randrange(len(raw))
        return raw[:at] + bytes([raw[at] ^ 1 << self._rng.randrange(8)]) + raw[at + 1 :]
