"""The beginning of an engine life changes the pool as a specification does that visits every block.

Random lives: requests run, wait, are held, have ended behind a fence; steps are in flight; keys were dropped from free
blocks; one content is in several blocks, and a block has several keys; some keys came back from a store.
"""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from kvplane.base.stamps import MAX_COUNTER, in_time
from kvplane.base.step import CacheEvent, End, EventKind, RemoveReason
from kvplane_core.face import inspect
from kvplane_core.face.cache_events import CacheEvents
from kvplane_core.face.keys import NULL_BLOCK
from tests.core.builders import (
    GRANTED,
    REFERENCE,
    SAFE,
    Engine,
    changed,
    full,
    new_replica,
    state,
    window,
)

KINDS = {
    "full": (full(),),
    "window": (full(), window(8)),
    "state": (full(), state()),
    "several keys": (full(4), full(2, lookup_class=1)),
}


def begin_block_by_block(replica, epoch, table):
    """The specification."""
    pool = replica.coordinator.pool
    replica.tracker.abandon()
    replica.tracker.close()
    for block in [block for block, key in enumerate(pool.key) if key is not None]:
        proven = block < len(table) and table[block] == pool.stamp[block] != 0
        proven = proven and in_time(table[block]) > in_time(table[NULL_BLOCK])  # issued after the memory's last reset
        if not table:
            pool.unregister(block)
            pool.restamp(block)
            pool.events = CacheEvents([CacheEvent(EventKind.CLEARED)])
        elif not proven or pool.key_step[block] > pool.executed_through:
            pool.drop_keys(block, RemoveReason.UNVERIFIED)
        pool.key_step[block] = 0
    order = list(pool.free)
    pool.free.rebuild([block for block in order if pool.key[block] is None])
    pool.free.append([block for block in order if pool.key[block] is not None])
    pool._born, pool._used, pool._age_base, pool.step = [0] * pool.num_blocks, [0] * pool.num_blocks, 0, 0
    changed(replica)
    return replica.enter_epoch(epoch, table)


class Life:
    """Does what an engine may do, at random."""

    def __init__(self, kind, chance, commit):
        self.chance = chance
        partial = kind == "several keys"
        self.engine = Engine(*KINDS[kind], num_blocks=30, partial_hits=partial, commit=commit)
        self.slots: dict[int, bool] = {}  # live, and whether running
        self.next_slot = 0

    def go_on(self, steps):
        for _ in range(steps):
            self.chance.choice((self.admit, self.admit, self.end, self.run, self.drop, self.wait))()

    def admit(self):
        slot, self.next_slot = self.next_slot, self.next_slot + 1
        text = "".join(self.chance.choice("ab") for _ in range(self.chance.randint(1, 18)))
        news = {"skip_reading": self.chance.randrange(2), "domain": self.chance.choice(("", "", "tenant"))}
        self.slots[slot] = self.engine.admit(slot, text, news=news).status is GRANTED

    def end(self):
        if self.slots:
            slot = self.chance.choice(list(self.slots))
            how = self.chance.choice((End.FREE, End.FREE, End.HELD)) if self.slots[slot] else End.FREE
            fence = self.chance.choice((0, self.engine.seq)) if how is End.FREE else 0
            self.engine.end(slot, how=how, fence=fence)
            del self.slots[slot]

    def run(self):
        running = [slot for slot, runs in self.slots.items() if runs]
        if running:
            self.engine.run(self.chance.choice(running), text=self.chance.choice("ab"))

    def drop(self):
        blocks = self.chance.sample(range(1, 30), 2)
        self.engine.cache(evicted=[block for block in blocks if block not in self.engine.pool.reserved])

    def wait(self):
        """Steps stay in flight, or are executed again at once."""
        self.engine.executed = self.engine.seq if self.engine.executed is None else None
        self.engine.idle()

    def come_back(self):
        """As a new object, with what was stored."""
        engine = self.engine
        stored, table = engine.replica.entries(), list(engine.pool.stamp)
        engine.replica = new_replica(engine.spec)
        engine.replica.recover(1, [table], [stored])
        self.begin_again()

    def begin_again(self):
        self.engine.seq, self.engine.executed = 0, None
        self.slots.clear()


def shown_by(pool, chance):
    """The stamps of a memory that may have lost any page, or no stamps."""
    sound = chance.choice((0.0, 0.5, 1.0))
    table = [stamp if chance.random() < sound else chance.choice((0, stamp + 1)) for stamp in pool.stamp]
    return chance.choice((table, table, table[:9], ()))


