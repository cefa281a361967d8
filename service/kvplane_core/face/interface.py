"""What the rest of the service uses of an allocator: `ReplicaCore`. `Replica` is its reference implementation.

Whatever changes the state goes through `ReplicaCore`, step by step; `image` is the whole state. Each core checks its
own structures.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

from kvplane.base.groups import ReplicaSpec
from kvplane.base.hashing import PackedHashes
from kvplane.base.step import CacheEvent, News, Part, Step, StepResult
from kvplane_core.face.cache_events import CacheEvents
from kvplane_core.face.counters import Counters, GroupCounters, GroupTotals, GroupUse, Residency, TierCounters
from kvplane_core.face.entries import Entries
from kvplane_core.face.recovery import RecoveredState, RecoveryOutcome

INSIDE = 1 << 62  # look-up horizon of the replica's own requests, which see tentative keys


MAX_SLOTS = 1 << 14

# Of a block: its stamp, the step that registered its keys, and the keys, the primary one first: ((pair, digest),
# tokens), where a pair stands for a domain and a group. Of a slot of a tier its version, 0, and its key with 0 tokens.
# Behind these, references.
KeyRow: TypeAlias = tuple[int, int, list[tuple[tuple[Any, bytes], int]], int]


@dataclass(frozen=True, slots=True)
class Hit:
    """The result of a look-up.

    Attributes:
        num_tokens: length of the hit in tokens.
        single_group_hit: tokens of the longest hit in a single look-up class, if it is longer than `num_tokens`; else 0
            (vLLM: shared prefix boundary). Groups that keep only some blocks cached keep the blocks at this length.
        blocks: per group, the blocks of the hit in token order; the null block where the group needs none.
    """

    num_tokens: int
    single_group_hit: int
    blocks: tuple[list[int], ...]


@dataclass(frozen=True, slots=True)
class Need:
    """An allocation that is planned: `GroupManager.blocks_needed` counts how many free blocks the allocation would
    take.

    Attributes:
        slot: slot of the request.
        num_slots: leading tokens of the request that need memory, lookahead included.
        num_main: leading tokens of the request that need memory, without lookahead.
        total_computed: tokens that need not be computed: the tokens of the hit and the external tokens.
        local_computed: tokens of the hit.
        num_encoder: encoder tokens, for cross attention.
        capped: count at most the blocks that a request can hold at one time; used when the whole sequence must fit
            (`full_fit`).
    """

    slot: int
    num_slots: int
    num_main: int
    total_computed: int
    local_computed: int
    num_encoder: int = 0
    capped: bool = False


class BrokenInvariant(AssertionError):
    """Raised when the state of a replica contradicts itself, which is a bug or damaged memory.

    Attributes:
        invariant: name of the violated invariant, such as "free_list"; the message states where and how.
    """

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(message)
        self.invariant = invariant


class BlockCounts(NamedTuple):
    """Blocks of a pool by state; the null block, or the null state, is in none.

    Attributes:
        held: blocks in tables of requests, or waiting for a step to end.
        busy: blocks that a load of an earlier engine life may still write.
        cached: free blocks with a key.
        empty: free blocks without a key that any group can take.
        slack: free blocks without a key of superblocks in use, which no state can take; only with split pages.
    """

    held: int
    busy: int
    cached: int
    empty: int
    slack: int

    @classmethod
    def of(cls, spec: ReplicaSpec, busy: int, num_free: int, cached: int, slack: int) -> BlockCounts:
        """Return the counts of a pool of which `num_free` blocks are free."""
        held = spec.num_blocks - spec.blocks_per_state - num_free - busy
        return cls(held, busy, cached, num_free - cached - slack, slack)


class ReadStep(NamedTuple):
    """A step as a compiled core read it from a message, which must outlive it, and what a service knows of it.

    Attributes:
        form: the step, which is applied once.
        epoch, seq, part, last, executed_through, traceparent: as in `Step`.
        num_parts, num_rows, num_tokens: numbers of parts, rows and token ids.
        kinds: what it has, the sum of SCHEDULES (run or admit rows), BEGINS (new requests), RESUMES and HAS_KEYS.
        of_service_at: the first part with a section that only the service adds, `retain` or `peers`; -1 = none has.
        domains: the cache domains of new requests, by the number of their part.
    """

    form: object
    epoch: int
    seq: int
    part: int
    last: bool
    executed_through: int
    traceparent: str
    num_parts: int
    num_rows: int
    num_tokens: int
    kinds: int
    of_service_at: int
    domains: Sequence[tuple[int, Sequence[str]]]


SCHEDULES, BEGINS, RESUMES, HAS_KEYS = 1, 2, 4, 8


class Answer(NamedTuple):
    """The answer of a compiled core to a step that it read.

    Attributes:
        message: of the session.
        events, tier_events: of each part.
        is_counted: whether the counters of the decision log must read it.
        published_through: as in `StepResult`.
    """

    message: bytes
    events: tuple[Sequence[CacheEvent], ...]
    tier_events: tuple[Sequence[CacheEvent], ...]
    is_counted: bool
    published_through: int


class RequestColumns(Protocol):
    """Columns of all requests, indexed by slot, and never changed by a reader."""

    @property
    def running(self) -> Sequence[bool]:
        """Whether the request holds blocks and may run."""

    @property
    def held(self) -> Sequence[bool]:
        """Whether the request has ended and its blocks are held for a transfer."""

    @property
    def num_tokens(self) -> Sequence[int]:
        """Known tokens: the prompt and the appended ones."""

    @property
    def computed(self) -> Sequence[int]:
        """Tokens whose KV is computed or granted to a step."""

    @property
    def request_id(self) -> Sequence[str]:
        """Names of the requests, "" for those without."""

    @property
    def loading(self) -> AbstractSet[int]:
        """Slots whose blocks a transfer still writes."""

    def is_live(self, slot: int) -> bool:
        """Whether the slot has a request, running or not."""

    def slots(self) -> list[int]:
        """Return the live slots, ascending."""

    def slot_named(self, name: str) -> int | None:
        """Return the live slot of the first request with this name; None if no request has it."""

    def hashes(self, slot: int) -> Sequence[bytes]:
        """Return the hashes of the request's full hash blocks."""


