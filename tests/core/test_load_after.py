"""A load into a request's blocks starts after every launch that may still read or write them.

An admission with delayed caching is answered with that step, `admit_load_after`; until it is executed nothing of the
load is registered, and the blocks do not return.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.stamp_table import StampTable, table_bytes
from kvplane.base.step import Admit, Cache, End, Facts, News, OnRefusal, Part, Peek, RowFlag, Run, Step
from kvplane.rank import Rank, RankGroup
from tests.core.builders import (
    DEFERRED,
    GRANTED,
    Engine,
    admit_row,
    digests,
    full,
    new_replica,
    prompt_and_window,
    replica_spec,
    run_rows,
    tokens,
    window,
)
from tests.core.later import Later
from tests.core.page_memory import Launch, Memory, Row
from tests.core.specification import specification_of
from tests.twins import weakened

DELAY = RowFlag.DELAY_CACHING
LOADED = "zzzzyyyyx"  # 8 tokens come from outside


def load(engine, slot=9, text=LOADED, external=8, **columns):
    """Admit a request whose first tokens a transfer loads; the step after which that may start."""
    admitted = engine.admit(slot, text, external=external, cap=0, flags=DELAY, **columns)
    assert admitted.status is GRANTED
    return next(iter(admitted.result.admit_load_after), 0)


def in_flight(*groups, ends: End = End.FREE, **changes):
    """An engine whose request 0 ended in step 2 while step 1, which computed it, is in flight."""
    engine = Engine(*groups or (full(),), num_blocks=3, **changes)
    engine.executed = 0
    engine.admit(0, "aaaabbbb")
    engine.end(0, how=ends)
    return engine


def test_load_after_does_not_name_its_own_step():
    """A block that a row of this step releases is read by earlier launches only: a launch could not wait for itself."""
    engine = Engine(window(4), num_blocks=7)
    engine.admit(0, "aaaabbbbccccdddd")
    grown = Part(facts=Facts([0], appended=[1], tokens=tokens("e")), run=Run([0], in_flight=[16]))
    late = Admit([1], external=[8], cap=[4], flags=[int(DELAY)])
    news = News([1], [12], tokens("zzzzyyyyxxxx"))
    parts = engine.step(grown, Part(facts=Facts([0], release_skipped=[16]), news=news, admit=late))
    assert parts[1].admit_status == [int(GRANTED)]
    assert parts[1].admit_load_after == []


@pytest.mark.parametrize("waits", [True, False])
def test_skipped_blocks_are_not_released_while_a_load_may_write_them(waits):
    """The request comes back with tokens that it generated: the load writes the gap behind its prompt too."""
    engine = Engine(prompt_and_window(5))
    engine.add(9, "aaaa")
    engine.step(Part(facts=Facts([9], appended=[21], tokens=tokens("b" * 21))))
    assert engine.admit(9, external=24, cap=0, flags=DELAY).status is GRANTED
    blocks = engine.table(9)
    engine.replica = specification_of(engine.replica)  # the fault is planted in the Python core alone
    with nullcontext() if waits else weakened("skipped blocks released during a load"):
        engine.step(Part(facts=Facts([9], release_skipped=[24])))
    assert (engine.table(9) == blocks) is waits


def test_load_after_is_0_for_blocks_without_an_earlier_owner():
    engine = Engine(full())
    engine.executed = 0
    engine.admit(0, "aaaabbbbc")
    assert load(engine) == 0


@pytest.mark.parametrize("ends", [End.FREE, End.PREEMPTED])
def test_load_after_is_the_last_step_of_the_previous_owner(ends):
    engine = in_flight(ends=ends)
    assert load(engine) == 1


def test_load_after_ignores_executed_steps():
    engine = in_flight()
    engine.executed = 1
    assert load(engine) == 0


def test_load_after_is_the_highest_step_of_several_owners():
    engine = Engine(full(), num_blocks=4)
    engine.executed = 0
    engine.admit(0, "aaaabbb")
    engine.run(0, text="b")
    engine.run(0, text="c")
    engine.end(0)
    assert load(engine) == 3


def test_load_after_counts_an_owner_preempted_in_the_same_step():
    """Only the core preempts here, so the engine has no fence to give."""
    engine = Engine(full(), num_blocks=7)
    engine.executed = 0
    engine.admit(0, "aaaabbb")
    engine.executed = 1
    engine.run(0, text="b")
    engine.admit(1, "ccccdddde")
    facts = Facts([0, 1], appended=[1, 4], tokens=tokens("bxxxx"))
    run = run_rows(1, 0, on_refusal=OnRefusal.PREEMPT)
    admit = admit_row(2, external=8, cap=0, flags=DELAY, watermark=2)
    result = engine.step(Part(facts=facts, run=run, news=engine.news(2, LOADED), admit=admit))[0]
    assert (result.preempted, result.admit_status) == ([0], [GRANTED])
    assert result.admit_load_after == [2]


def test_load_after_counts_steps_that_read_a_block():
    """The window moved on and gave back a block that the launch in flight reads: step 2 attends to tokens 2 to 4."""
    engine = Engine(window(3), num_blocks=5)
    engine.executed = 0
    engine.admit(0, "aaaab")
    engine.run(0, text="b")
    freed = engine.table(0)[0]
    engine.extend(0, "bbb", in_flight=0)
    assert freed in engine.free_order
    engine.end(0)
    assert load(engine) == 3


def test_load_after_counts_all_owners_of_a_shared_block():
    engine = Engine(full(), num_blocks=4)
    engine.admit(0, "aaaab")
    engine.executed = 1
    engine.admit(1, "aaaac")
    engine.end(1)
    engine.executed = 2
    engine.end(0)
    assert load(engine, text="zzzzyyyyxxxxw", external=12) == 0
    engine = Engine(full(), num_blocks=4)
    engine.admit(0, "aaaab")
    engine.executed = 1
    engine.admit(1, "aaaac")
    engine.end(0)
    engine.end(1)
    assert load(engine, text="zzzzyyyyxxxxw", external=12) == 2


def test_load_after_ignores_blocks_of_the_hit():
    engine = Engine(full(), num_blocks=9)
    engine.admit(0, "aaaab")
    engine.executed = 1
    engine.run(0, text="b")
    assert load(engine, text="aaaaccccd", external=4) == 0


def test_load_after_counts_launches_behind_an_early_fence():
    engine = Engine(full(), num_blocks=4)
    engine.executed = 0
    engine.admit(0, "aaaabbbb")
    engine.run(0, text="c")
    engine.end(0, fence=1)
    engine.executed = 1
    assert load(engine) == 2


# -- what is refused, what is always allowed ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "field"),
    [
        (Part(facts=Facts([9], commit=[8])), "parts[0].facts.commit[0]"),
        (Part(run=run_rows(9)), "parts[0].run.slot[0]"),
    ],
)
def test_ending_a_load_before_load_after_is_executed_is_refused(part, field):
    engine = in_flight()
    load(engine)
    before = engine.digest
    with pytest.raises(InvalidArgument) as refused:
        engine.step(part)
    assert refused.value.field == field
    assert "step 1 is not executed" in refused.value.message
    assert "executed_through" in refused.value.remedy
    engine.seq -= 1
    assert engine.digest == before
    engine.executed = 1
    engine.step(part)


def test_a_commit_may_come_with_the_executed_through_that_its_load_waits_for():
    engine = in_flight()
    load(engine)
    engine.executed = 1
    engine.fact(9, commit=8)
    assert engine.would_hit(LOADED).num_tokens == 8


def test_a_commit_in_the_step_that_admits_its_load_is_refused():
    engine = in_flight()
    admit = admit_row(9, external=8, cap=0, flags=DELAY)
    parts = [Part(news=engine.news(9, LOADED), admit=admit), Part(facts=Facts([9], commit=[8]))]
    with pytest.raises(InvalidArgument, match="commit it after its answer"):
        engine.step(*parts)


def test_a_run_row_in_the_step_that_admits_its_load_is_granted_nothing():
    engine = in_flight()
    admit = admit_row(9, external=8, cap=0, flags=DELAY)
    first, second = engine.step(Part(news=engine.news(9, LOADED), admit=admit), Part(run=run_rows(9)))
    assert (first.admit_load_after, second.granted) == ([1], [0])


def victim_of_its_own_part(*order):
    """The part's rows in this order want a block each and find one; slot 9, whose load has ended, goes first."""
    engine = Engine(full(), num_blocks=5)
    engine.admit(0, "aaaabbbb")
    load(engine, text="zzzz", external=4)
    facts = Facts([0, 9], appended=[1, 1], tokens=tokens("cc"))
    run = run_rows(*order, victims=[9], on_refusal=OnRefusal.PREEMPT)
    result = engine.step(Part(facts=facts, run=run))[0]
    assert result.preempted == [9]
    return engine