def lost(events):
    """Kind, group, domain, digest, block and reason of each key of the events, sorted."""
    return sorted(
        (event.kind, event.group, event.domain, digest, block, event.reason)
        for event in events
        for digest, block in zip(event.hashes or (b"",), event.blocks or (NULL_BLOCK,), strict=True)
    )


lives = st.tuples(
    st.sampled_from(sorted(KINDS)),
    st.sampled_from((SAFE, REFERENCE)),
    st.integers(0, 25),
    st.booleans(),
    st.integers(0),
)


def lived(kind, commit, steps, restarts, seed):
    """A life, and what its memory shows; the same again for the same arguments."""
    life = Life(kind, Random(seed), commit)
    life.go_on(steps)
    if restarts:
        life.come_back()
        life.go_on(steps // 3)
    life.engine.replica.take_events()
    return life, shown_by(life.engine.pool, life.chance)


@given(lives)
def test_begin_epoch_equals_a_model_that_visits_every_block(drawn):
    (life, table), (mirror, _) = lived(*drawn), lived(*drawn)
    kept = begin_block_by_block(mirror.engine.replica, 2, table)
    assert life.engine.replica.begin_epoch(2, table) == kept
    reported, expected = lost(life.engine.replica.take_events()), lost(mirror.engine.replica.take_events())
    assert reported == expected
    assert (life.engine.digest, life.engine.free_order) == (mirror.engine.digest, mirror.engine.free_order)
    for one in (life, mirror):
        one.begin_again()
        one.go_on(12)
    assert life.engine.digest == mirror.engine.digest
    assert life.engine.pool.residency == mirror.engine.pool.residency, "ages are of this life alone"


@given(lives, st.integers(0, 30))
def test_an_interrupted_begin_epoch_continues_and_reports_each_lost_key_once(drawn, turns):
    (life, table), (whole, _) = lived(*drawn), lived(*drawn)
    whole.engine.replica.begin_epoch(2, table)
    ending = life.engine.replica.end_epoch(table)
    for _, _ in zip(range(turns), ending, strict=False):
        inspect.check(life.engine.replica)
    ending.close()
    inspect.check(life.engine.replica)
    life.engine.replica.begin_epoch(2, table)
    inspect.check(life.engine.replica)
    assert lost(life.engine.replica.take_events()) == lost(whole.engine.replica.take_events())
    keyed = set(life.engine.keyed())
    assert keyed == set(whole.engine.keyed())
    orders = [[block for block in one.engine.free_order if block in keyed] for one in (life, whole)]
    assert orders[0] == orders[1], "keys are lost in the order of their last use"


def test_an_abandoned_begin_epoch_without_stamps_leaves_no_keys():
    """It has begun: its drops are not reported one by one, so the other keys must go too."""
    engine = Engine(full(), num_blocks=30)
    for slot, text in enumerate(("a" * 12, "b" * 12, "c" * 12)):
        engine.serve(slot, text)
    ending, stamps = engine.replica.end_epoch(), list(engine.pool.stamp)
    while engine.keyed():
        next(ending)
    ending.close()
    assert engine.replica.begin_epoch(1, stamps) == 0
    assert [event.kind for event in engine.replica.take_events()] == [EventKind.CLEARED]
    engine.seq = 0
    engine.serve(0, "a" * 12)
    assert engine.replica.begin_epoch(2, list(engine.pool.stamp)) == 3, "the life behind that is as any other"


def test_begin_epoch_continues_used_up_stamps_in_the_next_generation():
    engine = Engine(full(), num_blocks=30)
    engine.serve(0, "a" * 40)
    engine.pool._counter = MAX_COUNTER - 1
    changed(engine.replica)
    for _ in engine.replica.end_epoch([0] * 30):
        pass
    assert engine.pool.generation == 1
    engine.replica.enter_epoch(1, [0] * 30)
    assert engine.pool.generation == 0
    inspect.check(engine.replica)


def test_begin_epoch_reports_many_removed_keys_as_one_run_per_group(monkeypatch):
    engine = Engine(full(), window(8), num_blocks=30)
    engine.serve(0, "a" * 12)
    engine.replica.begin_epoch(1, [0] * 30)
    runs = engine.replica.take_events().runs
    assert sorted((run.group, len(run.hashes), run.reason) for run in runs) == [
        (0, 3, RemoveReason.UNVERIFIED),
        (1, 3, RemoveReason.UNVERIFIED),
    ]
