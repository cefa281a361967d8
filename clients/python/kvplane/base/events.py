"""A batch of cache events, as a subscriber receives it."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from kvplane.base.step import CacheEvent

KEY_BYTES = 16  # of a hash that make a key in digests and indexes


def domain_mask(name: str) -> int:
    """Return what distinguishes the keys of one request domain: requests of two domains share no block, though the
    hashes of their blocks are equal.
    """
    return int.from_bytes(blake2b(name.encode(), digest_size=KEY_BYTES).digest(), "big") if name else 0


@dataclass(frozen=True, slots=True)
class GroupDigest:
    """What the published keys of a group on the device have in common with those of a subscriber who missed nothing.

    Attributes:
        group: index of the group.
        keys: number of keys; a key of two blocks counts twice.
        sum: sum modulo 2^128 of the keys: of the last KEY_BYTES of each hash, big-endian, XOR `domain_mask`.
    """

    group: int
    keys: int
    sum: int


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The published cache events of one step of a replica.

    Attributes:
        seq: number of the batch; the next batch has `seq` + 1. To continue after a broken stream, subscribe with this
            number as `after_seq`.
        epoch: epoch of the step.
        events: the events, in the order in which they happened.
        gap: some batches before this one are lost; discard everything recorded of the replica.
        withdrawn: the replica's session expired; do not route requests by its cache entries until a batch with
            `restored`.
        restored: the session continues after it expired, and the replica's entries are valid again.
        digests: of the keys that the replica has after this batch, by group; () in most batches.
    """

    seq: int
    epoch: int
    events: tuple[CacheEvent, ...]
    gap: bool = False
    withdrawn: bool = False
    restored: bool = False
    digests: tuple[GroupDigest, ...] = ()
