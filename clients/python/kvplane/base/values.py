"""What the fields of a step and of its result are made of: constants, enumerations, extra keys and cache events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from kvplane.base.groups import Medium
from kvplane.base.typed import check

UNLIMITED = 0xFFFFFFFF
ALL_GROUPS = 0xFFFFFFFFFFFFFFFF  # a bit for each group
ANY_HIT = -1
UNCHANGED = -1
MAX_LOOKAHEAD = 4096
MAX_NS = (1 << 62) - 1  # of a time
MAX_WITHIN_NS = 3600 * 1_000_000_000


class End(IntEnum):
    """How a request ended: the value of the column `end` of the facts section."""

    NONE = 0
    FREE = 1  # its blocks return to the pool, last one first, once step `fence` is executed
    HELD = 2  # it ended, but transfers use its blocks: they are held until `Cache.released` names the slot
    PREEMPTED = 3  # its blocks return as with FREE, but its tokens and hashes are kept: it can be admitted again


class OnRefusal(IntEnum):
    """What a section of a step does after a row for which too few blocks are free."""

    STOP = 0  # later rows of the section are not processed
    SKIP = 1  # continue with the next row
    PREEMPT = 2  # only for run rows: preempt victims until the row fits


class Watermark(IntEnum):
    """Whether an admission must leave free the number of blocks that is the replica's watermark."""

    AUTO = 0  # only while a request is running
    ALWAYS = 1
    NEVER = 2


class RowFlag(IntFlag):
    """The bits of the flags column of run and admit rows. Bit 1 is reserved and ignored.

    If the replica has an AlignSpec, prompt chunks end where recurrent states can be cached, unless UNALIGNED is set.
    """

    NONE = 0
    DELAY_CACHING = 2  # allocate now, register keys by a later commit (an external load is in progress)
    FULL_FIT = 4  # blocks for the whole sequence must be free, not only for this chunk
    WHOLE = 8  # only for admit rows: no chunking; a row that does not get all its tokens stops the section
    UNALIGNED = 16  # the chunk may end anywhere; a state that does not end at a block boundary is not cached
    LOAD = 32  # only for admit rows: the hit may include blocks that the replica's tiers have; they are loaded


class AdmitStatus(IntEnum):
    """The result of an admit row: whether the waiting request was admitted, and if not, why."""

    NOT_REACHED = 0  # the section ended before this row: by the budget, max_running, or an earlier refusal
    GRANTED = 1
    REFUSED = 2  # too few blocks are free; nothing was allocated
    DEFERRED = 3  # a step in flight writes the state that it hit, or a load writes its old pages; admit it later
    STALE_HIT = 4  # the hit is not `expected_hit`; `hit` is the current one
    NO_ROOM = 5  # the rest of the budget is too small for a WHOLE row or for an aligned chunk
    NEVER_FITS = 6  # it needs more blocks than the empty pool has
    NOT_WAITING = 7  # it is running, or ended as HELD; later rows are processed


class EventKind(IntEnum):
    """What a cache event reports."""

    STORED = 1
    REMOVED = 2
    CLEARED = 3


class RemoveReason(IntEnum):
    """Why a prefix cache key was removed from its block."""

    NONE = 0
    EVICTED = 1  # the block was allocated to another request
    DROPPED = 2  # EvictBlocks, or a failed load
    PROMOTED = 3  # replaced by a longer key of the same block
    WITHDRAWN = 4  # tentative key of a step that will not run
    UNVERIFIED = 5  # a new epoch could not prove that the page still has the content
    MOVED = 6  # the key moved to a copy of the page, as the next event reports
    LEFT_WINDOW = 7  # as EVICTED: left a request's window or was superseded, and the policy lets such go first


EVICTIONS = (RemoveReason.EVICTED, RemoveReason.LEFT_WINDOW)  # the block was allocated to another request


@dataclass(frozen=True, slots=True)
class Multimodal:
    """One multimodal item of a prompt; `offset` and `length` are in tokens."""

    identifier: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """The inputs of a request's block hashes other than its tokens.

    Attributes:
        lora: (name, path) of the LoRA adapter; in the hash of every block.
        salt: text that keeps blocks of requests with different salts apart; in the hash of the first block.
        multimodal: multimodal items, ordered by offset; each item is in the hashes of the blocks that the item
            overlaps.
        prompt_embeds: one digest per hash block, for prompts given as embeddings.
    """

    lora: tuple[str, str] | None = None
    salt: str = ""
    multimodal: tuple[Multimodal, ...] = ()
    prompt_embeds: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        """Raise InvalidArgument if lora is not a pair; a string of two letters would otherwise be unpacked as one."""
        check(self.lora, tuple[str, str] | None, "extra_keys.lora")


NO_EXTRA_KEYS = ExtraKeys()


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """One change of the prefix cache. Events are in the order of the changes.

    STORED: `hashes` were registered for the blocks of `group` that hold tokens [start, end) of the request in `slot`.
    Null blocks and blocks that the group does not keep are left out of `hashes` and `blocks`, but the range includes
    their tokens. `parent` is the hash of the tokens before `start`, b"" at 0. `block_size` is tokens per hash. REMOVED:
    one hash was removed, for `reason`. CLEARED: every key was removed, of the device and all tiers.

    STORED after a recovery from a store has keys of many requests, so no parent, slot and range, and no `block_starts`
    if the first tokens of the blocks are unknown. An event of a `tier` has none of these either; `blocks` are slots.
    """

    kind: EventKind
    group: int = 0
    hashes: Sequence[bytes] = ()
    blocks: Sequence[int] = ()
    domain: str = ""
    parent: bytes = b""
    block_size: int = 0
    slot: int = 0
    start: int = 0
    end: int = 0
    block_starts: Sequence[int] = ()  # STORED: first token of each hash's block
    reason: RemoveReason = RemoveReason.NONE
    tier: Medium = Medium.DEVICE
