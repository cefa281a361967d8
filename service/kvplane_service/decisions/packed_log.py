"""Logs with packed entries under one memory budget.

    PackedLog   the last entries of one replica, bounded in number; the oldest are dropped first
    LogBudget   memory of all logs of a process: when it is used up, the longest log loses its oldest entries

An entry is appended as objects and packed later by a background task (`pack_in_background`). Without that task, the
step that finds too many unpacked entries packs them. A log within its equal share of the budget loses nothing to other
logs, and its newest entry is never dropped. Use all logs of one budget from one thread.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from kvplane_service.runtime.slices import in_slices

# Overhead of a packed entry: the object header and its slot in the log.
_ENTRY_BYTES = 64
_MAX_WAITING = 8  # unpacked entries of a log
_PAUSE_S = 0.01  # so that a burst of steps is answered before its entries are packed
_MAX_DROPS = 256  # per call; further room for a large entry is made by the following calls
_SLACK = 8  # a log loses 1/N of its size before the longest log is searched again


class Sized(Protocol):
    """A packed entry that is not a byte string and reports its size."""

    @property
    def num_bytes(self) -> int:
        """Approximate size in memory."""
        ...


_Entry = TypeVar("_Entry")
_Packed = TypeVar("_Packed", bound=bytes | Sized)


class LogBudget:
    """The memory budget of a set of logs.

    Attributes:
        used: bytes of packed entries; exceeds `max_bytes` only while no log can drop anything, or room is being made.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used = 0
        self._logs: dict[int, PackedLog[Any, Any]] = {}  # by id
        self._waiting: dict[int, PackedLog[Any, Any]] = {}  # those with unpacked entries
        self._is_waiting = asyncio.Event()
        self._payer: PackedLog[Any, Any] | None = None
        self._pays_until = 0  # size down to which the payer is reduced

    def join(self, log: PackedLog[Any, Any]) -> None:
        """Add an empty log."""
        self._logs[id(log)] = log

    def leave(self, log: PackedLog[Any, Any]) -> None:
        """Remove a log; does nothing when it is not in the budget."""
        if self._logs.pop(id(log), None) is not None:
            self.used -= log.num_bytes
            self._waiting.pop(id(log), None)
            self._payer = None

    def has_waiting(self, log: PackedLog[Any, Any]) -> None:
        """Note that the log has entries to pack."""
        if id(log) in self._logs:
            self._waiting[id(log)] = log
            self._is_waiting.set()

    def changed(self, log: PackedLog[Any, Any], num_bytes: int) -> None:
        """Note that the size of the log changed by `num_bytes`; the longest log drops entries when the budget
        is exceeded.
        """
        if id(log) not in self._logs:
            return
        self.used += num_bytes
        if num_bytes > 0 and self.used > self.max_bytes:
            self._make_room()

    def pack(self) -> Iterator[None]:
        """Pack the waiting entries, and yield after each."""
        while self._waiting:
            key = next(iter(self._waiting))
            if not self._waiting[key].pack_oldest():
                self._waiting.pop(key, None)
            yield

    async def pack_in_background(self) -> None:
        """Pack entries as they arrive, until cancelled, in slices of the event loop."""
        while True:
            await self._is_waiting.wait()
            await asyncio.sleep(_PAUSE_S)
            self._is_waiting.clear()
            async for _ in in_slices(self.pack()):
                pass

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
    """The last entries, at most `max_entries` and within the budget.

    Attributes:
        num_bytes: approximate size of all packed entries.
        spare_bytes: of those that may be dropped: all but the newest entry.
        num_lost: number of dropped entries.
        lost_bytes: their size.
    """

    def __init__(self, max_entries: int, budget: LogBudget) -> None:
        self._max_entries = max_entries
        self._budget = budget
        self._kept: deque[_Entry | _Packed] = deque()
        self._num_waiting = 0  # the newest entries, not packed yet
        self.num_bytes = self.spare_bytes = self.num_lost = self.lost_bytes = 0
        budget.join(self)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_entries(self) -> int:
        """Number of entries ever appended, including dropped ones."""
        return len(self._kept) + self.num_lost

    def pack_oldest(self) -> bool:
        """Pack the oldest unpacked entry. Returns whether there are more."""
        if not self._num_waiting:
            return False
        at = -self._num_waiting
        entry = self._kept[at]
        packed = self._kept[at] = self._pack(entry)  # type: ignore[arg-type]
        num_bytes = _size_of(packed)
        self._num_waiting -= 1
        self.num_bytes += num_bytes
        self.spare_bytes = self.num_bytes if self._num_waiting else self.num_bytes - num_bytes
        self._budget.changed(self, num_bytes)
        return self._num_waiting > 0

    def drop_oldest(self) -> None:
        """Drop the oldest of at least two entries."""
        oldest = self._kept.popleft()
        if len(self._kept) < self._num_waiting:
            self._num_waiting -= 1
        else:
            num_bytes = _size_of(oldest)  # type: ignore[arg-type]
            self.num_bytes -= num_bytes
            self.spare_bytes -= num_bytes
            self.lost_bytes += num_bytes
            self._budget.changed(self, -num_bytes)
        self.num_lost += 1
        self._dropped(oldest)

    def leave_budget(self) -> None:
        """Leave the budget: nothing is appended any more, and remaining readers keep the entries."""
        self._budget.leave(self)

    def _keep(self, entry: _Entry) -> None:
        """Append an entry, and drop the oldest ones when there is no room."""
        self._kept.append(entry)
        self._num_waiting += 1
        self.spare_bytes = self.num_bytes
        if len(self._kept) > self._max_entries:
            self.drop_oldest()
        if self._num_waiting == 1:
            self._budget.has_waiting(self)
        elif self._num_waiting > _MAX_WAITING:
            self.pack_oldest()

    def _lose(self) -> None:
        """Drop all entries and the one being appended, because a log must not have gaps."""
        self.num_lost += len(self._kept) + 1
        self.lost_bytes += self.num_bytes
        self._budget.changed(self, -self.num_bytes)
        self.num_bytes = self.spare_bytes = self._num_waiting = 0
        self._kept.clear()

    @abstractmethod
    def _pack(self, entry: _Entry) -> _Packed:
        """The entry packed."""

    def _dropped(self, entry: _Entry | _Packed) -> None:
        """Called when an entry was dropped."""


def _size_of(entry: bytes | Sized) -> int:
    """Approximate size of a packed entry in memory."""
    return _ENTRY_BYTES + (len(entry) if isinstance(entry, bytes) else entry.num_bytes)
