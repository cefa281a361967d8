"""A replica's journal: the store always has enough to recover all published keys, and the log is bounded."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.base.groups import AlignSpec
from kvplane.base.step import Part, RowFlag, Step
from kvplane_core.face import inspect
from kvplane_core.spec.replica import Replica
from kvplane_service.decisions.log import Decision, Life
from kvplane_service.store import journal
from kvplane_service.store.errors import LogSuperseded
from kvplane_service.store.interface import BlockingStore, LogName, StoredChunk
from kvplane_service.store.journal import Past, ReplicaJournal
from kvplane_service.store.memory import MemoryStore
from tests.core.builders import GRANTED, Engine, full, state, window
from tests.store.contract import load_log

LOG = LogName("r", b"n" * 16, 1)
PROMPT = "aaaabbbbccccd"


class Journaled(Engine):
    """An engine whose steps a journal records, and the store that it writes to."""

    def __init__(self, *groups, max_entries=100_000, **changes):
        super().__init__(*groups, **changes)
        self.now_ns = 0
        self.checks = self.spec.num_blocks < 1000
        self.store: BlockingStore = MemoryStore()
        self.max_entries = max_entries
        self.journal = self.new_journal()

    def new_journal(self):
        return ReplicaJournal(LOG, self.replica, self.max_entries, lambda: self.now_ns)

    def step(self, *parts: Part):
        self.seq += 1
        done = self.seq - 1 if self.executed is None else self.executed
        step = Step(0, self.seq, list(parts), executed_through=done)
        result = self.replica.apply(step)
        self.journal.note(Decision(step, result, tuple(part.events for part in result.parts), 0, 0))
        if self.checks:
            inspect.check(self.replica)
        self.last = result.parts
        return self.last

    def flush(self) -> int:
        """Write all pending changes; returns the number of chunks."""
        for count in itertools.count():
            batch = self.journal.take()
            if batch is None:
                return count
            try:
                kept = self.store.append(batch.log, batch.chunk, batch.trim_below)
            except LogSuperseded as error:
                self.journal.restart_above(error.number)
            else:
                self.journal.wrote(batch, kept)
        raise AssertionError

    def restart(self) -> None:
        """A new process: the core is recovered from the store, and the journal continues."""
        table = list(self.pool.stamp)
        loaded = load_log(self.store, LOG)
        self.replica = Replica(self.spec)
        self.replica.recover(self.pool.epoch + 2, [table], loaded.entries())
        inspect.check(self.replica)
        self.journal = self.new_journal()
        self.journal.resume(Past.of(loaded.chunks))
        self.seq = 0

    @property
    def stored_bytes(self) -> int:
        return self.store.size_bytes(LOG)


def logs_of(engine):
    assert isinstance(engine.store, MemoryStore)
    return engine.store.logs


def test_published_keys_are_written_and_unexecuted_ones_are_not():
    engine = Journaled(full())
    engine.executed = 0
    engine.admit(0, PROMPT)
    assert engine.journal.take() is None
    engine.executed = 1
    engine.idle()
    assert engine.flush() == 1
    (entries,) = load_log(engine.store, LOG).entries()
    assert sorted(entries.block) == [1, 2, 3]
    assert engine.flush() == 0, "nothing is written twice"


def test_a_restart_recovers_every_published_prefix():
    engine = Journaled(full(), window(8))
    for slot, prompt in enumerate((PROMPT, "aaaabbbbeeeef", "zzzzzzzzz")):
        engine.serve(slot, prompt)
    engine.idle()
    engine.flush()
    engine.restart()
    assert [engine.outside(text) for text in (PROMPT, "aaaabbbbeeeef", "zzzzzzzzz")] == [12, 12, 8]


def test_an_evicted_block_is_written_as_unkeyed_once():
    engine = Journaled(full(), num_blocks=6)
    engine.serve(0, PROMPT)
    engine.idle()
    engine.flush()
    engine.admit(1, "z" * 17)
    engine.flush()
    newest = load_log(engine.store, LOG).entries()[0]
    assert len(newest.unkeyed_block) == 3
    engine.end(1)
    engine.idle()
    engine.flush()
    assert engine.flush() == 0


def test_an_unwritten_block_is_not_written_as_unkeyed():
    engine = Journaled(full())
    engine.admit(0, "abc")
    engine.end(0)
    assert engine.flush() == 0
    assert not engine.journal.has_work


def test_many_changes_of_one_block_are_written_once():
    engine = Journaled(full(), num_blocks=5)
    for slot in range(20):
        engine.serve(slot, chr(97 + slot) * 13)
    engine.idle()
    engine.flush()
    assert engine.journal.written.rows <= 4


def test_the_latest_entry_of_a_state_that_moved_to_another_page():
    aligned = AlignSpec(8, 4096, stop_at_tail=True)
    engine = Journaled(full(8), state(8), partial_hits=True, hash_block_size=4, scheduler_block_size=8, align=aligned)
    engine.admit(0, "aaaaaaaabbbbcde")
    while engine.computed(0) < 12:
        engine.run(0)
    engine.idle()
    engine.flush()
    before = engine.keyed()
    engine.run(0)
    engine.idle()
    moved = engine.keyed()
    assert (before, moved) == ([1, 2, 3, 4], [1, 2, 3, 5]), "the state of 12 tokens moves to a copy"
    engine.flush()
    engine.restart()
    assert (engine.keyed(), engine.outside("aaaaaaaabbbbx")) == (moved, 12)


def test_take_repeats_a_batch_until_it_is_written():
    engine = Journaled(full())
    engine.serve(0, PROMPT)
    engine.idle()
    batch = engine.journal.take()
    engine.serve(1, "zzzzz")
    engine.idle()
    assert engine.journal.take() is batch
    engine.journal.wrote(batch, 1)
    assert engine.journal.take().chunk.seq == 2


def test_lag_is_counted_and_timed():
    engine = Journaled(full())
    engine.now_ns = 50
    assert (engine.journal.lag.entries, engine.journal.lag.waiting_ns) == (0, 0)
    engine.serve(0, PROMPT)
    engine.idle()
    engine.now_ns = 80
    assert (engine.journal.lag.entries, engine.journal.lag.waiting_ns) == (3, 30)
    batch = engine.journal.take()
    assert engine.journal.lag.entries == 3, "taken is not written"
    engine.journal.wrote(batch, 1)
    assert (engine.journal.lag.entries, engine.journal.lag.waiting_ns) == (0, 0)


def test_too_many_changes_are_shed_and_written_by_a_resync():
    engine = Journaled(full(), max_entries=4)
    engine.serve(0, PROMPT)
    engine.idle()
    assert not engine.journal.lag.shed
    engine.serve(1, "zzzzyyyyx")
    engine.idle()
    assert engine.journal.lag.shed
    engine.serve(2, "wwwwvvvvu")
    engine.idle()
    assert engine.journal.lag.entries == 0, "nothing is recorded meanwhile"
    engine.flush()
    assert engine.journal.written.resyncs == 1
    assert not engine.journal.lag.shed
    engine.restart()
    assert [engine.outside(text) for text in (PROMPT, "zzzzyyyyx", "wwwwvvvvu")] == [12, 8, 8]


def test_a_step_in_flight_during_shedding_is_written_when_executed():
    engine = Journaled(full(), max_entries=2)
    engine.serve(0, PROMPT)
    engine.executed = engine.seq
    engine.admit(1, "zzzzyyyyx")
    assert engine.journal.lag.shed
    engine.flush()
    engine.executed = engine.seq
    engine.idle()
    engine.flush()
    engine.restart()
    assert [engine.outside(text) for text in (PROMPT, "zzzzyyyyx")] == [12, 8]


@pytest.mark.parametrize("lost", [slice(None), slice(-1, None), slice(0, 1)], ids=["all", "the last", "the first"])
def test_lost_chunks_are_written_again(lost):
    engine = Journaled(full())
    for slot, prompt in enumerate(("aaaab", "ccccd", "eeeef")):
        engine.serve(slot, prompt)
        engine.idle()
        engine.flush()
    chunks = logs_of(engine)[LOG]
    for seq in sorted(chunks)[lost]:
        del chunks[seq]
    engine.serve(3, "ggggh")
    engine.idle()
    engine.flush()
    engine.restart()
    assert [engine.outside(text) for text in ("aaaab", "ccccd", "eeeef", "ggggh")] == [4, 4, 4, 4]


def test_new_page_memory_starts_a_new_log():
    engine = Journaled(full())
    engine.serve(0, PROMPT)
    engine.idle()
    batch = engine.journal.take()
    new = LogName("r", b"n" * 16, 2)
    assert engine.journal.switch(new) == LOG
    engine.journal.wrote(batch, 1)
    assert engine.journal.take() is None
    engine.replica.begin_epoch(3)
    engine.journal.note_life(Life(1, (), engine.replica.take_events(), 0))
    engine.seq, engine.executed = 0, None
    engine.serve(0, PROMPT)
    engine.idle()
    assert engine.journal.take().log == new


@pytest.mark.parametrize(("theirs", "after"), [(10, 50), (60, 50)], ids=["below", "above"])
def test_chunks_of_another_service_in_the_same_log_hide_no_chunk(theirs, after):
    """Another service wrote for this memory, and its log was never read here."""
    engine = Journaled(full())
    log = LogName("r", b"n" * 16, 2)
    for seq in range(1, theirs + 1):
        engine.store.append(log, StoredChunk(seq, b"theirs"), 0)
    engine.journal.switch(log, after)
    engine.serve(0, PROMPT)
    engine.idle()
    for _ in range(2):
        engine.flush()
    assert sorted(load_log(engine.store, log).entries()[0].block) == [1, 2, 3]


def test_a_late_chunk_of_the_previous_process_hides_no_chunk():
    """It was appended after the next process had read the log."""
    engine = Journaled(full())
    engine.serve(0, PROMPT)
    engine.idle()
    engine.flush()
    engine.restart()
    engine.store.append(LOG, StoredChunk(max(logs_of(engine)[LOG]) + 1, b"late"), 0)
    engine.serve(1, "eeeeffffg")
    engine.idle()
    for _ in range(2):
        engine.flush()
    engine.restart()
    assert [engine.outside(text) for text in (PROMPT, "eeeeffffg")] == [12, 8]


@pytest.mark.parametrize("most", [2, 3], ids=["by a resync", "one by one"])
def test_an_engine_life_without_keys_removes_all_entries(most, monkeypatch):
    monkeypatch.setattr(journal, "_MAX_LOST", most)
    engine = Journaled(full())
    engine.serve(0, PROMPT)
    engine.idle()
    engine.flush()
    engine.replica.begin_epoch(1)
    engine.journal.note_life(Life(1, (), engine.replica.take_events(), 0))
    assert engine.journal.written.resyncs == (most == 2)
    engine.flush()
    assert sorted(load_log(engine.store, LOG).entries()[0].unkeyed_block) == [1, 2, 3]


def test_a_resync_of_a_large_pool_pauses_in_unchanged_ranges(monkeypatch):
    monkeypatch.setattr(journal, "_MAX_LOOKS", 2)
    engine = Journaled(full(), num_blocks=5 * journal.CHUNK_ROWS)
    engine.journal.resync()
    looks = 0
    while engine.journal.has_work:
        assert engine.journal.take() is None
        looks += 1
    assert looks == 3


def test_the_log_length_is_bounded():
    """Rows of 52 bytes, 900 live blocks: the log is at most twice its live entries, and has all of them."""
    engine = Journaled(full(), num_blocks=4001)
    longest = 0
    for turn in range(400):
        engine.serve(turn % 8, f"{turn % 260:04d}" * 50)
        if turn % 3 == 0:
            engine.flush()
            longest = max(longest, engine.stored_bytes)
    engine.idle()
    engine.flush()
    live = len(engine.keyed())
    assert live > 3000
    assert longest < 2 * live * 52
    keyed = engine.keyed()
    engine.restart()
    assert engine.keyed() == keyed
    engine.serve(9, "another prompt that is new")
    engine.idle()
    engine.flush()
    assert engine.stored_bytes < 2 * live * 52, "the next process continues the same log"


def test_small_chunks_are_merged():
    engine = Journaled(full(), num_blocks=3001)
    for turn in range(1200):
        engine.serve(0, f"{turn:04d}!")
        engine.idle()
        engine.flush()
    assert engine.stored_bytes < 1200 * 52 * 2 + (64 << 10)
    engine.restart()
    assert len(engine.keyed()) == 1200


def test_unkeyed_entries_are_dropped_with_the_entries_they_revoke():
    engine = Journaled(full(), num_blocks=1001, max_model_len=9000)
    engine.serve(0, "".join(f"{number:04d}" for number in range(500)))
    engine.idle()
    engine.flush()
    engine.admit(1, "z" * 2500, flags=RowFlag.DELAY_CACHING)
    engine.flush()
    entries = load_log(engine.store, LOG).entries()
    assert sum(len(one.unkeyed_block) for one in entries) > 100
    for turn in range(1700):
        engine.serve(2, f"{turn:04d}!")
        if turn % 50 == 0:
            engine.flush()
    live = set(engine.keyed())
    bare = [block for one in load_log(engine.store, LOG).entries() for block in one.unkeyed_block if block not in live]
    assert bare == []


@pytest.mark.parametrize("is_resynced", [False, True])
def test_eviction_order_survives_by_last_use(is_resynced):
    engine = Journaled(full(), num_blocks=12)
    for slot, prompt in enumerate(("aaaaAAAAx", "bbbbBBBBx", "ccccCCCCx")):
        engine.serve(slot, prompt)
        engine.idle()
        engine.flush()
    engine.serve(3, "aaaaAAAAy")
    engine.idle()
    if is_resynced:
        logs_of(engine).clear()
    engine.serve(4, "ddddx")
    engine.idle()
    engine.flush()
    engine.restart()
    engine.admit(0, "z" * 24)
    engine.admit(1, "y" * 8)
    hits = {text[0]: engine.outside(text) for text in ("aaaaAAAAx", "bbbbBBBBx", "ccccCCCCx")}
    assert hits["a"] == 8, "used again, so evicted last"
    assert hits["b"] < 8


texts = st.text("ab", min_size=1, max_size=18)
GROUPS = {"full": (full(),), "window": (full(), window(8)), "state": (full(), state())}


@given(st.sampled_from(sorted(GROUPS)), st.lists(st.tuples(texts, st.integers(0, 5)), max_size=12), st.integers(2, 9))
def test_after_a_flush_nothing_published_is_missing(kind, turns, max_entries):
    """After any evictions, shedding, losses of the store, drops and resets."""
    engine = Journaled(*GROUPS[kind], num_blocks=17, max_entries=max_entries)
    for slot, (text, deed) in enumerate(turns):
        if engine.admit(slot, text).status is GRANTED and deed:
            engine.end(slot)
        if deed == 2:
            engine.flush()
        if deed == 3:
            engine.cache(evicted=[1, 2], reset=slot % 2 == 0)
        if deed == 4:
            logs_of(engine).clear()
    for slot in engine.replica.requests.slots():
        engine.end(slot)
    engine.serve(99, "zzzzz")  # a loss is detected with the next chunk
    engine.idle()
    engine.flush()
    engine.replica.begin_epoch(1, tuple(engine.pool.stamp))
    keyed, hits = engine.keyed(), [engine.outside(text) for text, _ in turns]
    engine.restart()
    assert engine.keyed() == keyed
    assert [engine.outside(text) for text, _ in turns] == hits
