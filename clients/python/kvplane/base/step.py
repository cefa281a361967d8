"""A step as rows in columns, and its answer.

One scheduler iteration of an engine is one Step: what happened, which requests are new, and what to run, in the order
of the engine's priorities. A part is applied in the order facts -> cache -> news -> resume -> run -> admit -> peek,
each section in row order, and each row is complete before the next. So a step has the same result whether it is sent
whole or one row per part. Only `resume` is applied as a whole, before any other row of an engine life runs.

A column is a list with one entry per row, or empty when every row has the default named in its comment. On the wire a
column is little-endian packed u32 (i32 if it may be negative, u64 where noted); see `kvplane.wire`.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag

from kvplane.base.typed import check

STEP_VERSION = 2  # of the meaning of columns; version 1 aligned only rows with flag bit 1
UNLIMITED = 0xFFFFFFFF
ANY_HIT = -1
UNCHANGED = -1


class End(IntEnum):
    """How a request ended, in a facts row."""

    NONE = 0
    FREE = 1  # blocks return to the pool, tail first (after `fence`)
    HELD = 2  # the request ended, its blocks stay until `Cache.released` names the slot (transfers)
    PREEMPTED = 3  # as FREE, but tokens and hashes are kept: the slot can be admitted again


class OnRefusal(IntEnum):
    """What a section does when a row gets no blocks."""

    STOP = 0  # later rows of the section are not processed
    SKIP = 1  # continue with the next row
    PREEMPT = 2  # run only: preempt victims until the row fits


class Watermark(IntEnum):
    """Whether an admission leaves the replica's watermark of blocks free."""

    AUTO = 0  # when a request is running
    ALWAYS = 1
    NEVER = 2


class RowFlag(IntFlag):
    """Bits of the flags column of run and admit rows. Bit 1 is reserved and ignored.

    With an AlignSpec, chunks of prompts end where recurrent states can be cached.
    """

    NONE = 0
    DELAY_CACHING = 2  # allocate now, register keys by a later commit (an external load is in progress)
    FULL_FIT = 4  # admit: the whole sequence must fit, not only this chunk
    WHOLE = 8  # admit: no chunking; a row that does not get all its tokens stops the section
    UNALIGNED = 16  # the chunk may end anywhere; a state that does not end at a block boundary is not cached


class AdmitStatus(IntEnum):
    """The outcome of an admit row."""

    NOT_REACHED = 0  # the section ended before: budget, max_running, or an earlier refusal
    GRANTED = 1
    REFUSED = 2  # out of blocks; nothing was allocated
    DEFERRED = 3  # its hit is a state in flight, or a load still writes its old pages; admit it again later
    STALE_HIT = 4  # the hit is not `expected_hit`; `hit` is the current one
    NO_ROOM = 5  # the remaining budget does not suffice (WHOLE rows and aligned chunks of 0 tokens)
    NEVER_FITS = 6  # it needs more blocks than the empty pool has
    NOT_WAITING = 7  # it is running, or ended as HELD; later rows are processed


class EventKind(IntEnum):
    """Kinds of cache events."""

    STORED = 1
    REMOVED = 2
    CLEARED = 3


class RemoveReason(IntEnum):
    """Why a key was removed from its block."""

    NONE = 0
    EVICTED = 1  # the block was allocated to another request
    DROPPED = 2  # EvictBlocks, or a failed load
    PROMOTED = 3  # replaced by a longer key of the same block
    WITHDRAWN = 4  # tentative key of a step that will not run
    UNVERIFIED = 5  # a new epoch could not prove that the page still has the content
    MOVED = 6  # to a copy of the page, which the next event reports


@dataclass(slots=True)
class Facts:
    """What happened to requests since the last step, row by row.

    Within a row: computed, then appended tokens, then commit, then end.
    """

    slot: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)  # i32, default UNCHANGED: new count (rejected drafts)
    appended: list[int] = field(default_factory=list)  # default 0: number of appended tokens
    tokens: MutableSequence[int] = field(default_factory=list)  # sum(appended) ids, in row order; empty = hashes given
    num_hashes: list[int] = field(default_factory=list)  # default 0: block hashes that became complete
    hashes: bytes = b""  # concatenated digests, rows in order
    commit: list[int] = field(default_factory=list)  # i32, default UNCHANGED: tokens to register blocks for
    end: list[int] = field(default_factory=list)  # End, default NONE
    fence: list[int] = field(default_factory=list)  # u64, default 0: executed_through that returns blocks


