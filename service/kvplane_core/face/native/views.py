"""Views of the compiled core: its attributes, the columns of its requests, and the events of its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, Generic, Protocol, TypeVar, overload

from kvplane.base.groups import Medium
from kvplane.base.hashing import PackedHashes
from kvplane.base.list_like import ListLike
from kvplane.base.packed_ints import PackedInts
from kvplane.base.sections import Declined, Prefetched, Retained
from kvplane.base.step import (
    Blocks,
    CacheEvent,
    EventKind,
    Orders,
    PartResult,
    RemoveReason,
    StepResult,
)
from kvplane_core.cpp import _native
from kvplane_core.face.cache_events import CacheEvents
from kvplane_core.face.contents import HashedRows

T = TypeVar("T")


class HasCore(Protocol):
    """An object that reads a compiled core."""

    @property
    def core(self) -> object:
        """The core."""


class Read(Generic[T]):
    """An attribute whose value is the answer to the question of its name, or what `made` makes of the answer."""

    def __init__(self, made: Callable[[Any], T] | None = None, question: str = "") -> None:
        self._made, self._question = made, question

    def __set_name__(self, owner: type, name: str) -> None:
        self._question = self._question or name

    @overload
    def __get__(self, of: None, owner: type) -> Read[T]: ...
    @overload
    def __get__(self, of: HasCore, owner: type) -> T: ...
    def __get__(self, of: HasCore | None, owner: type) -> Read[T] | T:
        if of is None:
            return self
        answer = _native.read(of.core, self._question)
        return answer if self._made is None else self._made(answer)


class NativeRequests:
    """Columns of all requests, which are those of the compiled core."""

    def __init__(self, core: object) -> None:
        self.core = core
        self.running, self.held, self.live = map(self._column, ("running", "held_slots", "live"))
        self.num_tokens, self.computed, self._ends_at = map(self._column, ("num_tokens", "computed", "ends_at"))
        self.request_id: Sequence[str] = _native.read(core, "column", "request_id")

    def _column(self, name: str) -> Sequence[Any]:
        return _native.read(self.core, "column", name)

    loading = Read[frozenset[int]](frozenset)  # slots whose blocks a transfer still writes

    def is_live(self, slot: int) -> bool:
        """Whether the slot has a request, running or not."""
        return 0 <= slot < len(self.live) and bool(self.live[slot])

    def launch_end(self, slot: int) -> int:
        """Return the position, in tokens, where the request's last launch ends, see `Requests.launch_end`."""
        return max(self._ends_at[slot], self.computed[slot])

    def slots(self) -> list[int]:
        """Return the live slots, ascending."""
        return _native.read(self.core, "slots")

    def slot_named(self, name: str) -> int | None:
        """Return the live slot of the first request with this name; None if no request has it."""
        return _native.read(self.core, "slot_named", name)

    def hashes(self, slot: int) -> Sequence[bytes]:
        """Return the hashes of the request's full hash blocks."""
        joined, size = _native.read(self.core, "hashes", slot)
        return PackedHashes(joined, size or 1)


class NativePart(PartResult):
    """The answer to a part. Its blocks, orders, events and columns without entries are made when they are read."""

    def __eq__(self, other: object) -> bool:
        """Return whether another answer, by any core, is the same."""
        if not isinstance(other, PartResult):
            return NotImplemented
        return all(getattr(self, one.name) == getattr(other, one.name) for one in fields(PartResult) if one.compare)


class NativeEvents(CacheEvents):
    """The events of a part, which become Python objects when they are read. There is at least one; never modified.

    Attributes:
        marks: whether there are STORED events, and others, and one that concerns a key of an earlier STORED event whose
            step is not executed: the sum of 1, 2 and 4.
    """

    __slots__ = ("_packed", "marks")
    marks: int

    def __init__(self, packed: object) -> None:
        self._packed, self.marks = packed, 7

    def __getattr__(self, name: str) -> list[CacheEvent]:
        if name != "runs":
            raise AttributeError(name)
        self.runs = _native.events(self._packed)
        return self.runs

    def __bool__(self) -> bool:
        return True

    def removals(self) -> Sequence[int]:
        """Count the removed keys by the number of the reason."""
        return _native.removals(self._packed)

    @staticmethod
    def pack(head: bytes, shares: Sequence[tuple[NativeEvents, int, int]]) -> bytes:
        """Return events packed behind `head`: of each the STORED ones for 1, the others for 2, all for 0. The third
        number is the medium of the tier that they are of; 0 = the device.
        """
        return _native.pack_events(head, [(events._packed, share, medium) for events, share, medium in shares])


class NativeTierEvents(ListLike[CacheEvent]):
    """The events of tiers in a part, which become Python objects when they are read. There is at least one; never
    modified.
    """

    __slots__ = ("_made", "_runs")
    _runs: list[tuple[int, object]]

    def shares(self) -> list[tuple[NativeEvents, int, int]]:
        """Return them as `NativeEvents.pack` takes them."""
        return [(NativeEvents(packed), 0, medium) for medium, packed in self._runs]

    def __getattr__(self, name: str) -> list[CacheEvent]:
        if name != "_made":
            raise AttributeError(name)
        self._made = tier_events_of(self._runs)
        return self._made

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self._made)

    def __iter__(self) -> Iterator[CacheEvent]:
        return iter(self._made)


def tier_events_of(runs: list[tuple[int, object]]) -> list[CacheEvent]:
    """Return the events of tiers; each tier's are packed. Hashes and blocks are lists, as those of a `Tier`."""
    events = [(one, Medium(medium)) for medium, packed in runs for one in _native.events(packed)]
    return [replace(one, hashes=list(one.hashes), blocks=list(one.blocks), tier=medium) for one, medium in events]


# Numbers of kinds and reasons are their places.
_native.answer_with(
    StepResult, NativePart, Blocks, Orders, CacheEvent, (None, *EventKind), tuple(RemoveReason), Medium.DEVICE,
    NativeEvents, PackedInts, NativeTierEvents, Declined, Prefetched, HashedRows,
    Retained,
)  # fmt: skip
