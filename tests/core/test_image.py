"""A replica that continues from its image decides as the original one, and no image breaks an invariant."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplane.base.errors import FailedPrecondition, InvalidArgument
from kvplane.base.groups import AlignSpec, GroupKind, ReplicaSpec
from kvplane.base.step import Admit, Cache, News, Part, PartResult, Resume, Run, Step, StepResult
from kvplane.session.rows import ResumeRow, resume_of
from kvplane_core.face import inspect
from kvplane_core.face.entries import Entries, KeyRun
from kvplane_core.face.keys import NULL_BLOCK
from kvplane_core.face.setup import states_for_drafts
from kvplane_core.face.state import digest as state_digest
from kvplane_core.spec.replica import Replica
from kvplane_core.spec.split import SplitPool
from tests.core.builders import (
    admit_row,
    changed,
    full,
    new_replica,
    prompt_and_window,
    replica_spec,
    state,
    tokens,
    window,
)
from tests.core.follower import Followed
from tests.core.image import Image, decisive_state, image_of, replica_of
from tests.core.page_engine import RandomEngine
from tests.core.test_page_contents import ALL_MIXES, run
from tests.twins import weakened

BEFORE, AFTER = 25, 15


def drain(engine: RandomEngine) -> None:
    """Nothing is in flight, no window holds what has left it, and some blocks of requests have just lost their keys."""
    while engine.queue:
        engine._launch()
    engine.seq += 1
    engine.executed_through = engine.launched
    (result,) = engine.apply([Part(cache=Cache(evicted=evicted(engine)))])
    engine.replica.coordinator.pool.retained.clear()  # no image has it
    engine.memory.stamp(result.orders)
    engine.launched = engine.stamped = engine.moved = engine.seq
    requests, coordinator = engine.replica.requests, engine.replica.coordinator
    for slot in (slot for slot in requests.slots() if requests.running[slot]):
        for manager in coordinator.managers:
            if slot not in requests.loading or manager.spec.kind is not GroupKind.R_SWA:
                manager.release_skipped(slot, requests.computed[slot])
    count_held_blocks_as_states(engine.replica)
    changed(engine.replica)
    for request in engine.requests.values():
        if request.load is not None:
            request.load.after = request.load.seq = 0  # executed, and of another epoch than what comes
        for row in request.rows:
            row.seq = 0


def count_held_blocks_as_states(replica: Replica) -> None:
    """No image says whether a held block is a state. One without a key counts as a state where it could be one: then
    no other request may get the rest of its superblock.
    """
    pool, coordinator = replica.coordinator.pool, replica.coordinator
    if not isinstance(pool, SplitPool):
        return
    slots = [slot for slot in replica.requests.slots() if replica.requests.running[slot]]
    running = {block for slot in slots for table in coordinator.tables(slot) for block in table}
    for first in {block for blocks in replica.tracker.held.values() for block in blocks} - running - {NULL_BLOCK}:
        number, others = first // pool.size, range(first + 1, first + pool.size)
        is_first = first % pool.size == 0 and pool.key[first] is None and not pool.free.has_state[number]
        if is_first and not any(pool.references[block] or pool.key[block] for block in others):
            for block in others:
                pool.free._remove(block)
            pool.free.has_state[number] = True


def evicted(engine: RandomEngine) -> list[int]:
    """Some blocks, of these rather those that several requests have."""
    references, rng = engine.replica.coordinator.pool.references, engine.rng
    shared = [block for block, count in enumerate(references) if block and count > 1]
    return sorted({*engine._evicted(), *engine._evicted(), *rng.sample(shared, rng.randint(0, len(shared)))})


def go_on(engine: RandomEngine, forget: Callable[[Image], Image] = lambda image: image) -> None:
    """With another replica, made from the image of this one as far as it is not forgotten."""
    engine.epoch += 1
    engine.replica, orders = replica_of(forget(image_of(engine.replica)), engine.epoch, engine.memory.stamps)
    for block, stamp in zip(orders.stamp_block, orders.stamp, strict=True):
        engine.memory.stamps[block] = stamp
    engine.followed = Followed(engine.replica)
    engine.seq = engine.launched = engine.stamped = engine.moved = 1
    engine.executed_through = 0
    inspect.check(engine.replica)
    engine.check_keys()


def answers(engine: RandomEngine, steps: int) -> list[object]:
    """The answers of the replica from now on, but for the stamps, whose epochs differ."""
    given: list[object] = []
    apply = engine.replica.apply

    def listen(step: Step) -> StepResult:
        result = apply(step)
        for part in result.parts:
            stamped = sorted(part.orders.stamp_block)
            orders = deepcopy(part.orders)
            orders.stamp, orders.stamp_block = [], []
            given.append((part.granted, part.preempted, part.admit_status, part.admit_hit, part.admit_granted))
            given.append((part.new_blocks, part.tables, orders, stamped, part.free_blocks))
        return result

    engine.replica.apply = listen  # type: ignore[method-assign]
    engine._crash = lambda: None  # type: ignore[method-assign]
    # These choices depend on the numbers of steps, which differ after an image.
    engine._has_rare_in_flight = lambda: False  # type: ignore[method-assign]
    engine._is_rare = lambda slot: False  # type: ignore[method-assign]
    engine.lags = engine.retains = False
    for _ in range(steps):
        engine.step()
    return given


def decides_as_before(mix: str, seed: int) -> None:
    """A replica made of the image of another one is in the same state, and answers the same."""
    engine = run(mix, seed, BEFORE, deaths=0)
    drain(engine)
    other = deepcopy(engine)
    go_on(other)
    assert decisive_state(other.replica) == decisive_state(engine.replica)
    assert answers(other, AFTER) == answers(engine, AFTER)


@pytest.mark.parametrize("mix", ALL_MIXES)
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32))
def test_a_resumed_replica_decides_as_the_original(mix, seed):
    decides_as_before(mix, seed)


def test_a_held_block_whose_superblock_could_be_a_state_s():
    """It was the last block of attention that was held there, and had lost its key."""
    decides_as_before("split pages, checkpoints and drafts", 1618)


def test_a_state_before_the_running_one_that_has_a_key_is_counted_as_registered():
    """The request counts no block as registered, and a launch noted where it left that state."""
    decides_as_before("checkpoints and drafts", 9700)


@pytest.mark.parametrize(
    ("mix", "seed"),
    [
        ("states, hits inside blocks", 19),
        ("checkpoints, hits inside blocks", 5),
        ("superseded states leave first", 24),
        ("split pages, checkpoints and drafts", 2),
    ],
)
def test_a_running_state_that_has_a_key_inside_its_block_is_copied_before_the_next_launch(mix, seed):
    decides_as_before(mix, seed)


# A mix and a seed that find each planted fault.
FOUND = {
    "image skips shared blocks": ("seven groups", 3),
    "image skips blocks before a key": ("seven groups", 1),
    "held states are blocks of attention": ("split pages, checkpoints and drafts", 0),
    "copy of an evicted state": ("states, hits inside blocks", 3),
    "image loses blocks behind the computed tokens": ("prompt and window", 19),
}


@pytest.mark.parametrize("twin", FOUND)
def test_an_image_twin_is_caught(twin):
    mix, seed = FOUND[twin]
    decides_as_before(mix, seed)
    with weakened(twin), pytest.raises(AssertionError):
        decides_as_before(mix, seed)


def as_sent_by_an_engine(image: Image) -> Image:
    """An image without single-group hits, keys and what the policy has learnt, with freed blocks in its tables, and a
    store without entries.
    """
    resume, groups = image.resume, image.spec.groups
    rng = Random(len(resume.blocks))
    blocks, start = list(resume.blocks), 0
    for number, count in enumerate(resume.num_blocks):
        kind = groups[number % len(groups)].kind
        for at in range(start, start + count):
            if not blocks[at] and kind is not GroupKind.MAMBA:
                blocks[at] = rng.randrange(image.spec.num_blocks)
        start += count
    sent = replace(resume, blocks=blocks, single_group_hit=[], num_cached_blocks=[])
    entries = image.entries if rng.random() < 0.5 else Entries(32)
    return replace(image, resume=sent, entries=entries, eviction=(*image.eviction[:2], []))


@pytest.mark.parametrize("mix", ALL_MIXES)
@settings(max_examples=3)
@given(seed=st.integers(0, 2**32))
def test_a_replica_resumed_from_an_engine_s_image_has_correct_pages(mix, seed):
    """Decisions differ, and every page holds what keys and launches require."""
    engine = run(mix, seed, BEFORE, deaths=0)
    drain(engine)
    running = engine.replica.num_running
    go_on(engine, as_sent_by_an_engine)
    assert engine.replica.num_running == running
    for _ in range(AFTER):
        engine.step()


@pytest.mark.parametrize("mix", ALL_MIXES)
@settings(max_examples=3)
@given(seed=st.integers(0, 2**32))
def test_a_changed_image_is_refused_or_keeps_the_invariants(mix, seed):
    meets_changed_images(mix, seed)


def meets_changed_images(mix: str, seed: int) -> None:
    """Each is refused whole, or what comes of it is sound."""
    engine, rng = run(mix, seed, 12), Random(seed)
    drain(engine)
    image = image_of(engine.replica)
    for _ in range(8):
        replica, _ = replica_of(replace(image, resume=Resume()), engine.epoch + 1, engine.memory.stamps)
        before = state_digest(replica)
        step = Step(engine.epoch + 1, 2, [Part(resume=meddled(image.resume, rng))])
        try:
            replica.apply(step)
        except InvalidArgument:
            assert state_digest(replica) == before
        inspect.check(replica)
        use(replica, engine.epoch + 1)


def meddled(resume: Resume, rng: Random) -> Resume:
    """Some entries are others."""
    made = deepcopy(resume)
    columns = [getattr(made, one.name) for one in fields(made)]
    for _ in range(rng.randint(1, 3)):
        column = rng.choice([column for column in columns if column] or [made.slot])
        what = rng.random()
        if what < 0.7 and column:
            column[rng.randrange(len(column))] = rng.choice([0, 1, 2, 5, 20, 99, rng.choice(resume.blocks or [1])])
        elif what < 0.85 and column:
            column.pop(rng.randrange(len(column)))
        else:
            column.append(rng.randrange(30))
    return made


def use(replica: Replica, epoch: int) -> None:
    """Run and end whatever is there."""
    for seq in range(replica.seq + 1, replica.seq + 4):
        slots = replica.requests.slots()
        running = [slot for slot in slots if replica.requests.running[slot]]
        waiting = [slot for slot in slots if not replica.requests.running[slot] and not replica.requests.held[slot]]
        part = Part(run=Run(running, extra=[states_for_drafts(replica.spec) or 0] * len(running)), admit=Admit(waiting))
        replica.apply(Step(epoch, seq, [part], executed_through=seq - 1))
        inspect.check(replica)
    replica.apply(
        Step(epoch, seq + 1, [Part(cache=Cache(released=sorted(replica.tracker.held)))], executed_through=seq)
    )
    inspect.check(replica)


SPEC = replica_spec(full(), num_blocks=20)
STAMPS = [0, *range(1 << 32, (1 << 32) + 19)]
ROW = Resume(slot=[1], computed=[9], num_blocks=[3], blocks=[5, 6, 7])


def waiting_replica(stamps=STAMPS) -> Replica:
    """It knows requests 1 and 2, of 10 tokens each, with one prefix."""
    replica = new_replica(SPEC)
    replica.begin_epoch(2, stamps)
    for seq, slot in enumerate((1, 2), 1):
        part = Part()
        part.news.slot, part.news.num_tokens, part.news.tokens = [slot], [10], [7] * 10
        replica.apply(Step(2, seq, [part]))
    return replica


def image_step(resume: Resume, seq: int = 3) -> Step:
    return Step(2, seq, [Part(resume=resume)])


def two(first: list[int], second: list[int]) -> Resume:
    return Resume(slot=[1, 2], computed=[9, 9], num_blocks=[3, 3], blocks=first + second)


REFUSED = [
    ("slot", replace(ROW, slot=[3])),
    ("computed", replace(ROW, computed=[])),
    ("computed", replace(ROW, computed=[0])),
    ("launch_end", replace(ROW, launch_end=[8])),
    ("num_prompt", replace(ROW, num_prompt=[11])),
    ("single_group_hit", replace(ROW, single_group_hit=[4097])),
    ("loading", replace(ROW, loading=[3])),
    ("num_blocks", replace(ROW, num_blocks=[])),
    ("num_cached_blocks", replace(ROW, num_cached_blocks=[1, 2])),
    ("blocks", replace(ROW, blocks=[5, 6])),
    ("blocks", replace(ROW, num_blocks=[2], blocks=[5, 6])),
    ("blocks", replace(ROW, blocks=[5, 0, 7])),
    ("blocks", replace(ROW, blocks=[5, 6, 20])),
    ("blocks", replace(ROW, blocks=[5, 6, 5])),
    ("blocks", two([5, 6, 7], [5, 6, 7])),
    ("blocks", two([5, 6, 7], [6, 8, 9])),
    ("slot", replace(two([5, 6, 7], [8, 9, 10]), slot=[1, 1])),
    ("held_slot", replace(ROW, held_slot=[1], held_count=[1], held_blocks=[9])),
    ("held_slot", replace(ROW, held_slot=[1 << 20], held_count=[1], held_blocks=[9])),
    ("held_count", replace(ROW, held_slot=[4], held_blocks=[9])),
    ("held_blocks", replace(ROW, held_slot=[4], held_count=[2], held_blocks=[9])),
    ("held_blocks", replace(ROW, held_slot=[4], held_count=[1], held_blocks=[7])),
    ("held_blocks", replace(ROW, held_slot=[4], held_count=[1], held_blocks=[0])),
]


@pytest.mark.parametrize(("column", "resume"), REFUSED)
def test_a_refused_image_names_its_column_and_changes_nothing(column, resume):
    replica = waiting_replica()
    before = state_digest(replica)
    with pytest.raises(InvalidArgument) as refused:
        replica.apply(image_step(resume))
    assert refused.value.field == f"parts[0].resume.{column}"
    assert "preempted" in refused.value.remedy
    assert state_digest(replica) == before


def test_an_image_may_have_one_full_block_in_two_tables():
    replica = waiting_replica()
    replica.apply(image_step(two([5, 6, 7], [5, 6, 8])))
    inspect.check(replica)
    assert replica.free_blocks == 19 - 4
    assert replica.coordinator.pool.references[5] == 2


@pytest.mark.parametrize("stamps", [(), [0] * 20, [7] * 20, [3 << 32] * 20], ids=["none", "zero", "equal", "future"])
def test_an_image_with_unproven_pages_is_refused(stamps):
    with pytest.raises(InvalidArgument, match=r"show|stamp"):
        waiting_replica(stamps).apply(image_step(ROW))


def test_an_image_with_the_stamp_of_another_block_s_key_is_refused():
    stamps = list(STAMPS)
    stamps[9] = stamps[5]
    stored = Entries(32, [KeyRun("", 0, 1)], [9], [stamps[9]], [4], [0], b"k" * 32)
    replica = new_replica(SPEC)
    replica.recover(2, [stamps], [stored])
    replica.apply(Step(2, 1, [Part(news=News([1], [10], [7] * 10))]))
    with pytest.raises(InvalidArgument, match="same stamp"):
        replica.apply(image_step(ROW, 2))


def test_a_stamp_that_this_pool_gave_to_another_block_in_an_equal_epoch_is_that_of_the_memory():
    """Two services began epoch 1, and the memory obeyed the other one."""
    replica = new_replica(SPEC)
    replica.begin_epoch(1)
    replica.apply(Step(1, 1, [Part(news=News([1], [3], [7] * 3), admit=admit_row(1))]))
    (ours,) = replica.coordinator.tables(1)[0]
    named = STAMPS.index(replica.coordinator.pool.stamp[ours])
    assert named != ours
    replica.begin_epoch(2, STAMPS)
    replica.apply(Step(2, 1, [Part(news=News([1], [10], [7] * 10))]))
    replica.apply(image_step(replace(ROW, blocks=[named, 6, 7]), 2))
    inspect.check(replica)
    assert [replica.coordinator.pool.stamp[block] for block in (ours, named)] == [0, STAMPS[named]]


def test_an_image_with_other_sections_or_allocated_blocks_is_refused():
    replica = waiting_replica()
    mixed = image_step(ROW)
    mixed.parts[0].admit = admit_row(2)
    with pytest.raises(InvalidArgument, match="alone"):
        replica.apply(mixed)
    replica.apply(image_step(ROW))
    with pytest.raises(InvalidArgument, match="allocated blocks already"):
        replica.apply(image_step(replace(ROW, slot=[2], blocks=[8, 9, 10]), 4))


def test_image_of_a_replica_with_a_step_in_flight_is_refused():
    replica = waiting_replica()
    replica.apply(Step(2, 3, [Part(admit=admit_row(1))]))
    with pytest.raises(FailedPrecondition, match="in flight"):
        image_of(replica)


def test_a_resumed_running_state_is_not_proven_by_an_older_stored_key():
    """The next launch overwrites it in place, and a store may find again what it had lost."""
    sizes = {"hash_block_size": 4, "partial_hits": True, "align": AlignSpec(8, 4096, stop_at_tail=True)}
    spec = replica_spec(state(8), full(8), num_blocks=9, **sizes)
    stamps, news = [0] * spec.num_blocks, News([0], [5], tokens("aaaab"))

    def step(replica: Replica, seq: int, **sections) -> PartResult:
        (result,) = replica.apply(Step(0, seq, [Part(**sections)], executed_through=seq - 1)).parts
        for block, stamp in zip(result.orders.stamp_block, result.orders.stamp, strict=True):
            stamps[block] = stamp
        return result

    first = new_replica(spec)
    first.begin_epoch(1)
    step(first, 1, news=news, admit=Admit([0], cap=[4]))
    step(first, 2)
    stored, tables = first.entries(), first.coordinator.tables(0)
    assert len(stored) == 2, "the state and the page of four tokens"
    second = new_replica(spec)
    second.recover(2, [stamps], [])
    step(second, 1, news=news)
    step(second, 2, resume=resume_of([ResumeRow(0, 4, tables, 5)]))
    third = new_replica(spec)
    third.recover(3, [stamps], [stored])
    assert third.coordinator.pool.key_of(tables[0][0]) is None
    assert third.coordinator.pool.key_of(tables[1][0]) is not None, "an attention page only grows"


def retained_under_load() -> tuple[ReplicaSpec, Resume]:
    """A prompt of 4 of 25 tokens; a load writes 24 tokens, also those between prompt and window."""
    spec = replica_spec(prompt_and_window(5), num_blocks=20)
    row = Resume(slot=[1], computed=[24], num_prompt=[4], num_blocks=[6], blocks=[5, 6, 7, 8, 9, 10], loading=[1])
    return spec, row


@pytest.mark.parametrize("loading", [0, 1])
def test_an_image_keeps_blocks_between_prompt_and_window_while_a_load_may_write_them(loading):
    spec, row = retained_under_load()
    replica = new_replica(spec)
    replica.begin_epoch(2, STAMPS)
    replica.apply(Step(2, 1, [Part(news=News([1], [25], tokens("a" * 25)))]))
    replica.apply(image_step(replace(row, loading=[loading]), 2))
    assert replica.coordinator.tables(1) == [[5, 6, 7, 8, 9, 10] if loading else [5, 0, 0, 0, 9, 10]]


def test_an_image_keeps_no_block_that_is_retained_before_a_hole():
    """No hit can use it: such a hit needs every block from there on."""
    replica = new_replica(replica_spec(window(5, extra_retained_tokens=8), num_blocks=20))
    replica.begin_epoch(2, STAMPS)
    replica.apply(Step(2, 1, [Part(news=News([1], [25], tokens("a" * 25)))]))
    replica.apply(image_step(Resume(slot=[1], computed=[24], num_blocks=[6], blocks=[0, 0, 0, 8, 0, 10]), 2))
    assert replica.coordinator.tables(1) == [[0, 0, 0, 0, 0, 10]]
