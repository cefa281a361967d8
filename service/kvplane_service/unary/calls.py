"""Unary calls and their answers as values: what a front end decodes into, and what it encodes from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from kvplane.base.hashing import HashTail
from kvplane.base.step import (
    ANY_HIT,
    NO_EXTRA_KEYS,
    UNCHANGED,
    UNLIMITED,
    ExtraKeys,
    News,
    RowFlag,
    StepResult,
    Watermark,
)
from kvplane_service.replicas.host import UnaryStep

if TYPE_CHECKING:
    from kvplane_service.unary.service import UnaryCalls

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class CallHeader:
    """What every mutation carries.

    Attributes:
        at: the step that it belongs to.
        op_id: idempotency key chosen by the client, "" for none.
        fingerprint: digest of the call's content; calls with equal `op_id` must have equal ones.
    """

    at: UnaryStep
    op_id: str = ""
    fingerprint: bytes = b""


class UnaryCall(ABC, Generic[_Answer]):
    """One mutation. `prepare` does everything that may wait; `apply` then runs without interruption."""

    __slots__ = ()

    async def prepare(self, unary: UnaryCalls) -> Self:
        """The call with its token ids hashed; itself when it has none. Raises as `UnaryCalls.do`."""
        del unary
        return self

    @abstractmethod
    def apply(self, unary: UnaryCalls, at: UnaryStep) -> _Answer:
        """Apply the prepared call. Raises as `UnaryCalls.do`."""


@dataclass(frozen=True, slots=True)
class Content:
    """The tokens of a new request, as token ids or as hashes of its full blocks.

    Attributes:
        hashes: digests of the full blocks, concatenated.
        tail: state of the hash chain after the last token; None when the client computes the hashes.
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
        """The row of an unnamed request, for look-ups."""
        return self.as_news(0, "")

    def as_news(self, slot: int, name: str) -> News:
        """The row that creates the request."""
        return News(
            slot=[slot],
            num_tokens=[self.num_tokens],
            num_hashes=[self.num_hashes],
            hashes=self.hashes,
            request_id=[name],
            domain=[self.domain],
            extra_keys=[self.extra_keys],
            skip_reading=[int(self.skip_reading)],
            max_tokens=[self.max_tokens],
        )


@dataclass(frozen=True, slots=True)
class Appended:
    """Tokens appended to a request, as token ids or as hashes of the blocks that they complete.

    Attributes:
        hashes: digests of the completed blocks, concatenated.
        was, tail: state of the hash chain before and after these tokens; None when the client computes the hashes.
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
    """Outcome of an allocation; the value is the name in the contract."""

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
    """Answer of an allocation; block ids are listed per group."""

    step: StepResult
    status: AllocationStatus
    hit: int
    granted: int
    single_group_hit: int
    load_after: int
    new_blocks: list[list[int]]
    table: list[list[int]]
    preempted: list[str]
    hashes: Hashes


@dataclass(frozen=True, slots=True)
class Committed:
    """Answer of a commit."""

    step: StepResult
    hashes: Hashes


class EndKind(Enum):
    """What happens to a request that ends; the value is the name in the contract."""

    FREE = "FREE"
    HELD = "HELD"
    PREEMPTED = "PREEMPTED"
    RELEASED = "RELEASED"


@dataclass(frozen=True, slots=True)
class AllocateCall(UnaryCall[Allocated]):
    """One AllocateSlots, see the contract."""

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

    async def prepare(self, unary: UnaryCalls) -> Self:
        """See UnaryCall."""
        content = None if self.content is None else await unary.hash_content(self.content)
        return replace(self, content=content, appended=await unary.hash_appended(self.request_id, self.appended))

    def apply(self, unary: UnaryCalls, at: UnaryStep) -> Allocated:
        """See UnaryCall."""
        return unary.allocate(at, self)


@dataclass(frozen=True, slots=True)
class CommitCall(UnaryCall[Committed]):
    """One CommitBlocks, see the contract; without a name it only ends the step."""

    request_id: str = ""
    computed: int = UNCHANGED
    appended: Appended = field(default_factory=Appended)
    commit: int = UNCHANGED

    async def prepare(self, unary: UnaryCalls) -> Self:
        """See UnaryCall."""
        return replace(self, appended=await unary.hash_appended(self.request_id, self.appended))

    def apply(self, unary: UnaryCalls, at: UnaryStep) -> Committed:
        """See UnaryCall."""
        return unary.commit(at, self)


@dataclass(frozen=True, slots=True)
class FreeCall(UnaryCall[StepResult]):
    """One Free, see the contract. `fence_seq` 0: none."""

    request_id: str
    end: EndKind = EndKind.FREE
    fence_seq: int = 0

    def apply(self, unary: UnaryCalls, at: UnaryStep) -> StepResult:
        """See UnaryCall."""
        return unary.free(at, self.request_id, self.end, self.fence_seq)


@dataclass(frozen=True, slots=True)
class EvictCall(UnaryCall[StepResult]):
    """One EvictBlocks, see the contract."""

    blocks: tuple[int, ...]

    def apply(self, unary: UnaryCalls, at: UnaryStep) -> StepResult:
        """See UnaryCall."""
        return unary.evict(at, list(self.blocks))


@dataclass(frozen=True, slots=True)
class ResetCall(UnaryCall[StepResult]):
    """One ResetPrefixCache, see the contract."""

    def apply(self, unary: UnaryCalls, at: UnaryStep) -> StepResult:
        """See UnaryCall."""
        return unary.reset(at)
