"""Aligned rows: chunks of a replica with states end at block boundaries; decode rows are not examined."""

from __future__ import annotations

from random import Random

import pytest

from kvplane.base.groups import AlignSpec
from kvplane.base.step import UNLIMITED, Budget, Facts, Part, RowFlag, Run
from kvplane_core.spec import step_applier
from tests.core.builders import Engine, admit_row, full, run_rows, state, tokens

ALIGNED = AlignSpec(8, 4096)


def hybrid(**changes) -> Engine:
    return Engine(state(8, speculative_blocks=2), full(8), **{"align": ALIGNED, **changes})


def test_rows_of_a_state_model_are_aligned_without_a_flag():
    engine = hybrid()
    assert engine.admit(0, "a" * 40, cap=20).granted == 16
    assert engine.run(0, budget=Budget(tokens=20)).granted == [16]


def test_a_running_row_without_columns_is_aligned():
    engine = hybrid()
    engine.admit(0, "a" * 40, cap=8)
    assert engine.run(0, budget=Budget(tokens=12)).granted == [8]


@pytest.mark.parametrize(("columns", "granted"), [({}, 0), ({"cap": 5}, 5)])
def test_a_row_capped_at_the_budget_of_its_part_is_not_aligned(columns, granted):
    """Its budget alone could be the rest of a large one, of which an earlier part had its tokens."""
    engine = hybrid()
    engine.admit(0, "d" * 7)
    engine.add(1, "p" * 40)
    decodes = Part(
        facts=Facts([0], appended=[4], tokens=tokens("dddd")),
        run=run_rows(0, flags=RowFlag.UNALIGNED),
        budget=Budget(tokens=100),
    )
    prefills = Part(admit=admit_row(1, **columns), budget=Budget(tokens=5))
    assert engine.step(decodes, prefills)[1].admit_granted == [granted]


def starved(order: tuple[int, int], budget: int, steps: int, waits: bool = False) -> Engine:
    """Slot 0 decodes in every step; slot 1 has a prompt of 40 tokens, of which 8 are computed unless it waits."""
    engine = hybrid()
    engine.admit(0, "d")
    if waits:
        engine.add(1, "p" * 40)
    else:
        engine.admit(1, "p" * 40, cap=8)
    for _ in range(steps):
        facts, runs = Facts([0], appended=[1], tokens=tokens("d")), engine.replica.requests.running[1]
        part = Part(facts=facts, run=run_rows(*order) if runs else run_rows(0), budget=Budget(tokens=budget))
        part.admit = part.admit if runs else admit_row(1)
        engine.step(part)
    return engine


@pytest.mark.parametrize("waits", [False, True])
def test_starved_chunks_count_steps_with_less_than_a_state_block_of_budget(waits):
    """It waits as in the reference, as long as the rows in front of it continue."""
    patience = step_applier.PATIENT_ROWS
    engine = starved((0, 1), budget=8, steps=patience, waits=waits)
    assert (engine.computed(1), engine.replica.counters.starved_chunks) == (0 if waits else 8, 0)
    engine = starved((0, 1), budget=8, steps=patience + 3, waits=waits)
    assert (engine.computed(1), engine.replica.counters.starved_chunks) == (0 if waits else 8, 3)
    last = Part(admit=admit_row(1, cap=7)) if waits else Part(run=run_rows(1, flags=RowFlag.UNALIGNED))
    last.budget = Budget(tokens=7)
    engine.step(last)
    assert engine.computed(1) > (0 if waits else 8), "a small cap, or a row that is not aligned, makes progress"


@pytest.mark.parametrize(("order", "budget"), [((1, 0), 8), ((0, 1), 9)])
def test_starved_chunks_are_0_when_the_prompt_is_first_or_a_block_fits(order, budget):
    engine = starved(order, budget, steps=step_applier.PATIENT_ROWS * 2)
    assert (engine.computed(1), engine.replica.counters.starved_chunks) == (40, 0)


def test_a_step_with_room_resets_the_wait_of_a_starved_prompt():
    engine = starved((0, 1), budget=8, steps=step_applier.PATIENT_ROWS)
    engine.step(Part(run=run_rows(1), budget=Budget(tokens=8)))
    for _ in range(step_applier.PATIENT_ROWS):
        facts = Facts([0], appended=[1], tokens=tokens("d"))
        engine.step(Part(facts=facts, run=run_rows(0, 1), budget=Budget(tokens=8)))
    assert engine.replica.counters.starved_chunks == 0
    engine.end(1)
    assert engine.replica.requests.unserved == {}


def test_an_unaligned_row_ends_at_any_token():
    engine = hybrid()
    assert engine.admit(0, "a" * 40, cap=20, flags=RowFlag.UNALIGNED).granted == 20
    assert engine.run(0, cap=3, flags=RowFlag.UNALIGNED).granted == [3]


def test_rows_of_a_model_without_states_are_not_aligned():
    engine = Engine(full(8))
    assert engine.admit(0, "a" * 40, cap=20).granted == 20


@pytest.mark.parametrize("columns", [{}, {"cap": 7}, {"flags": RowFlag.DELAY_CACHING}, {"extra": 2}])
def test_a_decode_row_is_not_aligned(monkeypatch, columns):
    engine = hybrid()
    engine.admit(0, "a" * 8)

    def look(*_: object) -> int:
        raise AssertionError("a decoding row was looked at")

    monkeypatch.setattr(step_applier, "align_chunk", look)
    for _ in range(30):
        computed = engine.computed(0)
        facts = Facts([0], computed=[computed], appended=[1], tokens=tokens("b"))
        (answer,) = engine.step(Part(facts=facts, run=run_rows(0, **columns)))
        assert answer.granted[0] >= 1
        engine.fact(0, computed=computed + 1)  # drafts are rejected


@pytest.mark.parametrize("seed", range(100))
def test_every_core_clips_a_chunk_alike(seed):
    """The compiled core does not ask the managers about a row below the bounds of its fast path."""
    rng, engine = Random(seed), hybrid()
    text = "".join(rng.choice("ab") for _ in range(90))
    engine.admit(0, text[:20], cap=20)
    for _ in range(50):
        known = engine.replica.requests.num_tokens[0]
        grown = min(rng.choice([0, 1, 1, 2, 5]), len(text) - known)
        facts = Facts([0], appended=[grown], tokens=tokens(text[known : known + grown])) if grown else Facts()
        run = Run([0], cap=rng.choice([[], [1], [2], [3], [100]]), extra=rng.choice([[], [], [0], [2]]))
        engine.step(Part(facts=facts, run=run, budget=Budget(tokens=rng.choice([UNLIMITED, 1, 2, 3]))))
