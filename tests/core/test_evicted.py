"""An eviction drops keys of blocks that requests may hold; a request with such a computed block registers it again."""

from __future__ import annotations

import pytest

from kvplane.base.step import Cache, End, Facts, Part
from tests.core.builders import REFERENCE, Engine, full, run_rows, tokens


def test_an_evicted_block_of_a_running_request_is_registered_again():
    engine = Engine(full())
    engine.admit(0, "aaaabbbbc")
    first, second, *_ = engine.table(0)
    engine.cache(evicted=[first])
    assert engine.keyed() == [second]
    engine.run(0, text="d")
    assert engine.keyed() == [first, second]
    assert engine.would_hit("aaaabbbbcd").num_tokens == 8


def test_an_evicted_block_is_registered_once_its_tokens_are_computed_again():
    """Its page was bad: the engine lowers `computed` in the same part."""
    engine = Engine(full())
    engine.admit(0, "aaaabbbbc")
    first, second, *_ = engine.table(0)
    part = Part(facts=Facts([0], computed=[0]), cache=Cache(evicted=[first]))
    engine.step(part)
    engine.run(0, cap=3)
    assert engine.keyed() == [second], "its four tokens are not there yet"
    engine.run(0, cap=3)
    assert engine.keyed() == [first, second]


def test_the_reference_rule_registers_no_evicted_block_again():
    engine = Engine(full(), commit=REFERENCE)
    engine.admit(0, "aaaabbbbc")
    engine.cache(evicted=engine.table(0)[:1])
    engine.run(0, text="d")
    assert engine.keyed() == engine.table(0)[1:2]


@pytest.mark.parametrize("order", [(1, 0), (0, 1)])
def test_a_holder_registers_again_what_a_late_end_withdrew(order):
    """Slots 0 and 1 hold a block with the end of the prompt of slot 0. A step evicts it, both requests register keys of
    it, and slot 1 ends: the keys that it registered go, and with them the one of slot 0.
    """
    text = "abcdefghijklmnopq"
    engine = Engine(full(8), full(4, lookup_class=1), hash_block_size=4, partial_hits=True)
    engine.admit(0, text[:13])
    for letter in text[13:]:
        engine.run(0, text=letter)
    assert engine.admit(1, text).hit == 16
    shared = engine.table(0)[1]
    assert shared == engine.table(1)[1]
    engine.run(0, 1, text="rr")
    facts = Facts([0, 1], appended=[1, 1], tokens=tokens("ss"))
    evicts = Part(facts=facts, cache=Cache(evicted=[shared]), run=run_rows(*order))
    engine.step(evicts, Part(facts=Facts([1], end=[int(End.FREE)])))
    engine.run(0, text="t")
    assert engine.would_hit(text[:13] + "?").num_tokens == 12


def test_a_holder_registers_again_what_a_failed_step_withdrew():
    """Slot 1 registers the evicted block of both requests and ends; then its step fails, and slot 0 alone has it."""
    engine = Engine(full())
    engine.admit(0, "aaaabbbbc")
    assert engine.admit(1, "aaaabbbbd").hit == 8
    first = engine.table(0)[0]
    engine.step(Part(facts=Facts([1], appended=[1], tokens=tokens("e")), cache=Cache(evicted=[first]), run=run_rows(1)))
    engine.executed = engine.seq - 1
    engine.run(0, text="f")
    engine.end(1, fence=engine.seq)
    engine.cache(failed_steps=[engine.seq - 2])
    assert first not in engine.keyed()
    engine.run(0, text="g")
    assert first in engine.keyed()
    assert engine.would_hit("aaaabbbbz").num_tokens == 8
