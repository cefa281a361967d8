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
NO_REQUEST = (1 << 32) - 1  # in `Prefetch.slot`: the row gives the hashes of a prompt
MAX_PRIORITY = 100  # of a retained prefix
MAX_RETAINED = 1024  # prefixes of one replica
MAX_RETAINED_PER_BLOCK = 8  # their blocks, each counted once per prefix, per block of the pool and slot that retains
MAX_RETAINED_NS = 7 * 24 * 3600 * 1_000_000_000  # from `Retain.now_ns` to an end
MAX_OWNER_CHARS = 256


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


class WhyDeclined(IntEnum):
    """Why the hit of an admission in the tiers, longer than what the admission got, is not loaded."""

    TOO_SLOW = 1  # to load it takes longer than to compute it
    NO_JOB = 2  # too many jobs are in flight
    WAITS = 3  # the row is deferred: loads in flight load a part of the hit, or leave no room for another one
    GIVEN_UP = 4  # the same, but no request waits any more for these loads, so that they may never end


class PrefetchOutcome(IntEnum):
    """What became of a row of `prefetch`, which copies a prompt's hit nearer before the prompt is admitted."""

    ALL = 0  # everything that was missing in the first tier is being copied, or nothing was
    TOO_LATE = 1  # it would take longer than `within_ns`, so nothing is copied
    TOO_MANY = 2  # a part is copied: as much as may be in flight, or as the first tier can hold without a loss


class RetainOutcome(IntEnum):
    """What became of a row of `retain`, which has a cached prefix evicted after all others, until a time."""

    RETAINED = 0  # what is cached of the prefix is retained; nothing if nothing is
    RELEASED = 1  # it is not retained for this owner any more, or was not
    OVER_BUDGET = 2  # of the pool `left` blocks are left for the owner, fewer than the row needs
    TOO_MANY = 3  # MAX_RETAINED prefixes are retained, or MAX_RETAINED_PER_BLOCK is reached
    OTHER_OWNER = 4  # a release of what is retained for others alone
    OVER_HOST_BUDGET = 5  # as OVER_BUDGET, of the host tier
    OVER_DISK_BUDGET = 6  # as OVER_BUDGET, of the disk


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
