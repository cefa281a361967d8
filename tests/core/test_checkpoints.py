"""Recurrent states that a launch writes inside its chunk.

tokens    0..3    4..7    8..11    12..13     a prompt of 14 in one chunk
table     null    null     s12      s14       the block before that of the running state has the state of 12 tokens
"""

from __future__ import annotations

from kvplane.base.groups import AlignSpec
from kvplane.base.step import EventKind, RowFlag
from tests.core.builders import DEFERRED, GRANTED, REFERENCE, SAFE, Engine, full, state

ALIGN = AlignSpec(4, 100)


def hybrid(**changes):
    """One group of states with checkpoints, and one of full attention."""
    groups = state(checkpoint_alignment=1), full()
    return Engine(*groups, **{"num_blocks": 60, "retention_interval": 0, "align": ALIGN, **changes})


def with_small_hashes(*, drafts=0, **changes):
    """Hits end inside blocks of 8 tokens, at multiples of 2."""
    states = state(8, checkpoint_alignment=2, speculative_blocks=drafts)
    defaults = {"partial_hits": True, "num_blocks": 60, "retention_interval": 0, "align": AlignSpec(8, 100, True)}
    return Engine(states, full(8), full(2, lookup_class=1), **{**defaults, **changes})


def shape(engine, slot=0):
    """The table of the states, drawn: "." null, "x" a state."""
    return "".join("." if block == 0 else "x" for block in engine.table(slot))


def test_a_prompt_with_a_checkpoint_is_one_chunk():
    engine = hybrid()
    admitted = engine.admit(0, "a" * 14)
    assert (admitted.granted, shape(engine)) == (14, "..xx")
    assert engine.would_hit("a" * 14).num_tokens == 12


def test_a_checkpoint_is_released_when_its_launch_is_executed():
    engine = hybrid()
    checkpoint = engine.admit(0, "a" * 14).table[0][2]
    engine.run(0, text="b")
    assert shape(engine) == "...x"
    assert engine.would_hit("a" * 14).blocks[0] == [0, 0, checkpoint]


def test_a_checkpoint_may_name_tokens_of_the_next_block():
    """After 20 tokens, in the block of the tokens 8 to 15; a request that hits it has it at the place of its length."""
    engine = with_small_hashes()
    checkpoint = engine.admit(0, "a" * 21).table[0][1]
    assert shape(engine) == ".xx"
    engine.end(0)
    again = engine.admit(1, "a" * 21 + "b" * 3)
    assert again.hit == 20
    (source,) = again.result.orders.copy_src[:1]
    assert source == checkpoint
    assert again.table[0][2] == again.result.orders.copy_dst[0]


def test_an_admission_waits_for_the_launch_that_writes_the_checkpoint():
    engine = hybrid()
    engine.executed = 0
    engine.admit(0, "a" * 14)
    assert engine.admit(1, "a" * 14).status is DEFERRED
    engine.executed = None
    assert engine.admit(1).hit == 12


def test_a_chunk_before_the_prompts_end_has_no_checkpoint_without_retention():
    engine = hybrid(align=AlignSpec())
    assert engine.admit(0, "a" * 40, cap=14).granted == 14
    assert shape(engine) == "...x"


def test_dense_retention_keeps_a_checkpoint_of_each_chunk():
    engine = hybrid(align=AlignSpec(), retention_interval=-1)
    engine.admit(0, "a" * 40, cap=14)
    assert shape(engine) == "..xx"
    assert engine.would_hit("a" * 40).num_tokens == 12


def test_an_admission_counts_the_block_of_the_checkpoint():
    """Two states and four blocks of full attention."""
    for commit in (SAFE, REFERENCE):
        assert hybrid(num_blocks=7, commit=commit).admit(0, "a" * 14).status is GRANTED
        assert hybrid(num_blocks=6, commit=commit).admit(0, "a" * 14).status is not GRANTED


def test_a_running_request_counts_the_block_of_the_checkpoint():
    engine = hybrid(num_blocks=9)
    assert engine.admit(0, "a" * 18, cap=4).status is GRANTED
    assert engine.admit(1, "b" * 8, cap=4).status is GRANTED
    free = engine.replica.coordinator.pool.num_free
    assert engine.run(0).granted == [0]
    assert engine.replica.coordinator.pool.num_free >= free
    engine.end(1)
    assert engine.run(0).granted == [14]


def test_the_full_block_that_the_checkpoint_replaces_has_no_key():
    """The reference registers the key of the end of the block first, and replaces it."""
    engine = with_small_hashes(commit=REFERENCE, retention_interval=-1)
    checkpoint = engine.admit(0, "a" * 21).table[0][1]
    engine.idle()
    pool = engine.replica.coordinator.pool
    assert pool.key_tokens[checkpoint] == 20


def test_a_checkpoint_that_no_request_can_need_gets_no_key():
    """The state after 18 tokens is not that from which a repeat of the prompt continues."""
    engine = with_small_hashes(retention_interval=-1, align=AlignSpec())
    checkpoint = engine.admit(0, "a" * 40, cap=19).table[0][1]
    assert engine.replica.coordinator.pool.key[checkpoint] is None


def test_a_draft_state_where_ranks_write_the_checkpoint_stays_there():
    """Tables of ranks are append-only: they would write the checkpoint over the draft state wherever it moved to."""
    engine = with_small_hashes(drafts=2, align=AlignSpec())
    engine.admit(0, "a" * 60, cap=8)
    drafts = engine.table(0)[1:]
    engine.run(0, cap=16)
    assert engine.table(0)[1] == drafts[0]
    assert engine.replica.coordinator.pool.key[drafts[0]] is None


def test_the_state_at_a_single_group_hit_inside_a_block_is_cached():
    """Attention has 14 tokens in common, and computes the last hash block again; no state has."""
    states, drafts = state(8, checkpoints_single_group_hits=True), full(2, drops_last_block=True)
    engine = Engine(states, drafts, partial_hits=True, num_blocks=60, align=AlignSpec(8, 100, True))
    engine.admit(0, "a" * 14 + "b" * 20, flags=RowFlag.UNALIGNED)
    engine.end(0)
    again = engine.admit(1, "a" * 14 + "c" * 20)
    assert (again.hit, again.single_group_hit, again.granted) == (0, 12, 12)
    assert engine.would_hit("a" * 14 + "d" * 20).num_tokens == 12


def test_the_event_of_a_checkpoint_names_its_last_hash_block():
    engine = with_small_hashes()
    admitted = engine.admit(0, "a" * 21)
    stored = [event for event in admitted.result.events if event.kind is EventKind.STORED and event.group == 0]
    assert [(event.blocks, event.start) for event in stored if event.blocks] == [((admitted.table[0][1],), 18)]
