"""Retention: window and state groups keep keys only of blocks at which a later request can resume.

    dense (-1)  every window that ends at a common boundary
    0           only the window before the prompt's end (its replay boundary), and at single-group hits
    n           also one window per n tokens

Full attention keeps every full block; what it costs is one key per block, and the shorter groups bound the hit.
"""

from __future__ import annotations

import pytest

from kvplane.base.groups import DENSE_RETENTION, AlignSpec
from kvplane_core.spec.coordinator import Coordinator
from kvplane_core.spec.requests import Requests
from tests.core.builders import Engine, full, replica_spec, state, window

ALIGNED = AlignSpec(4, 4096)


def kept(engine, slot, group=0):
    """Which blocks of a request's group carry a key: "x", or "." without one, "0" null."""
    keys = engine.pool.key
    return "".join("0" if not block else ".x"[keys[block] is not None] for block in engine.table(slot, group))


def reachable(group, start, end, boundaries=(), **changes):
    """The group's own mask over blocks start..end-1, drawn."""
    spec = replica_spec(group, full(lookup_class=10), **changes)
    mask = Coordinator(spec, Requests()).managers[0].reachable_blocks(start, end, boundaries)
    return "x" * (end - start) if mask is None else "".join(".x"[keep] for keep in mask)


# -- windows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval", "tokens", "expected"),
    [
        (DENSE_RETENTION, 8, "xxxxx"),
        (0, 8, "..xx."),  # a repeat of 20 tokens resumes at 19, floored to 16: blocks 2 and 3
        (0, 4, "...x."),
        (8, 4, ".x.x."),  # a window of one block before 8 and before 16
        (12, 4, "..xx."),  # before 12, and the replay boundary 16
        (12, 8, ".xxxx"),  # the same, and the first block of the window before 24
        (8, 8, "xxxxx"),  # windows of 8 every 8 tokens leave no gap
    ],
)
def test_retention_interval_decides_the_kept_windows_of_a_prompt(interval, tokens, expected):
    engine = Engine(window(tokens), full(), retention_interval=interval)
    engine.admit(0, "a" * 20)
    assert kept(engine, 0) == expected
    assert kept(engine, 0, group=1) == "xxxxx"


@pytest.mark.parametrize("interval", [DENSE_RETENTION, 0, 4, 8])
def test_a_repeated_prompt_hits_with_every_retention_interval(interval):
    engine = Engine(window(8), full(), retention_interval=interval)
    engine.serve(0, "a" * 20)
    assert engine.would_hit("a" * 20).num_tokens == 16


def test_shorter_prefixes_hit_only_where_a_window_was_kept():
    hits = {}
    for interval in (DENSE_RETENTION, 8, 0):
        engine = Engine(window(4), full(), retention_interval=interval)
        engine.serve(0, "a" * 20)
        hits[interval] = [engine.would_hit("a" * length + "b").num_tokens for length in (4, 8, 12, 16, 20)]
    assert hits == {DENSE_RETENTION: [4, 8, 12, 16, 20], 8: [0, 8, 8, 16, 16], 0: [0, 0, 0, 16, 16]}


def test_dense_retention_keeps_windows_that_end_at_a_common_boundary():
    """Hits are multiples of 8 here: of each 8 tokens, the last block fills a window of 4."""
    engine = Engine(window(4, 4), full(8), retention_interval=DENSE_RETENTION)
    engine.admit(0, "a" * 24)
    assert kept(engine, 0) == ".x.x.x"


def test_decode_steps_keep_windows_only_at_retention_intervals():
    """The next turn of a chat continues from generated tokens; interval 0 keeps that window by the single-group hit."""
    masks = {}
    for interval in (0, 16):
        engine = Engine(window(4), full(), retention_interval=interval)
        engine.admit(0, "a" * 8)
        keyed = set()
        for _ in range(28):
            engine.run(0, text="b")
            keyed |= {engine.pool.key_tokens[block] for block in engine.keyed(group=0)}
        masks[interval] = sorted(keyed)
    assert masks == {0: [4], 16: [4, 16, 32]}