def test_a_granted_row_ends_its_load_when_its_request_is_preempted_in_the_same_part():
    engine = victim_of_its_own_part(9, 0)
    assert engine.replica.requests.loading == set()
    assert engine.num_free == 1, "its blocks are back, and one is slot 0's"


@pytest.mark.parametrize("order", [(9, 0), (0, 9)])
def test_an_end_ends_the_load_of_a_request_preempted_before_or_after_its_row(order):
    """The answer does not show whether a request had tokens before it was preempted."""
    engine = victim_of_its_own_part(*order)
    engine.end(9, how=End.PREEMPTED)
    assert engine.admit(9, cap=1).status is not DEFERRED


@pytest.mark.parametrize("how", [End.FREE, End.PREEMPTED])
def test_an_end_before_load_after_holds_the_blocks_until_the_launches_are_executed(how):
    engine = in_flight()
    load(engine)
    engine.end(9, how=how)
    assert engine.num_free == 0
    assert engine.keyed() == []
    engine.executed = 1
    engine.idle()
    assert engine.num_free == 2


def test_a_release_before_the_start_fails_the_load():
    engine = in_flight()
    load(engine)
    result = engine.cache(released=[9])
    assert result.preempted == [9]
    assert (engine.num_free, engine.keyed()) == (0, [])
    engine.executed = 1
    assert engine.admit(9, cap=8).status is GRANTED, "nothing is loading any more, and the blocks are back"


