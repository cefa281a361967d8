"""Split pages: superblocks that a state takes whole or blocks of attention share (`spec/split.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import AlignSpec, CommitRule, EvictionPolicy, ReplicaSpec, TierKind, TierSpec
from kvplane.base.step import UNLIMITED, Cache, News, Part, RemoveReason, Resume, Step
from kvplane_core.face import inspect
from kvplane_core.face.entries import Entries, KeyRun
from kvplane_core.face.interface import Hit
from kvplane_core.face.setup import SLACK
from kvplane_core.face.state import digest, export_state
from kvplane_core.spec.coordinator import Coordinator
from kvplane_core.spec.loading import load_state
from kvplane_core.spec.replica import Replica
from kvplane_core.spec.split import SCARCE, SplitPool
from tests.core.builders import (
    GRANTED,
    NEVER_FITS,
    REFUSED,
    Engine,
    admit_row,
    chunked,
    fake_digest,
    full,
    new_replica,
    replica_spec,
    ring,
    state,
    tokens,
)
from tests.core.page_campaign import long_lives
from tests.core.test_page_contents import run
from tests.twins import weakened

SIZE = 4


def split_spec(num_superblocks: int = 12, size: int = SIZE, **changes: Any) -> ReplicaSpec:
    """States of 8 tokens take `size` blocks of 2 tokens."""
    spec: dict[str, Any] = {"hash_block_size": 2, "partial_hits": True, "align": AlignSpec(8, 4096, stop_at_tail=True)}
    groups = state(8), full(2)
    return replica_spec(*groups, **{"num_blocks": num_superblocks * size, "blocks_per_state": size, **spec, **changes})


class Model:
    """A dictionary model: by superblock, its state or the blocks that are held; and what was written where.

    Memory is cells, one per block. A state is written into all cells of its superblock. A key names what was written
    when it was registered, and a stamp proves it: neither may ever name a cell that something else was written into.
    """

    def __init__(self, spec: ReplicaSpec) -> None:
        self.pool = SplitPool(spec)
        self.cells: dict[int, int] = {}
        self.written = 0
        self.states: set[int] = set()  # held
        self.blocks: set[int] = set()  # held
        self.proofs: list[tuple[int, int, dict[int, int]]] = []  # (block, stamp, cells), of each key ever registered
        self.keys: dict[bytes, tuple[bool, dict[int, int]]] = {}

    def cells_of(self, block: int, is_state: bool) -> list[int]:
        return list(range(block, block + self.pool.size)) if is_state else [block]

    def free_superblocks(self) -> int:
        used = {block // self.pool.size for block in (*self.states, *self.blocks)}
        return self.pool.num_blocks // self.pool.size - 1 - len(used)

    def num_free(self) -> int:
        others = self.pool.num_blocks - self.pool.size - self.pool.size * len(self.states)
        return others - len(self.blocks)

    def write(self, block: int, is_state: bool) -> None:
        self.written += 1
        assert is_state or block not in self.cells_under_states(), f"block {block} is under a held state"
        if is_state:
            assert block % self.pool.size == 0
            assert not self.blocks & set(self.cells_of(block, is_state=True)), f"state {block} over held blocks"
        self.cells.update(dict.fromkeys(self.cells_of(block, is_state), self.written))

    def cells_under_states(self) -> set[int]:
        return {cell for block in self.states for cell in self.cells_of(block, is_state=True)}

    def take(self, num_states: int, num_blocks: int, after: int) -> None:
        """An allocation is possible exactly if there are enough superblocks and blocks, and then succeeds."""
        pool = self.pool
        possible = num_states <= self.free_superblocks() and num_states * pool.size + num_blocks <= self.num_free()
        assert (pool.demand([num_states, num_blocks]) <= pool.num_free) == possible
        if not possible:
            return
        whole, bare = pool.free.whole.count, pool.free.bare.count
        blocks = pool.take(num_blocks, after)  # first: these must leave superblocks for the states
        assert pool.free.whole.count >= num_states
        if (bare - num_blocks) * SLACK > pool.num_blocks:
            assert pool.free.whole.count == whole, "a superblock was cut although there was much slack"
        for block in blocks:
            assert block not in self.blocks
            self.write(block, is_state=False)
        self.blocks.update(blocks)
        for block in pool.take_states(num_states):
            assert block not in self.states
            self.write(block, is_state=True)
            self.states.add(block)

    def register(self, block: int) -> None:
        is_state = block in self.states
        if self.pool.key[block] is not None:
            return
        name = self.written.to_bytes(4, "big") + block.to_bytes(12, "big")
        content = {cell: self.cells[cell] for cell in self.cells_of(block, is_state)}
        self.pool.register(block, ("", 0 if is_state else 1, name), 2)
        self.keys[name] = is_state, content
        self.proofs.append((block, self.pool.stamp[block], content))

    def release(self, block: int) -> None:
        self.pool.release([block])
        (self.states if block in self.states else self.blocks).remove(block)

    def hit(self, name: bytes) -> None:
        """A key leads to what it names, or to nothing."""
        is_state, content = self.keys[name]
        found = self.pool.find("", [0 if is_state else 1], name)
        if found is None:
            return
        (block,) = found
        held = self.states if is_state else self.blocks
        if block not in held:
            self.pool.touch([block])
            held.add(block)
        assert {cell: self.cells[cell] for cell in content} == content

    def cached(self) -> list[int]:
        return [block for block in self.pool.free if self.pool.key[block] is not None]

    def check(self) -> None:
        """Nothing that was overwritten has a key, or the stamp that proved it; counts agree."""
        for block, stamp, content in self.proofs:
            if self.pool.stamp[block] == stamp:
                assert {cell: self.cells[cell] for cell in content} == content, f"stamp {stamp} of block {block}"
        assert self.pool.num_free == self.num_free()
        assert self.pool.free.whole.count == self.free_superblocks()
        assert sorted(self.pool.free) == sorted(
            set(range(self.pool.size, self.pool.num_blocks)) - self.cells_under_states() - self.blocks
        )
        assert self.pool.is_unused == (not self.states and not self.blocks)


@given(data=st.data(), size=st.sampled_from([2, 3, 8, 34]))
def test_a_split_pool_does_what_a_dictionary_of_superblocks_does(data, size):
    model = Model(split_spec(data.draw(st.integers(2, 9)), size))
    for _ in range(data.draw(st.integers(1, 60))):
        held = sorted(model.states | model.blocks)
        match data.draw(st.sampled_from(["take", "take", "register", "release", "release", "hit", "lose", "drop"])):
            case "take":
                counts = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 2 * size))
                model.take(*counts, data.draw(st.sampled_from([0, *sorted(model.blocks)])))
            case "register" if held:
                model.register(data.draw(st.sampled_from(held)))
            case "release" if held:
                model.release(data.draw(st.sampled_from(held)))
            case "hit" if model.keys:
                model.hit(data.draw(st.sampled_from(sorted(model.keys))))
            case "lose" if cached := model.cached():
                model.pool.unregister(data.draw(st.sampled_from(cached)))  # as by a recovery from an incomplete store
            case "drop" if held:
                model.pool.drop_keys(data.draw(st.sampled_from(held)), RemoveReason.EVICTED)
        model.check()


def test_blocks_of_a_table_stay_together_and_become_whole_together():
    pool = SplitPool(split_spec(64))
    first, second = pool.take(1), pool.take(1)
    for _ in range(5):
        first += pool.take(1, first[-1])
        second += pool.take(1, second[-1])
    assert first == [4, 5, 6, 7, 12, 13]
    assert second == [8, 9, 10, 11, 16, 17]
    whole = pool.free.whole.count
    pool.release(first)
    assert pool.free.whole.count == whole + 2


def test_a_block_is_taken_from_a_cut_superblock_while_many_of_these_are_free():
    """Slack: 3 blocks are more than 1/32 of 48, so another table's block shares the superblock."""
    pool = SplitPool(split_spec(12))
    assert pool.take(1) == [4]
    assert pool.take(1) == [5]
    assert pool.take_states(1) == [8]


