"""Parts of decode steps from columns: byte for byte those of rows; one loop of an engine with them."""

from __future__ import annotations

from array import array
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplane
from kvplane import Budget, Cache, ModelSource, Part, StepBuilder, part_of
from kvplane.base.errors import InvalidArgument
from kvplane.base.step import End, PartResult, Step, StepResult
from kvplane.base.when_read import PACKED
from kvplane.session.known_requests import KnownRequests
from kvplane.session.rows import AdmitRow, FactRow, NewsRow, PeekRow, Row, RunRow
from kvplane.wire.step import encode_step
from tests.client.worlds import GrpcWorld

U32 = st.integers(0, 2**32 - 1)
DIGESTS = st.lists(st.binary(min_size=32, max_size=32), max_size=3)
OTHERS = st.one_of(
    st.builds(NewsRow, U32, tokens=st.lists(U32, max_size=5)),
    st.builds(FactRow, U32, tokens=st.lists(U32, max_size=3), end=st.sampled_from(End), fence=st.integers(0, 9)),
    st.builds(FactRow, U32, computed=st.integers(0, 99), commit=st.integers(0, 99)),
    st.builds(RunRow, U32, extra=st.integers(0, 3), cap=st.integers(0, 99), lookahead=st.integers(0, 3)),
    st.builds(AdmitRow, U32, cap=st.integers(0, 99)),
    st.builds(PeekRow, U32),
)


def encoded(part: Part) -> bytes:
    return encode_step(Step(1, 1, [part])).SerializeToString(deterministic=True)


@given(st.data())
def test_a_builder_sends_the_bytes_of_rows(data):
    """Used for several steps, with and without tokens, extra tokens, hashes and other rows."""
    hashed = data.draw(st.booleans())
    builder = StepBuilder(hashed=hashed)
    for _ in range(data.draw(st.integers(1, 3))):
        if data.draw(st.booleans()):
            builder.set_rows(data.draw(st.lists(U32, max_size=6)))
        num_rows = len(builder)
        tokens = data.draw(st.lists(U32, min_size=num_rows, max_size=num_rows))
        extra = data.draw(st.lists(st.integers(-1, 2), min_size=num_rows, max_size=num_rows))
        hashes = {row: data.draw(DIGESTS) for row in range(num_rows) if hashed}
        builder.tokens[:], builder.extra[:] = array("I", tokens), array("i", extra)
        for row in data.draw(st.permutations(sorted(hashes))):
            for digest in hashes[row]:
                builder.add_hash(row, digest)
        others: list[Row] = data.draw(st.lists(OTHERS, max_size=4))
        slots = list(builder.slots)
        if hashed:
            facts = [FactRow(slot, num_tokens=1, hashes=hashes[row]) for row, slot in enumerate(slots)]
        else:
            facts = [FactRow(slot, tokens=[token]) for slot, token in zip(slots, tokens, strict=True)]
        runs = [RunRow(slot, extra=count) for slot, count in zip(slots, extra, strict=True)]
        rest = {"budget": data.draw(st.sampled_from([None, Budget(tokens=5)])), "cache": Cache(reset=True)}
        assert encoded(builder.part(*others, **rest)) == encoded(part_of(*facts, *runs, *others, **rest))


def test_a_part_without_tokens_has_no_facts():
    builder = StepBuilder([4, 2])
    builder.tokens[0] = 7
    assert encoded(builder.part(appended=False)) == encoded(part_of(RunRow(4), RunRow(2)))


def test_a_part_keeps_its_columns_when_the_builder_is_used_again():
    builder = StepBuilder([4, 2])
    builder.tokens[:] = array("I", [7, 8])
    builder.extra[:] = array("i", [1, 1])
    part = builder.part()
    expected = encoded(part)
    builder.tokens[:], builder.extra[:] = array("I", [9, 9]), array("i", [0, 3])
    builder.part()
    builder.set_rows([5])
    assert encoded(part) == expected


def test_the_columns_are_buffers_that_others_can_view():
    numpy = pytest.importorskip("numpy")
    builder = StepBuilder(range(8))
    numpy.asarray(builder.tokens)[:] = numpy.arange(8) * 3
    numpy.asarray(builder.extra)[:] = 1
    assert list(builder.part().facts.tokens) == [0, 3, 6, 9, 12, 15, 18, 21]
    assert list(builder.part().run.extra) == [1] * 8