def test_window_at_a_single_group_hit_is_kept_by_the_request_that_passes_it():
    """Retention 0. The second request parts from the first at 12, where only full attention knows the prefix: it hits
    nothing, gets the single-group hit, and keeps the window there as it passes, for the third.
    """
    engine = Engine(window(8), full(), retention_interval=0)
    shared = "aaaabbbbcccc"
    engine.serve(0, shared + "d" * 12)
    second = engine.admit(1, shared + "e" * 12)
    assert (second.hit, second.single_group_hit) == (0, 12)
    assert kept(engine, 1) == ".xxxx.", "the single-group hit at 12 and the replay boundary at 20"
    engine.end(1)
    third = engine.admit(2, shared + "f" * 12)
    assert (third.hit, third.single_group_hit) == (12, 0)


def test_single_group_hit_of_one_chat_turn_is_the_hit_of_the_next():
    engine = Engine(window(4), full(), retention_interval=0)
    turns = ["a" * 9, "a" * 9 + "b" * 8, "a" * 9 + "b" * 8 + "c" * 8]
    engine.admit(0, turns[0])
    for letter in "b" * 4:
        engine.run(0, text=letter)
    engine.end(0)
    assert engine.would_hit(turns[1]).num_tokens == 8, "the replay boundary of the first prompt"
    assert engine.would_hit(turns[1]).single_group_hit == 12, "its generated tokens are known to full attention alone"


def test_kept_blocks_stay_cached_after_they_leave_the_window():
    """The prompt is prefilled in chunks through a pool that holds a fifth of it: blocks that leave the window without a
    key are used again at once, and the kept ones stay.
    """
    engine = Engine(window(4, admission_cap_blocks=5), num_blocks=14, retention_interval=16)
    engine.admit(0, "a" * 128, cap=16)
    while engine.computed(0) < 128:
        assert engine.run(0, cap=16).granted == [16]
    engine.end(0)
    assert engine.would_hit("a" * 128).num_tokens == 124
    assert engine.would_hit("a" * 100 + "b").num_tokens == 96
    assert engine.would_hit("a" * 20 + "b").num_tokens == 16


def test_an_alignment_smaller_than_a_block_keeps_every_block():
    """A block cannot say "part of me": rather too many keys than a lost hit."""
    assert reachable(window(8, 8), 0, 5, [19], hash_block_size=4, scheduler_block_size=4) == "xxxxx"


def test_retention_masks_have_one_entry_per_block():
    """With context parallelism over 2 ranks a block of 4 tokens is one of 8 in the pool, and the mask is in those."""
    assert reachable(window(8, 4), 0, 8, [31], retention_interval=0) == ".....xx."
    assert reachable(window(8, 8), 0, 4, [31], retention_interval=0) == "..x."


def test_a_retention_mask_begins_at_its_first_block():
    assert reachable(window(8), 3, 6, [19], retention_interval=0) == "x.."
    assert reachable(window(4), 3, 9, [], retention_interval=12) == "..x..x"


# -- states ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval", "expected"),
    [(DENSE_RETENTION, "xxxxx"), (0, "...x."), (8, ".x.x."), (12, "..xx."), (4, "xxxxx")],
)
def test_one_state_is_kept_at_each_retention_boundary(interval, expected):
    assert reachable(state(), 0, 5, [19], retention_interval=interval) == expected


def test_a_state_is_made_only_where_a_chunk_ends():
    """The mask says what is worth a key; a null has no state to keep."""
    engine = Engine(state(), full(), retention_interval=0)
    engine.admit(0, "a" * 20, cap=8)
    assert kept(engine, 0) == "0."
    engine.run(0, cap=8)
    assert kept(engine, 0) == "0.0x"


def test_state_at_a_single_group_hit_is_kept_and_hit():
    engine = Engine(state(), full(), retention_interval=0, align=ALIGNED)
    engine.serve(0, "aaaabbbb" + "c" * 12)
    second = engine.admit(1, "aaaabbbb" + "d" * 12)
    assert (second.hit, second.single_group_hit, second.granted) == (0, 8, 8)
    assert kept(engine, 1) == "0x"
    assert engine.would_hit("aaaabbbb" + "e" * 12).num_tokens == 8