def keyed(pool: SplitPool, group: int, blocks: list[int]) -> list[int]:
    for block in blocks:
        pool.register(block, ("", group, fake_digest(1000 * group + block)), 2)
    return blocks


def test_what_is_cached_in_cut_superblocks_goes_first_while_few_are_whole():
    """Only then: it was used more recently than what is cached in whole ones."""
    pool = SplitPool(split_spec(16))
    first = keyed(pool, 1, pool.take(SIZE))
    pool.release(first[1:])
    assert pool.take(1) == [8]
    assert pool.take(3) == [9, 10, 11]
    pool.take_states(11)
    assert pool.free.whole.count * SCARCE == 16
    assert pool.take(4) == [*first[1:], 56]


def test_the_superblock_that_was_used_least_recently_is_evicted_for_a_state():
    pool = SplitPool(split_spec(4))
    tables = [keyed(pool, 1, pool.take(SIZE)) for _ in range(3)]
    for number in (1, 0, 2):
        pool.release(tables[number])
    pool.touch(tables[1][:1])  # used again
    pool.release(tables[1][:1])
    (taken,) = pool.take_states(1)
    assert taken == tables[0][0]
    assert [pool.key[block] for block in tables[0]] == [None] * SIZE
    assert all(pool.key[block] is not None for block in (*tables[1], *tables[2]))


