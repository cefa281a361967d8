"""Admission: rows are admitted in order, each with its cached prefix, until blocks or budgets are exhausted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplane.base.step import Budget, End, Facts, OnRefusal, Part, RowFlag, Step, StepResult, Watermark
from kvplane_service.decisions.text import operation_lines
from tests.core.builders import (
    GRANTED,
    NEVER_FITS,
    NO_ROOM,
    NOT_REACHED,
    NOT_WAITING,
    REFUSED,
    Engine,
    admit_row,
    chunked,
    full,
    run_rows,
    state,
    tokens,
    window,
)

WHOLE, FULL_FIT = RowFlag.WHOLE, RowFlag.FULL_FIT


def waiting(*texts, **changes):
    """A small pool and requests that wait in slots 0, 1, ..."""
    engine = Engine(full(), **{"num_blocks": 9, **changes})
    for slot, text in enumerate(texts):
        engine.add(slot, text)
    return engine


def outcome(result):
    return list(zip(result.admit_status, result.admit_granted, strict=True))


def section(engine, *slots, budget=None, **columns):
    return engine.step(Part(admit=admit_row(*slots, **columns), budget=budget or Budget()))[0]


# -- rows in order -----------------------------------------------------------------------------------------------------


def test_rows_are_admitted_in_their_order():
    engine = waiting("aaaab", "cccc", "ddd")
    result = section(engine, 2, 0, 1)
    assert outcome(result) == [(GRANTED, 3), (GRANTED, 5), (GRANTED, 4)]
    assert result.tables.by_row() == {0: {0: [1]}, 1: {0: [2, 3]}, 2: {0: [4]}}
    assert engine.replica.num_running == 3


def test_a_refused_admission_ends_the_section_or_is_skipped():
    """One large request at the head holds up the queue unless the engine says otherwise."""
    engine = waiting("a" * 20, "b" * 16, "cccc")
    assert outcome(section(engine, 0, 1, 2)) == [(GRANTED, 20), (REFUSED, 0), (NOT_REACHED, 0)]
    engine.preempt(0)
    assert outcome(section(engine, 0, 1, 2, on_refusal=OnRefusal.SKIP)) == [(GRANTED, 4), (REFUSED, 0), (GRANTED, 4)]


def test_max_running_limits_admissions():
    engine = waiting("aa", "bb", "cc")
    assert outcome(section(engine, 0, 1, 2, max_running=2)) == [(GRANTED, 2), (GRANTED, 2), (NOT_REACHED, 0)]
    assert outcome(section(engine, 2, max_running=2)) == [(NOT_REACHED, 0)]
    engine.end(0)
    assert outcome(section(engine, 2, max_running=2)) == [(GRANTED, 2)]


def test_only_if_no_preemption_skips_the_admit_section():
    """A new request must not get the blocks of a request that was preempted in the same step."""
    engine = waiting("a" * 16, "b" * 15, "cc")
    section(engine, 0, 1)
    rows = run_rows(0, 1, extra=[1, 0], victims=[1], on_refusal=OnRefusal.PREEMPT)
    (result,) = engine.step(Part(run=rows, admit=admit_row(2, only_if_no_preemption=True)))
    assert result.preempted == [1]
    assert outcome(result) == [(NOT_REACHED, 0)]
    (again,) = engine.step(Part(admit=admit_row(2, only_if_no_preemption=True)))
    assert outcome(again) == [(GRANTED, 2)]


def test_admission_of_a_running_request_is_not_waiting():
    engine = waiting("aa", "bb")
    section(engine, 0)
    assert outcome(section(engine, 0, 1)) == [(NOT_WAITING, 0), (GRANTED, 2)]


# -- amounts -----------------------------------------------------------------------------------------------------------


def test_the_first_chunk_is_limited_by_cap_and_budget():
    engine = waiting("a" * 12, "b" * 12)
    result = section(engine, 0, 1, cap=[5, 9], budget=Budget(tokens=12))
    assert outcome(result) == [(GRANTED, 5), (GRANTED, 7)]


def test_a_hit_is_not_charged_to_the_budget():
    engine = waiting()
    engine.serve(9, "a" * 12)
    engine.add(0, "a" * 12 + "bb")
    assert outcome(section(engine, 0, budget=Budget(tokens=2))) == [(GRANTED, 2)]


def test_rows_behind_an_exhausted_budget_are_not_reached():
    engine = waiting("aa", "bb")
    assert outcome(section(engine, 0, 1, budget=Budget(tokens=2))) == [(GRANTED, 2), (NOT_REACHED, 0)]
    assert outcome(section(engine, 1, budget=Budget(tokens=0))) == [(NOT_REACHED, 0)]


def test_the_input_budget_charges_each_row_its_overhead():
    """Positions of the input batch: the tokens of the row and its draft slots. 2 + 3, then 3 of the 8 are left: no more
    than the overhead, so nothing fits.
    """
    engine = waiting("aa", "bb")
    result = section(engine, 0, 1, budget=Budget(input=8, overhead=3))
    assert outcome(result) == [(GRANTED, 2), (NOT_REACHED, 0)]
    assert outcome(section(engine, 1, budget=Budget(input=4, overhead=3))) == [(GRANTED, 1)]


def test_a_whole_row_beyond_the_budget_gets_no_room():
    engine = waiting("a" * 8, "b" * 8)
    result = section(engine, 0, 1, flags=WHOLE, budget=Budget(tokens=12))
    assert outcome(result) == [(GRANTED, 8), (NO_ROOM, 0)]


def test_extra_tokens_are_placeholders_for_drafts():
    engine = waiting("aaa")
    assert outcome(section(engine, 0, extra=3)) == [(GRANTED, 6)]
    assert engine.computed(0) == 6
    assert engine.keyed() == []


def test_admission_is_limited_by_max_model_len():
    engine = waiting("a" * 6, max_model_len=8)
    assert outcome(section(engine, 0, extra=9)) == [(GRANTED, 8)]


# -- blocks ------------------------------------------------------------------------------------------------------------


def test_a_chunk_is_admitted_when_its_prompt_does_not_fit():
    engine = waiting("a" * 32, "b" * 4)
    section(engine, 1)
    assert outcome(section(engine, 0, cap=8)) == [(GRANTED, 8)]


def test_full_fit_counts_the_whole_sequence():
    engine = waiting("a" * 32, "b" * 4, "a" * 28)
    section(engine, 1)
    assert outcome(section(engine, 0, 2, cap=8, flags=FULL_FIT, on_refusal=OnRefusal.SKIP)) == [
        (REFUSED, 0),
        (GRANTED, 8),
    ]


def test_full_fit_counts_tokens_generated_before_a_preemption():
    engine = waiting("a" * 8)
    section(engine, 0)
    for letter in "b" * 20:
        engine.run(0, text=letter)
    engine.preempt(0)
    engine.admit(1, "cccccccc")
    assert engine.num_free == 6
    assert outcome(section(engine, 0, cap=4, flags=FULL_FIT)) == [(REFUSED, 0)]


def test_a_request_larger_than_the_pool_never_fits():
    """8 usable blocks hold 32 tokens. The engine should refuse such a request permanently instead of asking again."""
    engine = waiting("a" * 33, "b" * 32)
    assert outcome(section(engine, 0)) == [(NEVER_FITS, 0)]
    engine.admit(2, "c")
    assert outcome(section(engine, 1)) == [(REFUSED, 0)]


def test_a_long_request_with_a_small_window_is_refused_and_not_never_fits():
    engine = Engine(window(4, admission_cap_blocks=4), num_blocks=6)
    engine.admit(1, "zzzzyyyyxxxx")
    assert engine.admit(0, "a" * 100, cap=16).status is REFUSED


# -- watermark ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("watermark", "running", "status"),
    [
        (Watermark.AUTO, False, GRANTED),
        (Watermark.AUTO, True, REFUSED),
        (Watermark.ALWAYS, False, REFUSED),
        (Watermark.NEVER, True, GRANTED),
    ],
)
def test_an_admission_leaves_the_watermark_free_when_others_run(watermark, running, status):
    """2 of 8 blocks stay free, so that requests that run already need not preempt one another at once."""
    engine = waiting("a" * (24 if running else 28), "b", watermark_blocks=2)
    if running:
        section(engine, 1)
    assert outcome(section(engine, 0, watermark=int(watermark)))[0][0] == status


def test_running_requests_may_use_watermark_blocks():
    engine = waiting("a" * 24, watermark_blocks=2)
    section(engine, 0)
    assert engine.extend(0, "b" * 8).granted == [8]
    assert engine.num_free == 0


def test_the_watermark_counts_in_the_full_sequence_check():
    engine = waiting("a" * 24, "b", watermark_blocks=2)
    section(engine, 1)
    assert outcome(section(engine, 0, cap=4, flags=FULL_FIT)) == [(REFUSED, 0)]
    assert outcome(section(engine, 0, cap=4)) == [(GRANTED, 4)]


def test_the_watermark_counts_requests_admitted_earlier_in_the_step():
    engine = waiting("aaaa", "b" * 24, watermark_blocks=2)
    assert outcome(section(engine, 0, 1)) == [(GRANTED, 4), (REFUSED, 0)]


# -- counting is exact -------------------------------------------------------------------------------------------------

MIX = [window(6), full(), chunked(8), state()]


@settings(max_examples=40)
@given(
    groups=st.lists(st.sampled_from(range(len(MIX))), min_size=1, max_size=3, unique=True),
    before=st.integers(0, 20),
    length=st.integers(1, 24),
    cap=st.integers(1, 24),
    lookahead=st.integers(0, 5),
)
def test_an_admission_succeeds_exactly_when_its_blocks_are_free(groups, before, length, cap, lookahead):
    """Taken with plenty of blocks, then asked for with exactly as many free, and with one less."""

    def ready():
        engine = Engine(*(MIX[group] for group in groups), num_blocks=60)
        if before:
            engine.serve(0, "a" * before)
        engine.add(1, "a" * length)
        return engine

    engine = ready()
    assert engine.admit(1, cap=cap, lookahead=lookahead).status is GRANTED
    left = engine.num_free
    assert ready().admit(1, cap=cap, lookahead=lookahead, reserved=left).status is GRANTED
    assert ready().admit(1, cap=cap, lookahead=lookahead, reserved=left + 1).status is REFUSED


def test_admission_of_a_running_or_held_request_leaves_later_rows_admitted():
    engine = Engine(full())
    engine.admit(0, "aaaab")
    engine.admit(1, "bbbbc")
    engine.end(1, how=End.HELD)
    engine.add(2, "ccccd")
    before = engine.table(0)
    result = engine.step(Part(admit=admit_row(0, 1, 2)))[0]
    assert result.admit_status == [NOT_WAITING, NOT_WAITING, GRANTED]
    assert engine.table(0) == before


# -- what a refused row needs ------------------------------------------------------------------------------------------

NEEDS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "full": (full(), {}, {}),
    "hit": (full(), {}, {"text": "aaaabbbb" + "c" * 30}),
    "reserved": (full(), {}, {"reserved": 3}),
    "watermark": (full(), {"watermark_blocks": 2}, {"watermark": Watermark.ALWAYS}),
    "whole sequence": (full(), {}, {"cap": 4, "flags": FULL_FIT}),
    "lookahead": (full(), {}, {"lookahead": 5}),
    "external": (full(), {}, {"external": 8, "flags": RowFlag.DELAY_CACHING}),
    "window": (window(6), {}, {"cap": 24}),
    "states": (state(8), {}, {}),
}


@pytest.mark.parametrize("kind", NEEDS)
def test_a_refused_row_says_how_many_blocks_had_to_be_free(kind):
    """In a pool with that number of free blocks it is granted."""
    group, changes, row = NEEDS[kind]
    row, running, refused = dict(row), list(zip((0, 2, 3, 4, 5, 6), "defghi", strict=True)), []
    text = row.pop("text", "c" * 40)
    for num_blocks in range(4, 100):
        engine = Engine(group, num_blocks=num_blocks, **changes)
        if not all(engine.admit(slot, "aaaabbbb" + letter * 20).status is GRANTED for slot, letter in running):
            continue
        engine.idle()
        engine.add(1, text)
        free, result = engine.num_free, section(engine, 1, **row)
        if result.admit_status == [GRANTED]:
            break
        refused.append((result.admit_status[0], result.admit_needed[0]))
        assert result.admit_needed[0] > (num_blocks - 1 if result.admit_status == [NEVER_FITS] else free)
    assert not result.admit_needed
    assert refused[-1] == (REFUSED, free)


GROWS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "full": ((full(),), {}),
    "reserved": ((full(),), {"reserved": 3}),
    "whole sequence": ((full(),), {"cap": 4, "flags": FULL_FIT}),
    "lookahead": ((full(),), {"lookahead": 5}),
    "window": ((window(6),), {"cap": 8}),
    "full and states": ((full(), state(8)), {}),
    "every victim": ((full(),), {"on_refusal": OnRefusal.PREEMPT, "victims": [0]}),
}


@pytest.mark.parametrize("kind", GROWS)
def test_a_refused_running_row_says_how_many_blocks_had_to_be_free(kind):
    """In a pool with that number of free blocks it is granted."""
    groups, columns = GROWS[kind]
    refused = []
    for num_blocks in range(4, 100):
        engine = Engine(*groups, num_blocks=num_blocks)
        if not all(engine.admit(slot, letter * 8).status is GRANTED for slot, letter in enumerate("ab")):
            continue
        facts = Facts([1], appended=[30], tokens=tokens("c" * 30))
        free = engine.num_free if "victims" not in columns else engine.num_free + len(engine.table(0))
        result = engine.step(Part(facts=facts, run=run_rows(1, **columns)))[0]
        if result.granted != [0]:
            break
        refused.append(result.run_needed[0])
        assert result.run_needed[0] > result.free_blocks
    assert not result.run_needed
    assert refused[-1] == free


def test_run_rows_that_are_not_refused_need_nothing():
    engine = waiting("a" * 8, "b" * 8, "c" * 8)
    section(engine, 0, 1, 2)
    facts = Facts([0, 1, 2], appended=[4, 12, 1], tokens=tokens("a" * 4 + "b" * 12 + "c"))
    part = Part(facts=facts, run=run_rows(0, 1, 2, on_refusal=OnRefusal.SKIP))
    result = engine.step(part)[0]
    assert (list(result.granted), list(result.run_needed)) == ([4, 0, 1], [0, 3, 0])
    lines = list(operation_lines(Step(1, 1, [part]), StepResult(1, 0, [result], 0)))
    assert "run slot 1: 0 tokens, needs 3 blocks" in lines


def test_rows_that_are_not_refused_need_nothing():
    engine = waiting("a" * 20, "b" * 16, "cccc")
    part = Part(admit=admit_row(0, 1, 2, on_refusal=OnRefusal.SKIP))
    result = engine.step(part)[0]
    assert outcome(result) == [(GRANTED, 20), (REFUSED, 0), (GRANTED, 4)]
    assert result.admit_needed == [0, 4, 0]
    lines = list(operation_lines(Step(1, 1, [part]), StepResult(1, 0, [result], 0)))
    assert "admit slot 1: refused, hit 0, 0 tokens, needs 4 blocks" in lines
    assert "2 blocks free" in lines


def test_a_row_that_never_fits_says_what_the_request_holds_alone():
    result = section(waiting("a" * 41), 0)
    assert (outcome(result), result.admit_needed) == ([(NEVER_FITS, 0)], [11])
