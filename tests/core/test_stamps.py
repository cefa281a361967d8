"""A stamp is the version of a page's content; equal stamps mean equal content.

Each rank keeps a table of the stamps of its pages and writes the answer's orders into it before anything else. A stamp
is renewed when a block is handed out and whenever a key leaves it, so that nothing made for the old content is proven.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvplane.base.groups import AlignSpec
from kvplane.base.stamps import MAX_COUNTER, Stamp
from kvplane.base.step import End, Facts, Part, RowFlag
from tests.core.builders import Engine, admit_row, full, state


class Rank:
    """A rank's stamp table, kept by the orders of answers alone."""

    def __init__(self, engine):
        self.table = [0] * engine.spec.num_blocks
        self.seen = []

    def obey(self, *results):
        for result in results:
            for block, stamp in zip(result.orders.stamp_block, result.orders.stamp, strict=True):
                self.table[block] = stamp
                self.seen.append(stamp)
        return self


def ordered(result):
    """Blocks that the answer restamps."""
    return result.orders.stamp_block


def test_an_allocated_block_gets_a_new_stamp():
    engine = Engine(full())
    done = engine.admit(0, "aaaabbbbc")
    assert ordered(done.result) == done.table[0] == [1, 2, 3]
    assert done.result.orders.stamp == [engine.pool.stamp[block] for block in (1, 2, 3)]


def test_adopting_running_and_freeing_change_no_stamp():
    engine = Engine(full())
    engine.admit(0, "aaaabbbbc")
    adopted = engine.admit(1, "aaaabbbbc")
    assert ordered(adopted.result) == adopted.new[0] == [4]
    assert ordered(engine.run(0, text="c").result) == []
    assert ordered(engine.end(0)) == []


def test_registering_a_key_changes_no_stamp():
    """Attention pages are append-only: what a key over their first tokens says stays true while later slots fill."""
    engine = Engine(full())
    engine.admit(0, "aaa")
    filled = engine.run(0, text="a")
    assert engine.keyed() == [1]
    assert ordered(filled.result) == []


def test_an_evicted_block_gets_a_new_stamp_when_it_is_allocated():
    engine = Engine(full(), num_blocks=3)
    engine.serve(0, "aaaabbbb")
    before = engine.pool.stamp[:]
    taken = engine.admit(1, "zzzz").table[0]
    assert engine.pool.stamp[taken[0]] != before[taken[0]]


def test_a_dropped_key_renews_the_stamp_of_a_block_in_use():
    engine = Engine(full())
    engine.admit(0, "aaaabbbbc")
    assert ordered(engine.cache(evicted=[1])) == [1]
    assert ordered(engine.cache(evicted=[1])) == [1], "a store may know of a key that this replica does not"
    assert ordered(engine.cache(evicted=[3])) == [3]


def test_a_withdrawn_key_renews_the_stamp():
    engine = Engine(full())
    engine.add(0, "aaaabbbbc")
    granted, gone = engine.step(Part(admit=admit_row(0)), Part(facts=Facts([0], end=[End.PREEMPTED])))
    assert ordered(granted) == [1, 2, 3]
    assert sorted(ordered(gone)) == [1, 2]


def test_a_promoted_key_renews_the_stamp():
    """A prompt tail inside a block gives way when the block is full: entries for the tail are proven no more."""
    engine = Engine(full(2), full(4, lookup_class=1), partial_hits=True)
    engine.admit(0, "aaaabbc")
    tail = engine.table(0, 1)[1]
    filled = engine.extend(0, "d")
    assert tail in ordered(filled.result)


def test_a_state_that_moves_renews_both_stamps_before_the_page_is_overwritten():
    """The running state at the prompt's last hash boundary is cached in place. The next step would overwrite it, so its
    content moves to a copy and the key with it.
    """
    align = AlignSpec(8, 4096, stop_at_tail=True)
    engine = Engine(state(8), full(8), full(4, lookup_class=1), partial_hits=True, align=align)
    engine.admit(0, "aaaabbbbcccc" + "d", cap=12, flags=RowFlag.UNALIGNED)
    source = engine.table(0)[-1]
    assert source in engine.keyed()
    before = engine.pool.stamp[source]
    moved = engine.run(0).result
    ((_, target),) = zip(moved.orders.copy_src, moved.orders.copy_dst, strict=True)
    assert {source, target} <= set(ordered(moved))
    assert engine.pool.stamp[source] != before
    assert source not in engine.keyed()
    assert target in engine.keyed()


def test_reset_renews_the_stamps_of_keyed_blocks_and_the_null_block():
    engine = Engine(full())
    engine.serve(0, "aaaabbbbc")
    result = engine.cache(reset=True)
    assert [*ordered(result)] == [1, 2, 0]
    assert max(result.orders.stamp) == engine.pool.stamp[0]


def test_a_reset_without_keys_renews_the_stamp_of_the_null_block():
    engine = Engine(full())
    assert [*ordered(engine.cache(reset=True))] == [0]


def test_stamps_carry_the_epoch():
    engine = Engine(full())
    engine.replica.begin_epoch(7)
    engine.seq = 0
    result = engine.admit(0, "aaaa").result
    assert [Stamp.unpack(stamp) for stamp in result.orders.stamp] == [Stamp(0, 7, 1)]


def test_a_used_up_stamp_counter_begins_the_next_generation():
    engine = Engine(full())
    engine.pool._counter = MAX_COUNTER - 1
    engine.admit(0, "aaaabbbb")
    assert [Stamp.unpack(engine.pool.stamp[block]) for block in (1, 2)] == [Stamp(0, 0, MAX_COUNTER), Stamp(1, 0, 1)]


MOVES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 9)), max_size=30)


@given(MOVES)
def test_stamps_are_unique_and_orders_keep_a_rank_s_stamps_equal(moves):
    """A rank that carries out the orders has the service's stamps, and no stamp is used for two contents."""
    engine = Engine(full(2), full(4, lookup_class=1), num_blocks=14, partial_hits=True)
    rank, requests = Rank(engine), engine.replica.requests
    for move, slot, length in moves:
        live = requests.is_live(slot)
        if not live:
            rank.obey(engine.admit(slot, "abcabcabc"[:length]).result)
        elif move == 0:
            rank.obey(engine.end(slot))
        elif move == 1:
            rank.obey(engine.preempt(slot))
        elif move == 2:
            rank.obey(engine.cache(evicted=[length]))
        elif move == 3:
            rank.obey(engine.cache(reset=True))
        elif requests.running[slot]:
            rank.obey(engine.extend(slot, "abcabcabc"[:length]).result)
        else:
            rank.obey(engine.admit(slot).result)
    assert rank.table == list(engine.pool.stamp)
    assert len(set(rank.seen)) == len(rank.seen)
