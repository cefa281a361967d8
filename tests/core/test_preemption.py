"""Running requests are granted tokens in row order; without enough blocks, victims are preempted."""

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


def test_a_running_row_is_granted_its_uncomputed_tokens():
    engine = crowd(3, 5)
    assert run(engine, 0, 1).granted == [1, 1]
    assert run(engine, 0, 1).granted == [0, 0], "nothing is left to compute"


def test_caps_and_budgets_limit_running_rows_in_order():
    engine = Engine(full())
    for slot in range(3):
        engine.admit(slot, "abc"[slot] * 9, cap=1)
    assert run(engine, 2, 0, 1, cap=[3, 8, 8], budget=Budget(tokens=8)).granted == [3, 5, 0]


def test_the_input_budget_charges_each_scheduled_row():
    engine = crowd(3, 3, 3)
    assert run(engine, 0, 1, 2, budget=Budget(input=8, overhead=2)).granted == [1, 1, 0]


def test_a_row_without_uncomputed_tokens_uses_no_budget():
    engine = crowd(3, 3)
    run(engine, 0)
    assert run(engine, 0, 1, budget=Budget(tokens=1)).granted == [0, 1]


def test_running_rows_are_limited_by_max_model_len():
    engine = crowd(7, max_model_len=8)
    assert run(engine, 0, extra=[5]).granted == [1]


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("on_refusal", "granted"), [(STOP, [1, 0, 0]), (SKIP, [1, 0, 1])])
def test_a_refused_running_row_ends_the_section_or_is_skipped(on_refusal, granted):
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


def test_victims_are_preempted_one_by_one_until_the_row_fits():
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


def test_a_granted_victim_returns_its_budget_and_blocks():
    """Slot 0 was given 1 token and a block; for slot 1 it is taken out, so slot 1 and 2 share its budget of 2."""
    engine = crowd(8, 12, 7, num_blocks=9)
    assert engine.num_free == 1
    result = run(engine, 0, 1, 2, victims=[0], budget=Budget(tokens=2))
    assert (result.granted, result.preempted) == ([0, 1, 1], [0])
    assert result.new_blocks.row == [1], "the answer leaves out the blocks of slot 0"


def test_a_victim_returns_its_input_budget_and_overhead():
    engine = crowd(8, 12, 7, num_blocks=9)
    result = run(engine, 0, 1, 2, victims=[0], budget=Budget(input=9, overhead=3))
    assert result.granted == [0, 1, 1]


def test_a_row_that_is_its_own_victim_is_granted_nothing():
    engine = crowd(8, 12, 12)
    result = run(engine, 2, 0, 1, victims=[2])
    assert (result.granted, result.preempted) == ([0, 1, 1], [2])


def test_a_row_of_a_preempted_request_is_skipped():
    engine = crowd(8, 12, 12)
    result = run(engine, 0, 2, 1, victims=[2])
    assert (result.granted, result.preempted) == ([1, 0, 1], [2])


def test_rows_are_victims_from_the_last_when_none_are_named():
    engine = crowd(8, 12, 12)
    assert run(engine, 0).preempted == [0]


def test_a_row_that_runs_out_of_victims_leaves_them_preempted():
    """Slot 0 needs 3 blocks, slot 1 has 1 to give."""
    engine = crowd(8, 4, 20)
    facts = Facts([0], appended=[9], tokens=tokens("y" * 9))
    (result,) = engine.step(Part(facts=facts, run=Run([0], victims=[1])))
    assert (result.granted, result.preempted) == ([0], [1])
    assert engine.num_free == 1


# -- what becomes of the victim ----------------------------------------------------------------------------------------


def test_a_preempted_request_keeps_its_tokens_hashes_and_cached_blocks():
    engine = crowd(8, 12, 12)
    run(engine, 0, 1, 2)
    requests = engine.replica.requests
    assert (requests.num_tokens[2], requests.computed[2], requests.in_flight[2]) == (13, 0, 0)
    engine.end(1)
    again = engine.admit(2)
    assert (again.hit, again.granted) == (4, 9), "tail first: two of its three cached blocks went to the others"


def test_a_request_can_be_preempted_by_a_fact():
    engine = crowd(8)
    assert engine.preempt(0).preempted == [], "the engine knows"
    assert engine.num_free == 8
    assert engine.admit(0).hit == 8


def test_preempting_a_waiting_request_counts_no_preemption():
    engine = Engine(full())
    engine.add(0, "aa")
    engine.preempt(0)
    assert engine.replica.counters.preempted == 0


@pytest.mark.parametrize(("rule", "hit"), [(SAFE, 8), (REFERENCE, 12)])
def test_tokens_granted_in_the_step_that_preempts_are_not_computed(rule, hit):
    """Admitted with 8 cached tokens and given 5 more, then preempted in the same step; see safe commit."""
    engine = Engine(full(), commit=rule)
    engine.serve(0, "aaaabbbbc")
    engine.admit(1, "z")
    admit = Part(news=engine.news(2, "aaaabbbbccccd"), admit=admit_row(2))
    engine.step(admit, Part(facts=Facts([2], end=[3])))
    assert engine.admit(2).hit == hit


def test_blocks_outside_the_window_are_freed_before_a_preemption():
    engine = Engine(window(4), num_blocks=5)
    engine.admit(0, "aaaabbbb")
    engine.admit(1, "zzzzyyyy")
    result = run(engine, 0, extra=[1])
    assert (result.granted, result.preempted) == ([1], [])
