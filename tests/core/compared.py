"""Both cores behind one replica: the specification answers, and every difference of the compiled core is an error.

What the builders of `tests/core`, `tests/conformance` and `tests/fuzz` make. Compared are, of each step: results,
errors, what is published of its events, and the bytes of the image; of each engine life its events
and state; and the answers to questions. The invariants of the compiled structures are checked after each step.

A test that changes what is inside of the specification, instead of applying a step, runs on it alone: it has the mark
`specification`, or builds its replicas within `specification()`. Where there is no library, all tests do; `reason` says
why, and `test_compared` prints it.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import pytest

from kvplane.base.errors import KvplaneError
from kvplane.base.groups import CommitRule, ReplicaSpec
from kvplane.base.step import CacheEvent, PartResult, Step, StepResult
from kvplane.base.when_read import given_fields
from kvplane_core.face import loader
from kvplane_core.face.cache_events import CacheEvents
from kvplane_core.face.common import CommonCore
from kvplane_core.face.entries import Entries
from kvplane_core.face.recovery import RecoveredState, RecoveryOutcome
from kvplane_core.face.state import MAGIC, export_state, read_entries
from kvplane_core.spec.loading import load_state
from kvplane_core.spec.replica import Replica
from kvplane_service.replicas.events import Batch, PublicationHold
from tests.core import shown_keys

if TYPE_CHECKING:
    from kvplane_core.face.interface import ReplicaCore
    from kvplane_core.spec.tiers.tiers import Tiers

_T = TypeVar("_T")
Load = Callable[[ReplicaSpec, bytes], "ReplicaCore"]

KEPT_STEPS = 200
SMALL = 256  # blocks
FIRST_STEPS, EVERY, LARGE_EVERY = 4, 4, 32  # steps after which the states are compared; of pools that are not small
CALLS = frozenset(
    "lookup peek_slot blocks_of key_step count_keys group_totals group_counters block_map common_prefix_blocks "
    "shorten_chunk count_held group_blocks".split()
)
NUMBERS = frozenset(
    "seq epoch executed_through free_blocks num_running block_counts busy_blocks counters retained_counts "
    "digest_size".split()
)


class CoresDiffer(AssertionError):
    """The cores answered differently.

    Attributes:
        before: the image before the first of `steps`, or before the engine life that this step begins.
        steps: the last steps, the one that differs last.
    """

    def __init__(self, message: str, before: bytes, steps: Sequence[Step]) -> None:
        super().__init__(message)
        self.before, self.steps = before, list(steps)


# -- which tests compare -----------------------------------------------------------------------------------------------

_alone: list[None] = []  # one entry per `specification()` around


@contextmanager
def specification() -> Iterator[None]:
    """Within the block, replicas are those of the specification alone."""
    _alone.append(None)
    try:
        yield
    finally:
        _alone.pop()


def reason() -> str:
    """Why replicas are those of the specification alone; "" if they are compared."""
    if os.environ.get(loader.VARIABLE) == "python":
        return f"{loader.VARIABLE}=python"
    return loader.problem()


def compares() -> bool:
    """Whether replicas that are made now are compared."""
    return not _alone and not reason()


def new_replica(spec: ReplicaSpec) -> Replica:
    """An empty replica of both cores."""
    return compared(Replica(spec))


def compared(replica: Replica) -> Replica:
    """Both cores with the state of a replica, which may have been changed from outside; the replica itself where cores
    are not compared.
    """
    first = replica.first if isinstance(replica, ComparedCores) else replica
    return cast("Replica", ComparedCores(first)) if compares() else first


def changed(replica: Replica) -> None:
    """Note that a test has changed the specification without a step: the compiled core takes over its state."""
    if isinstance(replica, ComparedCores):
        replica._second = None


@contextmanager
def in_services() -> Iterator[None]:
    """Within the block, the replicas of services in this process are compared."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loader, "new_replica", new_replica)
        patched.setattr(loader, "load_replica", lambda spec, raw: compared(load_state(spec, raw)))
        yield


# -- the cores ---------------------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    _Base = Replica
else:
    _Base = object


