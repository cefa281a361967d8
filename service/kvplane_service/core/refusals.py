"""Remembered refusals of admissions, so that an engine can offer all its waiting requests in every step.

A refusal depends on the request, its row, its hit, which blocks of the hit are free, and the number of free blocks. It
is forgotten when a key that its look-up read is registered or removed, or when a block of its hit becomes free or held.
It is used only while fewer blocks are free than the admission needs. So the answer is always that of a new look-up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvplane.base.step import AdmitStatus
from kvplane_service.core.keys import Key

MOST_WATCHED = 512  # keys, and blocks, that a remembered refusal may depend on
MOST_WATCHED_OF_ALL = 1 << 18  # keys and blocks; above this all refusals are forgotten


class RowTerms(NamedTuple):
    """The row of an admission.

    Attributes:
        which: numbers of the columns that the section has.
        entries: of the row, in these columns.
        runs: whether some request runs, so that the watermark applies.
    """

    which: tuple[int, ...]
    entries: tuple[int, ...]
    runs: bool


class RequestVersion(NamedTuple):
    """The request of an admission, as it was at its refusal.

    Attributes:
        serial: number of its stay in the slot.
    """

    serial: int
    num_tokens: int
    num_digests: int


class Refusal(NamedTuple):
    """A refusal.

    Attributes:
        free_wanted: blocks that must be free for the admission.
        room: tokens of budget from which on the budget does not limit the row.
        hit_tokens, single_group_hit, status: the answer.
    """

    asked: RequestVersion
    row: RowTerms
    free_wanted: int
    room: int
    hit_tokens: int
    single_group_hit: int
    status: AdmitStatus


class Refusals:
    """The last refusal of each slot.

    Attributes:
        by_digest, by_block: slots whose refusals depend on the digest or block.
    """

    def __init__(self) -> None:
        self.by_digest: dict[bytes, set[int]] = {}
        self.by_block: dict[int, set[int]] = {}
        self._refused: dict[int, Refusal] = {}

    def find(self, slot: int) -> Refusal | None:
        """The last refusal of this slot, if its hit, and which blocks of that are free, have not changed."""
        return self._refused.get(slot)

    def note(self, slot: int, refused: Refusal, digests: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Remember a refusal that depends on these digests and blocks; not if these exceed MOST_WATCHED."""
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
        """These keys were registered or removed."""
        for key in keys:
            if key.digest in self.by_digest:
                self._forget(self.by_digest.pop(key.digest))

    def forget_blocks(self, blocks: Sequence[int]) -> None:
        """These blocks became free or held."""
        for block in self.by_block.keys() & blocks:
            self._forget(self.by_block.pop(block))

    def clear(self) -> None:
        """Forget all refusals: many keys were registered or removed at once."""
        for book in (self.by_digest, self.by_block, self._refused):
            book.clear()

    def _forget(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._refused.pop(slot, None)