# -- replicas ----------------------------------------------------------------------------------------------------------


class SplitEngine(Engine):
    """An engine on a replica with this spec."""

    def __init__(self, spec: ReplicaSpec, make: Callable[[ReplicaSpec], Replica] = new_replica) -> None:
        super().__init__(*spec.groups)
        self.spec, self.replica = spec, make(spec)


def test_a_prompt_is_hit_at_the_unit_of_the_attention_kernel():
    engine = SplitEngine(split_spec(40))
    engine.serve(0, "aabbccddee")
    engine.idle()
    assert engine.admit(1, "aabbccddeeff").hit == 8  # the state where a repeat of the first prompt continues
    assert engine.admit(2, "aabbccddeef").hit == 10  # the state at the longest hit of attention


def unused_pools(
    spec: ReplicaSpec, seed: int, make: Callable[[ReplicaSpec], Replica] = new_replica
) -> Iterator[tuple[SplitEngine, list[str]]]:
    """Play random requests with common prefixes; yield whenever all blocks are free again."""
    rng, engine, running = Random(seed), SplitEngine(spec, make), set[int]()
    texts = ["".join(rng.choices("ab", k=4)) * 8 for _ in range(3)]
    for _ in range(40):
        slot = rng.randrange(5)
        if slot not in running and rng.random() < 0.5:
            admitted = engine.admit(slot, rng.choice(texts)[: rng.randint(2, 20)])
            if admitted.status is GRANTED:
                running.add(slot)
            else:
                engine.end(slot)
        elif slot in running:
            if rng.random() < 0.3 or engine.replica.requests.num_tokens[slot] > 24:
                granted = 0
            else:
                (granted,) = engine.extend(slot, rng.choice("ab")).granted
            if not granted:
                engine.end(slot)
                running.remove(slot)
        if rng.random() < 0.1:
            engine.end(*running)
            running.clear()
            engine.idle()
            engine.idle()
            assert engine.pool.is_unused
            yield engine, [text[: rng.randint(9, 20)] for text in texts]


def test_a_request_alone_is_always_admitted(monkeypatch):
    """Also if blocks of its hit are in all superblocks, and none is whole for its states: then it has no hit."""
    given_up: list[Hit] = []
    give_up = Coordinator.give_up

    def noted(self: Coordinator, hit: Hit) -> bool:
        given_up.append(hit)
        return give_up(self, hit)

    monkeypatch.setattr(Coordinator, "give_up", noted)
    for seed in range(16):
        for engine, texts in unused_pools(split_spec(5), seed):
            for text in texts:
                assert engine.admit(0, text).status in (GRANTED, NEVER_FITS), (seed, text)
                engine.end(0)
                engine.idle()
                engine.idle()
    assert given_up


def test_an_exported_state_continues_as_the_replica():
    for seed in range(4):
        for engine, texts in unused_pools(split_spec(9), seed):
            other = load_state(engine.spec, export_state(engine.replica))
            for number, replica in enumerate((engine.replica, other)):
                engine.replica = replica
                results = [engine.admit(slot, text).table for slot, text in enumerate(texts)]
                engine.seq -= len(texts) * (1 - number)
            assert digest(engine.replica) == digest(other), results
            break


