"""Stores refusals of admissions, so that an engine can offer all its waiting requests in every step at low cost.

A refusal depends on the request, its row in the step, its hit, which blocks of the hit are free, and the number of free
blocks. A stored refusal is dropped when a key that its look-up read is registered or removed, or when a block of its
hit becomes free or held. It answers a row only while the pool has fewer free blocks than the admission needs. So the
answer equals that of a new look-up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvplane.base.sections import AdmitRow
from kvplane.base.step import AdmitStatus
from kvplane_service.core.keys import Key

if TYPE_CHECKING:
    from kvplane_service.core.interface import Hit

MOST_WATCHED = 512  # most keys, and most blocks, that a stored refusal may depend on
MOST_WATCHED_OF_ALL = 1 << 18  # keys and blocks of all refusals; above this all refusals are dropped


class RequestVersion(NamedTuple):
    """The state of a request when its admission was refused.

    Attributes:
        serial: number of uses of the slot, so that a later request in the same slot has another value.
        num_tokens: tokens of the request.
        num_digests: block hashes of the request.
    """

    serial: int
    num_tokens: int
    num_digests: int


class Refusal(NamedTuple):
    """A refused admission, and the conditions under which it would be refused again.

    Attributes:
        asked: state of the request when it was refused.
        row: what the engine sent.
        runs: whether any request was running, so that the watermark applied.
        free_wanted: number of blocks that must be free for the admission.
        room: the row does not depend on the budget if the budget has at least this number of tokens.
        hit: what the look-up found.
        status: the answer to the row.
    """

    asked: RequestVersion
    row: AdmitRow
    runs: bool
    free_wanted: int
    room: int
    hit: Hit
    status: AdmitStatus

    def finds(self, limit: int, asked: tuple[int, int, int]) -> bool:
        """Whether `hit` answers a look-up with this limit for a request in this state (a `RequestVersion`)."""
        return self.row.hit_limit == limit and self.asked == asked


class Refusals:
    """The last refusal of each slot, until it is dropped.

    Attributes:
        by_digest: by digest of a key, the slots whose refusals change if this key is registered or removed.
        by_block: by block, the slots whose refusals change if this block becomes free or held.
    """

    def __init__(self) -> None:
        self.by_digest: dict[bytes, set[int]] = {}
        self.by_block: dict[int, set[int]] = {}
        self._refused: dict[int, Refusal] = {}

    def find(self, slot: int) -> Refusal | None:
        """Return the last refusal of this slot; None if there is none, or if it was dropped."""
        return self._refused.get(slot)

    def note(self, slot: int, refused: Refusal, digests: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Store a refusal that depends on these digests and blocks; does nothing if there are more than MOST_WATCHED of
        either.
        """
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
        """Drop the refusals that depend on these keys, which were registered or removed."""
        for _, _, digest in keys:
            if digest in self.by_digest:
                self._forget(self.by_digest.pop(digest))

    def forget_blocks(self, blocks: Sequence[int]) -> None:
        """Drop the refusals that depend on these blocks, which became free or held."""
        for block in self.by_block.keys() & blocks:
            self._forget(self.by_block.pop(block))

    def clear(self) -> None:
        """Drop all refusals, because many keys were registered or removed at once."""
        for book in (self.by_digest, self.by_block, self._refused):
            book.clear()

    def _forget(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._refused.pop(slot, None)