@dataclass(slots=True)
class Cache:
    """What happened to pages, not to requests."""

    # u64: steps of this epoch whose launch does not run; every rank still carries out their orders, in order
    failed_steps: list[int] = field(default_factory=list)
    # Blocks whose keys are removed, in order. A request for which such a block is computed registers it again: if the
    # page is bad, lower `computed` of every request that has it, or end it, in the same part.
    evicted: list[int] = field(default_factory=list)
    released: list[int] = field(default_factory=list)  # HELD slots whose transfers ended, and slots whose load ended
    reset: bool = False  # drop every key; has no effect while a request holds a block
    loads_over: list[int] = field(default_factory=list)  # blocks of `Opened.busy_blocks` whose loads ended


@dataclass(frozen=True, slots=True)
class Multimodal:
    """One multimodal item: `offset` and `length` in tokens."""

    identifier: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """Inputs of a request's block hashes other than its tokens.

    Attributes:
        lora: (name, path) of the adapter; in the hash of every block.
        salt: cache salt; in the hash of the first block.
        multimodal: items by offset; in the hash of each block they overlap.
        prompt_embeds: digest per hash block, for prompts given as embeddings.
    """

    lora: tuple[str, str] | None = None
    salt: str = ""
    multimodal: tuple[Multimodal, ...] = ()
    prompt_embeds: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        """Raise InvalidArgument for a lora that is not a pair: a string of two letters would unpack as one."""
        check(self.lora, tuple[str, str] | None, "extra_keys.lora")


NO_EXTRA_KEYS = ExtraKeys()


@dataclass(slots=True)
class News:
    """New requests. A slot is a small number that the client chooses, and may reuse after the request ended."""

    slot: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    tokens: MutableSequence[int] = field(default_factory=list)  # sum(num_tokens) ids, row by row; empty = hashes given
    num_hashes: list[int] = field(default_factory=list)  # default 0
    hashes: bytes = b""
    request_id: list[str] = field(default_factory=list)  # default "": id for explanations and traces
    domain: list[str] = field(default_factory=list)  # default "": requests share pages only within a domain
    extra_keys: list[ExtraKeys] = field(default_factory=list)  # default none; used when tokens are given
    skip_reading: list[int] = field(default_factory=list)  # default 0; 1 = do not look the prefix up, but register it
    max_tokens: list[int] = field(default_factory=list)  # default 0 = max_model_len: maximum length in tokens
    traceparent: list[str] = field(default_factory=list)  # default "": W3C context, see kvplane.base.trace


@dataclass(slots=True)
class Resume:
    """The image: all blocks that were held in the previous engine life, with nothing in flight. It is accepted as a
    whole or refused.

    Rows are requests of `News` that continue with their blocks. Table entries that the group's kind no longer needs may
    have any value. Held rows are requests of `News` that do not run and whose pages a load still fills, and slots
    without a request, which ended as HELD. Every other block is free. Each page needs a stamp in the stamp table with
    which this engine life was opened.
    """

    slot: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)  # leading tokens whose pages are written
    launch_end: list[int] = field(default_factory=list)  # default computed: tokens of the last launch, drafts included
    num_prompt: list[int] = field(default_factory=list)  # default all tokens: its number of tokens when first admitted
    single_group_hit: list[int] = field(default_factory=list)  # default 0: as the admission reported
    loading: list[int] = field(default_factory=list)  # default 0; 1 = a load still fills its pages
    num_cached_blocks: list[int] = field(default_factory=list)  # default up to the last key: leading blocks, per group
    num_blocks: list[int] = field(default_factory=list)  # entries of the table of each group, row by row
    blocks: list[int] = field(default_factory=list)  # the tables, concatenated
    held_slot: list[int] = field(default_factory=list)
    held_count: list[int] = field(default_factory=list)  # blocks of each held slot
    held_blocks: list[int] = field(default_factory=list)
    held_loading: list[int] = field(default_factory=list)  # default 0; 1 = it ended as HELD while a load still writes


