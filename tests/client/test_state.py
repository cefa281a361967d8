"""Step numbers, steps in flight and busy blocks in the client."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplane.base.errors import FailedPrecondition, InternalError, InvalidArgument, LimitExceeded, SequenceError
from kvplane.base.groups import GroupKind, GroupSpec, ReplicaSpec
from kvplane.base.session import Opened, OpenRequest
from kvplane.base.step import Cache, Part, PartResult, StepResult
from kvplane.session.reopening import Revival
from kvplane.session.state import SessionState

SPEC = ReplicaSpec((GroupSpec(GroupKind.FULL_ATTENTION, 16),), 10, 1024, 16, 16, 1024)


def opened(epoch=3, seq=0, next_part=0, free_blocks=9, max_rows=4096):
    return Opened(epoch, seq, next_part, 4, max_rows, 10_000, SPEC, free_blocks, 0)


def answer(step, free_blocks=5):
    return StepResult(step.seq, step.part, [PartResult(free_blocks=free_blocks) for _ in step.parts])


def number(step):
    return step.seq, step.part


@pytest.fixture
def state():
    return SessionState(opened())


def register(state, parts=1, last=True, executed_through=None):
    return state.register([Part() for _ in range(parts)], last, executed_through)


def test_steps_are_numbered_from_one_and_parts_from_zero(state):
    steps = [register(state, 2, last=False), register(state, 1, last=False), register(state)]
    assert [number(step) for step in steps] == [(1, 0), (1, 2), (1, 3)]
    assert [step.last for step in steps] == [False, False, True]
    for step in steps:
        state.answered(answer(step))
    assert number(register(state)) == (2, 0)


def test_a_resumed_engine_continues_at_the_position_of_the_service():
    assert number(register(SessionState(opened(seq=41, next_part=2)))) == (42, 2)


def test_steps_in_flight_are_limited(state):
    for _ in range(4):
        register(state, executed_through=0)
    assert state.in_flight == 4
    with pytest.raises(LimitExceeded):
        register(state, executed_through=0)
    assert state.in_flight == 4


def test_parts_of_one_step_count_as_one_step_in_flight(state):
    for _ in range(9):
        register(state, last=False)
    assert state.in_flight == 1


def test_parts_in_flight_are_limited():
    state = SessionState(opened(max_rows=3))
    for _ in range(3):
        register(state, last=False)
    with pytest.raises(LimitExceeded, match="3 messages"):
        register(state, last=False)


def test_executed_through_defaults_to_all_earlier_steps(state):
    assert register(state).executed_through == 0
    state.answered(answer(state.resumed(opened())[0]))
    first, second = register(state, last=False), register(state)
    assert (first.executed_through, second.executed_through) == (1, 1)


def test_executed_through_is_required_with_steps_in_flight(state):
    first = register(state)
    with pytest.raises(InvalidArgument) as caught:
        register(state)
    assert caught.value.field == "executed_through"
    assert number(register(state, executed_through=0)) == (2, 0)
    state.answered(answer(first))
    assert register(state, executed_through=1).executed_through == 1


@pytest.mark.parametrize("given", [-1, 0, 1, 4, 2**70])
def test_executed_through_is_an_answered_step_and_does_not_decrease(state, given):
    for _ in range(2):
        state.answered(answer(register(state)))
    state.answered(answer(register(state, executed_through=2)))  # step 3
    with pytest.raises(InvalidArgument, match="not within 2 to 3"):
        register(state, executed_through=given)


def test_a_step_with_missing_parts_is_not_answered(state):
    state.answered(answer(register(state, last=False)))
    register(state)
    with pytest.raises(InvalidArgument, match="not within 0 to 0"):
        register(state, executed_through=1)


def test_withdraw_undoes_register(state):
    step = register(state, 3, last=False)
    state.withdraw(step)
    assert state.in_flight == 0
    assert number(register(state)) == (1, 0)


def test_a_refusal_frees_the_numbers_of_its_step_and_of_later_ones(state):
    first = register(state)
    register(state, 2, last=False, executed_through=0)
    register(state, executed_through=0)
    state.answered(answer(first))
    assert state.followers == 1
    state.refused()
    assert state.in_flight == 0
    assert number(register(state)) == (2, 0)


def test_a_refused_part_leaves_earlier_parts_applied(state):
    state.answered(answer(register(state, 2, last=False)))
    register(state, last=False)
    assert state.followers == 0
    state.refused()
    assert number(register(state)) == (1, 2)


def test_an_answer_to_another_step_is_a_bug_of_the_service(state):
    register(state)
    with pytest.raises(InternalError, match="answered step 2 part 0, expected step 1 part 0"):
        state.answered(StepResult(2, 0, [PartResult()]))


def test_free_blocks_are_as_in_the_last_answer(state):
    assert state.free_blocks == 9
    state.answered(answer(register(state, 2), free_blocks=4))
    assert state.free_blocks == 4


def test_a_step_without_parts_is_refused_by_the_client(state):
    with pytest.raises(InvalidArgument, match="parts"):
        state.register([], True, None)


def test_require_idle_and_require_in_flight(state):
    state.require_idle()
    with pytest.raises(FailedPrecondition, match="no step is in flight"):
        state.require_in_flight()
    register(state)
    state.require_in_flight()
    with pytest.raises(FailedPrecondition, match="1 earlier steps have not been answered"):
        state.require_idle()


@pytest.mark.parametrize("position", [(0, 0), (0, 1), (1, 0), (2, 0)])
def test_unanswered_steps_are_resent_after_a_broken_stream(state, position):
    steps = [register(state, last=False), register(state), register(state, executed_through=0)]
    assert state.resumed(opened(seq=position[0], next_part=position[1])) == steps


def test_answered_steps_are_not_resent(state):
    state.answered(answer(register(state)))
    step = register(state)
    assert state.resumed(opened(seq=1)) == [step]


@pytest.mark.parametrize("position", [(0, 0), (3, 0), (2, 1)])
def test_a_service_at_another_position_ends_the_session(state, position):
    state.answered(answer(register(state)))
    register(state)
    with pytest.raises(SequenceError):
        state.resumed(opened(seq=position[0], next_part=position[1]))


def test_a_service_at_another_epoch_ends_the_session(state):
    with pytest.raises(SequenceError):
        state.resumed(opened(epoch=4))


def test_free_blocks_are_taken_from_open_when_nothing_is_in_flight(state):
    state.resumed(opened(free_blocks=7))
    assert state.free_blocks == 7
    register(state)
    state.resumed(opened(free_blocks=8))
    assert state.free_blocks == 7


def over(*blocks: int) -> Part:
    return Part(cache=Cache(loads_over=list(blocks)))


def test_blocks_are_busy_until_a_step_that_ends_their_loads_is_answered():
    state = SessionState(replace(opened(), busy_blocks=(3, 5, 8)))
    step = state.register([over(5), over(3)], True, None)
    assert (state.busy_blocks, state.still_busy()) == ((3, 5, 8), (8,))
    state.answered(answer(step))
    assert state.busy_blocks == state.still_busy() == (8,)


def test_a_refused_step_ends_no_load():
    state = SessionState(replace(opened(), busy_blocks=(3, 5)))
    state.register([over(3, 4)], True, None)
    state.refused()
    assert state.busy_blocks == state.still_busy() == (3, 5)


def test_busy_blocks_are_taken_from_the_service_after_a_reopen():
    state = SessionState(replace(opened(), busy_blocks=(3, 5)))
    step = state.register([over(3)], True, None)
    state.resumed(replace(opened(seq=1), busy_blocks=(5,)))
    assert state.busy_blocks == (5,)
    state.answered(answer(step))
    assert state.busy_blocks == (5,)


@pytest.mark.parametrize("held", [(), (2,)], ids=["as released", "as held"])
def test_a_slot_whose_release_was_lost_is_released_again(held):
    """Two services in a row know nothing of the held slot; the release is answered here, and never sent."""
    state, results = SessionState(opened()), [StepResult(1, 0, [PartResult()])]
    state.restarted(opened(epoch=4), Revival(held=(2,)), results)
    state.register([Part(cache=Cache(released=[2]))], True, None)
    state.restarted(opened(epoch=5), Revival(held=held), results)
    made = state.take_synthesized()
    assert made is not None
    state.answered(made)
    again = state.register([Part(cache=Cache(released=[2]))], True, None)
    assert state.numbers.to_service(again).parts[0].cache.released == [2]


def test_a_reopened_session_reports_busy_blocks_and_takes_those_of_the_service():
    state = SessionState(replace(opened(), busy_blocks=(3, 5)))
    state.register([over(3)], True, None)
    revival = Revival(busy_blocks=(9, 5))
    assert revival.open_request(OpenRequest("r", 1), 2, state.still_busy()).busy_blocks == (5, 9)
    results = [StepResult(1, 0, [PartResult()])]
    state.restarted(replace(opened(epoch=7), busy_blocks=(3, 5, 9)), revival, results)
    assert state.busy_blocks == (3, 5, 9)
    made = state.take_synthesized()
    assert made is not None
    state.answered(made)
    assert state.busy_blocks == (3, 5, 9), "a transfer of a worker was still writing to block 3"
    state.answered(answer(state.register([over(9)], True, None)))
    assert list(state.busy_blocks) == [3, 5]