def test_a_state_of_a_pool_with_other_superblocks_is_refused():
    raw = export_state(new_replica(split_spec(12, 2, num_blocks=48)))
    with pytest.raises(InvalidArgument, match="another spec"):
        load_state(split_spec(12, 4, num_blocks=48), raw)


def test_a_load_waits_for_launches_that_use_a_superblock_under_another_number():
    def last_uses() -> list[int]:
        pool = SplitPool(split_spec(2))
        (of_state,) = pool.take_states(1)
        pool.note_use([of_state], 3)
        pool.release([of_state])
        blocks = pool.take(SIZE)
        found = [pool.last_use(blocks[2:3])]
        pool.note_use(blocks[2:3], 5)
        pool.release(blocks)
        return [*found, pool.last_use(pool.take_states(1))]

    assert last_uses() == [3, 5]
    with weakened("load over a superblock in use"):
        assert last_uses() == [0, 3]


def test_a_state_of_an_earlier_life_proves_nothing_that_was_under_it():
    """A key that a store lost could be found again later by a stamp, after a state was written over its block."""
    replica = new_replica(split_spec(6))
    shown = list(range(100, 100 + replica.spec.num_blocks))
    replica.recover(1, [shown], [], busy=[8])
    assert replica.free_blocks == 4 * SIZE
    (part,) = replica.apply(Step(1, 1, [Part(cache=Cache(loads_over=[8]))])).parts
    assert {9, 10, 11} <= set(part.orders.stamp_block)
    assert replica.coordinator.pool.is_unused


def test_stored_entries_that_share_memory_are_not_recovered():
    """Stamps of both prove them, which only a wrong stamp table can do."""
    spec = split_spec(6)
    shown = list(range(100, 100 + spec.num_blocks))

    def recovered(*rows: tuple[int, int]) -> list[int]:
        runs = [KeyRun("", group, 1) for group, _ in rows]
        blocks = [block for _, block in rows]
        hashes = b"".join(fake_digest(block + 1000 * group) for group, block in rows)
        stamps = [shown[block] for block in blocks]
        entries = Entries(32, runs, blocks, stamps, [2] * len(rows), [1] * len(rows), hashes)
        replica = new_replica(spec)
        replica.recover(1, [shown], [entries])
        inspect.check(replica)
        return [one for one in range(spec.num_blocks) if replica.coordinator.pool.key_of(one) is not None]

    assert recovered((0, 4), (1, 8), (1, 9), (1, 11)) == [4, 8, 9, 11]
    assert recovered((0, 4), (1, 7), (1, 9)) == [9]
    assert recovered((1, 4), (1, 7), (0, 4), (1, 9)) == [9]
    assert recovered((0, 5), (0, 8)) == [8]


@pytest.mark.parametrize(
    ("tables", "held", "busy"),
    [
        ([[0, 9], [4, 5, 6]], [], []),  # a state that begins no superblock
        ([[0, 8], [4, 9, 6]], [], []),  # a block of attention under the state
        ([[0, 8], [4, 5, 6]], [10], []),
        ([[0, 8], [4, 5, 6]], [], [10]),
    ],
)
def test_an_image_in_which_blocks_share_memory_is_refused(tables, held, busy):
    spec = replace(split_spec(6), groups=(state(8), full(4)), hash_block_size=4, partial_hits=False)
    replica = new_replica(spec)
    replica.begin_epoch(2, [0, *range(1 << 32, (1 << 32) + 23)], busy)
    part = Part(news=News([1, 2], [12, 4], tokens("a" * 16)))
    replica.apply(Step(2, 1, [part]))
    blocks = [block for table in tables for block in table]
    resume = Resume([1], computed=[10], num_blocks=[2, 3], blocks=blocks)
    if held:
        resume = replace(resume, held_slot=[4], held_count=[1], held_blocks=held)
    before = digest(replica)
    with pytest.raises(InvalidArgument) as refused:
        replica.apply(Step(2, 2, [Part(resume=resume)]))
    assert refused.value.field == "parts[0].resume.blocks"
    assert digest(replica) == before
    resume = Resume([1], computed=[10], num_blocks=[2, 3], blocks=[0, 12, 4, 5, 6])
    replica.apply(Step(2, 2, [Part(resume=resume)]))
    inspect.check(replica)


