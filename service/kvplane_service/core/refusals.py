"""Admissions that were refused, and would be again as long as nothing that they depend on has changed.

An engine that offers all its waiting requests in every step asks the same thousands of questions each time. A refusal
follows from the request, its row, its hit, which blocks of that are free, and how many blocks are free in all. So it is
kept until one of the keys that its look-up asked for comes or goes, or a block of its hit is given back or taken; and
used while fewer blocks are free than it wants. It changes no decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvplane.base.step import AdmitStatus
from kvplane_service.core.keys import Key

MOST_WATCHED = 512  # keys, and blocks, that a refusal may depend on; a longer look-up is done again
MOST_WATCHED_OF_ALL = 1 << 18  # beyond, all is forgotten


class Row(NamedTuple):
    """What an admission asks for, beside its request.

    Attributes:
        which: columns that are there, by number.
        entries: the row's, in these.
        runs: some request runs, so that the watermark counts.
    """

    which: tuple[int, ...]
    entries: tuple[int, ...]
    runs: bool


class Asked(NamedTuple):
    """A request, as it asked.

    Attributes:
        serial: of its stay in the slot.
    """

    serial: int
    num_tokens: int
    num_digests: int


class Refused(NamedTuple):
    """A refusal.

    Attributes:
        free_wanted: blocks that would have to be free.
        room: tokens of a budget that does not limit the row.
        hit_tokens, single_group_hit, status: the answer.
    """

    asked: Asked
    row: Row
    free_wanted: int
    room: int
    hit_tokens: int
    single_group_hit: int
    status: AdmitStatus


class Refusals:
    """By slot.

    Attributes:
        by_digest, by_block: slots whose refusals depend on it.
    """

    def __init__(self) -> None:
        self.by_digest: dict[bytes, set[int]] = {}
        self.by_block: dict[int, set[int]] = {}
        self._refused: dict[int, Refused] = {}

    def find(self, slot: int) -> Refused | None:
        """The last refusal of this slot, if its hit is still the same, and the same of its blocks are free."""
        return self._refused.get(slot)

    def note(self, slot: int, refused: Refused, digests: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Remember a refusal that depends on these keys and on which of these blocks are free, unless they are many."""
        if len(digests) > MOST_WATCHED or len(blocks) > MOST_WATCHED:
            return
        self._refused[slot] = refused
        for digest in digests:
            self.by_digest.setdefault(digest, set()).add(slot)
        for block in blocks:
            self.by_block.setdefault(block, set()).add(slot)
        if len(self.by_digest) + len(self.by_block) > MOST_WATCHED_OF_ALL:
            self.clear()

    def forget_keys(self, keys: Iterable[Key]) -> None:
        """These keys came to a block or left one."""
        for key in keys:
            if key.digest in self.by_digest:
                self._forget(self.by_digest.pop(key.digest))

    def forget_blocks(self, blocks: Sequence[int]) -> None:
        """These blocks are free now, or no longer are."""
        for block in self.by_block.keys() & blocks:
            self._forget(self.by_block.pop(block))

    def clear(self) -> None:
        """Many keys came or went at once."""
        for book in (self.by_digest, self.by_block, self._refused):
            book.clear()

    def _forget(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._refused.pop(slot, None)
