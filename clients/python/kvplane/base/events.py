"""A batch of cache events, as a subscriber receives it."""

from __future__ import annotations

from dataclasses import dataclass

from kvplane.base.step import CacheEvent


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The published cache events of one step of a replica.

    Attributes:
        seq: number of the batch; the next batch has `seq` + 1. To continue after a broken stream, subscribe with this
            number as `after_seq`.
        epoch: epoch of the step.
        events: the events, in the order in which they happened.
        gap: some batches before this one are lost; discard everything recorded of the replica.
        withdrawn: the replica's session lapsed; do not route requests by the replica's cache entries until a batch with
            `restored`.
        restored: the session continues after a lapse, and the replica's entries are valid again.
    """

    seq: int
    epoch: int
    events: tuple[CacheEvent, ...]
    gap: bool = False
    withdrawn: bool = False
    restored: bool = False