@pytest.mark.parametrize(
    ("held", "others"),  # by slot; how many other blocks of superblock 8 to 11 can be allocated
    [([[8]], 0), ([[9]], 3), ([[8, 10]], 2), ([[8], [10]], 2), ([[10], [8]], 2), ([[8], [8]], 0)],
)
def test_a_held_block_of_an_image_that_may_be_a_state_keeps_its_superblock(held, others):
    """No image says whether a held block is a state. If it is one, the rest of its superblock is written with it."""
    replica = new_replica(split_spec(6))
    replica.begin_epoch(2, [0, *range(1 << 32, (1 << 32) + 23)])
    slots, blocks = list(range(len(held))), [block for one in held for block in one]
    resume = Resume(held_slot=slots, held_count=[len(one) for one in held], held_blocks=blocks)
    replica.apply(Step(2, 1, [Part(resume=resume)]))
    inspect.check(replica)
    assert replica.free_blocks == 4 * SIZE + others
    replica.apply(Step(2, 2, [Part(cache=Cache(released=slots))], executed_through=1))
    inspect.check(replica)
    assert replica.free_blocks == 5 * SIZE
    assert replica.coordinator.pool.is_unused


# A mix and a seed that find each planted fault.
FOUND: dict[str, tuple[Callable[[str, int], object], str, int]] = {
    "keys under a state": (long_lives, "split pages", 0),
    "stamps under a state": (long_lives, "split pages", 0),
    "stamp of a divided state": (long_lives, "split pages", 2),
    "stamps of an ended life": (run, "split pages, drafts and windows", 1045),
}


@pytest.mark.parametrize("twin", FOUND)
def test_a_planted_fault_of_split_pages_is_found(twin):
    play, mix, seed = FOUND[twin]
    play(mix, seed)
    with weakened(twin), pytest.raises(AssertionError):
        play(mix, seed)


def test_loads_of_a_dead_engine_into_a_state_and_a_block_under_it_are_both_awaited():
    """The load of the block had ended; that of the state was still writing, and the block was handed out."""
    long_lives("split pages, drafts and windows", 67)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_blocks": 47}, "blocks_per_state"),
        ({"num_blocks": 4}, "blocks_per_state"),
        ({"blocks_per_state": 0}, "blocks_per_state"),
        ({"eviction": EvictionPolicy.HAZARD}, "eviction"),
        ({"commit": CommitRule.REFERENCE}, "commit"),
        ({"tiers": (TierSpec(TierKind.HOST, 8),)}, "tiers"),
        ({"groups": (state(8), ring(2))}, "groups[1].kind"),
        ({"groups": (state(8), full(2), chunked(8, 2))}, "groups[2].kind"),
        ({"groups": (state(8), state(8))}, "blocks_per_state"),
        ({"groups": (full(2), full(2))}, "blocks_per_state"),
    ],
)
def test_settings_that_split_pages_do_not_allow_are_refused_by_name(changes, field):
    with pytest.raises(InvalidArgument) as refused:
        new_replica(replace(split_spec(), **changes))
    assert refused.value.field == field


def test_a_state_without_a_whole_superblock_needs_more_than_any_number_of_blocks():
    pool: dict[str, Any] = {"num_blocks": 24, "blocks_per_state": SIZE, "hash_block_size": 2, "partial_hits": True}
    engine = Engine(state(8), full(2), **pool, align=AlignSpec(8, 4096, stop_at_tail=True))
    while (refused := engine.admit(engine.seq, "abcdef"[engine.seq] * 6)).status is GRANTED:
        assert not engine.last[0].admit_needed
    assert refused.status is REFUSED
    assert engine.num_free
    assert engine.last[0].admit_needed == [UNLIMITED]
    waiting = engine.seq - 1
    engine.end(0)
    assert engine.step(Part(admit=admit_row(waiting)))[0].admit_status == [GRANTED]
