"""Packed decisions and batches are unpacked equal, in every field of their types."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import IntEnum
from random import Random
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.base import sections
from kvplane.base import step as types
from kvplane.base.groups import Medium
from kvplane.base.packed_ints import PackedInts
from kvplane.base.step import CacheEvent, End, EventKind, Facts, Part, PartResult, Step, StepResult
from kvplane_core.face.cache_events import CacheEvents, runs_of
from kvplane_service.decisions import packing
from kvplane_service.decisions.log import Decision, without_tokens
from kvplane_service.decisions.packing import pack_decision, unpack_decision
from kvplane_service.replicas.events import Batch

KINDS, REASONS, MEDIA = tuple(EventKind), tuple(types.RemoveReason), tuple(Medium)
REFUSALS = tuple(types.OnRefusal)
LOWEST, HIGHEST = (0, 0, -(2**31), 0, -(2**63)), (255, 2**32 - 1, 2**31 - 1, 2**64 - 1, 2**63 - 1)
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


@contextmanager
def pieces_of(num_items: int, num_bytes: int) -> Iterator[None]:
    """Let a piece have this many items, or bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_PIECE", num_items)
        patch.setattr(packing, "_FEW", num_items)
        patch.setattr(packing, "_PIECE_BYTES", num_bytes)
        yield


