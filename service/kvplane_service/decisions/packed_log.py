"""Logs whose entries are packed, under one budget of bytes.

    PackedLog   the last entries of one replica, bounded in number; the oldest go first
    LogBudget   bytes of all logs of a process: when they are used up, the longest log loses its oldest entries

An entry is appended as it is and becomes one byte string a moment later, beside the steps (`pack_beside`); where
nothing runs beside them, the step packs that finds too many waiting. A log that holds no more than its share, the
budget by the number of logs, loses nothing for the sake of others, and its newest entry stays in any case. Logs of one
budget belong to one thread.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from kvplane_service.runtime.slices import in_slices

# Of a packed entry, what is not in its bytes: the header of the object, and its place in the log.
_ENTRY_BYTES = 64
_MAX_WAITING = 8  # entries of a log that are not packed yet
_PAUSE_S = 0.01  # steps that come together are answered before what they leave is packed
_MAX_DROPS = 256  # at once; a large entry has room made for it by those behind it too
_SLACK = 8  # a log that pays loses the Nth part of itself before the longest is looked for again


class Sized(Protocol):
    """A packed entry that is no byte string, and knows how many bytes it stands for."""

    @property
    def num_bytes(self) -> int:
        """In memory, about."""
        ...


_Entry = TypeVar("_Entry")
_Packed = TypeVar("_Packed", bound=bytes | Sized)


class LogBudget:
    """Bytes that logs may have together.

    Attributes:
        used: by what is packed; above `max_bytes` only while no log can lose anything, or room is being made.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used = 0
        self._logs: dict[int, PackedLog[Any, Any]] = {}  # by id
        self._waiting: dict[int, PackedLog[Any, Any]] = {}  # those of them with something to pack
        self._is_waiting = asyncio.Event()
        self._payer: PackedLog[Any, Any] | None = None
        self._pays_until = 0  # bytes that it is left with

    def join(self, log: PackedLog[Any, Any]) -> None:
        """Count this log, which is empty, too."""
        self._logs[id(log)] = log

    def leave(self, log: PackedLog[Any, Any]) -> None:
        """Count it no longer; nothing when it is not counted."""
        if self._logs.pop(id(log), None) is not None:
            self.used -= log.num_bytes
            self._waiting.pop(id(log), None)
            self._payer = None

    def has_waiting(self, log: PackedLog[Any, Any]) -> None:
        """The log has something to pack."""
        if id(log) in self._logs:
            self._waiting[id(log)] = log
            self._is_waiting.set()

    def changed(self, log: PackedLog[Any, Any], num_bytes: int) -> None:
        """The log has so many bytes more; the longest one pays for what is too much."""
        if id(log) not in self._logs:
            return
        self.used += num_bytes
        if num_bytes > 0 and self.used > self.max_bytes:
            self._make_room()

    def pack(self) -> Iterator[None]:
        """Pack what waits; between two entries others may go on."""
        while self._waiting:
            key = next(iter(self._waiting))
            if not self._waiting[key].pack_oldest():
                self._waiting.pop(key, None)
            yield

    async def pack_beside(self) -> None:
        """Pack what waits, from now on, while the steps of others go on."""
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
                # Looked for after every Nth part of a log, since there may be thousands of them.
                payer = self._payer = max(self._logs.values(), key=attrgetter("spare_bytes"))
                self._pays_until = payer.spare_bytes - payer.spare_bytes // _SLACK - 1
            if not payer.spare_bytes:
                self._payer = None
                return
            payer.drop_oldest()
            if self.used <= self.max_bytes:
                return


class PackedLog(ABC, Generic[_Entry, _Packed]):
    """The last entries, at most `max_entries`, and what the budget leaves of them.

    Attributes:
        num_bytes: of all packed entries, about.
        spare_bytes: of those that may go: all but the newest entry.
        num_lost: entries that are no longer kept.
        lost_bytes: that these had.
    """

    def __init__(self, max_entries: int, budget: LogBudget) -> None:
        self._max_entries = max_entries
        self._budget = budget
        self._kept: deque[_Entry | _Packed] = deque()
        self._num_waiting = 0  # the newest, which are not packed
        self.num_bytes = self.spare_bytes = self.num_lost = self.lost_bytes = 0
        budget.join(self)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_entries(self) -> int:
        """That there were, those among them that are no longer kept."""
        return len(self._kept) + self.num_lost

    def pack_oldest(self) -> bool:
        """Pack the oldest entry that is not; whether there are more."""
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
        """Keep the oldest of at least two entries no longer."""
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
        """Nothing is appended from now on: what is kept belongs to those who still read it."""
        self._budget.leave(self)

    def _keep(self, entry: _Entry) -> None:
        """Append it, in place of the oldest ones when there is no room."""
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
        """Keep nothing, neither what is there nor the entry that comes now: a log has no holes."""
        self.num_lost += len(self._kept) + 1
        self.lost_bytes += self.num_bytes
        self._budget.changed(self, -self.num_bytes)
        self.num_bytes = self.spare_bytes = self._num_waiting = 0
        self._kept.clear()

    @abstractmethod
    def _pack(self, entry: _Entry) -> _Packed:
        """The entry packed."""

    def _dropped(self, entry: _Entry | _Packed) -> None:
        """An entry is no longer kept."""


def _size_of(entry: bytes | Sized) -> int:
    """Bytes that a packed entry takes in memory, about."""
    return _ENTRY_BYTES + (len(entry) if isinstance(entry, bytes) else entry.num_bytes)
