"""How often what an engine evicted is asked for again: of a sample of the removed keys, those that a later prompt has.

The share is the price of an eviction: content that is never asked for again costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

SAMPLE = 32  # one key in this number, by its value, so that removal and prompt choose the same
MOST = 1 << 14  # sampled keys that are remembered
_PRIOR, _PRIOR_KEYS = 0.2, 16.0
_HALVED_AT = 4096.0


class Returns:
    """Samples the removed keys of one place."""

    def __init__(self) -> None:
        self._gone: dict[int, None] = {}  # in the order of their removal
        self._returned = self._removed = 0.0

    @property
    def share(self) -> float:
        """Part of what was removed that a later prompt had, recent removals counting more."""
        return min(1.0, (self._returned + _PRIOR * _PRIOR_KEYS) / (self._removed + _PRIOR_KEYS))

    def removed(self, keys: Sequence[int]) -> None:
        """Take note of removed keys."""
        for key in sample(keys):
            if key not in self._gone:
                self._gone[key] = None
                self._removed += 1
        while len(self._gone) > MOST:
            del self._gone[next(iter(self._gone))]
        if self._removed > _HALVED_AT:
            self._removed, self._returned = self._removed / 2, self._returned / 2

    def asked(self, sampled: Sequence[int]) -> None:
        """Take note of the sampled keys of a prompt, wherever it is sent: it may be elsewhere because they are gone."""
        if not self._gone:
            return
        for key in sampled:
            if key in self._gone:
                del self._gone[key]
                self._returned += 1


def sample(keys: Sequence[int]) -> list[int]:
    """Return the sampled keys, cut to 64 bits: of longer integers an engine could choose many with equal hashes."""
    return [key % (1 << 64) for key in keys if key % SAMPLE == 0]
