"""The faults that an engine's event stream can have, by name; each is counted and none ends the stream.

What is unreadable must only lower a claim: a stored block that cannot be read is left out, and after a removal that
cannot be read the place is cleared, because any of its entries may have gone.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum


class Fault(Enum):
    """A fault of a frame, a batch, an event, or of the order of batches. The value is its label in metrics."""

    FRAME_COUNT = "frame_count"
    SEQUENCE_BYTES = "sequence_bytes"
    SEQUENCE_RANGE = "sequence_range"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    NOT_MSGPACK = "not_msgpack"
    BATCH_INVALID = "batch_invalid"
    EVENTS_INVALID = "events_invalid"
    TOO_MANY_EVENTS = "too_many_events"
    TIME_INVALID = "time_invalid"
    EVENT_UNKNOWN = "event_unknown"
    EVENT_UNTYPED = "event_untyped"
    EVENT_INVALID = "event_invalid"
    HASH_INVALID = "hash_invalid"
    HASH_CHANGED = "hash_changed"
    TOO_MANY_HASHES = "too_many_hashes"
    TOKENS_INVALID = "tokens_invalid"
    BLOCK_SIZE_INVALID = "block_size_invalid"
    ADAPTER_DIFFERS = "adapter_differs"
    GROUP_INVALID = "group_invalid"
    GROUP_CHANGED = "group_changed"
    KIND_UNKNOWN = "kind_unknown"
    WINDOW_INVALID = "window_invalid"
    MEDIUM_UNKNOWN = "medium_unknown"
    RANK_INVALID = "rank_invalid"
    RANK_CHANGED = "rank_changed"
    REMOVAL_UNKNOWN = "removal_unknown"
    TOO_MANY_ENTRIES = "too_many_entries"
    ENTRIES_DIFFER = "entries_differ"
    CLOCK_BACKWARDS = "clock_backwards"
    FRAME_REPEATED = "frame_repeated"
    FRAMES_LOST = "frames_lost"
    FRAMES_GONE = "frames_gone"
    LIFE_ENDED = "life_ended"
    SOURCES_MIXED = "sources_mixed"
    HITS_CONTRADICT = "hits_contradict"
    QUEUE_FULL = "queue_full"
    REPLAY_ORDER = "replay_order"
    REPLAY_TOO_LONG = "replay_too_long"
    REPLAY_TIMEOUT = "replay_timeout"
    TOPIC_FOREIGN = "topic_foreign"
    COSTS_TOO_MUCH = "costs_too_much"


class Faults:
    """Counts faults of one source by name."""

    def __init__(self) -> None:
        self.counts: Counter[Fault] = Counter()

    def count(self, fault: Fault, times: int = 1) -> None:
        """Count a fault `times` times."""
        if times:
            self.counts[fault] += times

    def __str__(self) -> str:
        return ", ".join(f"{fault.value} {times}" for fault, times in sorted(self.counts.items(), key=_by_name))


def _by_name(item: tuple[Fault, int]) -> str:
    return item[0].value
