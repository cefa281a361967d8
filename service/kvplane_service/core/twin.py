"""Two cores that apply the same steps: the first one answers, and every difference of the second one is an error."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, cast

from kvplane.base.errors import KvplaneError
from kvplane.base.step import CacheEvent, PartResult, Step, StepResult
from kvplane_service.core.cache_events import CacheEvents
from kvplane_service.core.loading import load_state
from kvplane_service.core.recovery import RecoveredState, RecoveryOutcome
from kvplane_service.core.replica import Replica
from kvplane_service.core.state import digest, export_state

if TYPE_CHECKING:
    from kvplane_service.core.interface import ReplicaCore
    from kvplane_service.core.tiers.tiers import Tiers

KEPT_STEPS = 200
_COLUMNS = [column.name for column in fields(PartResult)]
_OTHER_CHANGES = {"recover", "store_empty_ranges"}  # a second core is made before the next step


class CoresDiffer(AssertionError):
    """Two cores answered a step differently.

    Attributes:
        before: the image before the first of `steps`; empty where that step begins an engine life with events.
        steps: the last steps, the one that differs last.
    """

    def __init__(self, message: str, before: bytes, steps: Sequence[Step]) -> None:
        super().__init__(message)
        self.before, self.steps = before, list(steps)


if TYPE_CHECKING:
    _Base = Replica
else:
    _Base = object


class TwinReplica(_Base):
    """A `Replica` whose steps and engine lives are also those of a second core, with equal results, errors and state.

    Args:
        first: answers, and has all methods and attributes of this object.
        second: makes the second core with the state of a replica. None: a `Replica` is loaded from the exported state
            of the first.
        check_every: number of steps between two comparisons of the whole state, after which a loaded `Replica` is
            loaded again.
    """

    def __init__(
        self, first: Replica, second: Callable[[Replica], ReplicaCore] | None = None, check_every: int = 1
    ) -> None:
        self.first = first
        self._make = second or _reloaded
        self._reloads, self._check_every = second is None, check_every
        self._second: ReplicaCore | None = None
        self._lacks_events = self._lacks_tier_events = False  # the second core was made after the first one's events
        self._before, self._steps = b"", list[Step]()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name == "first":
            raise AttributeError(name)  # of an object that is being copied
        if name in _OTHER_CHANGES:
            self._second = None
        return getattr(self.first, name)

    def apply(self, step: Step) -> StepResult:
        """Apply a step on both cores. Raises CoresDiffer if they differ."""
        if self._second is None or len(self._steps) in (0, KEPT_STEPS):
            self._before, self._steps = self._exported(), []
        checks = len(self._steps) % self._check_every == 0
        if self._second is None or (self._reloads and checks):
            self._second = self._make(self.first)
        self._steps.append(step)
        result, error = _attempt(self.first, step)
        other, other_error = _attempt(self._second, step)
        if error is None or other_error is None:
            self._require("error", error, other_error)
        else:
            self._require("error", _plain(error), _plain(other_error))
        if result is not None and other is not None:
            self._compare(result, other)
        if checks:
            self._require("state", digest(self.first), digest(self._second))
        if error is not None:
            raise error
        assert result is not None, "a step has a result or an error"
        return result

    def apply_concurrently(self, step: Step) -> StepResult:
        """Apply a step as `apply` does."""
        return self.apply(step)

    # -- engine lives ------------------------------------------------------------------------------------------------

    def begin_epoch(
        self, epoch: int, stamp_table: Sequence[int] = (), busy: Iterable[int] = (), memory_is_new: bool = False
    ) -> int:
        """Begin a new engine life on both cores."""
        for _ in self.end_epoch(stamp_table):
            pass
        return self.enter_epoch(epoch, stamp_table, busy, memory_is_new)

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
        self._require("kept", kept, second.enter_epoch(epoch, stamp_table, busy, memory_is_new))
        self._require("state", digest(self.first), digest(second))
        self._steps = []
        return kept

    def take_events(self) -> CacheEvents:
        """Return and clear the events of an engine life, which both cores emit in an order of their own."""
        events = self.first.take_events()
        if self._second is not None and not self._lacks_events:
            self._require("events", _by_key(events), _by_key(self._second.take_events()))
        elif self._second is not None:
            self._second.take_events()
        self._lacks_events = False
        return events

    @property
    def tiers(self) -> Tiers:  # type: ignore[override]
        """The tiers of the first core, the taking of whose events also takes the second one's."""
        return cast("Tiers", _TwinTiers(self))

    def _take_tier_events(self) -> list[CacheEvent]:
        events = self.first.tiers.take_events()
        if self._second is not None:
            others = self._second.tiers.take_events()
            if not self._lacks_tier_events:
                self._require("tier events", events, others)
        self._lacks_tier_events = False
        return events

    def install_recovered(self, state: RecoveredState) -> RecoveryOutcome:
        """Install recovered keys on both cores."""
        if self._reloads:  # a pool takes ownership of the columns
            self._second = None
        else:
            self._made().install_recovered(state)
        return self.first.install_recovered(state)

    def _exported(self) -> bytes:
        return b"" if self.first.coordinator.pool.events else export_state(self.first)

    def _made(self) -> ReplicaCore:
        if self._second is None:
            pool = self.first.coordinator.pool
            events, pool.events = pool.events, CacheEvents()  # of an interrupted end of a life; no state has them
            try:
                self._second = self._make(self.first)
            finally:
                pool.events = events
            self._lacks_events, self._lacks_tier_events = bool(events), self._has_tier_events()
        return self._second

    def _has_tier_events(self) -> bool:
        return any(tier.events for tier in self.first.tiers.each)

    def _compare(self, result: StepResult, other: StepResult) -> None:
        self._require("published_through", result.published_through, other.published_through)
        for number, (part, of_other) in enumerate(zip(result.parts, other.parts, strict=True)):
            for name in _COLUMNS:
                self._require(f"parts[{number}].{name}", getattr(part, name), getattr(of_other, name))

    def _require(self, name: str, value: object, other: object) -> None:
        if value != other:
            where = f"step {self._steps[-1].seq}" if self._steps else "an engine life"
            message = f"{where} of {self.first.spec}: {name} is {value!r}, the other core has {other!r}"
            raise CoresDiffer(message, self._before, self._steps)

    def check_in_slices(self) -> Generator[None]:
        """Check the invariants of both cores."""
        yield from self.first.check_in_slices()
        if self._second is not None:
            yield from self._second.check_in_slices()

    def adopt(self, other: Replica) -> None:
        """Take over the state of another replica with an equal spec; the second core is made before the next step."""
        self._second = None
        self.first.adopt(other.first if isinstance(other, TwinReplica) else other)


class _TwinTiers:
    """The tiers of the first core of twins."""

    def __init__(self, twin: TwinReplica) -> None:
        self._twin = twin

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._twin.first.tiers, name)

    def take_events(self) -> list[CacheEvent]:
        """Return and clear the events of both cores."""
        return self._twin._take_tier_events()


def _reloaded(replica: Replica) -> Replica:
    return load_state(replica.spec, export_state(replica))


def _attempt(core: ReplicaCore, step: Step) -> tuple[StepResult | None, KvplaneError | None]:
    try:
        return core.apply(step), None
    except KvplaneError as error:
        return None, error


def _by_key(events: CacheEvents) -> list[tuple[object, ...]]:
    return sorted(
        (event.kind, event.domain, event.group, digest, block, event.reason)
        for event in events.runs
        for digest, block in zip(event.hashes or [b""], event.blocks or [0], strict=True)
    )


def _plain(error: KvplaneError) -> tuple[object, ...]:
    return type(error), error.message, error.field, error.remedy
