"""Running requests get their tokens in row order; when blocks run out, victims lose theirs."""

from __future__ import annotations

import pytest

from kvplane.base.step import Budget, Facts, OnRefusal, Part, Run
from tests.core.builders import REFERENCE, SAFE, Engine, admit_row, full, tokens, window

PREEMPT, STOP, SKIP = OnRefusal.PREEMPT, OnRefusal.STOP, OnRefusal.SKIP


def crowd(*lengths, num_blocks=9, **changes):
    """Requests a, b, c, ... of these lengths run in slots 0, 1, 2, ... and each has one more token to compute."""
    engine = Engine(full(), num_blocks=num_blocks, **changes)
    for slot, length in enumerate(lengths):
        engine.admit(slot, "abcdefgh"[slot] * length)
    facts = Facts(list(range(len(lengths))), appended=[1] * len(lengths), tokens=tokens("x" * len(lengths)))
    engine.step(Part(facts=facts))
    return engine


def run(engine, *slots, budget=None, **columns):
    (result,) = engine.step(Part(run=Run(list(slots), **columns), budget=budget or Budget()))
    return result


# -- amounts -----------------------------------------------------------------------------------------------------------


def test_a_row_gets_what_is_known_and_not_computed():
    engine = crowd(3, 5)
    assert run(engine, 0, 1).granted == [1, 1]
    assert run(engine, 0, 1).granted == [0, 0], "nothing is left to compute"


def test_caps_and_budgets_cut_rows_in_their_order():
    engine = Engine(full())
    for slot in range(3):
        engine.admit(slot, "abc"[slot] * 9, cap=1)
    assert run(engine, 2, 0, 1, cap=[3, 8, 8], budget=Budget(tokens=8)).granted == [3, 5, 0]


def test_the_input_budget_charges_each_scheduled_row():
    engine = crowd(3, 3, 3)
    assert run(engine, 0, 1, 2, budget=Budget(input=8, overhead=2)).granted == [1, 1, 0]


def test_a_row_with_nothing_to_do_costs_nothing():
    engine = crowd(3, 3)
    run(engine, 0)
    assert run(engine, 0, 1, budget=Budget(tokens=1)).granted == [0, 1]


def test_running_rows_stop_at_the_longest_request():
    engine = crowd(7, max_model_len=8)
    assert run(engine, 0, extra=[5]).granted == [1]


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("on_refusal", "granted"), [(STOP, [1, 0, 0]), (SKIP, [1, 0, 1])])
def test_a_refused_row_stops_the_section_or_is_passed_over(on_refusal, granted):
    """Slots 0 and 1 each need a block and one is free; slot 2 has room in its own."""
    engine = crowd(8, 8, 11)
    assert engine.num_free == 1
    assert run(engine, 0, 1, 2, on_refusal=on_refusal).granted == granted
    assert engine.table(1) == [3, 4]


def test_the_last_row_is_the_first_victim():
    engine = crowd(8, 12, 12)
    assert engine.num_free == 0
    result = run(engine, 0, 1, 2)
    assert (result.granted, result.preempted) == ([1, 1, 0], [2])
    assert engine.replica.num_running == 2
    assert engine.replica.counters.preempted == 1


def test_victims_go_one_by_one_until_the_row_fits():
    engine = crowd(4, 4, 12, 8)
    (result,) = engine.step(
        Part(facts=Facts([0], appended=[11], tokens=tokens("y" * 11)), run=Run([0, 1, 2, 3], victims=[3, 2, 1]))
    )
    assert (result.granted, result.preempted) == ([12, 1, 0, 0], [3, 2])


def test_the_engine_names_its_victims():
    """By priority, for example. A victim that does not run is skipped, and a victim need not be among the rows."""
    engine = crowd(8, 12, 12)
    engine.add(7, "zz")
    result = run(engine, 1, 2, victims=[7, 0, 2])
    assert (result.granted, result.preempted) == ([1, 1], [0])


