"""Cache events of an engine in one form, whatever the format in which they came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvplane.base.step import ExtraKeys

KEY_BYTES, WHOLE_KEY_BYTES = 8, 16  # of a key, where an engine states 64 bits of its hashes, or all
KEY_MASK = (1 << 64) - 1
MAX_HASHES = 1 << 17  # of one event: a prompt of two million tokens in blocks of 16
MAX_HASHES_OF_BATCH = 1 << 19
MAX_EVENTS = 1 << 16  # of one batch; vLLM states each evicted block in an event of its own
MAX_GROUP = 63
MAX_BLOCK_SIZE = 1 << 20
MAX_WINDOW = 1 << 30


class Tier(Enum):
    """The memory that holds a block."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


TIERS: dict[str, Tier] = {
    "gpu": Tier.DEVICE,
    "cpu": Tier.HOST,
    "cpu_pinned": Tier.HOST,
    "disk": Tier.DISK,
    "storage": Tier.DISK,
}


@dataclass(frozen=True, slots=True)
class GroupFormat:
    """What store events state of a KV cache group.

    Attributes:
        kind: vLLM's name of the kind of attention; "" if the engine does not state it.
        block_size: tokens per block; 0 if the event does not state it (placeholders of an offload tier).
        window: sliding window in tokens, or 0.
    """

    kind: str
    block_size: int
    window: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """The content of stored blocks, from which the domain of the keys is proven.

    Attributes:
        tokens: the tokens of the blocks, in order; more than `len(keys)` blocks of tokens for a sparse group.
        parent: key of the block before the first one; None at the start of a prompt.
        plain: whether nothing but tokens is in the hashes (no LoRA, image or salt).
        lookahead: tokens after each block that its hash covers.
        key_bytes: bytes of each key.
        extra: what else is in the hash of the first block: an adapter without its path, a salt; None if there is more.
    """

    tokens: Sequence[int]
    parent: int | None
    plain: bool
    lookahead: Sequence[Sequence[int]] = ()
    key_bytes: int = KEY_BYTES
    extra: ExtraKeys | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks were cached.

    Attributes:
        group: index of the group.
        tier: memory that has the blocks.
        keys: the ends of the engine's hashes.
        form: what the event states of the group.
        evidence: the content; None if the tokens were not decoded.
        key_bytes: bytes of each key: 8, or 16 where the engine states its hashes whole.
    """

    group: int
    tier: Tier
    keys: Sequence[int]
    form: GroupFormat
    evidence: Evidence | None = None
    key_bytes: int = KEY_BYTES


@dataclass(frozen=True, slots=True)
class Removed:
    """Copies of blocks were removed; a key that is in several blocks stays until each is removed."""

    group: int
    tier: Tier
    keys: Sequence[int]
    key_bytes: int = KEY_BYTES


@dataclass(frozen=True, slots=True)
class Cleared:
    """All blocks of the place were removed, or which ones remain is unknown."""


Event = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Batch:
    """The events of one message, in order.

    Attributes:
        time_s: the engine's clock when it published the batch.
        events: the events that could be read.
        rank: the data parallel rank that published it; None if not stated.
    """

    time_s: float
    events: Sequence[Event]
    rank: int | None = None
