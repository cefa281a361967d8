"""The order in which numbered entries were last used, and which of them were used last: for the ghosts of `hazard`."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

_Longs = npt.NDArray[np.int64]


class Recency:
    """Entries in the order of their last use.

    Attributes:
        recent: those used last, as many as the LRU ghost has places; the least recently used first.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._order: dict[int, None] = {}
        self.recent: dict[int, None] = {}

    def use(self, entries: Iterable[int]) -> None:
        """Use entries; the last one of them is used last."""
        for entry in entries:
            for used in (self._order, self.recent):
                used.pop(entry, None)
                used[entry] = None
        for entry in list(self.recent)[: max(0, len(self.recent) - self._places)]:
            del self.recent[entry]

    def hold(self, entries: Iterable[int]) -> None:
        """Take entries, which are used next, out of the order."""
        for entry in entries:
            self._order.pop(entry, None)

    def take_oldest(self, count: int) -> _Longs:
        """Take the entries that were used longest ago out of the order, and return them."""
        oldest = list(self._order)[:count]
        for entry in oldest:
            del self._order[entry]
            self.recent.pop(entry, None)
        return np.array(oldest, np.int64)

    def order(self) -> _Longs:
        """Return the entries, the least recently used first."""
        return np.array(list(self._order), np.int64)

    def are_recent(self, entries: _Longs) -> npt.NDArray[np.bool_]:
        """Return a mask: which of these entries are in the LRU ghost."""
        return np.array([entry in self.recent for entry in entries.tolist()], np.bool_)

    def load(self, count: int, num_recent: int) -> None:
        """Begin with entries 0 to `count` - 1, the least recently used first."""
        self._order = dict.fromkeys(range(count))
        self.recent = dict.fromkeys(range(count - num_recent, count))
