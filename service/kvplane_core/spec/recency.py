"""The order in which numbered entries were last used, and which of them were used last: for the ghosts of `hazard`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class Recency:
    """The entries of a table in the order of their last use, in columns: the queue has a row per use, and of an entry
    the last row counts.

    Attributes:
        recent: by entry, whether it is among those used last, as many as the LRU ghost has places.
    """

    def __init__(self, size: int, recent: int) -> None:
        """`size`: number of entries, `recent`: number of places of the LRU ghost."""
        self._places, self._num_recent = recent, 0
        self.recent = np.zeros(size, np.bool_)
        self._row = np.full(size, -1, np.int64)
        self._queue = np.zeros(4 * size, np.int64)
        self._oldest = self._first_recent = self._end = 0

    def use(self, entries: npt.NDArray[np.int64]) -> None:
        """Use entries, at most half of all, each once; the last one of them is used last."""
        if self._end + len(entries) > len(self._queue):
            self._compact()
        start, self._end = self._end, self._end + len(entries)
        self._queue[start : self._end] = entries
        self._row[entries] = np.arange(start, self._end)
        self._num_recent += len(entries) - int(np.count_nonzero(self.recent[entries]))
        self.recent[entries] = True
        while self._num_recent > self._places:
            found, self._first_recent = self._next(self._first_recent, self._num_recent - self._places)
            self.recent[found] = False
            self._num_recent -= len(found)

    def hold(self, entries: npt.NDArray[np.int64]) -> None:
        """Take entries, which are used next, out of the order."""
        self._row[entries] = -1

    def take_oldest(self, count: int) -> npt.NDArray[np.int64]:
        """Take the entries that were used longest ago out of the order, and return them."""
        taken = [np.zeros(0, np.int64)]
        while count:
            found, self._oldest = self._next(self._oldest, count)
            taken.append(found)
            count -= len(found)
        entries: npt.NDArray[np.int64] = np.concatenate(taken)
        self._row[entries] = -1
        self._num_recent -= int(np.count_nonzero(self.recent[entries]))
        self.recent[entries] = False
        return entries

    def _next(self, start: int, count: int) -> tuple[npt.NDArray[np.int64], int]:
        """Return at most `count` entries from a row of the queue on, and the row behind them."""
        rows = np.arange(start, min(start + 2 * count + 64, self._end))
        rows = rows[self._row[self._queue[rows]] == rows]
        if len(rows) >= count:
            return self._queue[rows[:count]], int(rows[count - 1]) + 1
        return self._queue[rows], min(start + 2 * count + 64, self._end)

    def _compact(self) -> None:
        """Move the rows that count to the beginning of the queue; entries that are held keep their places."""
        entries = self.order()
        self._row[entries] = np.arange(len(entries))
        self._queue[: len(entries)] = entries
        num_others = len(entries) - int(np.count_nonzero(self.recent[entries]))
        self._oldest, self._first_recent, self._end = 0, num_others, len(entries)

    def order(self) -> npt.NDArray[np.int64]:
        """Return the entries, the least recently used first."""
        rows = np.arange(self._oldest, self._end)
        entries: npt.NDArray[np.int64] = self._queue[rows[self._row[self._queue[rows]] == rows]]
        return entries

    def load(self, entries: npt.NDArray[np.int64], num_recent: int) -> None:
        """Begin with these entries, the least recently used first."""
        self._row[:] = -1
        self._row[entries] = np.arange(len(entries))
        self._queue[: len(entries)] = entries
        self._oldest, self._first_recent, self._end = 0, len(entries) - num_recent, len(entries)
        self.recent[:] = False
        self.recent[entries[self._first_recent :]] = True
        self._num_recent = num_recent

    @property
    def num_recent(self) -> int:
        """Number of entries in the LRU ghost."""
        return self._num_recent
