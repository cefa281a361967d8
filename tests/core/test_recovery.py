"""A replica recovers from its stored entries and the stamps of the page memory.

The oracle is the life that did not end: a new epoch of the old object keeps exactly the keys that a new object must
get back.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane import wire
from kvplane_core.face import inspect
from kvplane_core.face.entries import Entries, KeyRun
from kvplane_core.face.keys import Key
from kvplane_core.face.recovery import RecoveryOutcome
from tests.core.builders import GRANTED, Engine, digests, fake_digest, full, new_replica, sinks, state, window

PROMPT = "aaaabbbbccccd"
KINDS = {
    "full": (full(),),
    "window": (full(), window(8)),
    "state": (full(), state()),
    "small blocks": (full(4), window(8, 2)),
}


def engine_after(*groups, prompts=(PROMPT,), **changes):
    """An engine that has served these prompts, all executed."""
    engine = Engine(*groups, **changes)
    for slot, prompt in enumerate(prompts):
        engine.serve(slot, prompt)
    engine.idle()
    return engine


def recover(engine, stored, *tables, epoch=1):
    """A new object of the same spec: the engine continues with it."""
    engine.replica = new_replica(engine.spec)
    engine.seq, engine.executed = 0, None
    outcome = engine.replica.recover(epoch, tables, stored)
    inspect.check(engine.replica)
    return outcome


def memory(engine):
    return list(engine.pool.stamp)


def split(entries):
    """One piece per row, so that rows can be lost and mixed."""
    size, at, pieces = entries.digest_size, 0, []
    for run in entries.runs:
        for row in range(at, at + run.count):
            digest = entries.digests[row * size : (row + 1) * size]
            pieces.append(
                Entries(
                    size,
                    [replace(run, count=1)],
                    [entries.block[row]],
                    [entries.stamp[row]],
                    [entries.num_tokens[row]],
                    [entries.age[row]],
                    digest,
                )
            )
        at += run.count
    return pieces


@pytest.mark.parametrize("groups", KINDS.values(), ids=KINDS)
def test_recovered_keys_hit_all_published_prefixes(groups):
    prompts = ("aaaabbbbcccc", "aaaabbbbeeee", "x" * 16)
    engine = engine_after(*groups, prompts=prompts)
    before = [engine.outside(text + "?") for text in prompts]
    assert before == [12, 12, 16]
    keyed = engine.keyed()
    outcome = recover(engine, [engine.replica.entries()], memory(engine))
    assert engine.keyed() == keyed
    assert (outcome.unproven, outcome.repeated, outcome.impossible) == (0, 0, 0)
    assert [engine.outside(text + "?") for text in prompts] == before
    assert engine.admit(0, PROMPT).hit == 12


def test_recover_without_stamps_keeps_no_entry():
    engine = engine_after(full())
    stored = engine.replica.entries()
    assert recover(engine, [stored]) == RecoveryOutcome(0, 3, 0, 0)
    assert recover(engine, [stored], [0] * 101) == RecoveryOutcome(0, 3, 0, 0)
    assert engine.keyed() == []


def test_recover_requires_the_stamp_on_every_rank():
    engine = engine_after(full())
    stored, first = engine.replica.entries(), memory(engine)
    second = [*first]
    second[2] += 1
    assert recover(engine, [stored], first, second).kept == 2
    assert engine.keyed() == [1, 3]
    assert recover(engine, [stored], first, first[:2]).kept == 1, "a table that is too short proves what it holds"


def test_a_key_of_a_step_that_was_not_executed_is_not_stored():
    engine = Engine(full())
    engine.executed = 0
    engine.admit(0, PROMPT)
    assert len(engine.replica.entries()) == 0
    assert engine.replica.entries([1]).unkeyed_block == [1]
    engine.executed = 1
    engine.run(0, text="d")
    assert sorted(engine.replica.entries().block) == [1, 2, 3]


def test_recover_counts_an_entry_with_another_stamp_as_unproven():
    engine = engine_after(full(), num_blocks=5)
    stored = engine.replica.entries()
    engine.serve(1, "zzzzy")
    engine.idle()
    outcome = recover(engine, [stored], memory(engine))
    assert outcome == RecoveryOutcome(2, 1, 0, 0), "one block was handed out again"
    assert engine.outside("zzzzy") == 0


def test_recover_counts_repeated_entries_once():
    engine = engine_after(full(), window(8))
    stored = engine.replica.entries()
    outcome = recover(engine, [stored, stored], memory(engine))
    assert outcome.kept == outcome.repeated == len(stored)


def test_recover_keeps_all_blocks_of_one_key():
    engine = Engine(full())
    engine.admit(0, PROMPT, news={"skip_reading": 1})
    engine.admit(1, PROMPT, news={"skip_reading": 1})
    engine.end(0, 1)
    engine.idle()
    assert len(engine.keyed()) == 6
    pieces = engine.replica.entries()
    assert recover(engine, [pieces], memory(engine)).kept == 6
    assert engine.pool.count_keys() == 3
    engine.cache(evicted=[engine.pool.find("", (0,), digests(engine.spec, PROMPT)[0])[0]])
    assert engine.outside(PROMPT) == 12, "the other copy still hits"


def test_recover_keeps_all_keys_of_a_block():
    engine = Engine(full(4), full(2, lookup_class=1), partial_hits=True)
    engine.serve(0, "aaaabbc")
    engine.idle()
    pieces = split(engine.replica.entries())
    hit, table = engine.outside("aaaabbc"), memory(engine)
    assert hit > 4, "the prompt's end is inside a block"
    for order in (pieces, pieces[::-1]):
        assert recover(engine, order, table).kept == len(pieces)
        assert engine.outside("aaaabbc") == hit


def test_recover_counts_and_skips_impossible_entries():
    engine = engine_after(full())
    stored, table = engine.replica.entries(), memory(engine)
    far = replace(stored, block=[101 if block == 2 else block for block in stored.block])
    null = replace(stored, block=[0 if block == 2 else block for block in stored.block])
    group = replace(stored, runs=[KeyRun("", 1, 3)])
    size = Entries(16, [KeyRun("", 0, 1)], [1], [table[1]], [4], [0], fake_digest(1)[:16])
    for broken, kept in ((far, 2), (null, 2), (group, 0), (size, 0)):
        outcome = recover(engine, [broken], table)
        assert (outcome.kept, outcome.impossible) == (kept, len(broken) - kept)


def test_recover_skips_entries_with_one_stamp_on_two_pages():
    engine = engine_after(full())
    stored, table = engine.replica.entries(), memory(engine)
    table[2] = table[1]
    stored.stamp = [stamp if row != 1 else table[1] for row, stamp in enumerate(stored.stamp)]
    assert recover(engine, [stored], table).kept == 1
    assert engine.keyed() == [3]


@pytest.mark.parametrize("forgets", [False, True], ids=["a service that knew the keys", "a service that knew nothing"])
def test_recover_skips_entries_from_before_a_reset(forgets):
    """Whichever service did it, and in later lives: older stamps that the memory still shows prove nothing."""
    engine = engine_after(full())
    stored, table = engine.replica.entries(), memory(engine)

    def obey(orders):
        for block, stamp in zip(orders.stamp_block, orders.stamp, strict=True):
            table[block] = stamp

    if forgets:
        recover(engine, [], table, epoch=7)
    obey(engine.cache(reset=True).orders)
    recover(engine, [], table, epoch=8)
    obey(engine.admit(0, "q").result.orders)
    assert recover(engine, [stored], table, epoch=9).kept == 0


def test_recovered_entries_are_evicted_by_age_and_from_the_tail():
    engine = engine_after(full(), prompts=(PROMPT, "xxxxyyyyz"))
    stored, table = engine.replica.entries(), memory(engine)
    stored.age = [5 if block <= 3 else 4 for block in stored.block]
    recover(engine, [stored], table)
    assert engine.free_order[-5:] == [5, 4, 3, 2, 1]
    stored.used_block, stored.used_age = [4, 99], [6, 6]
    recover(engine, [stored], table)
    assert engine.free_order[-5:] == [5, 3, 2, 1, 4], "block 4 was used later, block 99 has no key"


def test_recover_skips_entries_of_reserved_blocks():
    engine = Engine(sinks(4))
    engine.serve(0, PROMPT)
    engine.idle()
    (sink,) = engine.pool.reserved
    stored, table = engine.replica.entries(), memory(engine)
    stored.block, stored.stamp = [sink, *stored.block[1:]], [table[sink], *stored.stamp[1:]]
    outcome = recover(engine, [stored], table)
    assert (outcome.kept, outcome.unproven) == (2, 1)


def test_recovered_keys_are_hit_evicted_and_reset_as_others():
    engine = engine_after(full(), prompts=(PROMPT, "xxxxyyyyz"))
    recover(engine, [engine.replica.entries()], memory(engine))
    assert (engine.pool.count_keys(), engine.outside(PROMPT)) == (5, 12)
    engine.admit(0, PROMPT)
    engine.cache(evicted=[engine.pool.find("", (0,), digests(engine.spec, "xxxx")[0])[0]])
    assert (engine.pool.count_keys(), engine.outside("xxxxyyyyz")) == (4, 0)
    engine.end(0)
    engine.cache(reset=True)
    assert (engine.keyed(), engine.pool.count_keys()) == ([], 0)


def test_content_equal_to_recovered_content_is_kept_in_two_blocks():
    engine = engine_after(full())
    recover(engine, [engine.replica.entries()], memory(engine))
    (first,) = engine.pool.find("", (0,), digests(engine.spec, PROMPT)[:1][0])
    engine.admit(0, PROMPT, news={"skip_reading": 1})
    engine.end(0)
    engine.idle()
    inspect.check(engine.replica)
    assert (len(engine.keyed()), engine.pool.count_keys()) == (6, 3)
    assert engine.pool.find("", (0,), digests(engine.spec, PROMPT)[0]) == [first], "the one that was there first"
    engine.cache(evicted=[first])
    inspect.check(engine.replica)
    assert engine.outside(PROMPT) == 12


def test_recovered_keys_are_evicted_with_removed_events():
    engine = engine_after(full(), num_blocks=5)
    recover(engine, [engine.replica.entries()], memory(engine))
    removed = [event.hashes[0] for event in engine.admit(0, "qqqqrrrrsssst").result.events if event.hashes]
    assert set(digests(engine.spec, PROMPT)[:3]) <= set(removed)
    inspect.check(engine.replica)


texts = st.text("ab", min_size=1, max_size=18)


def reported(engine):
    """Keys and their blocks by the events, and the start of each block for which an event has it."""
    blocks: list[tuple[Key, int]] = []
    starts: dict[int, int] = {}
    for event in map(wire.decode_event, (wire.encode_event(one) for _, one in engine.replica.stored_events())):
        keys = [(event.domain, event.group, digest) for digest in event.hashes]
        blocks += zip(keys, event.blocks, strict=True)
        starts.update(zip(event.blocks, event.block_starts, strict=bool(event.block_starts)))
    return blocks, starts


@given(
    st.sampled_from([*sorted(KINDS), "several keys"]),
    st.lists(texts, min_size=1, max_size=8),
    st.randoms(use_true_random=False),
)
def test_every_recovered_key_has_a_stored_event(kind, prompts, chance):
    several = kind == "several keys"
    groups = (full(4), full(2, lookup_class=1)) if several else KINDS[kind]
    engine = Engine(*groups, num_blocks=40, partial_hits=several)
    for slot, prompt in enumerate(prompts):
        if engine.admit(slot, prompt, news={"skip_reading": chance.randrange(2)}).status is GRANTED:
            engine.end(slot)
    engine.idle()
    recover(engine, [engine.replica.entries()], memory(engine))
    for slot, prompt in enumerate(chance.sample(prompts, len(prompts) // 2)):
        if engine.admit(slot, prompt).status is GRANTED:
            engine.end(slot)
    engine.idle()
    keys = list(inspect.take_snapshot(engine.replica).keys)
    blocks, starts = reported(engine)
    assert sorted(blocks) == sorted((one.key, one.block) for one in keys)
    first = {one.block: one for one in reversed(keys)}
    assert set(starts) == set(first)
    sizes = [group.block_size for group in groups]
    for block, start in starts.items():
        assert start < first[block].num_tokens <= start + sizes[first[block].group]
        assert start % sizes[first[block].group] == 0


@given(
    st.sampled_from(sorted(KINDS)),
    st.lists(texts, min_size=1, max_size=8),
    st.randoms(use_true_random=False),
)
def test_recover_keeps_the_keys_that_begin_epoch_keeps(kind, prompts, chance):
    """With any pages lost, and stored rows in any order and repeated."""
    engine = Engine(*KINDS[kind], num_blocks=25)
    for slot, prompt in enumerate(prompts):
        if engine.admit(slot, prompt).status is GRANTED and chance.random() < 0.8:
            engine.end(slot)
    engine.idle()
    table = [stamp if chance.random() < 0.8 else chance.choice((0, stamp + 1)) for stamp in memory(engine)]
    pieces = split(engine.replica.entries())
    pieces += chance.sample(pieces, len(pieces) // 2)
    chance.shuffle(pieces)
    engine.replica.begin_epoch(1, tuple(table))
    keyed, hits = engine.keyed(), [engine.outside(prompt) for prompt in prompts]
    recover(engine, pieces, table)
    assert engine.keyed() == keyed
    assert [engine.outside(prompt) for prompt in prompts] == hits
    for slot, prompt in enumerate(prompts):
        engine.admit(slot, prompt)
