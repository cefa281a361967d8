"""What a subscriber of cache events gets."""

from __future__ import annotations

from dataclasses import dataclass

from kvplane.base.step import CacheEvent


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The published events of one step of a replica.

    Attributes:
        seq: number of the batch, +1 each; subscribe again after it.
        epoch: engine life.
        events: in order.
        gap: batches before this one are lost; drop what is known of the replica.
        withdrawn: the replica lapsed; do not route by its entries until `restored`.
        restored: the replica is back and its entries hold.
    """

    seq: int
    epoch: int
    events: tuple[CacheEvent, ...]
    gap: bool = False
    withdrawn: bool = False
    restored: bool = False