def test_a_victim_that_was_granted_gives_back_its_budget_and_its_blocks():
    """Slot 0 was given 1 token and a block; for slot 1 it is taken out, so slot 1 and 2 share its budget of 2."""
    engine = crowd(8, 12, 7, num_blocks=9)
    assert engine.num_free == 1
    result = run(engine, 0, 1, 2, victims=[0], budget=Budget(tokens=2))
    assert (result.granted, result.preempted) == ([0, 1, 1], [0])
    assert result.new_blocks.row == [1], "the answer leaves out the blocks of slot 0"


def test_the_input_budget_comes_back_with_its_overhead():
    engine = crowd(8, 12, 7, num_blocks=9)
    result = run(engine, 0, 1, 2, victims=[0], budget=Budget(input=9, overhead=3))
    assert result.granted == [0, 1, 1]


def test_a_row_that_is_its_own_victim_gets_nothing_and_the_next_has_its_turn():
    engine = crowd(8, 12, 12)
    result = run(engine, 2, 0, 1, victims=[2])
    assert (result.granted, result.preempted) == ([0, 1, 1], [2])


def test_a_row_whose_request_was_preempted_before_its_turn_is_passed_over():
    engine = crowd(8, 12, 12)
    result = run(engine, 0, 2, 1, victims=[2])
    assert (result.granted, result.preempted) == ([1, 0, 1], [2])


def test_without_a_list_the_victims_are_the_rows_themselves():
    engine = crowd(8, 12, 12)
    assert run(engine, 0).preempted == [0]


def test_a_row_without_further_victims_gets_nothing_and_the_preempted_stay_preempted():
    """Slot 0 needs 3 blocks, slot 1 has 1 to give."""
    engine = crowd(8, 4, 20)
    facts = Facts([0], appended=[9], tokens=tokens("y" * 9))
    (result,) = engine.step(Part(facts=facts, run=Run([0], victims=[1])))
    assert (result.granted, result.preempted) == ([0], [1])
    assert engine.num_free == 1


# -- what becomes of the victim ----------------------------------------------------------------------------------------


def test_its_tokens_and_hashes_stay_and_so_do_its_cached_blocks():
    engine = crowd(8, 12, 12)
    run(engine, 0, 1, 2)
    requests = engine.replica.requests
    assert (requests.num_tokens[2], requests.computed[2], requests.in_flight[2]) == (13, 0, 0)
    engine.end(1)
    again = engine.admit(2)
    assert (again.hit, again.granted) == (4, 9), "tail first: two of its three cached blocks went to the others"


def test_it_can_be_preempted_by_a_fact_as_well():
    engine = crowd(8)
    assert engine.preempt(0).preempted == [], "the engine knows"
    assert engine.num_free == 8
    assert engine.admit(0).hit == 8


def test_a_request_that_waits_cannot_lose_anything():
    engine = Engine(full())
    engine.add(0, "aa")
    engine.preempt(0)
    assert engine.replica.counters.preempted == 0


@pytest.mark.parametrize(("rule", "hit"), [(SAFE, 8), (REFERENCE, 12)])
def test_what_it_was_granted_in_this_very_step_was_never_computed(rule, hit):
    """Admitted with 8 cached tokens and given 5 more, then preempted in the same step; see safe commit."""
    engine = Engine(full(), commit=rule)
    engine.serve(0, "aaaabbbbc")
    engine.admit(1, "z")
    admit = Part(news=engine.news(2, "aaaabbbbccccd"), admit=admit_row(2))
    engine.step(admit, Part(facts=Facts([2], end=[3])))
    assert engine.admit(2).hit == hit


def test_a_window_gives_blocks_before_anyone_is_preempted():
    engine = Engine(window(4), num_blocks=5)
    engine.admit(0, "aaaabbbb")
    engine.admit(1, "zzzzyyyy")
    result = run(engine, 0, extra=[1])
    assert (result.granted, result.preempted) == ([1], [])