@dataclass(slots=True)
class Run:
    """Running requests in scheduling order, each at most once per step.

    A row asks for known tokens + extra - computed, limited by cap and the budget.
    """

    slot: list[int] = field(default_factory=list)
    extra: list[int] = field(default_factory=list)  # i32, default 0: drafts beyond the known tokens
    cap: list[int] = field(default_factory=list)  # default UNLIMITED
    lookahead: list[int] = field(default_factory=list)  # default 0: further slots for later drafts
    in_flight: list[int] = field(default_factory=list)  # i32, default -1: counted by the service
    flags: list[int] = field(default_factory=list)  # RowFlag, default 0
    victims: list[int] = field(default_factory=list)  # slots to preempt, in order; empty = last row first
    on_refusal: OnRefusal = OnRefusal.PREEMPT


@dataclass(slots=True)
class Admit:
    """Waiting requests in order of admission; each looks up its prefix and adopts the hit."""

    slot: list[int] = field(default_factory=list)
    extra: list[int] = field(default_factory=list)  # i32, default 0
    cap: list[int] = field(default_factory=list)  # default UNLIMITED
    lookahead: list[int] = field(default_factory=list)  # default 0
    external: list[int] = field(default_factory=list)  # default 0: tokens after the hit that an external load provides
    expected_hit: list[int] = field(default_factory=list)  # i32, default ANY_HIT
    encoder_tokens: list[int] = field(default_factory=list)  # default 0: for cross attention
    reserved: list[int] = field(default_factory=list)  # default 0: blocks to leave free for other requests
    watermark: list[int] = field(default_factory=list)  # Watermark, default AUTO
    flags: list[int] = field(default_factory=list)  # RowFlag, default 0
    max_running: int = UNLIMITED
    on_refusal: OnRefusal = OnRefusal.STOP
    only_if_no_preemption: bool = False


@dataclass(slots=True)
class Peek:
    """Look-ups for later steps. They change no state, not even LRU order, and reserve nothing."""

    slot: list[int] = field(default_factory=list)
    with_blocks: bool = False


@dataclass(frozen=True, slots=True)
class Budget:
    """The budget that run and admit rows of a part share.

    Attributes:
        tokens: scheduled tokens.
        input: input positions; each scheduled row uses its tokens + `overhead`.
        overhead: input positions per scheduled row (draft slots).
    """

    tokens: int = UNLIMITED
    input: int = UNLIMITED
    overhead: int = 0


@dataclass(slots=True)
class Part:
    """One ordered set of rows. A step usually has one part."""

    facts: Facts = field(default_factory=Facts)
    cache: Cache = field(default_factory=Cache)
    news: News = field(default_factory=News)
    resume: Resume | None = None
    run: Run = field(default_factory=Run)
    admit: Admit = field(default_factory=Admit)
    peek: Peek = field(default_factory=Peek)
    budget: Budget = Budget()
    with_hashes: bool = False  # answer with the block hashes of facts and news rows, for checks
    with_tables: bool = False  # answer with the full block tables of all run and admit rows, for debugging


@dataclass(slots=True)
class Step:
    """One scheduler iteration, or some parts of it.

    Attributes:
        epoch: the engine life that sends it.
        seq: step number, from 1, incremented by one.
        part: number of parts[0] within the step.
        last: whether these are the last parts of the step.
        executed_through: all steps up to this one have finished on all ranks.
        traceparent: W3C context of the engine's step, see kvplane.base.trace; "" = none.
    """

    epoch: int
    seq: int
    parts: list[Part]
    part: int = 0
    last: bool = True
    executed_through: int = 0
    traceparent: str = ""


