"""Logs with packed entries (each one byte string) that share one memory budget.

    PackedLog   the last entries of one replica, bounded in number; the oldest are dropped first
    LogBudget   memory of all logs of a process: when it is used up, the longest log drops its oldest entries

An entry is appended as objects and packed later by a background task (`pack_in_background`), a long one in pieces.
Without that task, the append that finds too many unpacked entries packs the oldest one. Readers get an entry as objects
until all of it is packed. A log that is not larger than an equal share of the budget loses nothing to other logs, and
its newest entry is never dropped. All logs of one budget must be used from one thread.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from kvplane_service.runtime.slices import in_slices

# Overhead of a packed entry: the object header and its slot in the log.
_ENTRY_BYTES = 64
MAX_WAITING = 8  # unpacked entries that a log may have
_PAUSE_S = 0.01  # so that a burst of steps is answered before its entries are packed
_MAX_DROPS = 256  # entries dropped per call; the following calls drop more if a large entry needs it
_SLACK = 8  # the longest log drops 1/8 of its size before the longest log is searched again


class Sized(Protocol):
    """A packed log entry that is an object instead of a byte string, and reports its own size."""

    @property
    def num_bytes(self) -> int:
        """Approximate size in memory, in bytes."""


_Entry = TypeVar("_Entry")
_Packed = TypeVar("_Packed", bound=bytes | Sized)


class LogBudget:
    """The memory budget that a set of logs shares.

    Attributes:
        max_bytes: the budget.
        used: bytes of all packed entries. The size exceeds `max_bytes` only while no log can drop anything, or while
            entries are being dropped.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used = 0
        self._logs: dict[int, PackedLog[Any, Any]] = {}  # by id
        self._waiting: dict[int, PackedLog[Any, Any]] = {}  # those with unpacked entries
        self._is_waiting = asyncio.Event()
        self._payer: PackedLog[Any, Any] | None = None
        self._pays_until = 0  # size at which the payer (the log that drops entries) is chosen again

    def join(self, log: PackedLog[Any, Any]) -> None:
        """Add an empty log to the logs that share this memory budget."""
        self._logs[id(log)] = log

    def leave(self, log: PackedLog[Any, Any]) -> None:
        """Remove a log from the budget; do nothing if it is not in the budget."""
        if self._logs.pop(id(log), None) is not None:
            self.used -= log.num_bytes
            self._waiting.pop(id(log), None)
            self._payer = None

    def has_waiting(self, log: PackedLog[Any, Any]) -> None:
        """Record that the log has entries to pack, and wake the background task."""
        if id(log) in self._logs:
            self._waiting[id(log)] = log
            self._is_waiting.set()

    def changed(self, log: PackedLog[Any, Any], num_bytes: int) -> None:
        """Add `num_bytes` (may be negative) to the used size. If the budget is exceeded, the longest log drops its
        oldest entries.
        """
        if id(log) not in self._logs:
            return
        self.used += num_bytes
        if num_bytes > 0 and self.used > self.max_bytes:
            self._make_room()

    def pack(self) -> Iterator[None]:
        """Pack the unpacked entries of all logs, and yield after each piece."""
        while self._waiting:
            key = next(iter(self._waiting))
            if not self._waiting[key].pack_oldest():
                self._waiting.pop(key, None)
            yield

    async def pack_in_background(self) -> None:
        """Pack entries as they arrive, until cancelled. Runs in slices of the event loop, so that other tasks run in
        between.
        """
        while True:
            await self._is_waiting.wait()
            await asyncio.sleep(_PAUSE_S)
            async for _ in in_slices(self.pack()):
                pass
            self._is_waiting.clear()  # not before: a task that follows a cancelled one packs the remaining entries

    def _make_room(self) -> None:
        for _ in range(_MAX_DROPS):
            payer = self._payer
            if payer is None or payer.spare_bytes <= self._pays_until:
                # The search is repeated only after 1/N of a log was dropped, because there may be thousands of logs.
                payer = self._payer = max(self._logs.values(), key=attrgetter("spare_bytes"))
                self._pays_until = payer.spare_bytes - payer.spare_bytes // _SLACK - 1
            if not payer.spare_bytes:
                self._payer = None
                return
            payer.drop_oldest()
            if self.used <= self.max_bytes:
                return