class ComparedCores(_Base):
    """See the module. It has all methods and attributes of `first`.

    Args:
        first: the specification, which answers.
        load: makes the second core with the image of the first one, before the first step and when it changes
            otherwise; the compiled one by default.
        checks: whether the invariants of the second one are checked after each step.
    """

    def __init__(self, first: Replica, load: Load | None = None, checks: bool = True) -> None:
        self.first = first
        self._load: Load = load or loader._required().NativeReplica.load
        self._checks = checks and first.spec.commit is CommitRule.SAFE
        self._is_small = first.spec.num_blocks <= SMALL
        self._second: ReplicaCore | None = None
        self._lacks_events = self._lacks_tier_events = False  # the second core was made after the first one's events
        self._before, self._steps = b"", list[Step]()
        self._published = Published()

    def __getattr__(self, name: str) -> Any:
        if name == "first":
            raise AttributeError(name)  # of an object that is being copied
        mine = getattr(self.first, name)
        if self._second is not None and name in NUMBERS:
            self.require(name, mine, getattr(self._second, name))
        return partial(self._ask, name) if name in CALLS else mine

    def __deepcopy__(self, memo: dict[int, Any]) -> ComparedCores:
        return ComparedCores(deepcopy(self.first, memo), self._load, self._checks)

    def _ask(self, name: str, *arguments: object) -> Any:
        answer = getattr(self.first, name)(*arguments)
        if self._second is not None:
            other = getattr(self._second, name)(*arguments)
            self.require(name, _listed(answer), _listed(other))
        return answer

    @property
    def second(self) -> ReplicaCore:
        """The other core."""
        return self._made()

    # -- steps

    def apply(self, step: Step) -> StepResult:
        """Apply a step on both cores. Raises CoresDiffer if they differ."""
        if _alone:
            self._second = None
            return self.first.apply(step)
        second = self._made()
        if len(self._steps) == KEPT_STEPS:
            self._before, self._steps = export_state(self.first), []
        number = len(self._steps)
        whole = number % EVERY == 0 or number < FIRST_STEPS if self._is_small else number % LARGE_EVERY == 0
        self._steps.append(step)
        efforts = self._efforts(step) if whole else (0, 0)
        result, error = _attempt(self.first, step)
        other, other_error = _attempt(second, step)
        self.require("error", _plain(error), _plain(other_error))
        if result is not None and other is not None:
            self.compare(step, result, other)
            self._published.compare(self.require, step, result.parts, other.parts)
        self.compare_states(whole)
        self.require("effort", *efforts)
        if error is not None:
            raise error
        assert result is not None, "a step has a result or an error"
        return result

    def apply_concurrently(self, step: Step) -> StepResult:
        """Apply a step as `apply` does."""
        return self.apply(step)

    def open_step(self, executed_through: int, records: bool = False) -> Any:
        """Begin the next step, whose rows are applied one by one on both cores."""
        from tests.core.compared_rows import ComparedStep

        return ComparedStep(self, executed_through)

    def _efforts(self, step: Step) -> tuple[int, int]:
        """The estimates of a step, in units of each core; 0 of one that is not valid."""
        try:
            self.first.check(step)
        except KvplaneError:
            return 0, 0
        return self.first.effort(step) // unit_ns(self.first), self._made().effort(step) // unit_ns(self._made())

    def compare(self, step: Step, result: StepResult, other: StepResult) -> None:
        """Compare the answers to a step."""
        self.require("published_through", result.published_through, other.published_through)
        for number, (part, of_other) in enumerate(zip(result.parts, other.parts, strict=True)):
            for name in given_fields(part).keys() | given_fields(of_other).keys():
                self.require(f"parts[{number}].{name}", getattr(part, name), getattr(of_other, name))

    def compare_states(self, whole: bool = True) -> None:
        """Check the second core, and compare the states if `whole`."""
        if self._second is not None and self._checks:
            for _ in self._second.check_in_slices():
                pass
        if self._second is not None and whole:
            mine, other = (b"".join(core.image(with_statistics=False)) for core in (self.first, self._second))
            self.require("state", mine, other)

    # -- engine lives

    begin_epoch = CommonCore.begin_epoch

    def end_epoch(self, stamp_table: Sequence[int] = ()) -> Generator[None]:
        """Do the long part of `begin_epoch` on both cores."""
        second = self._made()
        others = second.end_epoch(stamp_table)
        try:
            for _ in self.first.end_epoch(stamp_table):
                next(others, None)
                yield
        except GeneratorExit:  # the cores are at different places of the work
            self._second = None
            raise
        for _ in others:
            pass

    def enter_epoch(
        self, epoch: int, stamp_table: Sequence[int] = (), busy: Iterable[int] = (), memory_is_new: bool = False
    ) -> int:
        """Do the short part of `begin_epoch` on both cores. Raises CoresDiffer if they differ."""
        busy, second = list(busy), self._made()
        kept = self.first.enter_epoch(epoch, stamp_table, busy, memory_is_new)
        self.require("kept", kept, second.enter_epoch(epoch, stamp_table, busy, memory_is_new))
        self.compare_states()
        self._steps, self._published = [], Published()
        return kept

    def take_events(self) -> CacheEvents:
        """Return and clear the events of an engine life, which both cores emit in an order of their own."""
        events = self.first.take_events()
        if self._second is not None:
            others = self._second.take_events()
            if not self._lacks_events:
                self.require("events", _by_key(events), _by_key(others))
        self._lacks_events = False
        return events

    @property
    def tiers(self) -> Tiers:  # type: ignore[override]
        """The tiers of the first core, the taking of whose events also takes the second one's."""
        return cast("Tiers", _ComparedTiers(self))

    def take_tier_events(self) -> list[CacheEvent]:
        """Return and clear the events of tiers that are in no result."""
        events = self.first.tiers.take_events()
        if self._second is not None:
            others = self._second.tiers.take_events()
            if not self._lacks_tier_events:
                self.require("tier events", events, others)
        self._lacks_tier_events = False
        return events

    def recover(
        self, epoch: int, tables: Sequence[Sequence[int]], stored: Iterable[Entries], busy: Iterable[int] = ()
    ) -> RecoveryOutcome:
        """Begin the first engine life from stored keys on both cores."""
        stored, busy = list(stored), list(busy)
        second: Any = self._made()
        outcome = self.first.recover(epoch, tables, stored, busy)
        self.require("recovered", outcome, second.recover(epoch, tables, stored, busy))
        self.compare_states()
        return outcome

    def install_recovered(self, state: RecoveredState) -> RecoveryOutcome:
        """Install recovered keys on both cores. The pool of the first one takes ownership of the columns."""
        self._made().install_recovered(state)
        return self.first.install_recovered(state)

    def adopt(self, other: Any) -> None:
        """Take over the state of another replica with an equal spec."""
        self._second = None
        self.first.adopt(other.first if isinstance(other, ComparedCores) else other)

    def store_empty_ranges(self) -> None:
        """Report empty registrations on both cores."""
        if self._second is not None:
            self._second.store_empty_ranges()
        self.first.store_empty_ranges()

    # -- keys, which both cores show by the same code: the oracle reads the pool

    def entries(self, blocks: Iterable[int] | None = None) -> Entries:
        """Return the published keys."""
        asked = None if blocks is None else list(blocks)
        answer: Entries = self._ask("entries", asked)
        self.require("entries of the pool", shown_keys.rows_of(answer), shown_keys.shown(self.first, asked))
        return answer

    def stored_events(self) -> Iterator[tuple[int, CacheEvent]]:
        """Return STORED events of all keys."""
        mine = list(self.first.stored_events())
        self.require("events of the pool", shown_keys.announced_by(mine), shown_keys.announced(self.first))
        if self._second is not None:
            self.require("stored_events", mine, list(self._second.stored_events()))
        return iter(mine)

    def cached_columns(self, digests: Sequence[bytes], domain: str) -> list[bytes]:
        """Return where the cache has keys."""
        answer: list[bytes] = self._ask("cached_columns", digests, domain)
        self.require("columns of the pool", answer, shown_keys.cached(self.first, digests, domain))
        return answer

    # -- the whole state

    def image(self, with_statistics: bool = True, hashed: bool = False) -> Iterator[bytes]:
        """Return the image of the state, which is that of both cores."""
        mine = b"".join(self.first.image(with_statistics, hashed))
        if self._second is not None:
            self.require("image", mine, b"".join(self._second.image(with_statistics, hashed)))
        return iter([mine])

    def check_in_slices(self) -> Generator[None]:
        """Check the invariants of both cores."""
        yield from self.first.check_in_slices()
        if self._second is not None:
            yield from self._second.check_in_slices()

    def require(self, name: str, value: object, other: object) -> None:
        """Raise CoresDiffer if an answer of the cores differs."""
        if value != other:
            where = f"step {self._steps[-1].seq}" if self._steps else "an engine life"
            value, other = _parts_that_differ(value, other)
            message = f"{where}: {name} is {value:.400}, the other core has {other:.400}, of {self.first.spec}"
            raise CoresDiffer(message, self._before, self._steps)

    def _made(self) -> ReplicaCore:
        if self._second is None:
            pool = self.first.coordinator.pool
            events, pool.events = pool.events, CacheEvents()  # of an interrupted end of a life; no state has them
            try:
                self._before, self._steps = export_state(self.first), []
            finally:
                pool.events = events
            self._second, self._published = self._load(self.first.spec, self._before), Published()
            self._lacks_events = bool(events)
            self._lacks_tier_events = any(tier.events for tier in self.first.tiers.each)
        return self._second