def test_a_wrong_slot_row_or_hash_is_refused_by_name():
    with pytest.raises(InvalidArgument, match="slots"):
        StepBuilder([-1])
    with pytest.raises(InvalidArgument, match="hashed"):
        StepBuilder([1]).add_hash(0, bytes(32))
    for row in (-1, 1):
        with pytest.raises(InvalidArgument, match="row"):
            StepBuilder([1], hashed=True).add_hash(row, bytes(32))


def test_a_session_records_the_hashes_of_a_builder():
    known, digests = KnownRequests(), [bytes([number]) * 32 for number in range(4)]

    def note(part):
        known.note(Step(1, 1, [part], rows=vars(part).get(PACKED)), StepResult(1, 0, [PartResult()]))

    note(part_of(*(NewsRow(slot, num_tokens=16, hashes=[digests[slot]]) for slot in (0, 1))))
    builder = StepBuilder([1, 0], hashed=True)
    for step in range(16):
        if step == 15:
            builder.add_hash(0, digests[2])
            builder.add_hash(1, digests[3])
        note(builder.part())
    news = known.revival(1, 4).news
    assert (news.num_tokens, news.num_hashes) == ([32, 32], [2, 2])
    assert news.hashes == digests[0] + digests[3] + digests[1] + digests[2]


def test_a_session_records_the_requests_of_parts_with_arrays():
    """In either form, over more steps than are collected together, with rows that change and end."""
    with closing(GrpcWorld("127.0.0.1:0")) as world:
        revivals = []
        for build in (StepBuilder, None):
            world.reset()
            known = KnownRequests()
            with world.client.session(world.replica, remember=False) as session:

                def apply(part, known=known, session=session):
                    result = session.apply(part)
                    known.note(Step(session.epoch, result.seq, [part]), result)

                apply(part_of(*(NewsRow(slot, range(5)) for slot in (0, 1, 2)), *map(AdmitRow, (0, 1, 2))))
                for slots, num_steps in (((0, 1, 2), 70), ((2, 0), 3), ((0,), 40)):
                    builder = StepBuilder(slots)
                    for step in range(num_steps):
                        tokens = [step * 10 + slot for slot in slots]
                        builder.tokens[:] = array("I", tokens)
                        facts = [FactRow(slot, tokens=[token]) for slot, token in zip(slots, tokens, strict=True)]
                        apply(builder.part() if build else part_of(*facts, *map(RunRow, slots)))
                apply(part_of(FactRow(0, tokens=[1, 2, 3]), FactRow(1, end=End.FREE), FactRow(2, end=End.PREEMPTED)))
                revivals.append(known.revival(session.epoch, 4))
        by_builder, by_rows = revivals
        assert by_builder.news == by_rows.news
        assert list(by_builder.news.slot) == [0, 2]
        expected = [*range(5), *(step * 10 for count in (70, 3, 40) for step in range(count)), 1, 2, 3]
        assert list(by_builder.news.tokens[: len(expected)]) == expected
        assert by_builder.news.num_tokens == [len(expected), 5 + 70 + 3]


def test_the_decode_loop_of_the_notes_for_engine_authors_runs():
    blocks = (Path(__file__).parents[2] / "docs" / "engines.md").read_text().split("```python\n")[1:]
    (code,) = (code for code in (block.split("```")[0] for block in blocks) if "StepBuilder" in code)
    seen = []

    def launch(result):
        seen.append(result.granted)
        return array("I", [7] * len(result.granted))

    with closing(GrpcWorld("127.0.0.1:0")) as world, kvplane.connect(world.service.address) as client:
        client.register_replica("engine-0", ModelSource(model="llama-3.1-8b", num_blocks=4096))
        with client.session("engine-0") as session:
            slots = [0, 1, 2]
            session.apply(part_of(*(NewsRow(slot, range(40)) for slot in slots), *map(AdmitRow, slots)))
            given = {"slots": slots, "num_steps": 5, "sampled": array("I", [5] * 3)}
            exec(code, {"session": session, "launch": launch, **given})
            assert session.next_seq == 7
    assert seen == [[1, 1, 1]] * 5
