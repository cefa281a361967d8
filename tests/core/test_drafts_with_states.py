"""A decode row with more drafts than the replica keeps states for is refused; steps sent ahead are accepted."""

from __future__ import annotations

from random import Random

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.step import Budget, Facts, Part, Run
from tests.core.builders import REFERENCE, Engine, full, state, tokens

STATES = 3


def decoding(blocks: int = STATES, **changes) -> Engine:
    """A request that has computed 8 of its 9 tokens."""
    engine = Engine(state(speculative_blocks=blocks), full(), **changes)
    engine.admit(0, "aaaabbbbc", cap=8)
    return engine


def test_more_drafts_than_speculative_states_are_refused_by_name():
    engine = decoding()
    before = engine.digest
    with pytest.raises(InvalidArgument, match="would compute 5 tokens; 4 is the most where 3 states") as caught:
        engine.run(0, extra=4)
    assert caught.value.field == "parts[0].run.extra[0]"
    assert "speculative_tokens" in str(caught.value)
    assert engine.digest == before
    assert engine.run(0, extra=3).granted == [4]


def test_a_model_without_states_allows_any_number_of_drafts():
    engine = Engine(full())
    engine.admit(0, "aaaabbbbc", cap=8)
    assert engine.run(0, extra=9).granted == [10]


def test_the_reference_rule_allows_more_drafts_than_states():
    assert decoding(commit=REFERENCE).run(0, extra=4).granted == [5]


def test_drafts_are_limited_by_the_group_with_the_fewest_states():
    engine = Engine(state(speculative_blocks=3), state(8, speculative_blocks=1, lookup_class=4), full(8))
    engine.admit(0, "aaaabbbbc", cap=8)
    with pytest.raises(InvalidArgument, match="where 1 states"):
        engine.run(0, extra=2)


def test_a_cap_may_limit_a_row_to_its_speculative_states():
    assert decoding().run(0, extra=9, cap=4).granted == [4]


def test_tokens_appended_in_the_same_step_count_as_drafts():
    engine = decoding()
    assert engine.run(0).granted == [1]
    with pytest.raises(InvalidArgument, match="would compute 5 tokens"):
        engine.run(0, text="d", extra=4)  # tokens that the service hashes
    assert engine.run(0, text="d", extra=3).granted == [4]
    facts = Facts([0], computed=[10], appended=[1], tokens=tokens("e"))
    with pytest.raises(InvalidArgument, match="would compute 5 tokens"):
        engine.step(Part(facts=facts, run=Run([0], extra=[4])))
    assert engine.step(Part(facts=facts, run=Run([0], extra=[3])))[0].granted == [4]


def test_a_prefill_row_is_not_limited_by_speculative_states():
    engine = Engine(state(speculative_blocks=1), full())
    engine.admit(0, "aaaabbbbccccd", cap=4)
    assert engine.run(0, extra=5).granted == [14]


def test_a_step_ahead_counts_placeholders_and_drafts():
    """Each step ahead assumes that the one before it samples one token and keeps its drafts."""
    engine = decoding()
    engine.executed = 1
    assert engine.run(0, extra=3).granted == [4]
    assert engine.run(0, extra=4 + 3).granted == [4]
    with pytest.raises(InvalidArgument, match="would compute 5 tokens"):
        engine.run(0, extra=8 + 4)
    assert engine.run(0, extra=8 + 3).granted == [4]


@pytest.mark.parametrize("seed", range(32))
def test_steps_of_an_engine_that_runs_ahead_are_accepted(seed):
    """Budgets and full pools cut its rows short, and it sends up to three more steps before it reads of that."""
    rng = Random(seed)
    engine = decoding(num_blocks=rng.choice([12, 60]), max_model_len=256)
    engine.executed = engine.seq
    sampled = 9  # tokens, when all that was asked for is computed and accepted
    for _ in range(30):
        ahead = [rng.randint(0, STATES) for _ in range(rng.randint(1, 4))]
        for drafts in ahead:
            known = engine.replica.requests.num_tokens[0]
            budget = Budget(tokens=rng.choice([100, 100, 0, 1, 2, 3]))
            engine.step(Part(run=Run([0], extra=[sampled - known + drafts]), budget=budget))
            sampled += 1 + drafts
        engine.executed = engine.seq  # all is read and executed: what was computed is known now
        if not engine.replica.requests.running[0]:
            break
        known, computed = engine.replica.requests.num_tokens[0], engine.computed(0)
        accepted = max(known, computed - rng.randint(0, STATES))
        facts = Facts([0], computed=[min(accepted, computed)], appended=[accepted + 1 - known])
        facts.tokens = tokens("a" * (accepted + 1 - known))
        engine.step(Part(facts=facts))
        sampled = accepted + 1