def test_blocks_of_a_held_load_are_free_after_release_and_load_after():
    engine = in_flight()
    load(engine)
    engine.end(9, how=End.HELD)
    engine.cache(released=[9])
    assert engine.num_free == 0
    engine.executed = 1
    engine.idle()
    assert engine.num_free == 2


def test_blocks_of_a_preempted_load_are_free_after_release_and_load_after():
    engine = in_flight()
    load(engine)
    failed = engine.seq
    assert engine.cache(failed_steps=[failed]).preempted == [9]
    engine.cache(released=[9])
    assert engine.num_free == 0, "the load is over, the launch in front of it is not"
    engine.executed = 1
    engine.idle()
    assert engine.num_free == 2


def test_load_after_of_a_new_engine_life_ignores_steps_of_the_previous_life():
    """Its ranks wait for the launches of that life (StampTable.check_load)."""
    engine = in_flight()
    engine.replica.begin_epoch(1)
    engine.seq = 0
    assert load(engine) == 0


def test_a_peek_has_no_loads():
    engine = in_flight()
    engine.add(3, LOADED)
    assert engine.step(Part(peek=Peek([3])))[0].admit_load_after == []


def test_released_of_a_request_without_a_load_is_refused():
    engine = Engine(full())
    engine.admit(0, "aaaab")
    with pytest.raises(InvalidArgument, match="has no load"):
        engine.step(Part(cache=Cache(released=[0])))


