"""A remembered refusal equals the one that a new look-up gives: decisions do not depend on the memory of refusals."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplane.base.groups import AlignSpec, GroupSpec
from kvplane.base.step import Budget, End, Facts, OnRefusal, Part, RowFlag, Watermark
from kvplane_service.core import refusals
from kvplane_service.core.coordinator import Coordinator
from kvplane_service.core.refusals import Refusals
from kvplane_service.core.step_applier import StepApplier
from tests.core.builders import (
    GRANTED,
    NO_ROOM,
    REFUSED,
    Engine,
    admit_row,
    chunked,
    full,
    ring,
    run_rows,
    state,
    tokens,
    window,
)
from tests.core.test_page_contents import ALL_MIXES, run

SKIP = OnRefusal.SKIP
REUSED = Counter[str]()
GROUPS: dict[str, tuple[list[GroupSpec], dict[str, Any]]] = {
    "full": ([full()], {}),
    "hits inside blocks": ([full(8), full(4, lookup_class=5)], {"hash_block_size": 4, "partial_hits": True}),
    "window and full": ([window(6), full()], {"retention_interval": 0}),
    "windows": ([window(6), window(10, lookup_class=8)], {}),
    "chunks": ([chunked(8), full(lookup_class=5)], {}),
    "states": ([state(), full()], {"align": AlignSpec(4, 4096)}),
    "states alone": ([state()], {"align": AlignSpec(4, 4096)}),
    "drafts": ([full(), window(6, is_draft=True, drops_last_block=True)], {}),
    "rings": ([full(), ring()], {}),
}


def grow(engine, slot, text):
    """Tokens join a request that waits."""
    engine.step(Part(facts=Facts([slot], appended=[len(text)], tokens=tokens(text))))


@pytest.fixture
def answered_twice(monkeypatch):
    """Each refusal from memory is held against the one that is given without."""
    remembered = StepApplier._refused_before

    def compare(self, row, at):
        refused, status = self._blocks.pool.refusals.find(row.slot), remembered(self, row, at)
        if status is not None:
            REUSED[status.name] += 1
            result, slot = self._result, row.slot
            column = self._requests.single_group_hit
            remembered_answer = status, result.admit_hit[at], result.admit_single_group_hit[at], column[slot]
            unaligned = self.unaligned_chunks
            again = self._admit_row(row, at)
            assert remembered_answer == (again, result.admit_hit[at], result.admit_single_group_hit[at], column[slot])
            assert unaligned == self.unaligned_chunks
        if refused is not None and refused.finds(row.hit_limit, self._asked(row.slot)):
            assert refused.hit == self._blocks.find_hit(row.slot, row.hit_limit)
        return status

    monkeypatch.setattr(StepApplier, "_refused_before", compare)


class Queue:
    """An engine that offers all that waits in every step, and does a little of everything else."""

    def __init__(self, seed, groups, **changes):
        self.rng = Random(seed)
        self.engine = Engine(*groups, num_blocks=self.rng.choice([8, 12, 20]), max_model_len=64, **changes)
        self.waiting, self.running, self.free = [], [], list(range(16))

    def step(self):
        engine, rng = self.engine, self.rng
        if self.free and rng.random() < 0.5:
            self.waiting.append(self.free.pop())
            prefix = rng.choice(["aaaa", "aaaabbbb", "aaaabbbbcccc", "dddd", ""])
            engine.add(self.waiting[-1], prefix + rng.choice("ef") * rng.randint(1, 24))
        if self.running and rng.random() < 0.3:
            slot = self.running.pop(rng.randrange(len(self.running)))
            if rng.random() < 0.7:
                engine.end(slot)
                self.free.append(slot)
            else:
                engine.preempt(slot)
                self.waiting.append(slot)
        if rng.random() < 0.1:
            engine.cache(evicted=[rng.randrange(1, engine.replica.spec.num_blocks)])
        if self.waiting and rng.random() < 0.1:
            grow(engine, rng.choice(self.waiting), "e")
        if self.running:
            engine.step(Part(run=run_rows(*self.running, on_refusal=OnRefusal.SKIP)))
        self.offer()

    def offer(self):
        if not self.waiting:
            return
        rng, columns = self.rng, {}
        if rng.random() < 0.3:
            name, value = rng.choice([
                ("watermark", int(Watermark.ALWAYS)), ("reserved", 1), ("lookahead", 2), ("cap", 8),
                ("expected_hit", 4), ("flags", int(RowFlag.FULL_FIT)), ("flags", int(RowFlag.UNALIGNED)), ("extra", 1),
            ])  # fmt: skip
            columns[name] = value
        budget = Budget(tokens=rng.choice([6, 40, 1000, 1000, 1000]))
        part = Part(admit=admit_row(*self.waiting, on_refusal=SKIP, **columns), budget=budget)
        result = self.engine.step(part)[0]
        for slot, status in zip(list(self.waiting), result.admit_status, strict=True):
            if status == GRANTED:
                self.waiting.remove(slot)
                self.running.append(slot)


@pytest.mark.parametrize("name", GROUPS)
def test_remembered_refusals_equal_new_ones_for_a_queue(name, answered_twice):
    groups, changes = GROUPS[name]
    before = REUSED.total()
    for seed in range(25):
        queue = Queue(seed, groups, **changes)
        for _ in range(40):
            queue.step()
    assert REUSED.total() > before + 300, "memory was hardly used, so this proves nothing"


@pytest.mark.parametrize("forgets", ["forget_keys", "forget_blocks"])
def test_refusals_that_are_never_forgotten_are_caught(forgets, answered_twice, monkeypatch):
    monkeypatch.setattr(Refusals, forgets, lambda *_: None)

    def work():
        for seed in range(200):
            queue = Queue(seed, [full()])
            for _ in range(40):
                queue.step()

    with pytest.raises(AssertionError):
        work()


@pytest.mark.parametrize("mix", ALL_MIXES)
def test_remembered_refusals_equal_new_ones_for_random_engines(mix, answered_twice):
    for seed in range(25):
        run(mix, seed)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), name=st.sampled_from(sorted(GROUPS)))
def test_replicas_with_and_without_remembered_refusals_decide_alike(seed, name):
    groups, changes = GROUPS[name]
    one, other = Queue(seed, groups, **changes), Queue(seed, groups, **changes)
    other.engine.pool.refusals.note = lambda *_: None
    for _ in range(30):
        one.step()
        other.step()
        assert one.engine.digest == other.engine.digest


class TestRefusalIsForgotten:
    """A pool of 8 blocks, of which a running request has 6; "aaaa..." waits for 5."""

    @pytest.fixture
    def looks(self, monkeypatch):
        looks, find = [], Coordinator.find_hit

        def counted(self, slot, limit):
            looks.append(slot)
            return find(self, slot, limit)

        monkeypatch.setattr(Coordinator, "find_hit", counted)
        return looks

    @pytest.fixture
    def engine(self):
        engine = Engine(full(), num_blocks=9)
        engine.admit(0, "x" * 24)
        engine.add(1, "a" * 20)
        return engine

    def offer(self, engine, *slots, budget=None, **columns):
        part = Part(admit=admit_row(*slots or (1,), on_refusal=SKIP, **columns), budget=budget or Budget())
        return [int(status) for status in engine.step(part)[0].admit_status]

    def test_an_unchanged_replica_repeats_the_refusal_without_a_lookup(self, engine, looks):
        for _ in range(4):
            assert self.offer(engine) == [REFUSED]
        assert looks == [1]

    def test_steps_of_other_requests_keep_the_refusal(self, engine, looks):
        self.offer(engine)
        engine.run(0, text="x")
        engine.admit(2, "zz")
        looks.clear()
        assert self.offer(engine) == [REFUSED]
        assert not looks

    @pytest.mark.parametrize(
        "columns", [{"cap": 4}, {"lookahead": 1}, {"reserved": 1}, {"flags": int(RowFlag.FULL_FIT)}, {"watermark": 2}]
    )
    def test_changed_columns_need_a_new_lookup(self, engine, looks, columns):
        self.offer(engine)
        looks.clear()
        self.offer(engine, **columns)
        assert looks == [1]

    def test_reserved_and_cap_are_distinct_in_a_refusal(self, engine):
        assert self.offer(engine, reserved=7) == [REFUSED]
        assert self.offer(engine, cap=7) == [GRANTED]

    def test_freed_blocks_end_the_refusal(self, engine):
        self.offer(engine)
        engine.end(0)
        assert self.offer(engine) == [GRANTED]

    def test_a_newly_cached_prefix_ends_the_refusal(self, engine):
        self.offer(engine)
        engine.admit(2, "a" * 8)
        assert engine.step(Part(admit=admit_row(1, on_refusal=SKIP)))[0].admit_hit == [8]

    def test_an_evicted_hit_ends_the_refusal(self, engine):
        engine.serve(2, "a" * 8)
        assert engine.step(Part(admit=admit_row(1, on_refusal=SKIP)))[0].admit_hit == [8]
        engine.cache(evicted=list(engine.keyed()))
        assert engine.step(Part(admit=admit_row(1, on_refusal=SKIP)))[0].admit_hit == [0]

    def test_a_hit_adopted_by_another_request_ends_the_refusal(self, engine):
        """Adopting a block that someone holds takes nothing from the free ones."""
        engine.end(0)
        engine.admit(0, "x" * 15)
        engine.serve(2, "a" * 8)
        assert self.offer(engine) == [REFUSED]
        engine.admit(3, "a" * 9, watermark=int(Watermark.NEVER))
        assert engine.num_free < 5 - 2
        engine.end(0)
        assert self.offer(engine) == [GRANTED]

    def test_appended_tokens_end_the_refusal(self, engine, looks):
        self.offer(engine)
        grow(engine, 1, "aaaa")
        looks.clear()
        self.offer(engine)
        assert looks == [1]

    def test_another_request_in_the_slot_ends_the_refusal(self, engine):
        self.offer(engine)
        engine.end(1)
        engine.add(1, "a" * 4)
        assert self.offer(engine) == [GRANTED]

    def test_a_smaller_budget_ends_the_refusal(self, engine):
        self.offer(engine)
        assert self.offer(engine, budget=Budget(tokens=4)) == [GRANTED]

    def test_a_refusal_limited_by_the_budget_is_not_remembered(self, engine, looks):
        engine.admit(2, "yyyyy")
        for _ in range(2):
            assert self.offer(engine, budget=Budget(tokens=10)) == [REFUSED]
        assert looks.count(1) == 2
        whole = int(RowFlag.WHOLE)
        self.offer(engine, flags=whole)
        assert self.offer(engine, flags=whole, budget=Budget(tokens=10)) == [NO_ROOM]

    def test_an_idle_replica_ends_a_refusal_by_the_watermark(self):
        """The watermark counts only while other requests run."""
        engine = Engine(full(), num_blocks=9, watermark_blocks=4)
        engine.add(1, "a" * 20)
        engine.admit(0, "x" * 4)
        assert self.offer(engine) == [REFUSED]
        engine.end(0, how=End.HELD)
        assert self.offer(engine) == [GRANTED]

    def test_remembered_refusals_are_bounded_per_pool(self, engine, monkeypatch):
        monkeypatch.setattr(refusals, "MOST_WATCHED_OF_ALL", 2)
        for _ in range(2):
            assert self.offer(engine) == [REFUSED]
        assert not engine.pool.refusals.by_digest

    def test_a_refusal_with_a_long_lookup_is_not_remembered(self, engine, looks, monkeypatch):
        monkeypatch.setattr(refusals, "MOST_WATCHED", 2)
        for _ in range(2):
            assert self.offer(engine) == [REFUSED]
        assert looks == [1, 1]
