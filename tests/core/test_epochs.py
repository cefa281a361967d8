"""A new engine life on the same page memory: all requests end, and pages with a proven stamp stay cached.

A key survives exactly where the page's stamp in the memory is the service's, and the step that wrote it was executed.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.base.step import End, Facts, Part, Step
from kvplane_core.face import inspect
from tests.core.builders import GRANTED, REFERENCE, SAFE, Engine, admit_row, full, state, window

PROMPT = "aaaabbbbccccd"


def begin(engine, stamps=(), epoch=1):
    """A new epoch; the number of keys kept."""
    kept = engine.replica.begin_epoch(epoch, tuple(stamps))
    engine.seq = 0
    engine.executed = None
    inspect.check(engine.replica)
    return kept


def stamps(engine):
    """The stamps of an intact page memory."""
    return list(engine.pool.stamp)


def test_begin_epoch_without_a_stamp_table_drops_all_keys():
    engine = Engine(full())
    engine.serve(0, PROMPT)
    assert begin(engine) == 0
    assert engine.keyed() == []
    assert engine.admit(0, PROMPT).hit == 0


def test_begin_epoch_with_intact_memory_keeps_executed_keys():
    engine = Engine(full())
    engine.serve(0, PROMPT)
    assert begin(engine, stamps(engine)) == 3
    assert engine.outside(PROMPT) == 12, "it is executed content from the first moment"
    assert engine.admit(0, PROMPT).hit == 12


def test_a_key_of_a_step_that_was_not_executed_is_not_kept():
    """Under the reference's rule it counted as true while the engine lived; the pages cannot say that it is."""
    for rule in (SAFE, REFERENCE):
        engine = Engine(full(), commit=rule)
        engine.admit(0, PROMPT, cap=4)
        engine.executed = 1
        engine.run(0)
        assert engine.keyed() == [1, 2, 3]
        assert begin(engine, stamps(engine)) == 1
        assert engine.keyed() == [1]


@pytest.mark.parametrize("wrong", [1, 2, 3])
def test_begin_epoch_drops_only_the_key_of_an_overwritten_page(wrong):
    engine = Engine(full())
    engine.serve(0, PROMPT)
    memory = stamps(engine)
    memory[wrong] += 1
    assert begin(engine, memory) == 2
    assert wrong not in engine.keyed()
    assert engine.admit(0, PROMPT).hit == 4 * (wrong - 1), "a hit ends before the hole"


def test_begin_epoch_drops_keys_of_pages_with_stamp_0():
    engine = Engine(full())
    engine.serve(0, PROMPT)
    memory = stamps(engine)
    memory[2] = 0
    assert begin(engine, memory) == 2


def test_begin_epoch_drops_keys_beyond_the_end_of_a_short_stamp_table():
    engine = Engine(full())
    engine.serve(0, PROMPT)
    assert begin(engine, stamps(engine)[:3]) == 2


def test_begin_epoch_drops_keys_with_a_stamp_of_an_earlier_life():
    """Block 1 was dropped when the second life began, so the memory's old stamp for it is out of date from then on."""
    engine = Engine(full())
    engine.serve(0, PROMPT)
    old = stamps(engine)
    begin(engine, [], epoch=1)
    engine.serve(0, PROMPT)
    assert begin(engine, old, epoch=2) == 0


def test_begin_epoch_ends_requests_in_every_state():
    """Running, waiting, held, fenced, with copies under way and within an unfinished step: all blocks return."""
    engine = Engine(full(2), full(4, lookup_class=1), num_blocks=40, partial_hits=True)
    engine.executed = 0
    engine.serve(0, "aaaabbc")
    engine.admit(1, "aaaabbdd")
    engine.admit(2, "zzzz")
    engine.end(2, how=End.HELD)
    engine.admit(3, "yyyy")
    engine.end(3, fence=5)
    engine.add(4, "xxxx")
    half = Part(news=engine.news(5, "aaaabbee"), admit=admit_row(5))
    engine.replica.apply(Step(0, engine.seq + 1, [half], last=False))
    assert engine.replica.coordinator.managers[1].copies, "a copy waits for the end of the step"
    begin(engine)
    assert engine.num_free == 39
    assert engine.replica.num_running == 0
    assert engine.replica.requests.slots() == []


def test_step_numbers_of_an_epoch_begin_with_1():
    engine = Engine(full())
    engine.serve(0, PROMPT)
    begin(engine, stamps(engine))
    assert (engine.replica.seq, engine.replica.executed_through) == (0, 0)
    assert engine.admit(0, PROMPT).status is GRANTED


def test_begin_epoch_moves_blocks_without_a_key_to_the_front_of_the_free_list():
    engine = Engine(full(), num_blocks=9)
    engine.serve(0, "aaaabbbb")
    engine.serve(1, "ccccdddd")
    assert engine.free_order == [5, 6, 7, 8, 2, 1, 4, 3]
    memory = stamps(engine)
    memory[1] = 0
    begin(engine, memory)
    assert engine.free_order == [5, 6, 7, 8, 1, 2, 4, 3]


def test_begin_epoch_verifies_pages_per_group():
    engine = Engine(window(4), full(), num_blocks=40)
    engine.serve(0, PROMPT)
    memory = stamps(engine)
    windowed = engine.keyed(group=0)
    for block in windowed:
        memory[block] = 0
    begin(engine, memory)
    assert engine.admit(0, PROMPT).hit == 0, "full attention alone does not make a hit"


def test_begin_epoch_keeps_states_with_proven_stamps():
    engine = Engine(state(), full(), num_blocks=40)
    engine.admit(0, PROMPT, cap=12)
    engine.idle()
    begin(engine, stamps(engine))
    assert engine.admit(0, PROMPT).hit == 12


def test_begin_epoch_refuses_an_epoch_that_is_not_higher():
    engine = Engine(full())
    begin(engine, epoch=3)
    for epoch in (3, 2):
        with pytest.raises(AssertionError, match="stamps would repeat"):
            engine.replica.begin_epoch(epoch)


def test_eviction_ages_are_not_counted_across_engine_lives():
    """Step numbers begin again, so an age across two lives would be no number of steps."""
    engine = Engine(full(), num_blocks=3)
    for _ in range(100):
        engine.serve(0, "aaaabbbb")
    assert sum(engine.pool.residency.lifetime) > 0
    begin(engine)
    engine.admit(0, "zzzz")
    assert sum(engine.pool.residency.lifetime) == 0, "the first hand-out of a life has no age"


@given(st.sets(st.integers(1, 12)), st.integers(0, 8))
def test_begin_epoch_keeps_exactly_the_proven_and_executed_keys(intact, executed):
    """Four requests of two blocks each, in steps 1, 3, 5, 7 (and their ends in between)."""
    engine = Engine(full(), num_blocks=13)
    engine.executed = 0
    written: dict[int, int] = {}
    for slot, text in enumerate(["aaaabbbb", "ccccdddd", "eeeeffff", "gggghhhh"]):
        done = engine.admit(slot, text)
        written |= dict.fromkeys(done.table[0], engine.seq)
        engine.step(Part(facts=Facts([slot], end=[End.FREE])))
    engine.executed = executed
    engine.idle()
    memory = [stamp if block in intact else 0 for block, stamp in enumerate(engine.pool.stamp)]
    expected = sorted(block for block, step in written.items() if step <= executed and block in intact)
    assert begin(engine, memory) == len(expected)
    assert engine.keyed() == expected
