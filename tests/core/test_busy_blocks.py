"""Pages that a load of an earlier engine life may still write are not allocated until its mover is known to be done."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.step import Cache, End, Facts, Orders, Part, Resume, RowFlag, Run, Step
from kvplane_core.face import inspect
from kvplane_core.face.state import digest as state_digest
from kvplane_core.spec.replica import Replica
from tests.core.builders import (
    GRANTED,
    NEVER_FITS,
    REFUSED,
    Engine,
    changed,
    full,
    new_replica,
    replica_spec,
    sinks,
    state,
    window,
)
from tests.core.image import image_of, replica_of
from tests.core.page_engine import RandomEngine
from tests.core.test_page_contents import ALL_MIXES, CACHED_MIXES
from tests.twins import weakened

DELAY = RowFlag.DELAY_CACHING
PROMPT = "aaaabbbbccccd"
STEPS = 40


def begin(engine: Engine, epoch: int = 1, **how: Any) -> tuple[int, ...]:
    """A new engine life on the same memory; its busy blocks."""
    engine.replica.begin_epoch(epoch, tuple(engine.pool.stamp), **how)
    engine.executed = None
    inspect.check(engine.replica)
    return engine.replica.busy_blocks


def with_a_load(how: Callable[[Engine], object] = lambda engine: None) -> Engine:
    """Slot 0 was served "aaaa"; slot 1 hits that (block 1) and waits for a load of 8 tokens (blocks 3 and 4)."""
    engine = Engine(full(), num_blocks=9)
    engine.serve(0, "aaaab")
    loading = engine.admit(1, PROMPT, external=8, cap=0, flags=DELAY)
    assert (loading.hit, loading.table) == (4, [[1, 2, 3]])
    how(engine)
    engine.idle()
    return engine


def failed(engine: Engine) -> None:
    """The request is preempted under its load: its pages stay with that."""
    engine.replica.tracker.preempt(1, engine.seq)
    changed(engine.replica)


# -- which blocks are held ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", [lambda engine: None, failed, lambda engine: engine.end(1, how=End.HELD)], ids=["runs", "preempted", "held"]
)
def test_blocks_under_a_load_are_busy_in_the_next_engine_life(how):
    """But its hit does not: no load writes to what has a key."""
    engine = with_a_load(how)
    assert begin(engine) == (2, 3)
    assert (engine.num_free, engine.keyed()) == (6, [1])
    assert not {2, 3} & set(engine.admit(0, "z" * 20).table[0])


@pytest.mark.parametrize(
    "finish",
    [
        lambda engine: engine.cache(released=[1]),
        lambda engine: engine.fact(1, commit=12),
        lambda engine: engine.end(1),
        lambda engine: engine.run(1),
        lambda engine: (engine.end(1, how=End.HELD), engine.cache(released=[1])),
    ],
    ids=["released", "committed", "ended", "run", "held and released"],
)
def test_a_load_that_ended_leaves_no_busy_blocks(finish):
    assert begin(with_a_load(finish)) == ()


def test_a_load_before_the_launch_ends_when_its_step_is_executed():
    """It may continue when the engine dies with the step in flight, though its keys are tentative."""
    engine = Engine(full(), num_blocks=9)
    engine.executed = 0
    loaded = engine.admit(0, PROMPT, external=8)
    engine.preempt(0)
    dead, executed = deepcopy(engine), engine
    assert begin(dead) == tuple(loaded.table[0])
    executed.executed = executed.seq
    executed.idle()
    assert begin(executed) == ()


def test_blocks_under_a_load_of_states_are_busy_in_every_group():
    engine = Engine(state(), full(lookup_class=1), window(6, lookup_class=2), num_blocks=40)
    tables = engine.admit(0, "a" * 21, external=16, cap=0, flags=DELAY).table
    assert begin(engine) == tuple(sorted(block for table in tables for block in table if block))


def test_begin_epoch_adds_the_busy_blocks_that_it_is_given():
    """Their keys go, whatever the memory shows; a block that the group holds forever cannot be named."""
    engine = Engine(sinks(4), num_blocks=12)
    table = engine.serve(0, "aaaabbbbc").table[0]
    (sink,) = engine.pool.reserved
    named = [table[1], 9, sink]
    assert begin(engine, busy=named) == tuple(sorted({table[1], 9}))
    assert table[0] in engine.keyed()
    assert table[1] not in engine.keyed()
    assert [event.blocks for event in engine.replica.take_events()] == [(table[1],)]


def test_recovered_keys_of_busy_blocks_are_dropped():
    engine = Engine(full(), num_blocks=12)
    table = engine.serve(0, "aaaabbbbc").table[0]
    engine.idle()
    stamps, entries = tuple(engine.pool.stamp), [engine.replica.entries()]
    replica = new_replica(engine.spec)
    replica.recover(3, [stamps], entries, busy=[table[1], 9])
    inspect.check(replica)
    assert replica.busy_blocks == tuple(sorted({table[1], 9}))
    assert [event.blocks for event in replica.take_events()] == [(table[1],)]
    assert replica.count_keys() == 1
    assert replica.apply(Step(3, 1, [Part()])).parts[0].orders.stamp_block == [table[1]], "the memory gets a new stamp"


def test_busy_blocks_stay_busy_in_later_engine_lives():
    engine = with_a_load()
    begin(engine)
    engine.admit(0, "zzzzz", external=4, cap=0, flags=DELAY)
    assert len(begin(engine, epoch=2)) == 3


def test_new_memory_frees_all_busy_blocks():
    engine = with_a_load()
    begin(engine)
    engine.admit(0, "zzzzz", external=4, cap=0, flags=DELAY)
    assert begin(engine, epoch=2, memory_is_new=True) == ()
    assert engine.num_free == 8


# -- how they return ---------------------------------------------------------------------------------------------------


def test_loads_over_frees_busy_blocks():
    engine = with_a_load()
    begin(engine)
    assert engine.cache(loads_over=[3]).free_blocks == 7
    assert engine.replica.busy_blocks == (2,)
    assert engine.cache(loads_over=[2]).free_blocks == 8
    assert engine.free_order[0] == 2, "a block without a key is given away first"


@pytest.mark.parametrize("named", [[4], [0], [99], [2, 3, 2], [1]])
def test_loads_over_refuses_blocks_that_are_not_busy_or_repeated(named):
    engine = with_a_load()
    begin(engine)
    before = engine.digest
    with pytest.raises(InvalidArgument) as caught:
        engine.cache(loads_over=named)
    assert caught.value.field == f"parts[0].cache.loads_over[{len(named) - 1}]"
    assert engine.digest == before


def test_loads_over_of_one_part_ends_busy_blocks_for_the_next_part():
    engine = with_a_load()
    begin(engine)
    once = Part(cache=Cache(loads_over=[2]))
    with pytest.raises(InvalidArgument, match="block 2"):
        engine.replica.apply(Step(0, engine.seq + 1, [once, once]))
    assert engine.replica.busy_blocks == (2, 3)


def test_a_reset_succeeds_with_busy_blocks():
    """They have no key, and no request has a block."""
    engine = with_a_load()
    begin(engine)
    assert engine.cache(reset=True).reset_done
    assert engine.replica.busy_blocks == (2, 3)


def test_a_request_that_needs_busy_blocks_is_refused_until_they_are_free():
    """The pool will have room for it; it would never fit if it were longer."""
    engine = with_a_load()
    begin(engine)
    assert engine.admit(0, "z" * 31).status is REFUSED
    assert engine.admit(2, "z" * 33).status is NEVER_FITS
    engine.cache(loads_over=[2, 3])
    assert engine.admit(0).status is GRANTED


# -- images ------------------------------------------------------------------------------------------------------------


def test_the_image_of_a_replica_has_its_busy_blocks():
    engine = with_a_load()
    begin(engine)
    engine.serve(0, "zzzz")
    engine.idle()
    other, _ = replica_of(image_of(engine.replica), 5, tuple(engine.pool.stamp))
    inspect.check(other)
    assert other.busy_blocks == (2, 3)
    assert other.free_blocks == engine.num_free


@pytest.mark.parametrize("how", [lambda engine: None, failed], ids=["runs", "preempted"])
def test_resume_makes_busy_blocks_part_of_the_loads_of_its_requests(how):
    """Named busy when the life was opened, they belong to the request's own load then, and to no other life's."""
    engine = with_a_load(how)
    image = image_of(engine.replica)
    news = Part(news=engine.news(1, PROMPT))
    engine.replica.begin_epoch(5, tuple(engine.pool.stamp))
    assert engine.replica.busy_blocks == (2, 3)
    engine.replica.apply(Step(5, 1, [news]))
    engine.replica.apply(Step(5, 2, [Part(resume=image.resume)]))
    inspect.check(engine.replica)
    assert not engine.replica.busy_blocks
    assert engine.replica.requests.loading == {1}
    engine.replica.apply(Step(5, 3, [Part(cache=Cache(released=[1]))], executed_through=2))
    engine.replica.begin_epoch(6, tuple(engine.pool.stamp))
    assert not engine.replica.busy_blocks, "the load was over"


def test_a_failed_load_of_a_resumed_request_is_zeroed():
    engine = Engine(full(zero_new_blocks=True), num_blocks=9)
    loaded = engine.admit(1, PROMPT, external=8, cap=0, flags=DELAY).table[0]
    engine.idle()
    other, _ = replica_of(image_of(engine.replica), 5, tuple(engine.pool.stamp))
    other.apply(Step(5, 2, [Part(cache=Cache(released=[1]))], executed_through=1))
    (result,) = other.apply(Step(5, 3, [Part(facts=Facts([1], computed=[0]))], executed_through=2)).parts
    inspect.check(other)
    assert result.orders.zero_block == loaded


def released_and_resumed(loading: int | None = None) -> tuple[Replica, Orders, list[int]]:
    """A load ended, and its request came to another replica before a grant: the orders when its `computed` is lowered
    from 8 to 4, and its blocks.
    """
    engine = Engine(full(zero_new_blocks=True), num_blocks=9)
    loaded = engine.admit(1, PROMPT, external=8, cap=0, flags=DELAY).table[0]
    engine.cache(released=[1])
    engine.idle()
    image = image_of(engine.replica)
    assert image.resume.loading == [2]
    if loading is not None:
        image.resume.loading = [loading]
    other, _ = replica_of(image, 5, tuple(engine.pool.stamp))
    inspect.check(other)
    (result,) = other.apply(Step(5, 2, [Part(facts=Facts([1], computed=[4]))], executed_through=1)).parts
    return other, result.orders, loaded


@pytest.mark.parametrize("weak", [False, True])
def test_a_load_that_was_over_before_the_image_may_have_failed(weak):
    """Its blocks were not zeroed when they were allocated; what it left unwritten is zeroed, and only that."""
    replica, orders, loaded = released_and_resumed(0 if weak else None)
    assert orders.zero_block == ([] if weak else loaded[1:])
    assert (replica.requests.loading, replica.busy_blocks) == (set(), ())
    with pytest.raises(InvalidArgument, match="has no load"):
        replica.apply(Step(5, 3, [Part(cache=Cache(released=[1]))], executed_through=2))
    (result,) = replica.apply(Step(5, 3, [Part(run=Run([1]))], executed_through=2)).parts
    assert not set(loaded) & set(result.orders.zero_block), "a zero order now would erase a loaded page"
    assert replica.requests.not_zeroed == set()


@pytest.mark.parametrize("loading", [0, 2])
def test_resume_refuses_busy_blocks_of_a_request_that_does_not_load(loading):
    engine = with_a_load()
    resume = image_of(engine.replica).resume
    resume.loading = [loading]
    news = Part(news=engine.news(1, PROMPT))
    engine.replica.begin_epoch(5, tuple(engine.pool.stamp))
    engine.replica.apply(Step(5, 1, [news]))
    before = state_digest(engine.replica)
    with pytest.raises(InvalidArgument) as caught:
        engine.replica.apply(Step(5, 2, [Part(resume=resume)]))
    assert caught.value.field == "parts[0].resume.loading"
    assert state_digest(engine.replica) == before
    engine.replica.apply(Step(5, 2, [Part(cache=Cache(loads_over=[2, 3]))]))
    engine.replica.apply(Step(5, 3, [Part(resume=resume)]))
    assert engine.replica.num_running == 1


@pytest.mark.parametrize(("loading", "busy"), [([1], (1, 2, 3)), ([0], ()), ([], ())])
def test_resume_names_held_requests_that_load(loading, busy):
    """The other replica has no keys, so that it does not know a hit from what is loaded."""
    engine = with_a_load(lambda engine: engine.end(1, how=End.HELD))
    resume = image_of(engine.replica).resume
    assert resume.held_loading == [1]
    resume.held_loading = loading
    other = Engine(full(), num_blocks=9)
    other.replica.recover(5, [tuple(engine.pool.stamp)], [])
    other.replica.apply(Step(5, 1, [Part(resume=resume)]))
    inspect.check(other.replica)
    assert begin(other, epoch=6) == busy


def test_resume_refuses_held_loading_of_another_length():
    engine = with_a_load()
    engine.replica.begin_epoch(5, tuple(engine.pool.stamp))
    with pytest.raises(InvalidArgument) as caught:
        engine.replica.apply(Step(5, 1, [Part(resume=Resume(held_loading=[1]))]))
    assert caught.value.field == "parts[0].resume.held_loading"


# -- the proof ---------------------------------------------------------------------------------------------------------


def run(mix: str, seed: int) -> RandomEngine:
    """Engines that die often: every load of a dead one continues, writes at any time, and ends at some time."""
    rng = Random(seed)
    groups, changes = ALL_MIXES[mix]
    spec = replica_spec(*groups, **{"max_model_len": 64, "max_in_flight_tokens": 256, "num_blocks": 24, **changes})
    engine = RandomEngine(spec, rng)
    engine.deaths, engine.loads = 8, 90
    for _ in range(STEPS):
        engine.step()
    return engine


def _run_all(seeds: int) -> None:
    for seed in range(seeds):
        for mix in CACHED_MIXES:
            run(mix, seed)


@pytest.mark.parametrize("mix", CACHED_MIXES)
def test_late_writes_of_loads_change_no_page_with_a_key(mix):
    engines = [run(mix, seed) for seed in range(10)]
    assert sum(engine.late for engine in engines) > 5, "the runs must reach late writes"
    assert sum(engine.keys_seen for engine in engines) > 1000


def test_the_twin_that_allocates_busy_blocks_is_caught():
    with weakened("new life during a load"), pytest.raises(AssertionError, match=r"block|token"):
        _run_all(3)
