"""The order of steps: none is applied twice or skipped, and repeats get the stored answer."""

from __future__ import annotations

import pytest

from kvplane.base.errors import SequenceError
from kvplane.base.step import Facts, Part, Peek, Step, StepResult
from kvplane_service.replicas.step_order import StepOrder, size_of


def step(seq: int, part: int = 0, parts: int = 1, last: bool = True) -> Step:
    return Step(1, seq, [Part() for _ in range(parts)], part, last)


def apply(order: StepOrder, one: Step, content: bytes = b"c") -> StepResult:
    """As the host does."""
    stored = order.find(one, content)
    if stored is not None:
        return stored
    result = StepResult(one.seq, one.part, [])
    order.record(one, len(one.parts), content, result)
    return result


@pytest.fixture
def order():
    return StepOrder(kept_steps=2)


def test_step_numbers_begin_with_1(order):
    for seq in (1, 2, 3):
        apply(order, step(seq))
    assert (order.seq, order.next_part) == (3, 0)


@pytest.mark.parametrize("future", [step(2), step(1, 1), step(99), step(2**64 - 1)])
def test_a_step_ahead_of_its_turn_is_refused(order, future):
    with pytest.raises(SequenceError, match="ahead of its turn"):
        order.find(future, b"")


def test_part_numbers_are_counted_within_their_step(order):
    apply(order, step(1, 0, parts=2, last=False))
    assert (order.seq, order.next_part, order.rows) == (0, 2, 2)
    with pytest.raises(SequenceError, match="ahead of its turn"):
        order.find(step(1, 3), b"")
    apply(order, step(1, 2, last=True))
    assert (order.seq, order.next_part, order.rows) == (1, 0, 0)


def test_a_repeated_step_gets_the_first_answer(order):
    first = apply(order, step(1, last=False))
    second = apply(order, step(1, 1))
    assert apply(order, step(1, last=False)) is first
    assert apply(order, step(1, 1)) is second
    assert order.seq == 1


def test_a_repeated_step_with_other_content_is_refused(order):
    apply(order, step(1))
    with pytest.raises(SequenceError, match="other content"):
        apply(order, step(1), b"other")


def test_a_part_of_a_step_sent_whole_is_not_a_repeat(order):
    apply(order, step(1, 0, parts=2))
    with pytest.raises(SequenceError, match="no longer stored"):
        order.find(step(1, 1), b"c")


def test_answers_of_old_steps_are_dropped(order):
    for seq in (1, 2, 3):
        apply(order, step(seq, last=False))
        apply(order, step(seq, 1))
    apply(order, step(4, last=False))
    with pytest.raises(SequenceError, match=r"no longer stored.*next is part 1 of step 4"):
        order.find(step(1), b"c")
    for kept in (step(2), step(2, 1), step(3), step(4)):
        assert order.find(kept, b"c") is not None


def test_rows_are_counted_over_sections_and_a_bare_part_is_one():
    part = Part(facts=Facts(slot=[1, 2]), peek=Peek(slot=[3]))
    assert size_of(Step(1, 1, [part, Part(), part])) == (7, 0)
