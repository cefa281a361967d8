"""Packed decisions and batches are unpacked equal, in every field of their types."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import fields, is_dataclass
from enum import IntEnum
from random import Random
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.base import step as types
from kvplane.base.groups import Medium
from kvplane.base.packed_ints import PackedInts
from kvplane.base.step import CacheEvent, End, EventKind, Facts, Part, PartResult, Step, StepResult
from kvplane.wire import step, tables
from kvplane.wire.columns import Columns
from kvplane.wire.sections import Section
from kvplane_core.face.cache_events import CacheEvents, runs_of
from kvplane_service.decisions.log import Decision
from kvplane_service.decisions.packing import pack_decision, unpack_decision
from kvplane_service.replicas.events import Batch

KINDS, REASONS, MEDIA = tuple(EventKind), tuple(types.RemoveReason), tuple(Medium)
RANGES = {
    "I": (0, 2**32 - 1),
    "i": (-(2**31), 2**31 - 1),
    "Q": (0, 2**64 - 1),
}  # of the values of a column, by its code
SECTIONS = step._SECTIONS
SEEDS = st.integers(0, 2**32 - 1)

_T = TypeVar("_T")


def finish(work: Generator[None, None, _T]) -> _T:
    """Return what a packing returns."""
    return counted(work)[0]


def counted(work: Generator[None, None, _T]) -> tuple[_T, int]:
    """Return what a packing returns, and how often it yields."""
    for pieces in range(1 << 20):
        try:
            next(work)
        except StopIteration as ended:
            return ended.value, pieces
    raise AssertionError("it does not end")


class Anything:
    """Objects of the types of steps with something in every field, from a seed, because drawing each field
    would take long.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def number(self, bits: int = 64) -> int:
        return self._random.randrange(2**bits) >> self._random.randrange(bits + 1)

    def u32(self) -> int:
        return self.number(32)

    def raw(self) -> bytes:
        return self._random.randbytes(self._random.choice((0, 16, 32)))

    def text(self) -> str:
        return self._random.choice(("", "a", "\u00e4\u20ac", "x" * 300))

    def some(self, one, most: int = 3) -> list[Any]:
        return [one() for _ in range(self._random.randint(0, most))]

    def extra_keys(self) -> types.ExtraKeys:
        if self._random.random() < 0.3:
            return types.NO_EXTRA_KEYS
        lora = ("adapter", self.text()) if self._random.random() < 0.5 else None
        items = self.some(lambda: types.Multimodal(self.text(), self.u32(), self.u32()))
        return types.ExtraKeys(lora, self.text(), tuple(items), tuple(self.some(self.raw)))

    def event(self) -> CacheEvent:
        as_one = self._random.choice((list, tuple))
        return CacheEvent(
            self._random.choice(KINDS),
            self.u32(),
            as_one(self.some(self.raw)),
            as_one(self.some(self.u32)),
            domain=self.text(),
            parent=self.raw(),
            block_size=self.u32(),
            slot=self.u32(),
            start=self.u32(),
            end=self.u32(),
            block_starts=as_one(self.some(self.u32)),
            reason=self._random.choice(REASONS),
            tier=self._random.choice(MEDIA),
        )

    def table(self, of: Columns) -> dict[str, list[int]]:
        """Columns with an entry for each row, or none, or any number of them."""
        rows, table = self._random.randint(0, 3), {}
        for at, column in enumerate(of.each):
            is_left_out = column.by_row and at != of.first and self._random.random() < 0.3
            low, high = RANGES[column.code] if column.highest is None else (0, column.highest)
            count = rows if column.by_row else self._random.randint(0, 9)
            values = [self._random.choice((low, high, self._random.randint(low, high))) for _ in range(count)]
            table[column.name] = [] if is_left_out or column.name == "tokens" else values
        return table

    def section(self, of: Section) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for table in of.tables:
            made |= self.table(table)
        if of is tables.BLOCKS:
            made["count"] = [self._random.randint(0, 3) for _ in made["row"]]
            made["ids"] = [self.u32() for _ in range(sum(made["count"]))]
        others = {
            "hashes": self.raw,
            "texts": lambda: self.some(self.text),
            "digests": lambda: self.some(self.raw),
            "keys": lambda: self.some(self.extra_keys),
            "flag": lambda: self._random.random() < 0.5,
            "u32": self.u32,
            "u64": self.number,
        }
        for name, other in of.others.items():
            is_choice = other.kind == "choice"
            made[name] = types.OnRefusal(self._random.randrange(other.highest)) if is_choice else others[other.kind]()
        return made | {name: inner.kind(**self.section(inner)) for name, inner in of.inner.items()}

    def part(self) -> Part:
        made: dict[str, Any] = {name: of.kind(**self.section(of)) for name, of in SECTIONS.items()}
        if self._random.random() < 0.5:
            made["resume"] = None
        flags: dict[str, Any] = {name: self._random.random() < 0.5 for name in ("with_hashes", "with_tables")}
        assert made.keys() | flags.keys() == {one.name for one in fields(Part)}
        return Part(**made, **flags)

    def outcome(self) -> PartResult:
        logged = {"taken_back": self.u32(), "went_back": self.u32()}
        hashed = {name: self.some(self.raw) for name in ("hashed_facts", "hashed_news")}
        made = self.section(tables.PART_RESULT) | hashed | logged
        made["events"] = CacheEvents(self.some(self.event))
        no_decision_has = {"tier_events"}
        assert made.keys() | no_decision_has == {one.name for one in fields(PartResult)}
        return PartResult(**made)

    def decision(self) -> Decision:
        parts = [(self.part(), self.outcome()) for _ in range(self._random.randint(1, 2))]
        flag, trace = self._random.random() < 0.5, self.text()
        made = Step(self.number(), self.number(), [part for part, _ in parts], self.u32(), flag, self.number(), trace)
        result = StepResult(self.number(), self.u32(), [outcome for _, outcome in parts], self.number())
        events = tuple(outcome.events for _, outcome in parts)
        return Decision(made, result, events, self.number(), self.number())

    def batch(self) -> Batch:
        flags = [self._random.random() < 0.5 for _ in range(3)]
        return Batch(self.number(), self.number(), CacheEvents(self.some(self.event)), *flags)


