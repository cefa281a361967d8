"""Step numbers of an engine whose service restarted; tests of whole sessions are in tests/store."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.session import NEW_EPOCH, Opened
from kvplane.base.step import Cache, Facts, News, Part, PartResult, Resume, Step, StepResult
from kvplane.session.options import SessionOptions, first_request
from kvplane.session.reopening import Revival, StepNumbering
from tests.client.mini_engine import HYBRID


def opened(seq=0, max_rows=100) -> Opened:
    return Opened(9, seq, 0, 4, max_rows, 1000, HYBRID, 39, 0)


def test_numbers_are_unchanged_before_a_restart():
    numbers, step = StepNumbering(), Step(1, 5, [Part()])
    result = StepResult(5, 0, [PartResult()])
    assert numbers.to_service(step) is step
    assert numbers.to_engine(result) is result


def test_step_numbers_continue_in_the_engine_and_restart_in_the_service():
    numbers = StepNumbering()
    numbers.restart((41, 0), 2, ())
    sent = numbers.to_service(Step(9, 41, [Part()], executed_through=39))
    assert (sent.seq, sent.part, sent.executed_through) == (3, 0, 2), "the first steps of a life launch nothing"
    assert numbers.to_service(Step(9, 42, [Part()], executed_through=5)).executed_through == 2
    assert numbers.to_service(Step(9, 43, [Part()], executed_through=41)).executed_through == 3
    back = numbers.to_engine(StepResult(3, 0, [PartResult()], published_through=2))
    assert (back.seq, back.part, back.published_through) == (41, 0, 40)
    loads = numbers.to_engine(StepResult(4, 0, [PartResult(admit_load_after=[0, 3])]))
    assert loads.parts[0].admit_load_after == [0, 41]
    assert numbers.position(opened(seq=2)) == (41, 0)


def test_parts_of_a_split_step_are_renumbered():
    numbers = StepNumbering()
    numbers.restart((41, 3), 1, ())
    assert numbers.to_service(Step(9, 41, [Part()], part=3)).part == 0
    assert numbers.to_service(Step(9, 42, [Part()], part=1)).part == 1
    assert numbers.to_engine(StepResult(2, 2, [PartResult()])).part == 5
    assert numbers.position(opened(seq=1)) == (41, 3)


def test_step_references_in_a_part_are_translated_and_old_ones_dropped():
    numbers = StepNumbering()
    numbers.restart((41, 0), 1, held=(7,))
    facts = Facts(slot=[1, 2], end=[1, 1], fence=[38, 41])
    part = Part(facts=facts, cache=Cache(failed_steps=[30, 41], released=[7, 8]))
    (sent,) = numbers.to_service(Step(9, 42, [part])).parts
    assert sent.facts.fence == [0, 2]
    assert (sent.cache.failed_steps, sent.cache.released) == ([2], [8])
    assert part.cache.released == [7, 8], "the engine's part is its own"
    (later,) = numbers.to_service(Step(9, 43, [Part(cache=Cache(released=[7]))])).parts
    assert later.cache.released == [7], "a slot is used again"
    (again,) = numbers.to_service(Step(9, 42, [part])).parts
    assert again == sent, "a step that is sent again is the same one"


def test_an_engine_with_lower_numbers_than_the_service_references_no_wrong_step():
    """Its first step was lost, and the service received its requests in three steps."""
    numbers = StepNumbering()
    numbers.restart((2, 0), 3, ())
    part = Part(facts=Facts(slot=[1, 2, 3], end=[1, 1, 2], fence=[0, 2, 0]), cache=Cache(failed_steps=[1, 2]))
    sent = numbers.to_service(Step(9, 2, [part], executed_through=0))
    assert (sent.seq, sent.executed_through) == (4, 3)
    assert sent.parts[0].facts.fence == [0, 4, 0]
    assert sent.parts[0].cache.failed_steps == [4], "a step of the previous service is dropped"


def test_equal_numbers_after_a_restart_still_drop_old_references():
    numbers = StepNumbering()
    numbers.restart((4, 0), 3, held=(7,))
    part = Part(facts=Facts(slot=[1], end=[1], fence=[2]), cache=Cache(failed_steps=[2], released=[7]))
    sent = numbers.to_service(Step(9, 4, [part], executed_through=1))
    assert (sent.seq, sent.executed_through) == (4, 3)
    assert sent.parts[0].facts.fence == [0]
    assert (sent.parts[0].cache.failed_steps, sent.parts[0].cache.released) == ([], [])


def test_requests_are_sent_in_pieces_with_their_hashes_and_tokens():
    news = News(slot=[0, 1, 2], num_tokens=[1, 2, 3], tokens=[9, 8, 8, 7, 7, 7], request_id=["a", "b", "c"])
    steps = Revival(news=news).first_steps(opened(max_rows=2), [])
    assert [step.seq for step in steps] == [1, 2, 3]
    assert [step.parts[0].news.tokens for step in steps] == [[], [9, 8, 8], [7, 7, 7]]
    news = News(slot=[0, 1, 2], num_tokens=[16, 32, 5], num_hashes=[1, 2, 0], hashes=b"aabbcc")
    steps = Revival(news=news).first_steps(opened(max_rows=2), [])
    assert [step.parts[0].news.hashes for step in steps] == [b"", b"aabbcc", b""]
    assert steps[1].parts[0].news.num_hashes == [1, 2]


def test_pieces_have_a_bounded_number_of_tokens():
    lengths = [100_000, 200_000, 300_000, 10, 20]
    news = News(slot=list(range(5)), num_tokens=lengths, tokens=[1] * sum(lengths))
    steps = Revival(news=news).first_steps(opened(), [])
    assert [step.parts[0].news.num_tokens for step in steps] == [[], [100_000], [200_000], [300_000], [10, 20]]
    assert [len(step.parts[0].news.tokens) for step in steps] == [0, 100_000, 200_000, 300_000, 30]


def test_adopted_loads_are_the_blocks_of_loads_in_the_image():
    """Blocks of loading rows, of slots that ended as HELD during a load, and of preempted requests in the news."""
    resume = Resume(
        slot=[1, 2, 3, 4],
        loading=[0, 1, 1, 2],
        num_blocks=[2, 1, 1, 2, 0, 1, 1, 0],
        blocks=[10, 11, 12, 20, 21, 22, 30, 40],
        held_slot=[5, 6, 7],
        held_count=[1, 1, 2],
        held_blocks=[50, 60, 70, 71],
        held_loading=[0, 1, 0],
    )
    assert Revival(resume=resume, held=(5, 6)).adopted_loads == {20, 21, 22, 30, 60, 70, 71}
    assert Revival().adopted_loads == frozenset()
    assert Revival(resume=replace(resume, loading=[], held_loading=[]), held=(5, 6, 7)).adopted_loads == frozenset()


MEMORY: SessionOptions = {"stamp_table": (1, 2), "incarnation": 7, "owner_epoch": 3}


def test_a_session_without_revival_begins_its_life_on_the_memory_that_it_is_given():
    request = first_request("r", None, MEMORY)
    assert {name: getattr(request, name) for name in MEMORY} == MEMORY
    assert request.epoch == NEW_EPOCH


@pytest.mark.parametrize("name", MEMORY)
def test_a_revival_and_the_memory_of_a_life_are_not_given_together(name):
    with pytest.raises(InvalidArgument, match=f"{name} is given together with revive"):
        first_request("r", Revival, cast(SessionOptions, {name: dict(MEMORY)[name]}))
