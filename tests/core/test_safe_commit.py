"""Other replicas see a key only after the step that wrote its page is executed (commit=safe).

    step sent -> answered -> executed          `executed_through` = all steps up to it are executed
                 |-- tentative --|

Until then its own replica may build on it, and if the step does not run, the key goes and so does what was built on it.
The reference registers a key permanently when it grants the tokens (vLLM #57580); `commit=reference` keeps that.
"""

from __future__ import annotations

import pytest

from kvplane.base.step import (
    AdmitStatus,
    Cache,
    End,
    EventKind,
    Facts,
    OnRefusal,
    Part,
    Peek,
    RemoveReason,
    RowFlag,
    Run,
    Step,
)
from tests.core.builders import (
    DEFERRED,
    GRANTED,
    REFERENCE,
    SAFE,
    Engine,
    admit_row,
    digests,
    full,
    removed,
    run_rows,
    state,
    tokens,
    window,
)

PROMPT = "aaaabbbbc"  # two full blocks and one token


def in_flight_engine(*groups, **changes):
    """Nothing is executed until a test sets it."""
    engine = Engine(*(groups or (full(),)), **changes)
    engine.executed = 0
    return engine


def reasons(result):
    return [event.reason for event in result.events if event.kind is EventKind.REMOVED]


# -- who sees what, when -----------------------------------------------------------------------------------------------


def test_others_see_a_key_once_its_step_is_executed():
    engine = in_flight_engine()
    engine.admit(0, PROMPT)
    assert engine.outside(PROMPT) == 0
    engine.executed = 1
    engine.idle()
    assert engine.outside(PROMPT) == 8


def test_requests_of_the_same_replica_build_on_tentative_keys():
    engine = in_flight_engine()
    first = engine.admit(0, PROMPT)
    second = engine.admit(1, PROMPT)
    assert second.hit == 8
    assert second.table[0][:2] == first.table[0][:2]


def test_requests_of_one_step_build_on_its_tentative_keys():
    engine = in_flight_engine()
    engine.add(0, PROMPT)
    engine.add(1, PROMPT)
    (result,) = engine.step(Part(admit=admit_row(0, 1)))
    assert result.admit_hit == [0, 8]


def test_a_state_is_adopted_only_when_executed():
    """Attention pages are written token by token, a state page only at the end of its step."""
    engine = in_flight_engine(state(), full(), num_blocks=40)
    engine.admit(0, PROMPT, cap=8)
    assert engine.admit(1, PROMPT).status is DEFERRED
    engine.executed = 1
    assert engine.admit(1).status is GRANTED
    assert engine.computed(1) == 9


def test_a_deferred_row_ends_the_section_or_is_skipped():
    engine = in_flight_engine(state(), full(), num_blocks=40)
    engine.admit(0, PROMPT, cap=8)
    engine.add(1, PROMPT)
    engine.add(2, "zzzzyyyyx")
    (stopped,) = engine.step(Part(admit=admit_row(1, 2, on_refusal=OnRefusal.STOP)))
    assert stopped.admit_status == [DEFERRED, 0]
    (passed,) = engine.step(Part(admit=admit_row(1, 2, on_refusal=OnRefusal.SKIP)))
    assert passed.admit_status == [DEFERRED, GRANTED]


def test_published_through_is_the_last_executed_step():
    engine = in_flight_engine()
    engine.idle()
    engine.idle()
    assert engine.replica.apply(Step(0, 3, [Part()], executed_through=1)).published_through == 1


@pytest.mark.parametrize(("rule", "shown"), [(REFERENCE, b"\1\1"), (SAFE, b"\0\0")])
def test_columns_show_what_a_look_up_finds_and_nothing_tentative(rule, shown):
    engine = Engine(full(), window(6), num_blocks=20, commit=rule)
    engine.executed = 0
    engine.admit(0, PROMPT[:8] + "z")
    found = engine.replica.cached_columns(digests(engine.spec, PROMPT[:8]), "")
    assert (found, bool(engine.outside(PROMPT[:8] + "z"))) == ([shown, shown], rule is REFERENCE)
    engine.executed = engine.seq
    engine.idle()
    assert engine.replica.cached_columns(digests(engine.spec, PROMPT[:8]), "") == [b"\1\1", b"\1\1"]
    assert engine.replica.cached_columns(digests(engine.spec, PROMPT[:8]), "other") == [b"\0\0", b"\0\0"]


