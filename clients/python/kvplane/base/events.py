"""Batches of cache events, as a subscriber receives them."""

from __future__ import annotations

from dataclasses import dataclass

from kvplane.base.step import CacheEvent


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The published events of one step of a replica.

    Attributes:
        seq: number of the batch, incremented by one; subscribe again after it.
        epoch: engine life.
        events: in order.
        gap: batches before this one are lost; discard everything recorded of the replica.
        withdrawn: the replica's session lapsed; do not route by its entries until `restored`.
        restored: the session is back, and its entries are valid.
    """

    seq: int
    epoch: int
    events: tuple[CacheEvent, ...]
    gap: bool = False
    withdrawn: bool = False
    restored: bool = False