def deep(value: object) -> object:
    """All that it says, in what can be compared: fields that `==` passes over, too."""
    if is_dataclass(value):
        return {one.name: deep(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, CacheEvents):
        return [deep(run) for run in value.runs]
    if isinstance(value, list | tuple | PackedInts):
        return [*map(deep, value)]
    assert isinstance(value, int | str | bytes | None), value
    return value


@given(SEEDS)
def test_packed_decision_round_trip(seed):
    decision = Anything(seed).decision()
    raw = finish(pack_decision(*decision))
    again = Decision(*unpack_decision(raw))
    assert deep(again) == deep(decision)
    assert again.events == tuple(outcome.events for outcome in again.result.parts)


@given(SEEDS, SEEDS)
def test_a_packed_decision_sorts_by_its_time(seed, other_seed):
    one, other = Anything(seed).decision(), Anything(other_seed).decision()
    assert (finish(pack_decision(*one))[:8] < finish(pack_decision(*other))[:8]) == (one.took_ns < other.took_ns)


@given(SEEDS)
def test_packed_batch_round_trip(seed):
    batch = Anything(seed).batch()
    assert deep(Batch.unpack(batch.seq, finish(batch.pack()))) == deep(batch)


def test_a_long_decision_is_packed_in_pieces_and_a_short_one_at_once():
    one, long = (CacheEvent(EventKind.STORED, 0, [bytes(32)] * count) for count in (1, 100_000))
    pieces = []
    for runs in ([one] * 100, [one] * 10_000, [long]):
        events = CacheEvents(runs)
        decision = Decision(Step(1, 1, [Part()]), StepResult(1, 0, [PartResult()]), (events,), 0, 0)
        pieces.append(counted(pack_decision(*decision))[1])
        pieces.append(counted(Batch(1, 1, events).pack())[1])
        assert deep(unpack_decision(finish(pack_decision(*decision))).events) == [deep(events)]
    assert pieces == [0, 0, 39, 39, 24, 24], "256 events in each, or 4096 keys"


@pytest.mark.parametrize("count", [3, 20])
def test_enumerations_and_ranges_of_sessions_in_process_are_packed_as_numbers(count):
    facts = Facts(list(range(count)), end=[End.FREE] * count, commit=range(count))  # type: ignore[arg-type]
    decision = Decision(Step(1, 1, [Part(facts)]), StepResult(1, 0, [PartResult()]), ([],), 0, 0)
    again = unpack_decision(finish(pack_decision(*decision))).step.parts[0].facts
    assert (again.slot, again.end, again.commit) == (list(range(count)), [End.FREE] * count, list(range(count)))
    assert not any(isinstance(end, IntEnum) for end in again.end)


@pytest.mark.parametrize("numbers", [[1, 2, 255], [1 << 31]])
def test_arrays_are_packed_as_lists(numbers):
    columns = [PartResult(granted=column, free_blocks=9) for column in (numbers, PackedInts("I", numbers))]
    packed = [
        finish(pack_decision(*Decision(Step(1, 1, [Part()]), StepResult(1, 0, [one]), ([],), 0, 0))) for one in columns
    ]
    assert packed[0] == packed[1]
    assert unpack_decision(packed[1]).result.parts[0].granted == numbers


def test_packed_decisions_contain_no_tokens():
    token = 0x6B766B76
    part = Part(Facts([0], appended=[9], tokens=[token] * 9), news=types.News([1], [9], tokens=[token] * 9))
    raw = finish(pack_decision(Step(1, 1, [part]), StepResult(1, 0, [PartResult()]), ([],), 0, 0))
    assert token.to_bytes(4, "little") not in raw
    again = unpack_decision(raw).step.parts[0]
    assert again.facts.tokens == again.news.tokens == []
    assert again.facts.appended == [9]


def test_packed_events_are_stored_in_runs():
    removed = CacheEvents()
    for block in range(100):
        removed.removed(block, [("", 0, bytes(32))], types.RemoveReason.EVICTED)
    again = Batch.unpack(1, finish(Batch(1, 1, removed).pack()))
    assert len(runs_of(again.events)) == 1
    assert again.events == removed


def test_fields_that_were_not_read_yet_are_not_made_for_packing():
    part, result = Part(run=types.Run([1])), PartResult(granted=[1])
    before = [dict(vars(one)) for one in (part, result)]
    finish(pack_decision(Step(1, 1, [part]), StepResult(1, 0, [result]), ([],), 5, 6))
    assert [vars(one) for one in (part, result)] == before
