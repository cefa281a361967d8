"""Pack decisions and cache events into single byte strings, which the cyclic garbage collector need not traverse.

    frame       u32 number of chunks; u32 number, code, length of each chunk; the chunks
    decision    u64, big-endian: time taken; then a frame, which contains a frame for each part
    events      a frame with one column per field of the event runs

A chunk is a column of numbers in the smallest integer type that fits (its code), or raw bytes in a format that depends
on the type of its field. Empty chunks are omitted. The fields are read from the dataclasses, so a new field is packed
too, or the import of this module fails. Tokens are omitted, because no log contains them. A packed entry never leaves
its process.

Functions that pack are generators: they yield between pieces of about a millisecond, so that one long entry does not
block the event loop, and return what they packed. Short entries have one piece.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import accumulate, chain, compress, islice, pairwise
from operator import attrgetter, itemgetter
from types import SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

from kvplane import wire
from kvplane.base.declined import Declined
from kvplane.base.groups import Medium
from kvplane.base.prefetch import Prefetch, Prefetched
from kvplane.base.retain import Retain, Retained
from kvplane.base.sections import Peers
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
from kvplane.base.when_read import given_fields
from kvplane.v1 import step_pb2 as pb
from kvplane_core.face.cache_events import CacheEvents, runs_of

_TOOK, _COUNT = struct.Struct(">Q"), struct.Struct("<I")
_CODES = "IiQq"  # types of columns whose numbers do not fit into bytes, smallest first
_BYTES = ord("B")  # code of a column of bytes
_RAW = 0  # code of a chunk that is not a column
_COLUMN_KINDS = ("MutableSequence[int]",)
_TOKENS = frozenset({"facts.tokens", "news.tokens"})
_KINDS = {kind.value: kind for kind in EventKind}
_REASONS = {reason.value: reason for reason in RemoveReason}
_MEDIA = {medium.value: medium for medium in Medium}

_PIECE = 1 << 12  # items of a list that are packed between two yields
_FEW = 1 << 8  # the same, for items that are converted one by one
_PIECE_BYTES = 1 << 18  # more bytes are joined in a piece of their own

_T = TypeVar("_T")
_Chunk: TypeAlias = tuple[int, bytes]  # its code and bytes
_Chunks: TypeAlias = dict[int, _Chunk]  # by their number
Packing: TypeAlias = Generator[None, None, _T]


class Unpacked(NamedTuple):
    """The fields of an unpacked decision, in the order of `decisions.log.Decision`."""

    step: Step
    result: StepResult
    events: tuple[Sequence[CacheEvent], ...]
    at_ns: int
    took_ns: int


# -- chunks ------------------------------------------------------------------------------------------------------------


def _column(values: Sequence[int]) -> _Chunk:
    for code in ("B", *_CODES):
        try:  # not bytes(): it would copy the memory of an array
            return ord(code), array(code, values).tobytes()
        except OverflowError:  # at the first value that does not fit, which is early in columns of block ids
            continue
    raise AssertionError(f"numbers of more than 64 bits: {values}")


def _columns(pieces: Sequence[Sequence[int]]) -> Packing[_Chunk]:
    """Pack one column of integers, given in pieces, as an array of the smallest integer type that fits; yield after
    each piece.
    """
    if len(pieces) == 1:
        return _column(pieces[0])
    for code in ("B", *_CODES):
        packed = []
        try:
            for piece in pieces:
                packed.append(array(code, piece).tobytes())
                yield
        except OverflowError:
            continue
        return ord(code), b"".join(packed)
    raise AssertionError("numbers of more than 64 bits")


def _pieces(values: Iterable[Sequence[_T]]) -> Packing[list[Sequence[_T]]]:
    """Split the concatenation of `values` into pieces of _PIECE items."""
    items, pieces = chain.from_iterable(values), list[Sequence[_T]]()
    while piece := list(islice(items, _PIECE)):
        pieces.append(piece)
        if len(piece) == _PIECE:
            yield
    return pieces


def _numbers(chunk: tuple[int, bytes] | None) -> list[int]:
    if not chunk:
        return []
    return list(chunk[1]) if chunk[0] == _BYTES else array(chr(chunk[0]), chunk[1]).tolist()


def _join(values: Sequence[bytes]) -> bytes:
    return b"".join([_COUNT.pack(len(values)), array("I", map(len, values)).tobytes(), *values])


def _joins(pieces: Sequence[Sequence[bytes]]) -> Packing[bytes]:
    """Pack one list of byte strings, given in pieces: number of strings, their lengths, their bytes. Yields after each
    piece.
    """
    if len(pieces) == 1:
        return _join(pieces[0])
    lengths, joined = array("I"), []
    for piece in pieces:
        lengths.extend(map(len, piece))
        joined.append(b"".join(piece))
        yield
    return b"".join([_COUNT.pack(len(lengths)), lengths.tobytes(), *joined])


def _split(raw: bytes) -> list[bytes]:
    start = _COUNT.size * (1 + _COUNT.unpack_from(raw)[0])
    ends = accumulate(array("I", raw[_COUNT.size : start]), initial=start)
    return [raw[begin:end] for begin, end in pairwise(ends)]


def _join_texts(values: Sequence[str]) -> Packing[bytes]:
    return _join_converted(values, _encode_text)


def _encode_text(value: str) -> bytes:
    return value.encode("utf-8", "surrogatepass")


def _split_texts(raw: bytes) -> list[str]:
    return [value.decode("utf-8", "surrogatepass") for value in _split(raw)]


def _join_keys(rows: Sequence[ExtraKeys]) -> Packing[bytes]:
    return _join_converted(rows, _encode_keys)


def _encode_keys(keys: ExtraKeys) -> bytes:
    return wire.encode_extra_keys(keys).SerializeToString()


def _split_keys(raw: bytes) -> list[ExtraKeys]:
    return [wire.decode_extra_keys(pb.ExtraKeys.FromString(row)) for row in _split(raw)]


def _join_converted(values: Sequence[_T], convert: Callable[[_T], bytes]) -> Packing[bytes]:
    converted = list[bytes]()
    for start in range(0, len(values), _FEW):
        if start:
            yield
        converted += map(convert, values[start : start + _FEW])
    return _join(converted)


def _join_bytes(values: Sequence[bytes]) -> Packing[bytes]:
    return (yield from _joins((yield from _pieces([values])))) if len(values) > _PIECE else _join(values)


def _one(raw: bytes) -> Packing[bytes]:
    yield from ()
    return raw


def _as_it_is(raw: bytes) -> bytes:
    return raw


# How values of these types are packed and unpacked.
_RAW_KINDS: dict[str, tuple[Callable[[Any], Packing[bytes]], Callable[[bytes], Any]]] = {
    "bytes": (_one, _as_it_is),
    "list[bytes]": (_join_bytes, _split),
    "Sequence[bytes]": (_join_bytes, _split),
    "list[str]": (_join_texts, _split_texts),
    "list[ExtraKeys]": (_join_keys, _split_keys),
}
# Types of single numbers, and the functions that convert a packed number back to the type.
_SCALARS: dict[str, Callable[[int], Any]] = {"int": int, "bool": bool, "OnRefusal": OnRefusal}


def _frame(chunks: _Chunks) -> list[bytes]:
    """Return the parts of a frame, to be joined: the number, codes and lengths of all chunks, then the chunks."""
    heads = [(number, code, len(raw)) for number, (code, raw) in chunks.items()]
    return [_heads(heads), *[raw for _, raw in chunks.values()]]


def _heads(heads: Sequence[tuple[int, int, int]]) -> bytes:
    return _COUNT.pack(len(heads)) + array("I", chain.from_iterable(heads)).tobytes()


def _whole(packed: list[bytes]) -> Packing[bytes]:
    if sum(map(len, packed)) > _PIECE_BYTES:
        yield
    return b"".join(packed)


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
    """How to pack a dataclass whose fields are sections (dataclasses of columns), columns and single numbers. All
    single numbers are in chunk 0.

    Args:
        owner: the dataclass; the fields without a section in `sections` are packed as its own.
        sections: types of the sections that are packed, by field name.
        others: fields that this object does not pack.
    """

    def __init__(self, owner: type[_T], sections: dict[str, type], others: frozenset[str]) -> None:
        self._owner = owner
        self._sections = sections
        paths = [(path, kind) for path, kind in _paths(owner, sections) if path not in others]
        self._scalars = [(path, _SCALARS[kind]) for path, kind in paths if kind in _SCALARS]
        self._columns = [path for path, kind in paths if kind in _COLUMN_KINDS]
        self._raws = [(path, *_RAW_KINDS[kind]) for path, kind in paths if kind in _RAW_KINDS]
        unknown = {kind for _, kind in paths} - {*_SCALARS, *_RAW_KINDS, *_COLUMN_KINDS}
        assert not unknown, f"{owner.__name__} has fields of types that cannot be packed: {unknown}"
        self._scalars_of = attrgetter(*[f"{path}.real" for path, _ in self._scalars]) if self._scalars else None
        self._others_of = attrgetter(*self._columns, *[path for path, *_ in self._raws])
        self._numbers = range(1, 1 + len(self._columns) + len(self._raws))
        made = owner()
        self._scalar_names = [(*_split_path(path), turn) for path, turn in self._scalars]
        self._defaults = [attrgetter(path)(made).real for path, _ in self._scalars]
        names = [*self._columns, *[path for path, *_ in self._raws]]
        self._names = dict(zip(self._numbers, map(_split_path, names), strict=True))
        empty = made if sections else None
        self._empty = {one.name: getattr(empty, one.name) for one in fields(cast(Any, owner))} if sections else {}

    def pack(self, value: _T) -> Packing[_Chunks]:
        """Return the chunks of all fields that are not empty. In most steps, few fields are not empty."""
        # Fields that were not read yet are not made for this: `kvplane.base.when_read`.
        read = SimpleNamespace(**self._empty | given_fields(value)) if self._empty else value
        others = self._others_of(read)
        chunks: _Chunks = {0: _column(self._scalars_of(read))} if self._scalars_of else {}
        num_columns = len(self._columns)
        for number in compress(self._numbers, others):
            one = others[number - 1]
            if number > num_columns:
                chunks[number] = _RAW, (yield from self._raws[number - 1 - num_columns][1](one))
            elif len(one) <= _PIECE:
                chunks[number] = _column(one)
            else:
                chunks[number] = yield from _columns((yield from _pieces([one])))
        return chunks

    def unpack(self, chunks: _Chunks) -> _T:
        """Return the object whose fields these chunks contain; chunks with other numbers are ignored."""
        given: dict[str, dict[str, Any]] = {"": {}}  # a section without fields is made when it is read
        numbers = zip(self._scalar_names, _numbers(chunks.get(0)), self._defaults, strict=True)
        for (section, name, turn), number, default in numbers:
            if number != default:
                given.setdefault(section, {})[name] = turn(number)
        num_columns = len(self._columns)
        for number, chunk in chunks.items():
            if number not in self._names:
                continue
            is_column = number <= num_columns
            value = _numbers(chunk) if is_column else self._raws[number - 1 - num_columns][2](chunk[1])
            section, name = self._names[number]
            given.setdefault(section, {})[name] = value
        own = given.pop("")
        for section, fields_of in given.items():
            own[section] = self._sections[section](**fields_of)
        return self._owner(**own)


def _split_path(path: str) -> tuple[str, str]:
    section, _, name = path.rpartition(".")
    return section, name


def _paths(owner: type, sections: dict[str, type]) -> Iterator[tuple[str, str]]:
    """Yield the name and the declared type of each field; fields of a section are named "section.field"."""
    for one in fields(owner):
        if one.name in sections:
            yield from ((f"{one.name}.{inner.name}", str(inner.type)) for inner in fields(sections[one.name]))
        else:
            yield one.name, str(one.type)


_PART = _Shape(
    Part,
    {
        "facts": Facts,
        "cache": Cache,
        "peers": Peers,
        "news": News,
        "run": Run,
        "admit": Admit,
        "peek": Peek,
        "prefetch": Prefetch,
        "retain": Retain,
        "budget": Budget,
    },
    _TOKENS | {"resume"},
)
_RESULT = _Shape(
    PartResult,
    {
        "new_blocks": Blocks,
        "tables": Blocks,
        "peek_blocks": Blocks,
        "orders": Orders,
        "declined": Declined,
        "prefetched": Prefetched,
        "retained": Retained,
    },
    frozenset({"events", "tier_events"}),
)
_RESUME = _Shape(Resume, {}, frozenset())
_OF_RESULT, _OF_EVENTS, _OF_RESUME = (
    1001,
    1002,
    1003,
)  # chunks of a part's frame that are frames; `pack.h` of the compiled core has these numbers too


# -- decisions ---------------------------------------------------------------------------------------------------------


def pack_decision(
    step: Step, result: StepResult, of_parts: Iterable[Sequence[CacheEvent]], at_ns: int, took_ns: int
) -> Packing[bytes]:
    """Return the decision as bytes, without its tokens; `of_parts` are the cache events of each part."""
    parts = list[list[bytes]]()
    for part, outcome, events in zip(step.parts, result.parts, of_parts, strict=True):
        if parts:
            yield
        chunks = yield from _PART.pack(part)
        chunks[_OF_RESULT] = _RAW, (yield from _whole(_frame((yield from _RESULT.pack(outcome)))))
        if runs_of(events):
            chunks[_OF_EVENTS] = _RAW, (yield from pack_events(events))
        if part.resume is not None:
            chunks[_OF_RESUME] = _RAW, (yield from _whole(_frame((yield from _RESUME.pack(part.resume)))))
        parts.append(_frame(chunks))
    of_step = step.epoch, step.seq, step.part, step.last, step.executed_through
    code, numbers = _column((*of_step, result.seq, result.part, result.published_through, at_ns))
    trace = _encode_text(step.traceparent)
    lengths = [sum(map(len, part)) for part in parts]
    joined = [_COUNT.pack(len(parts)), array("I", lengths).tobytes(), *chain.from_iterable(parts)]
    heads = (0, code, len(numbers)), (1, _RAW, len(trace)), (2, _RAW, sum(map(len, joined)))
    # Not `_frame`: a long decision is copied once.
    return (yield from _whole([_TOOK.pack(took_ns), _heads(heads), numbers, trace, *joined]))


def unpack_decision(raw: bytes, with_events: bool = True) -> Unpacked:
    """Return the decision that `pack_decision` packed; empty columns become empty lists."""
    chunks = _unframe(raw, _TOOK.size)
    epoch, seq, number, last, executed_through, *of_result, at_ns = _numbers(chunks[0])
    parts, outcomes = [], []
    for packed in map(_unframe, _split(chunks[2][1])):
        part, outcome = _PART.unpack(packed), _RESULT.unpack(_unframe(packed[_OF_RESULT][1]))
        if with_events:
            outcome.events = unpack_events(packed[_OF_EVENTS][1]) if _OF_EVENTS in packed else CacheEvents()
        if _OF_RESUME in packed:
            part.resume = _RESUME.unpack(_unframe(packed[_OF_RESUME][1]))
        parts.append(part)
        outcomes.append(outcome)
    trace = chunks[1][1].decode("utf-8", "surrogatepass")
    step = Step(epoch, seq, parts, number, bool(last), executed_through, trace)
    result = StepResult(of_result[0], of_result[1], outcomes, of_result[2])
    return Unpacked(step, result, tuple([one.events for one in outcomes]), at_ns, _TOOK.unpack_from(raw)[0])


def events_of_packed(raw: bytes) -> list[CacheEvents]:
    """Return the cache events of each part of a packed decision, and unpack nothing else."""
    frames = (_unframe(part) for part in _split(_unframe(raw, _TOOK.size)[2][1]))
    return [unpack_events(frame[_OF_EVENTS][1]) for frame in frames if _OF_EVENTS in frame]


# Returns the leading bytes of a packed decision, which sort by the time taken.
slowness_of = itemgetter(slice(_TOOK.size))


# -- events ------------------------------------------------------------------------------------------------------------

_EVENT_FIELDS = [(one.name, str(one.type)) for one in fields(CacheEvent)]
_EVENT_SCALARS = {"int", "EventKind", "RemoveReason", "Medium"}
_event_of = attrgetter(*[f"{name}.real" if kind in _EVENT_SCALARS else name for name, kind in _EVENT_FIELDS])
_FLAT = 100  # chunk number of a list field plus this: the chunk with the lists of all runs, one after the other
assert {kind for _, kind in _EVENT_FIELDS} == {*_EVENT_SCALARS, "str", "bytes", "Sequence[int]", "Sequence[bytes]"}


def pack_events(events: Sequence[CacheEvent]) -> Packing[bytes]:
    """Return the events as bytes. Events are packed in runs (consecutive events that differ only in hash and block)."""
    runs = runs_of(events)
    columns: list[list[Any]] = [*map(list, zip(*map(_event_of, runs[:_FEW]), strict=True))]
    for start in range(_FEW, len(runs), _FEW):
        yield
        for values, more in zip(columns, zip(*map(_event_of, runs[start : start + _FEW]), strict=True), strict=True):
            values += more
    chunks: _Chunks = {}
    for number, values in enumerate(columns):
        kind = _EVENT_FIELDS[number][1]
        if not any(values):
            continue
        if kind in _EVENT_SCALARS:
            chunks[number] = _column(values)
        elif kind == "str":
            chunks[number] = _RAW, (yield from _join_texts(values))
        elif kind == "bytes":
            chunks[number] = _RAW, _join(values)
        else:
            flat = yield from _pieces(values)
            chunks[number] = _column([*map(len, values)])
            is_numbers = kind == "Sequence[int]"
            chunks[number + _FLAT] = (yield from _columns(flat)) if is_numbers else (_RAW, (yield from _joins(flat)))
    return (yield from _whole(_frame(chunks)))


def unpack_events(raw: bytes, start: int = 0) -> CacheEvents:
    """Return the events that `pack_events` packed; their bytes begin at offset `start` of `raw`."""
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
    columns[-2] = [_REASONS[value] for value in columns[-2]]
    columns[-1] = [_MEDIA[value] for value in columns[-1]]
    return CacheEvents(CacheEvent(*row) for row in zip(*columns, strict=True))


_EMPTY: dict[str, Any] = {"int": 0, "EventKind": 0, "RemoveReason": 0, "Medium": 0, "str": "", "bytes": b""}
_EMPTY |= {"Sequence[int]": (), "Sequence[bytes]": ()}
assert [_EVENT_FIELDS[at][1] for at in (0, -2, -1)] == ["EventKind", "RemoveReason", "Medium"]
