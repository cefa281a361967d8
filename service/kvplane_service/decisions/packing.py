"""Pack decisions and cache events into single byte strings, which the cyclic garbage collector need not traverse.

    frame       u32 number of chunks; u32 number, code, length of each; the chunks
    decision    u64, big-endian: time taken; then a frame, with a frame for each part
    events      a frame of columns over the runs

A chunk is a column of numbers in the smallest type that fits (its code), or raw bytes as the type of its field
requires. Empty chunks are omitted. The fields are read from the types, so that a new field is packed too, or refused
when this module is imported. Tokens are omitted: no log has them. A packed entry never leaves its process.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import accumulate, chain, compress, pairwise
from operator import attrgetter, itemgetter
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from kvplane import wire
from kvplane.base.step import (
    Admit,
    Blocks,
    Budget,
    Cache,
    CacheEvent,
    EventKind,
    ExtraKeys,
    Facts,
    News,
    OnRefusal,
    Orders,
    Part,
    PartResult,
    Peek,
    RemoveReason,
    Resume,
    Run,
    Step,
    StepResult,
)
from kvplane.v1 import step_pb2 as pb
from kvplane_service.core.cache_events import CacheEvents, runs_of

_TOOK, _COUNT = struct.Struct(">Q"), struct.Struct("<I")
_CODES = "IiQq"  # of columns that do not fit into bytes
_RAW = 0  # code of a chunk that is not a column
_TOKENS = frozenset({"facts.tokens", "news.tokens"})
_KINDS = {kind.value: kind for kind in EventKind}
_REASONS = {reason.value: reason for reason in RemoveReason}

_Chunks: TypeAlias = dict[int, tuple[int, bytes]]  # by number: code and bytes
_T = TypeVar("_T")


class Unpacked(NamedTuple):
    """An unpacked decision, see `decisions.log.Decision`."""

    step: Step
    result: StepResult
    events: tuple[Sequence[CacheEvent], ...]
    at_ns: int
    took_ns: int


# -- chunks ------------------------------------------------------------------------------------------------------------


def _column(values: Sequence[int]) -> tuple[int, bytes]:
    try:
        return ord("B"), bytes(values)
    except ValueError:  # the first value that does not fit ends the attempt, which is early in columns of block ids
        pass
    for code in _CODES:
        try:
            return ord(code), array(code, values).tobytes()
        except OverflowError:
            continue
    raise AssertionError(f"numbers of more than 64 bits: {values}")


def _numbers(chunk: tuple[int, bytes] | None) -> list[int]:
    return array(chr(chunk[0]), chunk[1]).tolist() if chunk else []


def _join(values: Sequence[bytes]) -> bytes:
    return b"".join([_COUNT.pack(len(values)), array("I", map(len, values)).tobytes(), *values])


def _split(raw: bytes) -> list[bytes]:
    start = _COUNT.size * (1 + _COUNT.unpack_from(raw)[0])
    ends = accumulate(array("I", raw[_COUNT.size : start]), initial=start)
    return [raw[begin:end] for begin, end in pairwise(ends)]


def _join_texts(values: Iterable[str]) -> bytes:
    return _join([value.encode("utf-8", "surrogatepass") for value in values])


def _split_texts(raw: bytes) -> list[str]:
    return [value.decode("utf-8", "surrogatepass") for value in _split(raw)]


def _join_keys(rows: Iterable[ExtraKeys]) -> bytes:
    return _join([wire.encode_extra_keys(keys).SerializeToString() for keys in rows])


def _split_keys(raw: bytes) -> list[ExtraKeys]:
    return [wire.decode_extra_keys(pb.ExtraKeys.FromString(row)) for row in _split(raw)]


def _as_it_is(raw: bytes) -> bytes:
    return raw


# How values of these types are packed and unpacked.
_RAW_KINDS: dict[str, tuple[Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    "bytes": (_as_it_is, _as_it_is),
    "list[bytes]": (_join, _split),
    "list[str]": (_join_texts, _split_texts),
    "list[ExtraKeys]": (_join_keys, _split_keys),
}
# Numbers, and how they are turned back.
_SCALARS: dict[str, Callable[[int], Any]] = {"int": int, "bool": bool, "OnRefusal": OnRefusal}


def _frame(chunks: _Chunks) -> bytes:
    heads = array("I", chain.from_iterable([(number, code, len(raw)) for number, (code, raw) in chunks.items()]))
    return b"".join([_COUNT.pack(len(chunks)), heads.tobytes(), *[raw for _, raw in chunks.values()]])


def _unframe(raw: bytes, start: int = 0) -> _Chunks:
    (count,) = _COUNT.unpack_from(raw, start)
    at = start + _COUNT.size * (1 + 3 * count)
    heads, chunks = iter(array("I", raw[start + _COUNT.size : at])), {}
    for number, code, length in zip(heads, heads, heads, strict=True):
        chunks[number] = code, raw[at : at + length]
        at += length
    return chunks


# -- sections ----------------------------------------------------------------------------------------------------------


class _Shape(Generic[_T]):
    """How the fields of a type are packed that consists of sections: chunk 0 has all that are a single number.

    Args:
        owner: the type; fields that it has no section for are its own.
        sections: by name, the types of those that are packed.
        others: fields that are packed elsewhere.
    """

    def __init__(self, owner: type[_T], sections: dict[str, type], others: frozenset[str]) -> None:
        self._owner = owner
        self._sections = sections
        paths = [(path, kind) for path, kind in _paths(owner, sections) if path not in others]
        self._scalars = [(path, _SCALARS[kind]) for path, kind in paths if kind in _SCALARS]
        self._columns = [path for path, kind in paths if kind == "list[int]"]
        self._raws = [(path, *_RAW_KINDS[kind]) for path, kind in paths if kind in _RAW_KINDS]
        unknown = {kind for _, kind in paths} - {*_SCALARS, *_RAW_KINDS, "list[int]"}
        assert not unknown, f"{owner.__name__} has fields of types that cannot be packed: {unknown}"
        self._scalars_of = attrgetter(*[f"{path}.real" for path, _ in self._scalars]) if self._scalars else None
        self._others_of = attrgetter(*self._columns, *[path for path, *_ in self._raws])
        self._numbers = range(1, 1 + len(self._columns) + len(self._raws))

    def pack(self, value: _T) -> _Chunks:
        """Chunks of what is not empty, which in most steps is little."""
        others = self._others_of(value)
        chunks: _Chunks = {0: _column(self._scalars_of(value))} if self._scalars_of else {}
        num_columns = len(self._columns)
        for number in compress(self._numbers, others):
            one = others[number - 1]
            if number <= num_columns:
                chunks[number] = _column(one)
            else:
                chunks[number] = _RAW, self._raws[number - 1 - num_columns][1](one)
        return chunks

    def unpack(self, chunks: _Chunks) -> _T:
        """The object of these chunks; chunks of other numbers are not looked at."""
        given: dict[str, dict[str, Any]] = {name: {} for name in ("", *self._sections)}
        for (path, turn), number in zip(self._scalars, _numbers(chunks.get(0)), strict=True):
            section, _, name = path.rpartition(".")
            given[section][name] = turn(number)
        num_columns = len(self._columns)
        for number in self._numbers:
            if number not in chunks:
                continue
            if number <= num_columns:
                path, value = self._columns[number - 1], _numbers(chunks[number])
            else:
                path, _, turn_raw = self._raws[number - 1 - num_columns]
                value = turn_raw(chunks[number][1])
            section, _, name = path.rpartition(".")
            given[section][name] = value
        own = given.pop("")
        for section, kind in self._sections.items():
            own[section] = kind(**given[section])
        return self._owner(**own)


def _paths(owner: type, sections: dict[str, type]) -> Iterator[tuple[str, str]]:
    """The fields with their types as they are written, those of sections behind the section's name."""
    for one in fields(owner):
        if one.name in sections:
            yield from ((f"{one.name}.{inner.name}", str(inner.type)) for inner in fields(sections[one.name]))
        else:
            yield one.name, str(one.type)


