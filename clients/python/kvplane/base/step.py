"""The types of a step, whose rows are stored in columns, and of its result.

One scheduler iteration of an engine is one Step: what happened to requests, which requests are new, and what to run, in
the order of the engine's priorities. A step consists of parts, a part of sections (such as `facts`), a section of rows:
usually one row per request. A part is applied in the order facts -> cache -> news -> resume -> run -> admit -> peek ->
prefetch -> retain, each section in row order, and each row completely before the next one. So a step has the same
result whether it is sent whole or one row per part. Only `resume` is applied as a whole, before the rows of its life.

A column is a list with one entry per row, or an empty list if every row has the default that the column's comment
states. On the wire a column is packed little-endian u32 (i32 if it may be negative, u64 where noted); see
`kvplane.wire`. The columns of a result that came over the wire are `PackedInts`: arrays that read like lists.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field

from kvplane.base.declined import Declined
from kvplane.base.decode_rows import DecodeRows
from kvplane.base.prefetch import Prefetch, Prefetched
from kvplane.base.retain import Retain, Retained
from kvplane.base.section_methods import BlocksMethods
from kvplane.base.values import (
    ALL_GROUPS,
    ANY_HIT,
    EVICTIONS,
    NO_EXTRA_KEYS,
    UNCHANGED,
    UNLIMITED,
    AdmitStatus,
    CacheEvent,
    End,
    EventKind,
    ExtraKeys,
    Multimodal,
    OnRefusal,
    RemoveReason,
    RowFlag,
    Watermark,
)
from kvplane.base.when_read import made_when_read

__all__ = [
    "ALL_GROUPS",
    "ANY_HIT",
    "EVICTIONS",
    "LOAD_COLUMNS",
    "MOVE_COLUMNS",
    "NO_EXTRA_KEYS",
    "SAVE_COLUMNS",
    "STEP_VERSION",
    "UNCHANGED",
    "UNLIMITED",
    "Admit",
    "AdmitStatus",
    "Blocks",
    "Budget",
    "Cache",
    "CacheEvent",
    "End",
    "EventKind",
    "ExtraKeys",
    "Facts",
    "Multimodal",
    "News",
    "OnRefusal",
    "Orders",
    "Part",
    "PartResult",
    "Peek",
    "RemoveReason",
    "Resume",
    "RowFlag",
    "Run",
    "Step",
    "StepResult",
    "Watermark",
]

STEP_VERSION = 2  # version of the meaning of the columns; in version 1 only rows with flag bit 1 were aligned


@dataclass(slots=True)
class Facts:
    """What happened to requests since the last step, one row per request.

    The columns of a row are applied in this order: computed tokens, appended tokens, commit, release_skipped, end.
    """

    slot: MutableSequence[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)  # i32, default UNCHANGED: lower count after rejected drafts
    appended: MutableSequence[int] = field(default_factory=list)  # default 0: number of appended tokens
    tokens: MutableSequence[int] = field(default_factory=list)  # sum(appended) ids, in row order; empty = hashes given
    num_hashes: MutableSequence[int] = field(default_factory=list)  # default 0: block hashes that became complete
    hashes: bytes = b""  # concatenated digests, rows in order
    commit: list[int] = field(default_factory=list)  # i32, default UNCHANGED: register blocks of these tokens
    end: list[int] = field(default_factory=list)  # End, default NONE
    fence: list[int] = field(default_factory=list)  # u64, default 0: blocks return once this step is executed
    release_skipped: list[int] = field(default_factory=list)  # i32, default UNCHANGED: free what is unread from there
    hint: list[int] = field(default_factory=list)  # i32, default UNCHANGED: as `News.hint`, by what is known now


@dataclass(slots=True)
class Cache:
    """What happened to pages independently of a request: failed launches, removed keys, and transfers that ended."""

    # u64: steps of this epoch whose launch will not run; every rank still carries out their orders, in step order
    failed_steps: list[int] = field(default_factory=list)
    # They lose their keys. A request that computed one registers it again: if it is bad, lower `computed`, or end it.
    evicted: list[int] = field(default_factory=list)
    released: list[int] = field(default_factory=list)  # HELD slots whose transfers ended, and slots whose load ended
    reset: bool = False  # drop every key; has no effect while a request holds a block
    loads_over: list[int] = field(default_factory=list)  # blocks of `Opened.busy_blocks` whose loads ended
    jobs_done: list[int] = field(default_factory=list)  # u64: jobs of `Orders` that every rank has done and verified
    jobs_failed: list[int] = field(default_factory=list)  # u64: jobs that failed, and that no rank works on any more
    jobs_before: int = 0  # u64: jobs with lower numbers that were not reported have failed, as those of `jobs_failed`
    costs_ns: list[int] = field(default_factory=list)  # u64, until others are sent: of a token, of a block of each tier
    mismatched: list[int] = field(default_factory=list)  # of `evicted`: a canary found other content than the key names
    hits_checked: int = 0  # hits that a canary has compared since the last step


@dataclass(slots=True)
class News:
    """New requests. A slot is a small number that the client chooses for a request and may reuse after its end."""

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
    hint: list[int] = field(default_factory=list)  # default 0: what the engine knows of later requests, an own number


@dataclass(slots=True)
class Resume:
    """The image: all blocks that requests or transfers held in the previous engine life. Nothing may be in flight.

    The service accepts the image as a whole or refuses it. Its rows are requests of `News` that continue with their
    blocks. A table entry that the kind of the group no longer needs may have any value. Held rows are of two kinds:
    requests of `News` that do not run and whose pages a load (a transfer from outside) still fills, and slots without
    a request, whose request ended as HELD. Every block that the image does not list is free. Each listed page
    needs a stamp in `OpenRequest.stamp_table` of this engine life.
    """

    slot: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)  # leading tokens whose pages are written
    launch_end: list[int] = field(default_factory=list)  # default computed: tokens of the last launch, drafts included
    num_prompt: list[int] = field(default_factory=list)  # default all tokens: its number of tokens when first admitted
    single_group_hit: list[int] = field(default_factory=list)  # default 0: as the admission reported
    loading: list[int] = field(default_factory=list)  # default 0; 1 = a load fills its pages; 2 = over, no grant since
    num_cached_blocks: list[int] = field(default_factory=list)  # per group; default up to the last block with a key
    num_blocks: list[int] = field(default_factory=list)  # entries of the table of each group, row by row
    blocks: list[int] = field(default_factory=list)  # the tables, concatenated
    held_slot: list[int] = field(default_factory=list)
    held_count: list[int] = field(default_factory=list)  # blocks of each held slot
    held_blocks: list[int] = field(default_factory=list)
    held_loading: list[int] = field(default_factory=list)  # default 0; 1 = it ended as HELD while a load still writes


@dataclass(slots=True)
class Run:
    """The running requests in scheduling order, each at most once per step.

    A row asks for known tokens + extra - computed tokens; its cap and the part's budget limit what it is granted.
    """

    slot: MutableSequence[int] = field(default_factory=list)
    extra: MutableSequence[int] = field(default_factory=list)  # i32, default 0: drafts beyond the known tokens
    cap: list[int] = field(default_factory=list)  # default UNLIMITED
    lookahead: list[int] = field(default_factory=list)  # default 0: further token positions for later drafts
    in_flight: list[int] = field(default_factory=list)  # i32: tokens in flight; default -1: as the service counts them
    flags: list[int] = field(default_factory=list)  # RowFlag, default 0
    victims: list[int] = field(default_factory=list)  # slots to preempt, in order; empty = last row first
    on_refusal: OnRefusal = OnRefusal.PREEMPT
    reserved: list[int] = field(default_factory=list)  # default 0: blocks to leave free for other requests


@dataclass(slots=True)
class Admit:
    """The waiting requests in order of admission. Each row adds the blocks of the hit to the request's table."""

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
    hit_limit: list[int] = field(default_factory=list)  # default UNLIMITED: longest hit to adopt, in tokens
    min_new: list[int] = field(default_factory=list)  # default 1: fewest tokens to grant; 0 = a hit alone is enough
    skip_zero_groups: list[int] = field(default_factory=list)  # u64 of bits, default ALL_GROUPS: groups of a late load
    single_group_hit: list[int] = field(default_factory=list)  # default UNLIMITED: as the look-up finds it