class PackedLog(ABC, Generic[_Entry, _Packed]):
    """The last entries of one replica, at most `max_entries` and within the memory budget.

    Attributes:
        num_bytes: approximate size of all packed entries.
        spare_bytes: size of the packed entries that may be dropped, which are all but the newest entry.
        num_lost: number of dropped entries.
        lost_bytes: size of the dropped entries.
    """

    def __init__(self, max_entries: int, budget: LogBudget) -> None:
        self._max_entries = max_entries
        self._budget = budget
        self._kept: deque[_Entry | _Packed] = deque()
        self._num_waiting = 0  # the newest entries, not packed yet
        self._packing: Generator[None, None, _Packed] | None = None  # of the oldest of them, if it has begun
        self.num_bytes = self.spare_bytes = self.num_lost = self.lost_bytes = 0
        budget.join(self)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_entries(self) -> int:
        """Number of entries ever appended, including dropped ones."""
        return len(self._kept) + self.num_lost

    def pack_oldest(self) -> bool:
        """Pack a piece of the oldest unpacked entry, which is all of a short entry. Returns True if there is more to
        pack.
        """
        if not self._num_waiting:
            return False
        at = -self._num_waiting
        if not isinstance(self._kept[at], bytes):
            # It is set again only after it yielded, so an entry whose packing failed is packed from its start.
            packing, self._packing = self._packing or self._pack(self._kept[at]), None  # type: ignore[arg-type]
            try:
                next(packing)
            except StopIteration as ended:
                self._kept[at] = ended.value
            else:
                self._packing = packing
                return True
        while True:  # also the entries behind it that were packed when they came
            self._num_waiting -= 1
            self._count(_size_of(self._kept[-self._num_waiting - 1]))  # type: ignore[arg-type]
            if not self._num_waiting or not isinstance(self._kept[-self._num_waiting], bytes):
                return self._num_waiting > 0

    def drop_oldest(self) -> None:
        """Drop the oldest entry; the log must have at least two."""
        oldest = self._kept.popleft()
        if len(self._kept) < self._num_waiting:
            self._num_waiting -= 1
            self._packing = None  # the dropped entry was the oldest unpacked one
        else:
            num_bytes = _size_of(oldest)  # type: ignore[arg-type]
            self.num_bytes -= num_bytes
            self.spare_bytes -= num_bytes
            self.lost_bytes += num_bytes
            self._budget.changed(self, -num_bytes)
        self.num_lost += 1
        self._dropped(oldest)

    def leave_budget(self) -> None:
        """Leave the shared memory budget when the log ends. No entry may be appended afterwards; readers that still
        hold the log can read it.
        """
        self._budget.leave(self)

    def _keep(self, entry: _Entry | _Packed) -> None:
        """Append an entry, packed already or not, and drop the oldest entries if there is no room."""
        self._kept.append(entry)
        if isinstance(entry, bytes) and not self._num_waiting:
            self._count(len(entry) + _ENTRY_BYTES)
            if len(self._kept) > self._max_entries:
                self.drop_oldest()
            return
        self._num_waiting += 1
        self.spare_bytes = self.num_bytes
        if len(self._kept) > self._max_entries:
            self.drop_oldest()
        if self._num_waiting == 1:
            self._budget.has_waiting(self)
        while self._num_waiting > MAX_WAITING:
            self.pack_oldest()

    def _count(self, num_bytes: int) -> None:
        """Count the entry that was packed last: the newest one, unless others wait behind it."""
        self.num_bytes += num_bytes
        self.spare_bytes = self.num_bytes if self._num_waiting else self.num_bytes - num_bytes
        self._budget.changed(self, num_bytes)

    def _lose(self) -> None:
        """Drop all entries and do not append the current one, which is too large to pack. The older entries are dropped
        too, because a log must not have gaps.
        """
        self.num_lost += len(self._kept) + 1
        self.lost_bytes += self.num_bytes
        self._budget.changed(self, -self.num_bytes)
        self.num_bytes = self.spare_bytes = self._num_waiting = 0
        self._packing = None
        self._kept.clear()

    @abstractmethod
    def _pack(self, entry: _Entry) -> Generator[None, None, _Packed]:
        """Return the packed form of an entry, and yield between pieces of it."""

    def _dropped(self, entry: _Entry | _Packed) -> None:
        """Do nothing; subclasses override this method to learn that an entry was dropped."""


def _size_of(entry: bytes | Sized) -> int:
    """Return the approximate size of a packed log entry in memory, in bytes."""
    return _ENTRY_BYTES + (len(entry) if isinstance(entry, bytes) else entry.num_bytes)