_PART = _Shape(
    Part,
    {"facts": Facts, "cache": Cache, "news": News, "run": Run, "admit": Admit, "peek": Peek, "budget": Budget},
    _TOKENS | {"resume"},
)
_RESULT = _Shape(
    PartResult,
    {"new_blocks": Blocks, "tables": Blocks, "peek_blocks": Blocks, "orders": Orders},
    frozenset({"events"}),
)
_RESUME = _Shape(Resume, {}, frozenset())
_OF_RESULT, _OF_EVENTS, _OF_RESUME = 1001, 1002, 1003  # chunks of a part's frame that are frames


# -- decisions ---------------------------------------------------------------------------------------------------------


def pack_decision(
    step: Step, result: StepResult, of_parts: Iterable[Sequence[CacheEvent]], at_ns: int, took_ns: int
) -> bytes:
    """A decision without tokens; `of_parts` are the events of each part."""
    parts = []
    for part, outcome, events in zip(step.parts, result.parts, of_parts, strict=True):
        chunks = _PART.pack(part)
        chunks[_OF_RESULT] = _RAW, _frame(_RESULT.pack(outcome))
        if runs_of(events):
            chunks[_OF_EVENTS] = _RAW, pack_events(events)
        if part.resume is not None:
            chunks[_OF_RESUME] = _RAW, _frame(_RESUME.pack(part.resume))
        parts.append(_frame(chunks))
    of_step = step.epoch, step.seq, step.part, step.last, step.executed_through
    numbers = *of_step, result.seq, result.part, result.published_through, at_ns
    trace = step.traceparent.encode("utf-8", "surrogatepass")
    return _TOOK.pack(took_ns) + _frame({0: _column(numbers), 1: (_RAW, trace), 2: (_RAW, _join(parts))})