@dataclass(slots=True)
class Peek:
    """Requests whose cached prefix is looked up for later steps. It changes nothing, not even LRU order."""

    slot: list[int] = field(default_factory=list)
    with_blocks: bool = False
    limit: list[int] = field(default_factory=list)  # default UNLIMITED: longest hit to find, in tokens


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits that the run and admit rows of a part share.

    Attributes:
        tokens: most scheduled tokens.
        input: most input positions of the launch; each scheduled row uses its granted tokens + `overhead` positions.
        overhead: further input positions of each scheduled row (draft slots).
    """

    tokens: int = UNLIMITED
    input: int = UNLIMITED
    overhead: int = 0


@made_when_read
@dataclass
class Part:
    """One ordered set of rows, in the sections of a step. A step usually has one part."""

    facts: Facts = field(default_factory=Facts)
    cache: Cache = field(default_factory=Cache)
    news: News = field(default_factory=News)
    resume: Resume | None = None
    run: Run = field(default_factory=Run)
    admit: Admit = field(default_factory=Admit)
    peek: Peek = field(default_factory=Peek)
    prefetch: Prefetch = field(default_factory=Prefetch)
    retain: Retain = field(default_factory=Retain)
    budget: Budget = Budget()
    with_hashes: bool = False  # answer with the block hashes of facts and news rows, for checks
    with_tables: bool = False  # answer with the full block tables of all run and admit rows, for debugging


@dataclass(slots=True)
class Step:
    """One scheduler iteration of an engine, or some parts of an iteration.

    Attributes:
        epoch: epoch of the engine life that sends the step.
        seq: step number; the first step is 1, the step after this one is seq + 1.
        parts: the parts, in order; `part` is the number of parts[0] within the step.
        last: whether these are the last parts of the step.
        executed_through: number of a step; it and all earlier steps have finished on all ranks.
        traceparent: W3C trace context of the engine's step, see kvplane.base.trace; "" = none.
        rows: the packed rows of the only part when the step was made; None if it had other sections.
    """

    epoch: int
    seq: int
    parts: list[Part]
    part: int = 0
    last: bool = True
    executed_through: int = 0
    traceparent: str = ""
    rows: DecodeRows | None = field(default=None, compare=False, repr=False)


@dataclass(slots=True)
class Blocks(BlocksMethods):
    """Block ids for some rows and groups: entry k has `count[k]` ids for group `group[k]` of row `row[k]`. Run rows are
    numbered from 0, and admit rows behind the last run row; in PartResult.peek_blocks, peek rows are numbered from 0.
    """

    row: MutableSequence[int] = field(default_factory=list)
    group: MutableSequence[int] = field(default_factory=list)
    count: MutableSequence[int] = field(default_factory=list)
    ids: MutableSequence[int] = field(default_factory=list)


@made_when_read
@dataclass
class Orders:
    """What each rank does before the launch, in this order: write stamps (versions of pages), zero pages, copy pages.

    Zeroing is first, since the target of a copy is a new page that may also be in the list of pages to zero. Pages that
    a transfer fills are in neither list. A rank also carries out the orders of a failed step, since the answer has
    already reported a reset of the cache, which is not undone.

    Attributes:
        stamp_block, stamp: each block that was allocated or lost a key, and its new stamp, a u64.
        copy_src, copy_dst, copy_group: pages to copy, in order: source block, target block, and their group.
        zero_block, zero_group: pages to zero: block and its group.

    The other columns are work for the movers of a replica with tiers, which begins when the above is done. A job is
    over when the engine reports it (`Cache.jobs_done`, `jobs_failed`). Each rank has all slots of all tiers.

    Attributes:
        load_job, load_tier, load_slot, load_version, load_block, load_group, load_stamp: rows to load: read slot
            `load_slot` of tier `load_tier` into the page of `load_block`, whose stamp is `load_stamp`. A row whose slot
            does not hold version `load_version` fails its job. Rows of one job follow each other: a hit (`admit_job`).
        save_job, save_block, save_group, save_stamp, save_tier, save_slot: pages to save, one per job, ascending: write
            the page to the slot as version `save_job`. The job fails if its stamp is not `save_stamp` before or after.
        move_job, move_tier, move_slot, move_version, move_to_tier, move_to_slot: slots to copy to another tier, one per
            job, ascending: version `move_job` there. The job fails if the source does not hold version `move_version`.
    """

    stamp_block: MutableSequence[int] = field(default_factory=list)
    stamp: MutableSequence[int] = field(default_factory=list)
    copy_src: MutableSequence[int] = field(default_factory=list)
    copy_dst: MutableSequence[int] = field(default_factory=list)
    copy_group: MutableSequence[int] = field(default_factory=list)
    zero_block: MutableSequence[int] = field(default_factory=list)
    zero_group: MutableSequence[int] = field(default_factory=list)
    load_job: MutableSequence[int] = field(default_factory=list)  # u64
    load_tier: MutableSequence[int] = field(default_factory=list)
    load_slot: MutableSequence[int] = field(default_factory=list)
    load_version: MutableSequence[int] = field(default_factory=list)  # u64
    load_block: MutableSequence[int] = field(default_factory=list)
    load_group: MutableSequence[int] = field(default_factory=list)
    load_stamp: MutableSequence[int] = field(default_factory=list)  # u64
    save_job: MutableSequence[int] = field(default_factory=list)  # u64
    save_block: MutableSequence[int] = field(default_factory=list)
    save_group: MutableSequence[int] = field(default_factory=list)
    save_stamp: MutableSequence[int] = field(default_factory=list)  # u64
    save_tier: MutableSequence[int] = field(default_factory=list)
    save_slot: MutableSequence[int] = field(default_factory=list)
    move_job: MutableSequence[int] = field(default_factory=list)  # u64
    move_tier: MutableSequence[int] = field(default_factory=list)
    move_slot: MutableSequence[int] = field(default_factory=list)
    move_version: MutableSequence[int] = field(default_factory=list)  # u64
    move_to_tier: MutableSequence[int] = field(default_factory=list)
    move_to_slot: MutableSequence[int] = field(default_factory=list)


LOAD_COLUMNS = ("load_job", "load_tier", "load_slot", "load_version", "load_block", "load_group", "load_stamp")
SAVE_COLUMNS = ("save_job", "save_block", "save_group", "save_stamp", "save_tier", "save_slot")
MOVE_COLUMNS = ("move_job", "move_tier", "move_slot", "move_version", "move_to_tier", "move_to_slot")


@made_when_read
@dataclass
class PartResult:
    """The result of one part. The service's logs, traces and metrics of a step are computed from it alone."""

    granted: MutableSequence[int] = field(default_factory=list)  # per run row: granted tokens, 0 = not scheduled
    preempted: list[int] = field(default_factory=list)  # preempted slots, in order; the engine queues them again
    admit_status: MutableSequence[int] = field(default_factory=list)
    admit_hit: MutableSequence[int] = field(default_factory=list)
    admit_granted: MutableSequence[int] = field(default_factory=list)
    admit_single_group_hit: MutableSequence[int] = field(default_factory=list)
    admit_load_after: MutableSequence[int] = field(default_factory=list)  # u64, default 0: a load waits for this step
    new_blocks: Blocks = field(default_factory=Blocks)  # newly allocated, of run and admit rows
    tables: Blocks = field(default_factory=Blocks)  # full tables; of granted admit rows, of all rows if with_tables
    peek_hit: MutableSequence[int] = field(default_factory=list)
    peek_single_group_hit: MutableSequence[int] = field(default_factory=list)
    peek_blocks: Blocks = field(default_factory=Blocks)
    num_hashes: MutableSequence[int] = field(default_factory=list)  # with_hashes: per facts row, then per news row
    last_hash: list[bytes] = field(default_factory=list)  # the last hash of the same rows, b"" = none
    reset_done: bool = False
    orders: Orders = field(default_factory=Orders)
    free_blocks: int = 0  # free blocks after the part, exact
    events: Sequence[CacheEvent] = field(default_factory=list)  # of the device
    hashed_facts: Sequence[bytes] = field(default_factory=list, compare=False)  # not sent: digests of each row's tokens
    hashed_news: Sequence[bytes] = field(default_factory=list, compare=False)
    taken_back: int = field(default=0, compare=False)  # requests in preempted without blocks before the run rows
    went_back: int = field(default=0, compare=False)  # those of them that were set back before a state or window
    admit_job: MutableSequence[int] = field(default_factory=list)  # u64, default 0: loads the hit; run rows follow it
    admit_tier_tokens: MutableSequence[int] = field(default_factory=list)  # default 0: hit beyond that of the device
    declined: Declined = field(default_factory=Declined)  # hits of tiers that are not loaded
    prefetched: Prefetched = field(default_factory=Prefetched)
    retained: Retained = field(default_factory=Retained)
    tier_events: Sequence[CacheEvent] = field(default_factory=list)  # of the tiers, apart: their `blocks` are slots


@dataclass(slots=True)
class StepResult:
    """The service's answer to a Step.

    Attributes:
        seq, part: number of the step, and of parts[0] within the step.
        parts: the results of the parts, in order.
        published_through: the keys that steps up to this number registered are visible to other requests.
    """

    seq: int
    part: int
    parts: list[PartResult]
    published_through: int = 0
