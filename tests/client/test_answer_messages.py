"""The compiled reader and writer of the usual messages of steps do what protobuf does."""

from __future__ import annotations

from array import array
from random import Random

import pytest

from kvplane.base.groups import Medium
from kvplane.base.packed_ints import PackedInts
from kvplane.base.step import (
    LOAD_COLUMNS,
    MOVE_COLUMNS,
    SAVE_COLUMNS,
    Admit,
    Blocks,
    Cache,
    CacheEvent,
    EventKind,
    Facts,
    Orders,
    Part,
    PartResult,
    Run,
    Step,
    StepResult,
)
from kvplane.session.builder import StepBuilder
from kvplane.v1.allocation_pb2 import SessionRequest, SessionResponse
from kvplane.wire import stream
from kvplane.wire.packed_step import step_bytes
from kvplane.wire.result import encode_result
from kvplane.wire.step import decode_step, encode_step

pytestmark = pytest.mark.skipif(stream._writer() is None, reason="the messages of steps are not compiled: install g++")


def write(*arguments):
    writer = stream._writer()
    assert writer is not None
    return writer(*arguments)


def bytes_of(step):
    raw = step_bytes(step)
    assert raw is not None
    return raw


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


def test_answers_are_written_as_protobuf_writes_them():
    rng, written = Random(5), 0
    for _ in range(400):
        answer = StepResult(rng.randrange(1 << 40), rng.randrange(3), [result(rng)], rng.randrange(2))
        fields = vars(answer.parts[0])
        raw = write(answer.seq, answer.part, answer.published_through, dict(fields))
        assert raw == SessionResponse(result=encode_result(answer)).SerializeToString()
        assert stream.result_message(answer) == raw
        written += 1
    assert written == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"peek_blocks": Blocks([0], [0], [1], [1])},
        {"events": [CacheEvent(EventKind.CLEARED)]}, {"reset_done": True}, {"last_hash": [b""]},
        {"orders": Orders(load_job=[-1])}, {"tier_events": [CacheEvent(EventKind.STORED, tier=Medium.HOST)]},
        {"granted": [1 << 32]}, {"granted": [-1]}, {"granted": array("Q", [1])},
        {"granted": None}, {"free_blocks": "many"}, {"new_blocks": object()},
    ],
)  # fmt: skip
def test_other_answers_are_left_to_protobuf(fields):
    assert write(1, 0, 0, fields) is None


@pytest.mark.parametrize("hashed", [False, True])
def test_decode_steps_are_read_as_protobuf_reads_them(hashed):
    rng = Random(hashed)
    for number in range(200):
        builder = StepBuilder(rng.sample(range(99), rng.randint(1, 9)), hashed=hashed)
        builder.tokens[:] = array("I", [rng.randrange(1 << 32) for _ in range(len(builder))])
        builder.extra[:] = array("i", [rng.choice((0, 0, -1, 7)) for _ in range(len(builder))])
        for row in rng.choices(range(len(builder)), k=rng.randint(0, 4) * hashed):
            builder.add_hash(row, rng.randbytes(32))
        part = builder.part(appended=number % 3 > 0)
        step = Step(7, number, [part], number % 2, number % 5 > 0, rng.randrange(1 << 40), "", vars(part)["_packed"])
        raw = bytes_of(step)
        read, message = stream.rows_step(raw, 32), SessionRequest.FromString(raw).step
        assert read is not None
        assert "_packed" in vars(read.parts[0])
        assert (read.epoch, read.seq, read.part, read.last, read.executed_through) == (
            message.epoch, message.seq, message.part, not message.more, message.executed_through,
        )  # fmt: skip
        assert SessionRequest(step=encode_step(read)).SerializeToString() == raw


def test_jobs_that_are_done_stay_with_the_rows_of_a_decode_step():
    builder = StepBuilder([3, 5, 8])
    builder.tokens[:] = array("I", [1, 2, 3])
    part = builder.part()
    part.cache = Cache(jobs_done=[7 << 32, 1])
    raw = SessionRequest(step=encode_step(Step(7, 2, [part], executed_through=1))).SerializeToString()
    read = stream.rows_step(raw, 32)
    assert read is not None
    assert "_packed" in vars(read.parts[0])
    assert SessionRequest(step=encode_step(read)).SerializeToString() == raw


@pytest.mark.parametrize(
    "step",
    [
        Step(1, 1, [Part(run=Run([1]), cache=Cache(jobs_done=[1], jobs_failed=[2]))]),
        Step(1, 1, [Part(run=Run([1]), cache=Cache(jobs_before=2))]),
        Step(1, 1, [Part()]),
        Step(1, 1, [Part(run=Run([1])), Part()]),
        Step(1, 1, [Part(run=Run([1]), admit=Admit([2]))]),
        Step(1, 1, [Part(facts=Facts([1], appended=[2], tokens=[3, 4]), run=Run([1]))]),
        Step(1, 1, [Part(facts=Facts([1], appended=[1], tokens=[3]), run=Run([2]))]),
        Step(1, 1, [Part(facts=Facts([1], appended=[1], tokens=[3]))]),
        Step(1, 1, [Part(facts=Facts([1], appended=[1], num_hashes=[1], hashes=bytes(31)), run=Run([1]))]),
        Step(1, 1, [Part(facts=Facts([1], appended=[1], num_hashes=[2], hashes=bytes(32)), run=Run([1]))]),
        Step(1, 1, [Part(facts=Facts([1], appended=[1], num_hashes=[0]), run=Run([1]))]),
        Step(1, 1, [Part(facts=Facts([1], appended=[1], hashes=bytes(32)), run=Run([1]))]),
        Step(1, 1, [Part(facts=Facts([1], [], [1], [3], [1], bytes(32)), run=Run([1]))]),
        Step(1, 1, [Part(run=Run([1], cap=[5]))]),
        Step(1, 1, [Part(run=Run([1]))], traceparent="00-" + "1" * 32 + "-" + "2" * 16 + "-01"),
    ],
)
def test_other_steps_are_left_to_protobuf(step):
    assert stream.rows_step(SessionRequest(step=encode_step(step)).SerializeToString(), 32) is None


@pytest.mark.parametrize("hashed", [False, True])
def test_no_bytes_are_read_beyond_the_end_of_a_message(hashed):
    builder = StepBuilder([1, 2, 3], hashed=hashed)
    if hashed:
        builder.add_hash(1, bytes(32))
    builder.extra[:] = array("i", [1, 2, 3])
    part = builder.part()
    raw = bytes_of(Step(1, 300, [part], 0, True, 299, "", vars(part)["_packed"]))
    assert stream.rows_step(raw, 32) is not None
    rng = Random(1)
    for _ in range(3000):
        damaged = bytearray(raw[: rng.randrange(len(raw) + 1)])
        for _ in range(rng.randint(0, 3)):
            if damaged:
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        read = stream.rows_step(bytes(damaged), 32)
        if read is not None:
            other = decode_step(SessionRequest.FromString(bytes(damaged)).step, 32)
            assert encode_step(read) == encode_step(other)
