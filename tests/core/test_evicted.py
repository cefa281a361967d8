"""An eviction drops keys of blocks that requests may hold; a request with such a computed block registers it again."""

from __future__ import annotations

from kvplane.base.step import Cache, Facts, Part
from tests.core.builders import REFERENCE, Engine, full


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