def test_a_load_of_a_new_life_waits_for_launches_of_the_previous_life():
    """The engine's service was restarted: its old launch is on the device while the new life admits a load."""
    spec = replica_spec(full(), num_blocks=3)
    replica, memory = new_replica(spec), Memory(spec)
    table = StampTable.create(bytearray(table_bytes(3)), 3, incarnation=7)
    rank, group = Rank(table, memory), RankGroup([table])
    replica.begin_epoch(1)
    rank.claim(1)
    news = News([0], [8], tokens("aaaabbbb"))
    first = replica.apply(Step(1, 1, [Part(news=news, admit=Admit([0]))])).parts[0]
    rank.carry_out(1, 1, 0, first.orders)
    launch = Launch(1, [], [Row((0, 0), "aaaabbbb", "aaaabbbb", 0, 0, [first.tables.by_row()[0][0]])])

    replica.begin_epoch(2, group.agreed_stamps())
    rank.claim(2, 2)
    news = News([1], [9], tokens("zzzzyyyyx"))
    late = Admit([1], external=[8], cap=[0], flags=[int(RowFlag.DELAY_CACHING)])
    second = replica.apply(Step(2, 1, [Part(news=news, admit=late)])).parts[0]
    blocks = second.tables.by_row()[0][0]
    assert set(blocks) == set(first.tables.by_row()[0][0])
    rank.carry_out(2, 2, 0, second.orders)
    assert not group.may_load(2, 2, 0, 0)
    memory.run(launch, {(0, 0)})  # ends behind the claim
    rank.launches_ended()
    assert group.may_load(2, 2, 0, 0)
    memory.load([blocks], "zzzzyyyyx", 0, 8)
    replica.apply(Step(2, 2, [Part(facts=Facts([1], commit=[8]))], executed_through=1))
    assert memory.holds(0, blocks[0], 4, "zzzz")
    assert replica.lookup(digests(spec, "zzzzyyyyx"), "", 9).num_tokens == 8


def partial_hit_with_a_load(device):
    """Slot 1 continues inside slot 0's block: its copy is ordered, and a load fills the rest of the page."""
    spec = device.sound.spec
    table = StampTable.create(bytearray(table_bytes(spec.num_blocks)), spec.num_blocks, incarnation=7)
    replica = new_replica(spec)
    rank, group = Rank(table, device), RankGroup([table])
    replica.begin_epoch(1)
    rank.claim(1)
    first = replica.apply(Step(1, 1, [Part(news=News([0], [6], tokens("aaaabb")), admit=Admit([0]))])).parts[0]
    rank.carry_out(1, 1, 0, first.orders)
    tables = [first.tables.by_row()[0][group] for group in (0, 1)]
    launch = Launch(1, [], [Row((0, 0), "aaaabb", "aaaabb", 0, 0, tables)])
    late = Admit([1], external=[4], cap=[0], flags=[int(DELAY)])
    second = replica.apply(
        Step(1, 2, [Part(news=News([1], [9], tokens("aaaazzzzx")), admit=late)], executed_through=1)
    ).parts[0]
    assert (second.admit_hit, len(second.orders.copy_src)) == ([4], 1)
    rank.carry_out(1, 2, 0, second.orders)
    return replica, rank, group, launch, [second.tables.by_row()[0][group] for group in (0, 1)]


@pytest.mark.parametrize("waits", [True, False])
def test_a_load_behind_a_partial_hit_waits_for_the_copy_of_its_block(waits):
    """The copy is on its way behind other work of the device; it would undo what the load wrote."""
    groups = full(8), full(4, lookup_class=5)
    memory = Memory(replica_spec(*groups, num_blocks=12, hash_block_size=4, partial_hits=True))
    device = Later(memory)
    with nullcontext() if waits else weakened("orders end when they are given"):
        replica, rank, group, launch, tables = partial_hit_with_a_load(device)
    memory.run(launch, set())
    assert group.may_load(1, 2, 0, 0) is not waits
    if waits:
        rank.synchronize()
        assert group.may_load(1, 2, 0, 0)
    memory.load(tables, "aaaazzzzx", 4, 8)
    device.run()
    replica.apply(Step(1, 3, [Part(facts=Facts([1], commit=[8]))], executed_through=2))
    assert replica.lookup(digests(replica.spec, "aaaazzzzx"), "", 9).num_tokens == 8
    assert memory.holds(0, tables[0][0], 8, "aaaazzzz") is waits