def unpack_decision(raw: bytes) -> Unpacked:
    """The decision that was packed; empty columns become empty lists."""
    chunks = _unframe(raw, _TOOK.size)
    epoch, seq, number, last, executed_through, *of_result, at_ns = _numbers(chunks[0])
    parts, outcomes = [], []
    for packed in map(_unframe, _split(chunks[2][1])):
        part, outcome = _PART.unpack(packed), _RESULT.unpack(_unframe(packed[_OF_RESULT][1]))
        outcome.events = unpack_events(packed[_OF_EVENTS][1]) if _OF_EVENTS in packed else CacheEvents()
        if _OF_RESUME in packed:
            part.resume = _RESUME.unpack(_unframe(packed[_OF_RESUME][1]))
        parts.append(part)
        outcomes.append(outcome)
    trace = chunks[1][1].decode("utf-8", "surrogatepass")
    step = Step(epoch, seq, parts, number, bool(last), executed_through, trace)
    result = StepResult(of_result[0], of_result[1], outcomes, of_result[2])
    return Unpacked(step, result, tuple([one.events for one in outcomes]), at_ns, _TOOK.unpack_from(raw)[0])


# Bytes of a packed decision that sort by the time taken.
slowness_of = itemgetter(slice(_TOOK.size))


# -- events ------------------------------------------------------------------------------------------------------------

_EVENT_FIELDS = [(one.name, str(one.type)) for one in fields(CacheEvent)]
_EVENT_SCALARS = {"int", "EventKind", "RemoveReason"}
_event_of = attrgetter(*[f"{name}.real" if kind in _EVENT_SCALARS else name for name, kind in _EVENT_FIELDS])
_FLAT = 100  # added to the number of a field: its values of all runs, one after the other
assert {kind for _, kind in _EVENT_FIELDS} == {*_EVENT_SCALARS, "str", "bytes", "Sequence[int]", "Sequence[bytes]"}


def pack_events(events: Sequence[CacheEvent]) -> bytes:
    """Pack events, in runs."""
    chunks: _Chunks = {}
    for number, values in enumerate(zip(*map(_event_of, runs_of(events)), strict=True)):
        kind = _EVENT_FIELDS[number][1]
        if not any(values):
            continue
        if kind in _EVENT_SCALARS:
            chunks[number] = _column(values)
        elif kind == "str":
            chunks[number] = _RAW, _join_texts(values)
        elif kind == "bytes":
            chunks[number] = _RAW, _join(values)
        else:
            flat = list(chain.from_iterable(values))
            chunks[number] = _column([*map(len, values)])
            chunks[number + _FLAT] = _column(flat) if kind == "Sequence[int]" else (_RAW, _join(flat))
    return _frame(chunks)


def unpack_events(raw: bytes, start: int = 0) -> CacheEvents:
    """The packed events that begin at `start`."""
    chunks = _unframe(raw, start)
    if not chunks:
        return CacheEvents()
    count = len(chunks[0][1])  # each has a kind, which fits into a byte
    columns: list[Sequence[Any]] = []
    for number, (_, kind) in enumerate(_EVENT_FIELDS):
        if number not in chunks:
            columns.append([_EMPTY[kind]] * count)
        elif kind in _EVENT_SCALARS:
            columns.append(_numbers(chunks[number]))
        elif kind == "str":
            columns.append(_split_texts(chunks[number][1]))
        elif kind == "bytes":
            columns.append(_split(chunks[number][1]))
        else:
            flat = chunks[number + _FLAT]
            values: Sequence[Any] = _numbers(flat) if kind == "Sequence[int]" else _split(flat[1])
            ends = accumulate(_numbers(chunks[number]), initial=0)
            columns.append([tuple(values[begin:end]) for begin, end in pairwise(ends)])
    columns[0] = [_KINDS[value] for value in columns[0]]
    columns[-1] = [_REASONS[value] for value in columns[-1]]
    return CacheEvents(CacheEvent(*row) for row in zip(*columns, strict=True))


_EMPTY: dict[str, Any] = {"int": 0, "EventKind": 0, "RemoveReason": 0, "str": "", "bytes": b""}
_EMPTY |= {"Sequence[int]": (), "Sequence[bytes]": ()}
assert (_EVENT_FIELDS[0][1], _EVENT_FIELDS[-1][1]) == ("EventKind", "RemoveReason")
