"""The compiled core: what `Replica` does within a step.

`NativeReplica` answers as `Replica` does, which is the specification, and checks its own structures. `module.cpp` is
the entry of the C++ files, each of which is named as the Python file that it follows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from kvplane.base.groups import NULL_BLOCK, ReplicaSpec
from kvplane.base.hashing import HashScheme, PackedHashes
from kvplane.base.step import (
    Part,
    Step,
    StepResult,
)
from kvplane_core.cpp import _native
from kvplane_core.face.cache_events import CacheEvents
from kvplane_core.face.columns import SLICE_BLOCKS
from kvplane_core.face.common import CommonCore
from kvplane_core.face.counters import Counters, GroupCounters, GroupTotals, Residency
from kvplane_core.face.entries import Entries
from kvplane_core.face.interface import (
    Answer,
    BlockCounts,
    BrokenInvariant,
    Hit,
    KeyRow,
    ReadStep,
    ReplicaCore,
)
from kvplane_core.face.native.hashers import Hashers
from kvplane_core.face.native.open_step import NativeOpenStep, hit_of
from kvplane_core.face.native.row_views import NativeCoordinator, NativeTracker
from kvplane_core.face.native.settings import of_group, of_hashes, of_tiers, settings
from kvplane_core.face.native.tiers import NativeTiers, stamps_of
from kvplane_core.face.native.views import NativeEvents, NativeRequests, Read
from kvplane_core.face.packed_values import ValueReader, pack_value
from kvplane_core.face.reasons import Refusal
from kvplane_core.face.recovery import PoolShape, RecoveredState, RecoveryOutcome, verify_entries
from kvplane_core.face.setup import check_spec
from kvplane_core.face.state import hasher_of, hasher_state, not_loaded, spec_digests

SOURCES = _native.SOURCES
UNIT_NS = 50  # to allocate and register a block, of requests of 40 blocks and more, rounded up


@dataclass(frozen=True, slots=True)
class PreparedState(RecoveredState):
    """A recovered state with the pool that has its keys, so that installing it takes no time."""

    pool: object


class NativeReplica(CommonCore):
    """A replica whose steps are applied by the compiled core.

    Attributes:
        core: the compiled core.
        hashers: hash the tokens that the core does not hash.
        requests: columns of all requests, by slot.
    """

    def __init__(self, spec: ReplicaSpec) -> None:
        """Raise InvalidArgument if fields of the spec contradict each other."""
        check_spec(spec)
        # Stamps of the memory when this engine life began, for an image.
        self._shown: array[int] | memoryview = array("Q")
        self._make(spec)

    @classmethod
    def of(cls, replica: ReplicaCore) -> NativeReplica:
        """Make a core with the state of a replica."""
        return cls.load(replica.spec, b"".join(replica.image()))

    @classmethod
    def load(cls, spec: ReplicaSpec, image: bytes) -> NativeReplica:
        """Make a core with the state of an image, see `state`. Raises InvalidArgument if it is none of this spec."""
        made = cls.__new__(cls)
        made._make(spec)
        try:
            shown, hashers = _native.change(made.core, "load", spec_digests(spec), image)
        except ValueError as error:
            raise not_loaded(*error.args) from error
        made._shown = array("Q", shown)
        for slot, state in hashers:
            made.hashers.continue_from(slot, hasher_of(ValueReader(state).read(), made._scheme))
        return made

    def _make(self, spec: ReplicaSpec) -> None:
        self.spec, self._scheme = spec, HashScheme.of(spec)
        groups = [of_group(group) for group in spec.normalized.groups]
        hashing = of_hashes(self._scheme)
        self.core = _native.new(settings(spec, self._scheme.digest.size), groups, of_tiers(spec), hashing)
        self.tiers = NativeTiers(self.core, spec)
        self.hashers = Hashers(self.core, self._scheme, hashes_here=hashing[1] is not None)
        self.requests = NativeRequests(self.core)

    # -- steps -------------------------------------------------------------------------------------------------------

    def apply(self, step: Step) -> Any:  # noqa: ANN401
        """Apply the parts of a step, see `Replica.apply`. A step that was read from a message (it has the attribute
        `read`, the form of `ReadStep`) has an `Answer`, with events if it is `with_events`.
        """
        return self._apply(step, alone=False)

    def apply_concurrently(self, step: Step) -> Any:  # noqa: ANN401
        """Apply a step as `apply` does, while other threads run: the interpreter's lock is released. A thread that uses
        this replica meanwhile waits for the step.
        """
        return self._apply(step, alone=True)

    def _apply(self, step: Step, alone: bool) -> StepResult | Answer:
        read = getattr(step, "read", None)
        with_events = read is None or step.with_events  # type: ignore[attr-defined]
        try:
            answer = _native.apply(self.core, step, alone, self.hashers.hash, self._shown, read, with_events)
        except _native.Refused as refused:
            raise Refusal(*refused.args).error(self.spec, step) from None
        return answer if isinstance(answer, StepResult) else Answer(*answer)

    def read_step(self, message: bytes) -> ReadStep | None:
        """Return the step of a session's message, and what is known of it; None for a message without a step, and for
        one that Python's reader refuses and can name.
        """
        found = _native.read_step(message, self._scheme.digest.size)
        return None if found is None else ReadStep(*found)

    def effort(self, step: Step) -> int:
        """Estimate what it takes to apply a step, in nanoseconds, see `Replica.effort`. A step that was read from a
        message has the attribute `read`.
        """
        return UNIT_NS * _native.read(self.core, "effort", getattr(step, "read", step))

    def look_up_effort(self, num_tokens: int) -> int:
        """Estimate what the look-up of a prompt of this length takes, in nanoseconds."""
        return UNIT_NS * _native.read(self.core, "look_up_effort", num_tokens)

    def pack_applied(self, step: Step, head: bytes) -> bytes | None:
        """Return the decision about the step that was applied last behind `head`, as `decisions.packing` packs it; None
        for one of objects with extra keys or traces of requests, which the core does not read.
        """
        return _native.pack_applied(head, self.core, step)

    def open_step(self, executed_through: int, records: bool = False) -> NativeOpenStep:
        """Begin the next step, whose rows are applied one by one, see `OpenStep`; `records`: they are recorded."""
        return NativeOpenStep(self.core, self, executed_through, records)

    @cached_property
    def coordinator(self) -> NativeCoordinator:
        """What an engine in this process reads."""
        return NativeCoordinator(self.core, self)

    @property
    def tracker(self) -> NativeTracker:
        """What such an engine reads of steps in flight."""
        return NativeTracker(self.core)

    # -- engine lives ------------------------------------------------------------------------------------------------

    def end_epoch(self, stamp_table: Sequence[int] = ()) -> Generator[None]:
        """Do the long part of `begin_epoch`, in slices, see `Replica.end_epoch`."""
        walk = _native.read(self.core, "end_epoch", stamps_of(stamp_table), SLICE_BLOCKS)
        while _native.advance(walk):
            yield
        self.hashers.clear()

    def enter_epoch(
        self, epoch: int, stamp_table: Sequence[int] = (), busy: Iterable[int] = (), memory_is_new: bool = False
    ) -> int:
        """Do the short part of `begin_epoch`, see `Replica.enter_epoch`."""
        shown = stamps_of(stamp_table)
        _native.change(self.core, "enter_epoch", epoch, list(busy), memory_is_new, shown)
        self._shown = shown[: self.spec.num_blocks]
        return self.count_keys()

    def verify_entries(self, tables: Sequence[Sequence[int]], stored: Iterable[Entries]) -> RecoveredState:
        """Select the stored entries that the page memory proves, and build the pool that has them, see
        `Replica.verify_entries`.
        """
        state = verify_entries(PoolShape.of(self.spec, self.digest_size), tables, stored)
        columns = {field.name: getattr(state, field.name) for field in fields(RecoveredState)}
        return PreparedState(**columns, pool=self._prepared(state))

    def _prepared(self, state: RecoveredState) -> object:
        numbers = {name: number for number, name in enumerate(state.names)}
        further = [(at, (numbers.setdefault(key[:2], len(numbers)), key[2])) for at, key in state.further]
        pair, block, free, digests = state.buffers()
        size = self.digest_size
        columns = pair, block, digests, size, state.key_tokens, state.stamp, free
        return _native.change(self.core, "prepare", list(numbers), *columns, further)

    def install_recovered(self, recovered: RecoveredState) -> RecoveryOutcome:
        """Install the result of `verify_entries`, see `Replica.install_recovered`."""
        assert not self.requests.slots() and not self.count_keys(), "only an unused replica can recover"
        pool = recovered.pool if isinstance(recovered, PreparedState) else self._prepared(recovered)
        _native.change(self.core, "install", pool, [(slot, *key, version) for slot, key, version in recovered.slots])
        return recovered.outcome

    def adopt(self, other: ReplicaCore) -> None:
        """Take over the state of another replica with an equal spec, which must not be used afterwards."""
        assert self.spec == other.spec, "the replicas have different specs"
        if not isinstance(other, NativeReplica):
            other = NativeReplica.of(other)
        vars(self).update(vars(other))

    def take_events(self) -> CacheEvents:
        """Return and clear the cache events that `begin_epoch` caused."""
        packed = _native.change(self.core, "take_events")
        return CacheEvents() if packed is None else NativeEvents(packed)

    def store_empty_ranges(self) -> None:
        """Report empty registrations, see `Replica.store_empty_ranges`."""
        _native.change(self.core, "store_empty_ranges")

    # -- state -------------------------------------------------------------------------------------------------------

    def image(self, with_statistics: bool = True, hashed: bool = False) -> Iterator[bytes]:
        """Return the image of the present state, see `Replica.image`. It is written in slices of about a millisecond,
        so that other threads get the interpreter in between.
        """
        hashers = [(slot, pack_value(hasher_state(one))) for slot, one in self.hashers.outside()]
        shown = array("Q", self._shown)
        terms = spec_digests(self.spec)[0], shown, hashers, with_statistics, hashed, SLICE_BLOCKS
        walk, pieces = _native.read(self.core, "image", *terms), list[bytes]()
        while isinstance(piece := _native.advance(walk), bytes):
            pieces.append(piece)
        return iter(pieces)

    def __deepcopy__(self, memo: dict[int, Any]) -> NativeReplica:
        return NativeReplica.of(self)

    def check_in_slices(self) -> Generator[None]:
        """Check the invariants of the compiled structures, see `Replica.check_in_slices`."""
        walk = _native.read(self.core, "check")
        while (found := _native.advance(walk)) is True:
            yield
        if isinstance(found, tuple):
            raise BrokenInvariant(*found)

    # -- reads -------------------------------------------------------------------------------------------------------

    # Each as in `Replica`. Of what is counted, the present number.
    seq = Read[int]()
    epoch = Read[int]()
    executed_through = Read[int]()
    free_blocks = Read[int]()
    num_running = Read[int]()
    retained_counts = Read[tuple[int, int]]()
    busy_blocks = Read[tuple[int, ...]](tuple)
    counters = Read(lambda counts: Counters(*counts))
    residency = Read(lambda histograms: Residency(*histograms))

    @property
    def block_counts(self) -> BlockCounts:
        """Number of blocks by state."""
        num_free, num_evictable, slack = _native.read(self.core, "block_counts")
        return BlockCounts.of(self.spec, len(self.busy_blocks), num_free, num_evictable, slack)

    @property
    def digest_size(self) -> int:
        """Bytes of a block hash."""
        return self._scheme.digest.size

    def _read(self, question: str, *given: object) -> Any:  # noqa: ANN401
        return _native.read(self.core, question, *given)

    def lookup(self, digests: Sequence[bytes], domain: str, num_tokens: int) -> Hit:
        """Find the cached prefix that other clients may use, see `Replica.lookup`."""
        if isinstance(digests, PackedHashes):
            joined, size = digests.joined, digests.size
        else:
            assert len(set(map(len, digests))) < 2, "hashes of one scheme have one size"
            joined, size = b"".join(digests), len(digests[0]) if digests else 0
        tokens, single, blocks = _native.read(self.core, "find", joined, size, domain, num_tokens - 1)
        return Hit(tokens, single, tuple(blocks))

    def peek_slot(self, slot: int) -> Hit:
        """Return the hit that an admission of this request would find now, see `Replica.peek_slot`."""
        return hit_of(self.core, slot)

    def check_alone(self, part: Part) -> None:
        """Raise InvalidArgument if a replica without requests could not apply the part."""
        try:
            _native.read(self.core, "check_alone", part)
        except _native.Refused as refused:
            raise Refusal(*refused.args).error(self.spec, part) from None

    def key_rows(self, blocks: Sequence[int]) -> list[KeyRow]:
        """Return what each of these blocks, or slots of tiers, has; see `KeyRow`."""
        return self._read("keys", blocks)

    def pair_names(self) -> Callable[[Any], tuple[str, int]]:
        """Return a function that returns domain and group of a pair of `key_rows`."""
        domains, groups = self._read("domains"), len(self.spec.groups)
        return lambda pair: (domains[(pair - 1) // groups], (pair - 1) % groups)

    def free_order(self) -> list[int]:
        """Return the free blocks in the order of eviction."""
        return self._read("free_order")

    def first_blocks(self, domain: str, groups: Sequence[int], digest: bytes, horizon: int) -> list[int] | None:
        """Return the first block of each group with this digest, see `BlockPool.find`."""
        return self._read("first_blocks", domain, groups, digest, horizon)

    def blocks_of(self, domain: str, group: int, digest: bytes) -> list[int]:
        """Return all blocks that have this key, published or not."""
        return self._read("blocks_of", domain, group, digest)

    def key_step(self, domain: str, group: int, digest: bytes) -> int | None:
        """Return the step that registered this key; None if no block has the key."""
        return self._read("key_step", domain, group, digest)

    def group_totals(self) -> list[GroupTotals]:
        """Return the keys of each group, and the blocks that it ever took."""
        return [GroupTotals(*one) for one in self._read("group_totals")]

    def count_keys(self) -> int:
        """Count the distinct keys of the prefix cache."""
        return sum(one.keys for one in self.group_totals())

    def group_counters(self) -> list[GroupCounters]:
        """Return the counters of each group. Passes over the pool."""
        return [GroupCounters(*one) for one in self._read("group_counters")]

    def block_map(self, cells: int) -> list[list[int]]:
        """Return per group the held and the cached blocks of each cell, then the other blocks in use."""
        return self._read("block_map", cells)

    def common_prefix_blocks(self) -> list[int]:
        """Return, per group, how many leading blocks all running requests share."""
        return self._read("common_prefix_blocks")

    def shorten_chunk(self, slot: int, start: int, wanted: int) -> int:
        """Return how many of the `wanted` tokens from `start` on an aligned row grants at most."""
        return self._read("shorten_chunk", slot, start, wanted)

    def count_held(self, slot: int) -> int:
        """Count the blocks that are held for the transfer of an ended request."""
        return len(self._read("held", slot))

    def group_blocks(self, slot: int) -> list[int]:
        """Count the blocks of a request by group."""
        assert self.requests.is_live(slot), "the slot has no request"
        return [len(table) - table.count(NULL_BLOCK) for table in self._read("tables", slot)]