# -- preempted in the step that granted it -----------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "hit"), [(REFERENCE, 144), (SAFE, 128)])
def test_a_request_preempted_in_the_step_that_granted_it_leaves_no_keys_behind(rule, hit):
    """The case of vLLM #57580, in blocks of 16: nine blocks, the ninth granted and taken back in one step.

    The request of low priority is granted tokens 128..149 and then preempted in the same step for one of higher
    priority, so the ninth page is never written. Readmitted, it must not find it.
    """
    engine = Engine(full(16), num_blocks=12, commit=rule)
    text = "".join(chr(97 + index // 16) for index in range(150))
    assert engine.admit(0, text, cap=128).granted == 128
    assert engine.admit(1, "z" * 30, cap=16).granted == 16
    (result,) = engine.step(Part(run=Run([0, 1], victims=[0], on_refusal=OnRefusal.PREEMPT)))
    assert (result.granted, result.preempted) == ([0, 14], [0])
    engine.end(1)
    assert engine.admit(0).hit == hit


def test_withdrawn_keys_have_their_own_reason():
    engine = in_flight_engine()
    engine.add(0, PROMPT)
    admitted, gone = engine.step(Part(admit=admit_row(0)), Part(facts=Facts([0], end=[End.PREEMPTED])))
    table = admitted.tables.ids
    assert removed(gone.events) == table[:2]
    assert set(reasons(gone)) == {RemoveReason.WITHDRAWN}
    assert engine.replica.counters.withdrawn_keys == 2
    assert engine.keyed() == []


def test_preemption_in_a_later_step_keeps_the_keys_of_the_steps_that_run():
    engine = in_flight_engine()
    engine.admit(0, PROMPT)
    engine.preempt(0)
    assert engine.admit(0).hit == 8


def test_a_request_freed_in_the_step_that_granted_it_leaves_no_keys():
    engine = in_flight_engine()
    engine.add(0, PROMPT)
    engine.step(Part(admit=admit_row(0)), Part(facts=Facts([0], end=[End.FREE])))
    assert engine.keyed() == []


def test_withdrawing_a_key_preempts_the_requests_that_adopted_it():
    engine = in_flight_engine()
    engine.add(0, PROMPT)
    engine.add(1, PROMPT + "ddd")
    engine.add(2, PROMPT + "dddeeee")
    engine.add(3, "zzzz")
    granted, gone = engine.step(Part(admit=admit_row(0, 1, 2, 3)), Part(facts=Facts([0], end=[End.PREEMPTED])))
    assert granted.admit_hit == [0, 8, 12, 0]
    assert gone.preempted == [1, 2], "the answer does not repeat the request's own end"
    assert engine.keyed() == granted.tables.by_row()[3][0], "what the bystander wrote stays"


def test_an_adopter_preempted_in_the_run_section_returns_its_budget():
    """Slot 1 built on what slot 0 got in this step; the run section grants slot 1, then takes slot 0 and with it 1."""
    engine = in_flight_engine(num_blocks=9)
    engine.admit(0, "aaa")
    engine.admit(2, "zzzz")
    adopt = Part(facts=Facts([0], appended=[2], tokens=tokens("ab")), run=run_rows(0))
    admit = Part(news=engine.news(1, "aaaabbbbccccd"), admit=admit_row(1))
    rows = Run([1, 2], victims=[0], on_refusal=OnRefusal.PREEMPT)
    scarce = Part(facts=Facts([1, 2], appended=[1, 9], tokens=tokens("e" + "y" * 9)), run=rows)
    _, admitted, result = engine.step(adopt, admit, scarce)
    assert admitted.admit_hit == [4]
    assert result.preempted == [0, 1]
    assert result.granted == [0, 9]
    assert 0 not in result.new_blocks.row, "the answer leaves out blocks of a row that was taken back"


# -- failed steps ------------------------------------------------------------------------------------------------------


def test_a_failed_step_preempts_the_requests_that_it_granted_and_withdraws_its_keys():
    engine = in_flight_engine()
    engine.admit(0, PROMPT)
    result = engine.cache(failed_steps=[1])
    assert result.preempted == [0]
    assert engine.keyed() == []
    assert engine.num_free == 100
    assert engine.admit(0).hit == 0, "its tokens stay, it can be admitted again"


def test_a_failed_step_leaves_keys_of_earlier_steps():
    engine = in_flight_engine()
    engine.admit(0, PROMPT, cap=4)
    engine.run(0)
    assert engine.keyed() == [1, 2]
    assert engine.cache(failed_steps=[2]).preempted == [0]
    assert engine.keyed() == [1]
    engine.executed = 1
    assert engine.admit(0).hit == 4


def test_a_failed_step_withdraws_keys_of_later_steps_built_on_it():
    engine = in_flight_engine()
    engine.admit(0, PROMPT)
    engine.admit(1, PROMPT + "dddeeee")
    engine.admit(2, "zzzzy")
    assert engine.cache(failed_steps=[1]).preempted == [0, 1]
    assert engine.keyed() == engine.table(2)[:1]


@pytest.mark.parametrize("how", [End.FREE, End.PREEMPTED, End.HELD])
def test_a_failed_step_withdraws_keys_of_a_request_that_ended(how):
    engine = in_flight_engine()
    engine.admit(0, PROMPT)
    engine.end(0, how=how)
    assert engine.cache(failed_steps=[1]).preempted == []
    assert engine.keyed() == []


def test_a_failed_step_withdraws_keys_of_an_adopter_that_ended():
    engine = in_flight_engine()
    engine.admit(0, PROMPT)
    engine.admit(1, PROMPT + "dddeeee")
    engine.end(1)
    assert engine.cache(failed_steps=[1]).preempted == [0]
    engine.executed = 3
    engine.idle()
    assert engine.outside(PROMPT + "dddeeee") == 0


def test_a_failed_step_preempts_an_adopter_whose_block_left_its_window():
    """Window 4: once slot 1 has 16 tokens it no longer holds the block that it adopted, but its pages come from it."""
    engine = in_flight_engine(window(4))
    engine.admit(0, "aaaab")
    engine.admit(1, "aaaabbbbccccdddde", cap=8)
    engine.executed = 0
    engine.run(1, in_flight=0)
    adopted = engine.table(0)[0]
    assert adopted not in engine.table(1)
    assert engine.cache(failed_steps=[1]).preempted == [0, 1]


def test_a_failed_step_preempts_an_adopter_that_copied_the_block():
    """A hit inside a block is copied at once: slot 1 does not hold the block that its copy came from."""
    engine = in_flight_engine(full(2), full(4, lookup_class=1), partial_hits=True)
    engine.admit(0, "aaaabbc")
    adopter = engine.admit(1, "aaaabbdd")
    assert adopter.hit == 6
    assert engine.table(0, 1)[1] != engine.table(1, 1)[1]
    assert engine.cache(failed_steps=[1]).preempted == [0, 1]


def test_a_failure_is_reported_before_its_step_counts_as_executed():
    """A synchronous engine whose step 1 failed says executed_through 0 with it; then the count may pass the failure."""
    engine = Engine(full())
    engine.admit(0, PROMPT)
    engine.executed = 0
    engine.cache(failed_steps=[1])
    engine.executed = 2
    engine.admit(0)
    engine.executed = 3
    engine.idle()
    assert engine.outside(PROMPT) == 8


def test_a_committed_key_is_tentative_until_the_admitting_step_is_executed():
    """External tokens arrived, but the admitting step may have ordered a copy below them that has not run."""
    engine = in_flight_engine()
    engine.admit(0, PROMPT, external=8, flags=RowFlag.DELAY_CACHING)
    assert engine.keyed() == []
    engine.fact(0, commit=8)
    assert engine.outside(PROMPT) == 0
    engine.executed = engine.seq
    engine.idle()
    assert engine.outside(PROMPT) == 8


def test_a_committed_key_is_withdrawn_when_the_admitting_step_fails():
    engine = in_flight_engine()
    engine.admit(0, PROMPT, external=8, flags=RowFlag.DELAY_CACHING)
    engine.fact(0, commit=8)
    assert engine.cache(failed_steps=[1]).preempted == [0]
    assert engine.keyed() == []


def test_a_committed_key_behind_a_tentative_hit_waits_for_the_step_of_the_hit():
    engine = in_flight_engine()
    engine.admit(0, PROMPT)
    engine.admit(1, "aaaabbbbccccd", external=4, flags=RowFlag.DELAY_CACHING)
    engine.fact(1, commit=12)
    assert engine.outside("aaaabbbbccccd") == 0
    assert engine.cache(failed_steps=[1]).preempted == [0, 1]
    assert engine.keyed() == []


def test_a_commit_is_limited_to_granted_tokens():
    engine = Engine(full())
    engine.admit(0, "aaaabbbbcccc", cap=4, lookahead=8)
    assert len(engine.table(0)) == 3
    engine.fact(0, commit=12)
    assert engine.keyed() == engine.table(0)[:1]


def test_a_fact_cannot_raise_computed_above_granted_tokens():
    engine = Engine(full())
    engine.add(0, "aaaabbbbcccc")
    engine.fact(0, computed=8)
    assert engine.admit(0, cap=4).granted == 4
    engine.fact(0, computed=11)
    assert engine.computed(0) == 4


# -- blocks whose return waits -----------------------------------------------------------------------------------------


def test_a_fence_holds_freed_blocks_until_its_step_is_executed():
    engine = in_flight_engine(num_blocks=6)
    engine.admit(0, PROMPT)
    engine.run(0, text="c")
    engine.end(0, fence=2)
    assert engine.num_free == 2
    assert engine.admit(1, "zzzzyyyyx").status is not GRANTED
    engine.executed = 2
    assert engine.admit(1).status is GRANTED


def test_fenced_blocks_are_freed_in_the_order_of_their_ends_and_tail_first():
    engine = in_flight_engine(full(), full(), num_blocks=13, enable_caching=False)
    engine.admit(0, "aaaabbbb")
    engine.admit(1, "ccccdddd")
    assert [engine.table(0, 0), engine.table(0, 1)] == [[1, 2], [3, 4]]
    assert [engine.table(1, 0), engine.table(1, 1)] == [[5, 6], [7, 8]]
    engine.end(1, fence=2)
    engine.end(0, fence=2)
    engine.executed = 2
    engine.idle()
    assert engine.free_order[:8] == [4, 3, 2, 1, 8, 7, 6, 5], "each return goes to the front as one"


def test_a_fence_also_holds_blocks_of_later_ends_with_earlier_fences():
    engine = in_flight_engine(enable_caching=False)
    engine.admit(0, "aaaa")
    engine.admit(1, "bbbb")
    engine.end(0, fence=3)
    engine.end(1, fence=1)
    engine.executed = 2
    engine.idle()
    assert engine.num_free == 98
    engine.executed = 3
    engine.idle()
    assert engine.num_free == 100


def test_a_fence_on_an_executed_step_frees_blocks_at_once():
    engine = Engine(full())
    engine.admit(0, PROMPT)
    engine.end(0, fence=1)
    assert engine.num_free == 100


def test_a_fenced_block_can_still_be_hit():
    engine = in_flight_engine()
    engine.admit(0, PROMPT)
    engine.end(0, fence=1)
    assert engine.admit(1, PROMPT).hit == 8
    engine.executed = 1
    engine.idle()
    assert engine.table(1)[0] not in engine.free_order


def test_a_held_request_keeps_its_blocks_until_it_is_released():
    """It ended, but a transfer still reads its pages."""
    engine = Engine(full())
    engine.admit(0, PROMPT)
    engine.end(0, how=End.HELD)
    assert engine.num_free == 97
    assert engine.replica.num_running == 0
    engine.cache(released=[0])
    assert engine.num_free == 100
    assert engine.admit(0, PROMPT).hit == 8, "the slot is free for the next request"


def test_a_held_request_is_granted_nothing():
    engine = Engine(full())
    engine.admit(0, PROMPT)
    engine.end(0, how=End.HELD)
    (result,) = engine.step(Part(run=run_rows(0), admit=admit_row(0), peek=Peek([0])))
    assert (result.granted, result.admit_status, result.peek_hit) == ([0], [AdmitStatus.NOT_WAITING], [8])


@pytest.mark.parametrize("rule", [SAFE, REFERENCE])
def test_both_blocks_of_a_copy_stay_until_its_step_is_executed(rule):
    """The reference gives them back when it hands the copy out; a step in flight may still be about to read them."""
    engine = in_flight_engine(full(2), full(4, lookup_class=1), partial_hits=True, commit=rule)
    engine.admit(0, "aaaabbc")
    source = engine.table(0, 1)[1]
    engine.end(0)
    copy = engine.admit(1, "aaaabbdd")
    orders = copy.result.orders
    target = engine.table(1, 1)[1]
    assert list(zip(orders.copy_group, orders.copy_src, orders.copy_dst, strict=True)) == [(1, source, target)]
    engine.end(1)
    kept = {source, target} - set(engine.free_order)
    assert kept == ({source, target} if rule is SAFE else set())
    engine.executed = 3
    engine.idle()
    assert {source, target} <= set(engine.free_order)


def test_tokens_in_flight_are_those_behind_executed_through():
    engine = in_flight_engine()
    engine.admit(0, PROMPT, cap=4)
    engine.run(0, cap=4)
    in_flight = engine.replica.requests.in_flight
    assert in_flight[0] == 8
    engine.executed = 1
    engine.idle()
    assert in_flight[0] == 4
    engine.executed = 3
    engine.idle()
    assert in_flight[0] == 0


def test_the_digest_contains_the_fences_of_blocks():
    """Two replicas that differ only in what they wait for will decide differently later."""
    ends = []
    for fence in (0, 2):
        engine = in_flight_engine()
        engine.admit(0, PROMPT)
        engine.step(Part(facts=Facts([0], end=[End.FREE], fence=[fence])), Part(cache=Cache()))
        ends.append(engine.digest)
    assert ends[0] != ends[1]
