"""The types of unary calls and of their answers. The RPC layer decodes messages into calls and encodes answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from kvplane.base.errors import InvalidArgument, LimitExceeded, PermissionDenied
from kvplane.base.hashing import HashTail
from kvplane.base.requests import Ending
from kvplane.base.sections import Prefetch, Retain
from kvplane.base.step import (
    ANY_HIT,
    NO_EXTRA_KEYS,
    UNCHANGED,
    UNLIMITED,
    Admit,
    Cache,
    ExtraKeys,
    News,
    OnRefusal,
    Part,
    RowFlag,
    Run,
    StepResult,
    Watermark,
)
from kvplane.base.values import MAX_RETAINED, MAX_RETAINED_PER_BLOCK, NO_REQUEST, RetainOutcome
from kvplane_service.replicas.step_order import UnaryStep

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class CallHeader:
    """The fields that are common to all unary calls that change a replica.

    Attributes:
        at: the step that the call belongs to.
        op_id: idempotency key chosen by the client, "" for none.
        fingerprint: digest of the call's content; calls with equal `op_id` must have equal ones.
    """

    at: UnaryStep
    op_id: str = ""
    fingerprint: bytes = b""


@dataclass(frozen=True, slots=True)
class Plan(Generic[_Answer]):
    """How a call is applied: the part of a step that it becomes, and what is done with the result.

    Attributes:
        part: a part of a step, whose only row (one operation on one request) is that of the call.
        done: records the result and returns the call's answer; called once, before any other call is served.
    """

    part: Part
    done: Callable[[StepResult], _Answer]


class UnaryCall(Generic[_Answer]):
    """One call that changes a replica. `UnaryCalls` hashes its token ids, and plans how it is applied."""

    __slots__ = ()


class CacheCall(UnaryCall[StepResult], ABC):
    """A call that changes the cache alone: where the replica has an engine, its next step carries it out."""

    __slots__ = ()

    @abstractmethod
    def plan(self, now_ns: int) -> Plan[StepResult]:
        """Plan how to apply the call, whose token ids are hashed. Raises InvalidArgument."""


@dataclass(frozen=True, slots=True)
class Content:
    """The tokens of a new request, as token ids or as hashes of its full blocks.

    Attributes:
        hashes: digests of the full blocks, concatenated.
        tail: state of the hash chain after the last token; None if the client computes the hashes.
        token_ids: tokens to hash; empty once they are hashed.
    """

    num_tokens: int
    hashes: bytes
    num_hashes: int
    tail: HashTail | None = None
    extra_keys: ExtraKeys = NO_EXTRA_KEYS
    domain: str = ""
    skip_reading: bool = False
    max_tokens: int = 0
    token_ids: Sequence[int] = ()

    def as_probe(self) -> News:
        """Return a news row (a step's row that creates a request) without a request name, for a look-up."""
        return self.as_news(0, "")

    def as_news(self, slot: int, name: str) -> News:
        """Return the news row: the row of a step that creates the request."""
        return News(
            slot=[slot],
            num_tokens=[self.num_tokens],
            num_hashes=[self.num_hashes],
            hashes=self.hashes,
            request_id=[name],
            domain=[self.domain],
            extra_keys=[self.extra_keys] if self.extra_keys != NO_EXTRA_KEYS else [],
            skip_reading=[int(self.skip_reading)],
            max_tokens=[self.max_tokens],
        )


@dataclass(frozen=True, slots=True)
class Appended:
    """Tokens appended to a request, as token ids or as hashes of the blocks that they complete.

    Attributes:
        hashes: digests of the completed blocks, concatenated.
        was, tail: state of the hash chain before and after these tokens; None if the client computes the hashes.
        token_ids: tokens to hash; empty once they are hashed.
    """

    num_tokens: int = 0
    hashes: bytes = b""
    num_hashes: int = 0
    was: HashTail | None = None
    tail: HashTail | None = None
    token_ids: Sequence[int] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is appended."""
        return not (self.num_tokens or self.num_hashes)


class AllocationStatus(Enum):
    """The outcome of an allocation; the value is the name in the proto contract."""

    GRANTED = "GRANTED"
    REFUSED = "REFUSED"
    DEFERRED = "DEFERRED"
    STALE_HIT = "STALE_HIT"
    NOTHING_TO_DO = "NOTHING_TO_DO"
    NEVER_FITS = "NEVER_FITS"


@dataclass(frozen=True, slots=True)
class Hashes:
    """Block hashes of a request: their number, and the last one (empty when there is none)."""

    count: int = 0
    last: bytes = b""


@dataclass(frozen=True, slots=True)
class Allocated:
    """The answer to an AllocateSlots call; block ids are listed per group."""

    step: StepResult
    status: AllocationStatus
    hit: int
    granted: int
    single_group_hit: int
    load_after: int
    needed: int
    new_blocks: list[list[int]]
    table: list[list[int]]
    preempted: list[str]
    hashes: Hashes


@dataclass(frozen=True, slots=True)
class Committed:
    """The answer to a CommitBlocks call."""

    step: StepResult
    hashes: Hashes


@dataclass(frozen=True, slots=True)
class AllocateCall(UnaryCall[Allocated]):
    """One AllocateSlots call: allocates blocks for a new, waiting or running request (allocation.proto)."""

    request_id: str
    content: Content | None = None
    computed: int = UNCHANGED
    appended: Appended = field(default_factory=Appended)
    cap: int = UNLIMITED
    extra: int = 0
    lookahead: int = 0
    flags: RowFlag = RowFlag.NONE
    external: int = 0
    encoder_tokens: int = 0
    reserved: int = 0
    watermark: Watermark = Watermark.AUTO
    expected_hit: int = ANY_HIT
    in_flight: int = -1
    victims: tuple[str, ...] = ()

    def as_run(self, slot: int, victims: list[int]) -> Run:
        """Return the row that grants tokens to a running request; `victims`: slots."""
        return Run(
            slot=[slot],
            extra=[self.extra],
            cap=[self.cap],
            lookahead=[self.lookahead],
            in_flight=[self.in_flight],
            flags=[self.flags & (RowFlag.UNALIGNED | RowFlag.DELAY_CACHING)],
            victims=victims,
            on_refusal=OnRefusal.PREEMPT if victims else OnRefusal.STOP,
        )

    def as_admit(self, slot: int) -> Admit:
        """Return the row that starts a request which does not run."""
        return Admit(
            slot=[slot],
            extra=[self.extra],
            cap=[self.cap],
            lookahead=[self.lookahead],
            external=[self.external],
            expected_hit=[self.expected_hit],
            encoder_tokens=[self.encoder_tokens],
            reserved=[self.reserved],
            watermark=[self.watermark],
            flags=[self.flags],
        )


@dataclass(frozen=True, slots=True)
class CommitCall(UnaryCall[Committed]):
    """One CommitBlocks call: appends tokens and registers full blocks; without a request it only ends the step."""

    request_id: str = ""
    computed: int = UNCHANGED
    appended: Appended = field(default_factory=Appended)
    commit: int = UNCHANGED


@dataclass(frozen=True, slots=True)
class FreeCall(UnaryCall[StepResult]):
    """One Free call: ends a request. Its blocks are released once step `fence_seq` is executed, at once if `fence_seq`
    is 0.
    """

    request_id: str
    end: Ending = Ending.FREE
    fence_seq: int = 0


@dataclass(frozen=True, slots=True)
class EvictCall(CacheCall):
    """One EvictBlocks call: removes the keys (hashes under which a block is found) of these blocks."""

    blocks: tuple[int, ...]

    def plan(self, now_ns: int) -> Plan[StepResult]:
        """Plan a cache section (the part of a step that changes cached blocks) that removes the keys of the blocks."""
        return Plan(Part(cache=Cache(evicted=list(self.blocks))), _itself)


@dataclass(frozen=True, slots=True)
class ResetCall(CacheCall):
    """One ResetPrefixCache call: removes the keys (hashes under which a block is found) of all blocks, if no request
    holds a block.
    """

    def plan(self, now_ns: int) -> Plan[StepResult]:
        """Plan a cache section (the part of a step that changes cached blocks) that removes all keys."""
        return Plan(Part(cache=Cache(reset=True)), _itself)


@dataclass(frozen=True, slots=True)
class PrefetchCall(CacheCall):
    """One Prefetch call: copies what only the disk has of a prompt's longest hit to the host tier."""

    content: Content
    within_ns: int = 0

    def plan(self, now_ns: int) -> Plan[StepResult]:
        """Plan a row of the section `prefetch`."""
        given = self.content
        if not given.num_hashes:
            what = f"a prompt of {given.num_tokens} tokens has no full block"
            raise InvalidArgument(what, field="content", remedy="prefetch longer prompts alone")
        rows = Prefetch([NO_REQUEST], [given.num_hashes], given.hashes, [given.domain], [self.within_ns])
        return Plan(Part(prefetch=rows), _itself)


_OF_TIER = "in the owner's limits and in the registration of the tier"
_OVER_BUDGET = {
    int(RetainOutcome.OVER_BUDGET): ("pool", "in the owner's limits"),
    int(RetainOutcome.OVER_HOST_BUDGET): ("host tier", _OF_TIER),
    int(RetainOutcome.OVER_DISK_BUDGET): ("disk", _OF_TIER),
}


@dataclass(frozen=True, slots=True)
class RetainCall(CacheCall):
    """One Retain call: retains the cached prefix of a prompt for `owner` and `ttl_ns`, or releases it if that is 0.

    `percent`: of the blocks of the pool, and of the slots of each tier, that may be retained for the owner.
    """

    content: Content
    ttl_ns: int
    priority: int
    owner: str
    percent: int

    def plan(self, now_ns: int) -> Plan[StepResult]:
        """Plan a row of the section `retain`."""
        given = self.content
        if not given.num_hashes:
            what = f"a prompt of {given.num_tokens} tokens has no full block"
            raise InvalidArgument(what, field="content", remedy="retain longer prefixes alone")
        until_ns = now_ns + self.ttl_ns if self.ttl_ns else 0
        rows = Retain([given.num_hashes], given.hashes, [given.domain], [self.owner], [self.priority], [until_ns])
        rows.percent, rows.now_ns = [self.percent], [now_ns]
        return Plan(Part(retain=rows), self._answered)

    def _answered(self, step: StepResult) -> StepResult:
        """Raise the refusal of the row, which changed nothing."""
        done = step.parts[0].retained
        blocks, left, outcome = done.blocks[0], done.left[0], done.outcome[0]
        if outcome in _OVER_BUDGET:
            place, limit = _OVER_BUDGET[outcome]
            what = f"the prefix needs {blocks} blocks, and of the owner's share of the {place} {left} are left"
            remedy = f"release a prefix, retain a shorter one, or raise retained_percent {limit}"
            raise InvalidArgument(what, field="content", remedy=remedy)
        if outcome == RetainOutcome.TOO_MANY:
            each = f"{MAX_RETAINED_PER_BLOCK} times the blocks of its pool, and of its tiers that retain"
            what = f"the replica retains {MAX_RETAINED} prefixes, or these need, counted each by itself, {each}"
            raise LimitExceeded(what, field="header.replica", remedy="release one, or wait until one ends")
        if outcome == RetainOutcome.OTHER_OWNER:
            what = "the prefix is retained for other owners alone"
            raise PermissionDenied(what, field="content", remedy="let its owner release it, or wait for its end")
        return step


def _itself(result: StepResult) -> StepResult:
    return result
