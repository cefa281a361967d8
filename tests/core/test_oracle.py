"""Random operations on a replica and on the oracle side by side.

Hits, tables, references, keys and the free order are equal after each operation, the invariants hold, equal operations
give equal digests, and a refusal leaves the digest as it was.
"""

from __future__ import annotations

import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import AlignSpec
from kvplane.base.step import AdmitStatus, Facts, Part, RowFlag, Step
from kvplane_core.face.state import digest as state_digest
from kvplane_core.spec.replica import Replica
from tests.core.builders import (
    GRANTED,
    REFERENCE,
    SAFE,
    Engine,
    chunked,
    full,
    most_drafts,
    prompt_and_window,
    ring,
    state,
    window,
)
from tests.core.oracle import Oracle, Request

SLOTS = st.integers(0, 3)
# Few texts that share much, so that hits, evictions and duplicates are common.
HEADS = st.sampled_from(["", "aaaa", "aaaabbbb", "aaaabbbbcccc"])
TEXTS = st.builds(str.__add__, HEADS, st.text("ab", min_size=1, max_size=9))
WINDOWS = st.lists(st.sampled_from([None, None, 4, 6]), min_size=1, max_size=3)  # None: full attention
CAPS = st.sampled_from([1, 3, 4, 7, 100])


class Recording(Engine):
    """Keeps every step, so that all can be played again."""

    def __init__(self, *groups, **changes):
        super().__init__(*groups, **changes)
        self.steps = []

    def step(self, *parts):
        sent = copy.deepcopy(parts)
        answer = super().step(*parts)
        self.steps.append((self.seq, self.seq - 1 if self.executed is None else self.executed, sent))
        return answer

    def replayed(self):
        replica = Replica(self.spec)
        for seq, executed, parts in self.steps:
            replica.apply(Step(0, seq, list(parts), executed_through=executed))
        return replica


class Operations(RuleBasedStateMachine):
    """The operations of both machines; `engine` is set by their first rule."""

    engine: Recording

    def live(self, slot):
        return self.engine.replica.requests.is_live(slot)

    def runs(self, slot):
        return self.engine.replica.requests.running[slot]

    @rule(slot=SLOTS)
    def end(self, slot):
        if self.live(slot):
            self.engine.end(slot)
            self.left(slot)
            self.gone(slot)

    @rule(slot=SLOTS)
    def preempt(self, slot):
        if self.live(slot):
            self.engine.preempt(slot)
            self.left(slot)

    @rule(blocks=st.lists(st.integers(1, 9), max_size=2, unique=True))
    def evict(self, blocks):
        inside = [block for block in blocks if block < self.engine.spec.num_blocks]
        self.engine.cache(evicted=inside)
        self.evicted(inside)

    @rule()
    def reset(self):
        self.was_reset(self.engine.cache(reset=True).reset_done)

    @rule(part=st.sampled_from([Part(facts=Facts([77])), Part(facts=Facts([0], appended=[1], tokens=[1, 2]))]))
    def refused_step(self, part):
        before = self.engine.digest
        with pytest.raises(InvalidArgument):
            self.engine.replica.apply(Step(0, self.engine.seq + 1, [Part(), part]))
        assert self.engine.digest == before

    def teardown(self):
        if hasattr(self, "engine"):
            assert state_digest(self.engine.replayed()) == self.engine.digest

    def left(self, slot):
        pass

    def gone(self, slot):
        pass

    def evicted(self, blocks):
        pass

    def was_reset(self, done):
        pass


