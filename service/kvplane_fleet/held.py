"""How many blocks the prompts in flight of one place hold: what they share is held once.

A prompt waits until its blocks are free, however short the queue of computation is: a few long contexts fill a pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STRIDE = 8  # one key in this number stands for the others: prompts share what they begin with
MAX_KEYS = 1 << 17  # of all prompts of a place; a prompt beyond them shares nothing


@dataclass(frozen=True, slots=True)
class Share:
    """What a prompt takes.

    Attributes:
        keys: one in STRIDE of the keys of its hash blocks, from the first one on.
        blocks: of the prompt itself.
        further: blocks of the tokens that will be generated.
    """

    keys: Sequence[int]
    blocks: int
    further: int

    @property
    def of_each(self) -> float:
        """Blocks for which each key stands."""
        return self.blocks / len(self.keys) if self.keys else 0.0


NOTHING = Share((), 0, 0)


class Held:
    """The blocks of the prompts in flight of one place.

    Attributes:
        blocks: that they hold, or wait for.
    """

    def __init__(self) -> None:
        self.blocks = 0.0
        self._keys: dict[int, tuple[int, float]] = {}  # prompts that have it, and the blocks for which it stands
        self._prompts: dict[str, Share] = {}
        self._num_keys = 0  # of all prompts: those that share keys keep them too

    def wanted(self, share: Share) -> float:
        """Return the further blocks that a prompt takes. As prompts share what they begin with, its
        keys that are held are the first ones.
        """
        first, end = 0, len(share.keys)
        while first < end:
            middle = (first + end) // 2
            first, end = (middle + 1, end) if share.keys[middle] in self._keys else (first, middle)
        return share.further + share.blocks - share.of_each * first

    def add(self, name: str, share: Share) -> None:
        """A prompt was sent to the place."""
        if self._num_keys + len(share.keys) > MAX_KEYS:
            share = Share((), share.blocks, share.further)
        self._num_keys += len(share.keys)
        self._prompts[name] = share
        self.blocks += share.further + (0 if share.keys else share.blocks)
        for key in share.keys:
            users, stands_for = self._keys.get(key, (0, share.of_each))
            self.blocks += 0.0 if users else stands_for
            self._keys[key] = users + 1, stands_for

    def remove(self, name: str) -> None:
        """A prompt has ended."""
        share = self._prompts.pop(name, NOTHING)
        self._num_keys -= len(share.keys)
        self.blocks -= share.further + (0 if share.keys else share.blocks)
        for key in share.keys:
            users, stands_for = self._keys.pop(key)
            if users > 1:
                self._keys[key] = users - 1, stands_for
            else:
                self.blocks -= stands_for
        if not self._prompts:
            self.blocks = 0.0  # without what was rounded