class Anything:
    """Objects of the types of steps with something in every field, from a seed, because drawing each field
    would take long.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def number(self) -> int:
        return self._random.randrange(2**64) >> self._random.randrange(65)

    def raw(self) -> bytes:
        return self._random.randbytes(self._random.choice((0, 16, 32)))

    def text(self) -> str:
        return self._random.choice(("", "a", "\u00e4\u20ac", "x" * 300))

    def some(self, one, most: int = 3) -> list[Any]:
        return [one() for _ in range(self._random.randint(0, most))]

    def column(self) -> list[int]:
        width = self._random.randrange(5)
        return self.some(lambda: self._random.randint(LOWEST[width], HIGHEST[width]), most=20)

    def extra_keys(self) -> types.ExtraKeys:
        if self._random.random() < 0.3:
            return types.NO_EXTRA_KEYS
        lora = ("adapter", self.text()) if self._random.random() < 0.5 else None
        items = self.some(lambda: types.Multimodal(self.text(), self.number() >> 32, self.number() >> 32))
        return types.ExtraKeys(lora, self.text(), tuple(items), tuple(self.some(self.raw)))

    def event(self) -> CacheEvent:
        as_one = self._random.choice((list, tuple))
        return CacheEvent(
            self._random.choice(KINDS),
            self.number(),
            as_one(self.some(self.raw)),
            as_one(self.some(self.number)),
            domain=self.text(),
            parent=self.raw(),
            block_size=self.number(),
            slot=self.number(),
            start=self.number(),
            end=self.number(),
            block_starts=as_one(self.some(self.number)),
            reason=self._random.choice(REASONS),
            tier=self._random.choice(MEDIA),
        )

    def of_type(self, name: str):
        plain = {
            "int": self.number,
            "bool": lambda: self._random.random() < 0.5,
            "str": self.text,
            "bytes": self.raw,
            "MutableSequence[int]": self.column,
            "list[str]": lambda: self.some(self.text),
            "list[bytes]": lambda: self.some(self.raw),
            "Sequence[bytes]": lambda: self.some(self.raw),
            "list[ExtraKeys]": lambda: self.some(self.extra_keys),
            "OnRefusal": lambda: self._random.choice(REFUSALS),
            "Sequence[CacheEvent]": lambda: CacheEvents(self.some(self.event)),
        }
        if name in plain:
            return plain[name]()
        if name.endswith(" | None"):
            return self.of_type(name.removesuffix(" | None")) if self._random.random() < 0.5 else None
        kind = getattr(types, name, None) or getattr(sections, name)
        return kind(**{one.name: self.of_type(str(one.type)) for one in fields(kind)})

    def decision(self) -> Decision:
        parts = self.some(lambda: (self.of_type("Part"), self.of_type("PartResult")))
        step = Step(self.number(), self.number(), [part for part, _ in parts], self.number(), bool(parts))
        for _, outcome in parts:
            outcome.tier_events = []  # no decision has them
        step.executed_through, step.traceparent = self.number(), self.text()
        result = StepResult(self.number(), self.number(), [outcome for _, outcome in parts], self.number())
        events = tuple(outcome.events for _, outcome in parts)
        return Decision(without_tokens(step), result, events, self.number(), self.number())

    def batch(self) -> Batch:
        flags = [self._random.random() < 0.5 for _ in range(3)]
        return Batch(self.number(), self.number(), CacheEvents(self.some(self.event)), *flags)


def deep(value: object) -> object:
    """All that it says, in what can be compared: fields that `==` passes over, too."""
    if is_dataclass(value):
        return {one.name: deep(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, CacheEvents):
        return [deep(run) for run in value.runs]
    if isinstance(value, list | tuple):
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


@given(SEEDS, st.integers(1, 8))
def test_the_size_of_pieces_does_not_change_the_packed_bytes(seed, num_items):
    anything = Anything(seed)
    decision, batch = anything.decision(), anything.batch()
    with pieces_of(1 << 30, 1 << 30):
        of_decision, of_batch = finish(pack_decision(*decision)), finish(batch.pack())
    with pieces_of(num_items, 100):
        assert finish(pack_decision(*decision)) == of_decision
        assert finish(batch.pack()) == of_batch


@pytest.mark.parametrize("last", LOWEST + HIGHEST)
def test_the_last_number_of_a_long_column_decides_its_type(last):
    column = [1] * 9 + [last]
    facts = Facts([0], computed=column)
    decision = Decision(Step(1, 1, [Part(facts)]), StepResult(1, 0, [PartResult()]), ([],), 0, 0)
    whole = finish(pack_decision(*decision))
    with pieces_of(3, 1 << 30):
        assert finish(pack_decision(*decision)) == whole
    assert unpack_decision(whole).step.parts[0].facts.computed == column


def test_a_long_decision_is_packed_in_pieces_and_a_short_one_at_once():
    pieces = []
    for count in (100, 100_000):
        blocks = range(count)
        events = CacheEvents([CacheEvent(EventKind.STORED, 0, [bytes(32)] * count, blocks, block_starts=blocks)])
        outcome = PartResult(new_blocks=types.Blocks(ids=list(blocks)), hashed_news=[bytes(32 * count)])
        decision = Decision(Step(1, 1, [Part()]), StepResult(1, 0, [outcome]), (events,), 0, 0)
        pieces.append(counted(pack_decision(*decision))[1])
        pieces.append(counted(Batch(1, 1, events).pack())[1])
    of_short, of_long = pieces[:2], pieces[2:]
    assert of_short == [0, 0]
    # 4096 items a piece: new_blocks, then blocks, block_starts and hashes, which are split first.
    assert all(count > 3 * 100_000 // 4096 for count in of_long)


@pytest.mark.parametrize("count", [3, 20])
def test_enumerations_and_ranges_of_sessions_in_process_are_packed_as_numbers(count):
    facts = Facts(list(range(count)), end=[End.FREE] * count, commit=range(count))  # type: ignore[arg-type]
    decision = Decision(Step(1, 1, [Part(facts)]), StepResult(1, 0, [PartResult()]), ([],), 0, 0)
    again = unpack_decision(finish(pack_decision(*decision))).step.parts[0].facts
    assert (again.slot, again.end, again.commit) == (list(range(count)), [End.FREE] * count, list(range(count)))
    assert not any(isinstance(end, IntEnum) for end in again.end)


@pytest.mark.parametrize("numbers", [[1, 2, 255], [1, 256], [1 << 31], [1 << 40, 3]])
def test_arrays_are_packed_as_lists(numbers):
    columns = [PartResult(granted=column, free_blocks=9) for column in (numbers, PackedInts("Q", numbers))]
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
