"""The types of a step, whose rows are stored in columns, and of its result.

One scheduler iteration of an engine is one Step: what happened to requests, which requests are new, and what to run, in
the order of the engine's priorities. A step consists of parts, a part of sections (such as `facts`), a section of rows:
usually one row per request. A part is applied in the order facts -> cache -> news -> resume -> run -> admit -> peek ->
prefetch -> retain, each section in row order, and each row completely before the next one. So a step has the same
result whether it is sent whole or one row per part. Only `resume` is applied as a whole, before the rows of its life.

A column is a list with one entry per row, or an empty list if every row has the default that the column's comment
states. On the wire a column is packed little-endian u32 (i32 if it may be negative, u64 where noted); see
`kvplane.wire`. The columns of a result that came over the wire are `PackedInts`: arrays that read like lists.

The sections (`kvplane.base.sections`) are generated from the contract, which documents each column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvplane.base import sections
from kvplane.base.decode_rows import DecodeRows
from kvplane.base.sections import LOAD_COLUMNS as LOAD_COLUMNS
from kvplane.base.sections import MOVE_COLUMNS as MOVE_COLUMNS
from kvplane.base.sections import SAVE_COLUMNS as SAVE_COLUMNS
from kvplane.base.sections import Admit as Admit
from kvplane.base.sections import Blocks as Blocks
from kvplane.base.sections import Budget as Budget
from kvplane.base.sections import Cache as Cache
from kvplane.base.sections import Facts as Facts
from kvplane.base.sections import News as News
from kvplane.base.sections import Orders as Orders
from kvplane.base.sections import Peek as Peek
from kvplane.base.sections import Peers, Prefetch, Retain
from kvplane.base.sections import Resume as Resume
from kvplane.base.sections import Run as Run
from kvplane.base.values import ALL_GROUPS as ALL_GROUPS
from kvplane.base.values import ANY_HIT as ANY_HIT
from kvplane.base.values import EVICTIONS as EVICTIONS
from kvplane.base.values import NO_EXTRA_KEYS as NO_EXTRA_KEYS
from kvplane.base.values import UNCHANGED as UNCHANGED
from kvplane.base.values import UNLIMITED as UNLIMITED
from kvplane.base.values import AdmitStatus as AdmitStatus
from kvplane.base.values import CacheEvent as CacheEvent
from kvplane.base.values import End as End
from kvplane.base.values import EventKind as EventKind
from kvplane.base.values import ExtraKeys as ExtraKeys
from kvplane.base.values import Multimodal as Multimodal
from kvplane.base.values import OnRefusal as OnRefusal
from kvplane.base.values import RemoveReason as RemoveReason
from kvplane.base.values import RowFlag as RowFlag
from kvplane.base.values import Watermark as Watermark
from kvplane.base.when_read import made_when_read

STEP_VERSION = 2  # version of the meaning of the columns; in version 1 only rows with flag bit 1 were aligned
NO_LIMITS = Budget()
KEY_COLUMNS = ("load_key", "save_key", "move_key")  # of orders: what seals name, which no decision follows from


@made_when_read
@dataclass
class Part:
    """One ordered set of rows, in the sections of a step. A step usually has one part."""

    facts: Facts = field(default_factory=Facts)
    cache: Cache = field(default_factory=Cache)
    peers: Peers = field(default_factory=Peers)
    news: News = field(default_factory=News)
    resume: Resume | None = None
    run: Run = field(default_factory=Run)
    admit: Admit = field(default_factory=Admit)
    peek: Peek = field(default_factory=Peek)
    prefetch: Prefetch = field(default_factory=Prefetch)
    retain: Retain = field(default_factory=Retain)
    budget: Budget = NO_LIMITS
    with_hashes: bool = False  # answer with the block hashes of facts and news rows, for checks
    with_tables: bool = False  # answer with the full block tables of all run and admit rows, for debugging


@dataclass(slots=True)
class Step:
    """One scheduler iteration of an engine, or some parts of an iteration.

    Attributes:
        epoch: epoch that sends the step.
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


@made_when_read
@dataclass
class PartResult(sections.PartResult):
    """The result of one part, and what the service keeps with it. Its logs, traces and metrics of a step are computed
    from it alone.

    Attributes:
        events: of the device.
        tier_events: of the tiers, apart: their `blocks` are slots. A message has them in `events`.
        hashed_facts, hashed_news: digests of the tokens of each row; not sent.
        taken_back: requests in `preempted` without blocks before the run rows; not sent.
        went_back: those of them that were set back before a state or window.
    """

    hashed_facts: Sequence[bytes] = field(default_factory=list, compare=False)
    hashed_news: Sequence[bytes] = field(default_factory=list, compare=False)
    taken_back: int = field(default=0, compare=False)
    went_back: int = field(default=0, compare=False)
    tier_events: Sequence[CacheEvent] = field(default_factory=list)


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