@dataclass(slots=True)
class Blocks:
    """Sparse lists of block ids: entry k has `count[k]` ids for group `group[k]` of row `row[k]`, in order.

    Run rows are numbered from 0, admit rows continue after them; peek rows are numbered from 0 in
    PartResult.peek_blocks.
    """

    row: list[int] = field(default_factory=list)
    group: list[int] = field(default_factory=list)
    count: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def add(self, row: int, group: int, ids: list[int]) -> None:
        """Append one entry."""
        self.row.append(row)
        self.group.append(group)
        self.count.append(len(ids))
        self.ids.extend(ids)

    def by_row(self) -> dict[int, dict[int, list[int]]]:
        """{row: {group: ids}}; a fresh copy."""
        out: dict[int, dict[int, list[int]]] = {}
        start = 0
        for row, group, count in zip(self.row, self.group, self.count, strict=True):
            out.setdefault(row, {})[group] = self.ids[start : start + count]
            start += count
        return out


@dataclass(slots=True)
class Orders:
    """What each rank does before the launch, in this order: write stamps, zero pages, copy pages.

    Zeroing precedes copying, since a copy target is a new page that may be in both lists. Pages that a transfer fills
    are in neither. Orders of a failed step are carried out too, since an answered reset is not undone.

    Attributes:
        stamp_block, stamp: new content version (u64) of each block that was allocated or lost a key.
        copy_src, copy_dst, copy_group: pages to copy, in order.
        zero_block, zero_group: pages to zero.
    """

    stamp_block: list[int] = field(default_factory=list)
    stamp: list[int] = field(default_factory=list)
    copy_src: list[int] = field(default_factory=list)
    copy_dst: list[int] = field(default_factory=list)
    copy_group: list[int] = field(default_factory=list)
    zero_block: list[int] = field(default_factory=list)
    zero_group: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """One change of the prefix cache; events are in the order of the changes.

    STORED: `hashes` were registered for the blocks of `group` that hold tokens [start, end) of the request in `slot`.
    Null blocks and blocks that are not retained are omitted from `hashes` and `blocks`, but are part of the range.
    `parent` is the hash before `start`, b"" at 0. `block_size` is tokens per hash. REMOVED: one hash, with the reason.
    CLEARED: every key.

    After a recovery from a store, one STORED has keys of many requests: without parent, slot and range, with
    `block_starts` where they are known.
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


@dataclass(slots=True)
class PartResult:
    """The result of one part. Logs, traces and metrics read only this."""

    granted: list[int] = field(default_factory=list)  # run rows: tokens, 0 = not scheduled
    preempted: list[int] = field(default_factory=list)  # slots in order; the engine queues them again
    admit_status: list[int] = field(default_factory=list)
    admit_hit: list[int] = field(default_factory=list)
    admit_granted: list[int] = field(default_factory=list)
    admit_single_group_hit: list[int] = field(default_factory=list)
    admit_load_after: list[int] = field(default_factory=list)  # u64, default 0: step to be executed before the load
    new_blocks: Blocks = field(default_factory=Blocks)  # newly allocated, of run and admit rows
    tables: Blocks = field(default_factory=Blocks)  # full tables; of granted admit rows, of all rows if with_tables
    peek_hit: list[int] = field(default_factory=list)
    peek_single_group_hit: list[int] = field(default_factory=list)
    peek_blocks: Blocks = field(default_factory=Blocks)
    num_hashes: list[int] = field(default_factory=list)  # with_hashes: hashes per facts row, then per news row
    last_hash: list[bytes] = field(default_factory=list)  # the last hash of the same rows, b"" = none
    reset_done: bool = False
    orders: Orders = field(default_factory=Orders)
    free_blocks: int = 0  # exact, after the part
    events: Sequence[CacheEvent] = field(default_factory=list)
    # For the decision log, not sent:
    hashed_facts: list[bytes] = field(default_factory=list, compare=False)  # digests of each row's tokens
    hashed_news: list[bytes] = field(default_factory=list, compare=False)
    taken_back: int = field(default=0, compare=False)  # of preempted: lost blocks held before the run section
    went_back: int = field(default=0, compare=False)  # of taken_back: set back before states or windows that they held


@dataclass(slots=True)
class StepResult:
    """Answer to a Step.

    Attributes:
        published_through: keys registered by steps up to this one are published to others.
    """

    seq: int
    part: int
    parts: list[PartResult]
    published_through: int = 0