class TierView(Protocol):
    """One tier of a replica."""

    @property
    def num_slots(self) -> int:
        """Number of slots."""

    @property
    def num_held(self) -> int:
        """Number of slots with a key."""

    @property
    def num_shadows(self) -> int:
        """Number of keys that the device has again."""

    @property
    def num_retained(self) -> int:
        """Number of keys that are evicted after all others, because a prefix is retained."""

    @property
    def num_free(self) -> int:
        """Number of slots that can be written without an eviction."""

    @property
    def hit_tokens(self) -> int:
        """Tokens by which loads made hits longer, where this is the farthest tier that they read."""

    @property
    def uses(self) -> Sequence[GroupUse]:
        """Blocks by group."""


class TiersView(Protocol):
    """The tiers of a replica, none at least."""

    @property
    def each(self) -> Sequence[TierView]:
        """Each tier, the nearest first. They are only read."""

    @property
    def counters(self) -> TierCounters:
        """What happened since the replica began."""

    @property
    def has_keys(self) -> bool:
        """Whether a tier has a key."""

    def tier_of(self, domain: str, group: int, digest: bytes) -> int | None:
        """Return the number of the nearest tier that has a key; None if none has."""

    def open_jobs(self) -> dict[str, int]:
        """Return the number of jobs in flight: loads, saves, moves."""

    def stored_events(self) -> list[CacheEvent]:
        """Return STORED events of all keys."""

    def take_events(self) -> list[CacheEvent]:
        """Return and clear the events that are not in the result of a part."""


class ReplicaCore(Protocol):
    """The allocator of one engine instance. The methods are described at `Replica`."""

    spec: ReplicaSpec

    @property
    def tiers(self) -> TiersView: ...
    @property
    def seq(self) -> int: ...
    @property
    def counters(self) -> Counters: ...
    @property
    def requests(self) -> RequestColumns: ...
    @property
    def epoch(self) -> int: ...
    @property
    def digest_size(self) -> int: ...
    @property
    def free_blocks(self) -> int: ...
    @property
    def block_counts(self) -> BlockCounts: ...
    @property
    def retained_counts(self) -> tuple[int, int]: ...
    @property
    def busy_blocks(self) -> tuple[int, ...]: ...
    @property
    def executed_through(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def residency(self) -> Residency: ...

    def apply(self, step: Step) -> StepResult: ...
    def apply_concurrently(self, step: Step) -> StepResult: ...
    def begin_epoch(
        self, epoch: int, stamp_table: Sequence[int] = (), busy: Iterable[int] = (), memory_is_new: bool = False
    ) -> int: ...
    def end_epoch(self, stamp_table: Sequence[int] = ()) -> Generator[None]: ...
    def enter_epoch(
        self, epoch: int, stamp_table: Sequence[int] = (), busy: Iterable[int] = (), memory_is_new: bool = False
    ) -> int: ...
    def verify_entries(self, tables: Sequence[Sequence[int]], stored: Iterable[Entries]) -> RecoveredState: ...
    def install_recovered(self, state: RecoveredState) -> RecoveryOutcome: ...
    def adopt(self, other: Self) -> None: ...
    def take_events(self) -> CacheEvents: ...
    def effort(self, step: Step) -> int: ...
    def look_up_effort(self, num_tokens: int) -> int: ...
    def store_empty_ranges(self) -> None: ...

    def lookup(self, digests: Sequence[bytes], domain: str, num_tokens: int) -> Hit: ...
    def cached_columns(self, digests: Sequence[bytes], domain: str) -> list[bytes]: ...
    def digests_of(self, content: News) -> PackedHashes: ...
    def check_alone(self, part: Part) -> None: ...
    def peek_slot(self, slot: int) -> Hit: ...
    def blocks_of(self, domain: str, group: int, digest: bytes) -> Sequence[int]: ...
    def key_step(self, domain: str, group: int, digest: bytes) -> int | None: ...
    def entries(self, blocks: Iterable[int] | None = None) -> Entries: ...
    def stored_events(self) -> Iterator[tuple[int, CacheEvent]]: ...
    def key_rows(self, blocks: Sequence[int]) -> Iterable[KeyRow]: ...
    def pair_names(self) -> Callable[[Any], tuple[str, int]]: ...
    def free_order(self) -> list[int]: ...
    def first_blocks(self, domain: str, groups: Sequence[int], digest: bytes, horizon: int) -> list[int] | None: ...
    def count_keys(self) -> int: ...
    def group_totals(self) -> list[GroupTotals]: ...
    def group_counters(self) -> list[GroupCounters]: ...
    def block_map(self, cells: int) -> list[list[int]]: ...
    def common_prefix_blocks(self) -> list[int]: ...
    def shorten_chunk(self, slot: int, start: int, wanted: int) -> int: ...
    def count_held(self, slot: int) -> int: ...
    def group_blocks(self, slot: int) -> list[int]: ...
    def check_in_slices(self) -> Generator[None]: ...
    def image(self, with_statistics: bool = True, hashed: bool = False) -> Iterator[bytes]: ...