class AgainstOracle(Operations):
    @initialize(
        windows=st.lists(st.sampled_from([None, None, 4, 6]), min_size=1, max_size=3), num_blocks=st.integers(6, 30)
    )
    def begin(self, windows, num_blocks):
        groups = [full() if tokens is None else window(tokens, lookup_class=tokens) for tokens in windows]
        self.engine = Recording(*groups, num_blocks=num_blocks)
        self.oracle = Oracle(windows, num_blocks, size=4)

    @rule(slot=SLOTS, text=TEXTS, cap=CAPS)
    def admit(self, slot, text, cap):
        if self.live(slot) and self.runs(slot):
            return
        known = self.live(slot)
        if not known:
            self.oracle.requests[slot] = Request(text)
        done = self.engine.admit(slot, None if known else text, cap=cap)
        assert done.hit == len(self.oracle.hit(self.oracle.requests[slot].text)[0]) * 4 or done.status is not GRANTED
        assert (done.status is GRANTED) == self.oracle.admit(slot, cap)

    @rule(slot=SLOTS, letters=st.text("ab", max_size=5), cap=CAPS)
    def extend(self, slot, letters, cap):
        if not self.live(slot) or not self.runs(slot):
            return
        self.oracle.requests[slot].text += letters
        assert self.engine.extend(slot, letters, cap=cap).granted == [self.oracle.run(slot, cap)]

    @rule(text=TEXTS)
    def look_up(self, text):
        blocks = [[block.number if block else 0 for block in table] for table in self.oracle.hit(text)]
        assert list(self.engine.would_hit(text).blocks) == blocks
        assert self.engine.outside(text) == len(blocks[0]) * 4

    def left(self, slot):
        self.oracle.leave(slot)

    def gone(self, slot):
        del self.oracle.requests[slot]

    def evicted(self, blocks):
        self.oracle.evict([self.oracle.blocks[number] for number in blocks])

    def was_reset(self, done):
        assert done == self.oracle.reset()

    @precondition(lambda self: hasattr(self, "engine"))
    @invariant()
    def equal(self):
        pool, oracle = self.engine.pool, self.oracle
        assert self.engine.free_order == [block.number for block in oracle.free]
        assert pool.references == [block.references for block in oracle.blocks]
        assert self.engine.keyed() == [block.number for block in oracle.blocks if block.key is not None]
        for slot, request in oracle.requests.items():
            tables = [[block.number if block else 0 for block in table] for table in request.tables]
            assert [table for table in self.engine.replica.coordinator.tables(slot) if table] == [
                t for t in tables if t
            ]
            assert self.engine.computed(slot) == request.computed


DRAFTS = st.integers(0, 2)
KINDS = {
    "window": window(6),
    "chunk": chunked(8),
    "state": state(),
    "drafts": state(speculative_blocks=2),
    "ring": ring(),
    "gap": prompt_and_window(4),
    "full": full(),
}


class AnyKinds(Operations):
    """Mixed kinds, several steps in flight, both commit rules: what must hold without knowing the outcome."""

    @initialize(
        names=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3, unique=True),
        num_blocks=st.integers(8, 40),
        rule=st.sampled_from([SAFE, REFERENCE]),
        retention=st.sampled_from([-1, 0]),
    )
    def begin(self, names, num_blocks, rule, retention):
        changes = {"commit": rule, "retention_interval": retention, "align": AlignSpec(4, 4096)}
        self.engine = Recording(*(KINDS[name] for name in names), num_blocks=num_blocks, **changes)
        self.engine.executed = 0

    @rule(slot=SLOTS, text=TEXTS, cap=CAPS, flags=st.sampled_from([0, RowFlag.UNALIGNED, RowFlag.FULL_FIT]))
    def admit(self, slot, text, cap, flags):
        known = self.live(slot)
        if not known or not self.runs(slot):
            done = self.engine.admit(slot, None if known else text, cap=cap, flags=flags)
            assert done.hit < len(text) or known
            assert done.status is not AdmitStatus.NOT_REACHED

    @rule(
        slots=st.lists(SLOTS, min_size=1, unique=True),
        letters=st.text("ab", min_size=4, max_size=4),
        extra=st.integers(0, 2),
    )
    def run_all(self, slots, letters, extra):
        running = [slot for slot in slots if self.live(slot) and self.runs(slot)]
        if running:
            before, most = self.engine.num_free, most_drafts(self.engine.spec)
            done = self.engine.run(*running, text=letters[: len(running)], extra=min(extra, most), on_refusal=2 + 1)
            assert all(not done.granted[running.index(slot)] for slot in done.preempted if slot in running)
            assert done.preempted or self.engine.num_free <= before + 20

    @rule(slot=SLOTS, drafts=DRAFTS)
    def reject_drafts(self, slot, drafts):
        if self.live(slot) and self.runs(slot):
            known = self.engine.replica.requests.num_tokens[slot]
            self.engine.fact(slot, computed=max(known - drafts, 1) if self.engine.computed(slot) > known else known)

    @rule(behind=st.integers(0, 3))
    def execute(self, behind):
        self.engine.executed = max(self.engine.executed or 0, self.engine.seq - behind)
        self.engine.idle()

    @rule(behind=st.integers(0, 2))
    def fail(self, behind):
        failed = self.engine.seq - behind
        if failed > (self.engine.executed or 0) and failed > 0:
            self.engine.cache(failed_steps=[failed])
            keys = [self.engine.pool.key_step[block] for block in self.engine.keyed()]
            assert failed not in keys or self.engine.spec.commit is REFERENCE


TestAgainstOracle = AgainstOracle.TestCase
TestAgainstOracle.settings = settings(stateful_step_count=30)
TestAnyKinds = AnyKinds.TestCase
TestAnyKinds.settings = settings(stateful_step_count=30)
