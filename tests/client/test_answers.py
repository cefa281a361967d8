"""Answers that one compiled call reads are those that protobuf reads."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from kvplane.base.hashing import native
from kvplane.base.packed_ints import PackedInts
from kvplane.base.step import LOAD_COLUMNS, MOVE_COLUMNS, SAVE_COLUMNS, Blocks, Orders, PartResult, StepResult
from kvplane.v1.allocation_pb2 import SessionResponse
from kvplane.wire.columns import U64
from kvplane.wire.result import encode_result
from kvplane.wire.stream import decoded, taken
from kvplane.wire.tables import ORDERS
from tests.client.test_wire import results, u32, u64


@pytest.fixture(autouse=True, scope="module")
def compiled():
    if native._COMPILED is None:
        pytest.skip("the compiled module is not installed")


@st.composite
def usual_parts(draw):
    """What a step of an engine without drafts is answered with."""
    part = PartResult(free_blocks=draw(u32), granted=draw(st.lists(u32, max_size=5)))
    for blocks in (part.new_blocks, part.tables):
        for row, ids in enumerate(draw(st.lists(st.lists(u32, max_size=3), max_size=4))):
            blocks.add(row, row % 3, ids)
    admitted = draw(st.lists(st.tuples(st.integers(0, 7), u32, u32, u32), max_size=3))
    part.admit_status, part.admit_hit, part.admit_granted, single = ([one[at] for one in admitted] for at in range(4))
    part.admit_single_group_hit = draw(st.sampled_from([single, []]))
    pairs, triples = st.lists(st.tuples(u32, u64), max_size=3), st.lists(st.tuples(u32, u32, u32), max_size=3)
    stamps, copies, zeroes = draw(pairs), draw(triples), draw(triples)
    part.orders = Orders(
        *[[one[at] for one in stamps] for at in range(2)],
        *[[one[at] for one in copies] for at in range(3)],
        *[[one[at] for one in zeroes] for at in range(2)],
    )
    for names in (LOAD_COLUMNS, SAVE_COLUMNS, MOVE_COLUMNS):
        rows = draw(st.lists(st.tuples(*[u64 if name in WIDE else u32 for name in names]), max_size=3))
        for at, name in enumerate(names):
            setattr(part.orders, name, [row[at] for row in rows])
    for name in ("peek_hit", "peek_single_group_hit", "num_hashes"):
        setattr(part, name, draw(st.lists(u32, max_size=2)))
    for name, number in (("admit_load_after", u64), ("admit_job", u64), ("admit_tier_tokens", u32)):
        if draw(st.booleans()):
            setattr(part, name, [draw(number) for _ in admitted])
    return part


WIDE = {column.name for column in ORDERS.columns.each if column.code == U64}
usual = st.builds(StepResult, u64, u32, usual_parts().map(lambda part: [part]), u64)
changes = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255), st.integers(0, 2)), max_size=2)


def raw_of(result: StepResult) -> bytes:
    return SessionResponse(result=encode_result(result)).SerializeToString()


def by_protobuf(raw: bytes) -> Any:
    return decoded(SessionResponse.FromString(raw))


def outcome(read: Any, raw: bytes) -> Any:
    try:
        return read(raw)
    except DecodeError as error:
        return str(error)


def columns(result: Any) -> list[tuple[str, str]]:
    """The types of all columns, by name."""
    (part,), found = result.parts, []
    for owner in (part, part.new_blocks, part.tables, part.orders):
        names = [one.name for one in fields(owner)]
        found += [
            (name, f"{type(value)} {getattr(value, 'typecode', '')}")
            for name in names
            if (value := getattr(owner, name))
        ]
    return found


@given(usual)
def test_the_usual_answer_is_read_by_one_call(result):
    raw = raw_of(result)
    read = native.read_answer()
    assert read is not None
    assert read(raw, PackedInts) is not None
    mine, theirs = taken(raw), by_protobuf(raw)
    assert mine == theirs == result
    assert columns(mine) == columns(theirs)


@given(usual | results, changes)
@example(StepResult(1, 0, [PartResult(granted=[1])]), [(5, 0x10, 0)])
@example(StepResult(1, 0, [PartResult(admit_status=[7], admit_hit=[1], admit_granted=[1])]), [(8, 8, 1)])
@example(StepResult(1, 0, [PartResult(new_blocks=Blocks([1], [0], [2], [5, 6]))]), [(14, 3, 1)])
def test_any_answer_reads_as_by_protobuf(result, given_changes):
    """Also one whose bytes are wrong: the same values, or the same message whose error is raised later."""
    changed = bytearray(raw_of(result))
    for at, byte, more in given_changes:
        changed[at : at + more] = bytes([byte])
    assert outcome(taken, bytes(changed)) == outcome(by_protobuf, bytes(changed))


@pytest.mark.parametrize(
    "arguments",
    [
        ({}, [1, 2], [0], [0], [1], [5]),
        ({0: [[]]}, PackedInts("I", [0]), *[PackedInts("I", [0])] * 3, PackedInts("I", [5])),
        ({}, *[PackedInts("Q", [0])] * 5),
        ({0: [PackedInts("I")]}, PackedInts("I", [0]), PackedInts("I", [3]), *[PackedInts("I", [0])] * 3),
    ],
)
def test_columns_that_are_no_blocks_are_refused(arguments):
    append = native.append_blocks()
    assert append is not None
    with pytest.raises((TypeError, IndexError, AttributeError, BufferError)):
        append(*arguments)