def unit_ns(core: ReplicaCore) -> int:
    """What one unit of effort takes on a core."""
    modules = (vars(sys.modules[one.__module__]) for one in type(core).__mro__)
    return next(module["UNIT_NS"] for module in modules if "UNIT_NS" in module)


class _ComparedTiers:
    """The tiers of the first core."""

    def __init__(self, both: ComparedCores) -> None:
        self._both = both

    def __getattr__(self, name: str) -> Any:
        return getattr(self._both.first.tiers, name)

    def take_events(self) -> list[CacheEvent]:
        """Return and clear the events of both cores."""
        return self._both.take_tier_events()


class Published:
    """What is published of the events of the cores, by one hold each: read for the first one, packed for the second.

    Attributes:
        counts: of steps, by the way in which the events of the second one were published.
    """

    counts: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        self.first, self.second = PublicationHold(), PublicationHold()

    def compare(
        self, require: Callable[..., None], step: Step, parts: Sequence[PartResult], others: Sequence[PartResult]
    ) -> None:
        """Publish the events of a step."""
        at = step.seq, step.executed_through
        shown = self.first.step(*at, [part.events for part in parts])
        shares = self.second.step_packed(*at, [part.events for part in others])
        if shares is None:
            read = self.second.step(*at, [part.events for part in others])
            require("published", finish(Batch(0, 0, shown).pack()), finish(Batch(0, 0, read).pack()))
            self.counts["read"] += 1
            return
        for part, other in zip(parts, others, strict=True):
            shown += part.tier_events
            shares += cast(Any, other.tier_events).shares() if other.tier_events else []
            self.counts["tiers"] += bool(other.tier_events)
        self.counts["packed"] += bool(shares)
        raw = shares[0][0].pack(bytes(9), shares)[9:] if shares else b""
        require("published", finish(Batch(0, 0, shown).pack())[9:] if shown else b"", raw)


