"""The compiled reader of the usual answers to steps does what protobuf does."""

from __future__ import annotations

from random import Random

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.packed_ints import PackedInts
from kvplane.base.step import (
    LOAD_COLUMNS,
    MOVE_COLUMNS,
    SAVE_COLUMNS,
    Blocks,
    Orders,
    PartResult,
    StepResult,
)
from kvplane.v1.allocation_pb2 import SessionResponse
from kvplane.wire import stream
from kvplane.wire.result import decode_result

pytestmark = pytest.mark.skipif(stream._reader() is None, reason="the messages of steps are not compiled: install g++")


def column(rng, count, most=1 << 32, code="I"):
    values = [rng.randrange(most) for _ in range(count)]
    return PackedInts(code, values) if rng.random() < 0.5 else values


def blocks(rng):
    count = rng.randint(0, 4)
    counts = [rng.randint(0, 3) for _ in range(count)]
    return Blocks(column(rng, count), column(rng, count), counts, column(rng, sum(counts)))


def result(rng):
    part = PartResult(free_blocks=rng.choice((0, 1, 1 << 31)))
    for name in ("granted", "preempted", "admit_status", "admit_hit", "admit_granted", "admit_single_group_hit"):
        if rng.random() < 0.5:
            setattr(part, name, column(rng, rng.randint(0, 5), 8 if name == "admit_status" else 1 << 32))
    for name in ("new_blocks", "tables"):
        if rng.random() < 0.5:
            setattr(part, name, blocks(rng))
    if rng.random() < 0.5:
        part.orders = Orders(stamp_block=column(rng, 3), stamp=column(rng, 3, 1 << 64, "Q"), zero_block=[1])
        for names in (LOAD_COLUMNS, SAVE_COLUMNS, MOVE_COLUMNS):
            rows = rng.choice((0, 0, 1, 3))
            for name in names:
                is_wide = name.endswith(("job", "stamp", "version"))
                setattr(part.orders, name, column(rng, rows, 1 << 64 if is_wide else 1 << 32, "IQ"[is_wide]))
    rare = ("peek_hit", "I"), ("peek_single_group_hit", "I"), ("num_hashes", "I")
    for name, code in (*rare, ("admit_load_after", "Q"), ("admit_job", "Q"), ("admit_tier_tokens", "I")):
        if rng.random() < 0.3:
            setattr(part, name, column(rng, 2, 1 << 32, code))
    if rng.random() < 0.2:
        part.events, part.hashed_facts, part.taken_back = [], [b"made"], 2
    return part


def test_answers_are_read_as_protobuf_reads_them():
    """The compiled reader leaves to protobuf what it does not read, such as slots that were preempted."""
    rng, compiled = Random(5), stream._reader()
    assert compiled is not None
    num_read = 0
    for _ in range(400):
        answer = StepResult(rng.randrange(1 << 40), rng.randrange(3), [result(rng)], rng.randrange(2))
        raw = stream.result_message(answer)
        try:
            expected = decode_result(SessionResponse.FromString(raw).result)
        except InvalidArgument:  # columns of different lengths
            continue
        assert stream.taken(raw) == expected
        num_read += compiled(raw, PackedInts) is not None
    assert num_read > 10