def finish(work: Generator[None, None, _T]) -> _T:
    """Return what a packing returns."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return cast(_T, end.value)


def _attempt(core: ReplicaCore, step: Step) -> tuple[StepResult | None, KvplaneError | None]:
    try:
        return core.apply(step), None
    except KvplaneError as error:
        return None, error


def _listed(answer: object) -> object:
    return list(answer) if isinstance(answer, Sequence) and not isinstance(answer, tuple | str) else answer


def _parts_that_differ(value: object, other: object) -> tuple[str, str]:
    """Return both as texts; of images the entries that differ."""
    if isinstance(value, bytes) and isinstance(other, bytes) and value.startswith(MAGIC):
        mine, its = list(read_entries(value)), list(read_entries(other))
        pairs = [pair for pair in zip(mine, its, strict=False) if pair[0] != pair[1]]
        return repr([one for one, _ in pairs]), repr([one for _, one in pairs])
    return repr(value), repr(other)


def _by_key(events: CacheEvents) -> list[tuple[object, ...]]:
    return sorted(
        (event.kind, event.domain, event.group, digest, block, event.reason)
        for event in events.runs
        for digest, block in zip(event.hashes or [b""], event.blocks or [0], strict=True)
    )


def _plain(error: KvplaneError | None) -> tuple[object, ...] | None:
    return None if error is None else (type(error), error.message, error.field, error.remedy)
