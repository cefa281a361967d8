"""Tiers of a replica: what leaves the device is saved, a hit loads what it needs, and no job is trusted too early."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import CommitRule, HashAlgorithm, TierKind, TierSpec
from kvplane.base.step import (
    ANY_HIT,
    Admit,
    AdmitStatus,
    Cache,
    End,
    EventKind,
    Facts,
    OnRefusal,
    Part,
    RowFlag,
    Run,
)
from kvplane.base.values import WhyDeclined
from kvplane_core.face import inspect, setup
from kvplane_core.face.state import export_state
from kvplane_core.spec.loading import load_state
from kvplane_core.spec.replica import Replica
from tests.core.builders import DEFERRED, GRANTED, REFUSED, Engine, compared, full, replica_spec, state, stored, window

HOST, DISK = TierSpec(TierKind.HOST, 64), TierSpec(TierKind.DISK, 64)
LOAD = int(RowFlag.LOAD)
FILLERS = ("1111222233334444", "5555666677778888")


class Mover(Engine):
    """An engine whose movers do every job at once; `report` reports them."""

    def __init__(self, *groups, tiers=(HOST,), **changes):
        super().__init__(*groups, **{"num_blocks": 21, "tiers": tiers, **changes})
        self.saved: list[int] = []
        self.loads: list[int] = []

    def step(self, *parts):
        results = super().step(*parts)
        for result in results:
            self.saved += [*result.orders.save_job, *result.orders.move_job]
            self.loads += dict.fromkeys(result.orders.load_job)
        return results

    def report(self, **columns):
        """All saves and moves so far are done."""
        done, self.saved = self.saved, []
        return self.cache(jobs_done=done, **columns)

    def save(self, text):
        """Let a text be computed, saved, and evicted by others; returns how many blocks the tiers have then."""
        self.serve(0, text)
        for filler in FILLERS:
            self.serve(1, filler)
            self.report()
        while self.outside(text + "x") > 0:
            self.serve(1, "".join(chr(200 + self.seq + at) for at in range(16)))
            self.report()
        return sum(len(tier.key) for tier in self.tiers.each)

    def ask(self, slot, text=None, **columns):
        return self.admit(slot, text, flags=LOAD, **columns)

    def changed(self):
        """A case changed the state itself: the second core of twins, if there is one, is made of it again."""
        self.tiers.take_events()
        self.replica = compared(self.replica)

    def shown(self):
        """The stamp table of a memory that holds all that the core knows."""
        slots = [tier.version.get(slot, 0) for tier in self.tiers.each for slot in range(tier.num_slots)]
        return [*self.pool.stamp, *slots]

    @property
    def tiers(self):
        return self.replica.coordinator.tiers


@pytest.fixture(autouse=True)
def small_pools(monkeypatch):
    """The whole of these small pools is looked at for what is evicted next."""
    monkeypatch.setattr(setup, "AHEAD_SHARE", 1)


@pytest.fixture
def engine():
    return Mover(full())


def evicted(engine, text="aaaabbbbcccc"):
    engine.save(text)
    assert engine.outside(text + "x") == 0
    return text + "x"


def test_what_was_evicted_is_hit_loaded_and_then_runs(engine):
    text = evicted(engine)
    asked = engine.ask(3, text)
    orders, table = asked.result.orders, asked.table[0]
    assert (asked.status, asked.hit, asked.granted) == (GRANTED, 12, 0)
    (job,) = asked.result.admit_job
    assert asked.result.admit_tier_tokens == [12]
    assert orders.load_job == [job] * 3
    assert orders.load_block == table[:3]
    assert set(table[:3]) <= set(orders.stamp_block)
    assert engine.run(3).granted == [0]
    done = engine.step(Part(cache=Cache(jobs_done=[job]), facts=Facts()))[0]
    assert stored(done.events) == [tuple(table[:3])]
    (event,) = [one for one in done.events if one.kind is EventKind.STORED]
    assert (event.start, event.end, event.parent, event.block_starts) == (0, 12, b"", (0, 4, 8))
    assert engine.outside(text) == 12
    assert engine.run(3).granted == [1]


def test_a_done_load_is_run_in_the_same_step(engine):
    text = evicted(engine)
    (job,) = engine.ask(3, text).result.admit_job
    assert engine.step(Part(cache=Cache(jobs_done=[job]), run=Run([3])))[0].granted == [1]


def test_a_request_that_goes_back_during_its_load_registers_the_blocks_itself(engine):
    text = evicted(engine)
    (job,) = engine.ask(3, text).result.admit_job
    engine.fact(3, computed=6)
    engine.cache(jobs_done=[job])
    assert engine.outside(text) == 0
    assert engine.run(3).granted == [7]
    engine.idle()
    assert engine.outside(text) == 12


def test_each_group_loads_only_what_it_lacks_and_needs():
    """The window needs its last two blocks of the hit, full attention all; one of these is on the device."""
    engine = Mover(full(), window(6), num_blocks=25)
    text = evicted(engine, "aaaabbbbccccdddd")
    engine.serve(4, "aaaab")
    asked = engine.ask(3, text)
    assert asked.hit == 16
    by_group = list(zip(asked.result.orders.load_group, asked.result.orders.load_block, strict=True))
    assert [block for group, block in by_group if group == 0] == asked.table[0][1:4]
    assert [block for group, block in by_group if group == 1] == asked.table[1][2:4]
    assert asked.table[1][:2] == [0, 0]


def test_of_states_one_is_loaded():
    engine = Mover(state(), full(), num_blocks=25)
    text = evicted(engine, "aaaabbbbccccdddd")
    asked = engine.ask(3, text)
    groups = asked.result.orders.load_group
    assert asked.hit == 16
    assert (groups.count(0), groups.count(1)) == (1, 0)  # the device has the pages of full attention


def test_a_failed_load_preempts_and_is_not_tried_again(engine):
    text = evicted(engine)
    asked = engine.ask(3, text)
    failed = engine.cache(jobs_failed=[asked.result.admit_job[0]])
    assert failed.preempted == [3]
    again = engine.ask(3)
    assert (again.status, again.hit, again.result.admit_job) == (GRANTED, 0, [])
    assert engine.tiers.counters.loads_failed == 1


def test_a_load_whose_request_left_still_makes_hits(engine):
    text = evicted(engine)
    asked = engine.ask(3, text)
    free = engine.num_free
    engine.end(3)
    assert engine.num_free == free  # the mover still writes
    engine.cache(jobs_done=asked.result.admit_job)
    assert engine.num_free == free + 3
    assert engine.outside(text) == 12


def test_another_request_waits_for_a_load_of_its_hit(engine):
    text = evicted(engine)
    asked = engine.ask(3, text)
    other = engine.ask(4, text + "y")
    assert other.status is DEFERRED
    engine.cache(jobs_done=asked.result.admit_job)
    assert (hit := engine.ask(4)).status is GRANTED
    assert (hit.hit, hit.result.admit_job) == (12, [])


def test_a_load_waits_for_launches_that_use_its_pages(engine):
    """The pages were released by a request whose launch is in flight: done before that is executed is refused."""
    text = evicted(engine)
    engine.admit(5, "o" * 70)
    engine.executed = engine.seq - 1
    engine.end(5)
    asked = engine.ask(3, text)
    (after,) = asked.result.admit_load_after
    assert after == engine.seq - 2
    with pytest.raises(InvalidArgument, match="is not executed") as refused:
        engine.cache(jobs_done=asked.result.admit_job)
    assert refused.value.field == "parts[0].cache.jobs_done[0]"
    engine.executed, engine.seq = None, engine.seq - 1
    assert not engine.cache(jobs_done=asked.result.admit_job).preempted


def test_a_save_counts_only_if_the_page_stayed(engine):
    """The block was allocated to another request while the mover read its page."""
    engine.serve(0, "aaaabbbbcccc")
    engine.serve(1, "1111222233334444")
    engine.serve(1, "5555666677778888")
    engine.serve(1, "9999000011112222")
    engine.idle()
    jobs = list(engine.tiers.jobs.saves)
    assert jobs
    engine.serve(1, "z" * 80)
    done = engine.cache(jobs_done=jobs)
    assert not done.preempted
    assert engine.tiers.counters.discarded >= len(jobs) > engine.tiers.counters.saved == 0


def test_nothing_is_saved_before_its_step_is_executed(engine):
    engine.executed = 0
    engine.serve(0, "aaaabbbbcccc")
    assert not any(engine.idle().orders.save_job for _ in range(2))


def test_an_evicted_block_is_not_served_from_a_tier(engine):
    """Its content was bad, so what was saved of it is."""
    text = evicted(engine)
    asked = engine.ask(3, text)
    engine.cache(jobs_done=asked.result.admit_job)
    engine.end(3)
    engine.cache(evicted=[asked.table[0][0]])
    assert engine.ask(4, text).hit == 0


def test_a_page_that_is_evicted_under_a_load_fails_it(engine):
    text = evicted(engine)
    asked = engine.ask(3, text)
    engine.cache(evicted=[asked.table[0][1]])
    assert engine.cache(jobs_done=asked.result.admit_job).preempted == [3]


def test_a_reset_forgets_the_tiers(engine):
    text = evicted(engine)
    assert engine.cache(reset=True).reset_done
    assert not engine.tiers.has_keys
    assert engine.ask(3, text).hit == 0


def test_a_load_alone_may_fill_more_than_a_quarter_of_the_pool():
    engine = Mover(full(), num_blocks=21)
    text = evicted(engine, "aaaabbbbccccddddeeeeffff")
    asked = engine.ask(3, text)
    assert (asked.status, asked.hit) == (GRANTED, 24)
    assert engine.tiers.num_loading == 6 > engine.tiers.most_loading


def test_a_load_waits_for_others_where_they_would_fill_a_quarter_of_the_pool():
    engine = Mover(full(), num_blocks=29, tiers=(TierSpec(TierKind.HOST, 400),))  # 7 of them at a time
    small, large, other = ("aaaabbbb", "ccccddddeeeeffffgggghhhh", "iiii")
    for text in (small, large, other):
        engine.save(text)
    assert [engine.outside(text + "x") for text in (small, large, other)] == [0, 0, 0]
    first = engine.ask(3, small + "x")
    waits = engine.ask(4, large + "x")
    assert (waits.status, waits.hit) == (DEFERRED, 24)
    declined = waits.result.declined
    assert (declined.row, declined.why, declined.hit) == ([0], [WhyDeclined.WAITS], [24])
    assert engine.ask(5, other + "x").status is GRANTED, "another step"
    engine.end(3, 5)
    assert first.result.admit_job
    engine.cache(jobs_done=engine.loads)
    assert not engine.tiers.num_loading
    assert engine.ask(4).status is GRANTED
    assert engine.tiers.counters.waited == 1


def test_no_admission_waits_for_a_load_that_was_given_up():
    engine = Mover(full(), num_blocks=29, tiers=(TierSpec(TierKind.HOST, 400),))
    small, large = "aaaabbbb", "ccccddddeeeeffffgggghhhh"
    for text in (small, large):
        engine.save(text)
    job = engine.ask(3, small + "x").result.admit_job[0]
    assert engine.ask(4, small + "y").status is DEFERRED, "the same slots are being read"
    engine.preempt(3)
    same, other = engine.ask(4), engine.ask(5, large + "x")
    assert [one.hit for one in (same, other)] == [0, 0]
    assert [one.result.declined.why for one in (same, other)] == [[WhyDeclined.GIVEN_UP]] * 2
    assert engine.tiers.counters.given_up == 2
    engine.cache(jobs_failed=[job])


def test_no_load_begins_behind_one_that_waits():
    engine = Mover(full(), num_blocks=29, tiers=(TierSpec(TierKind.HOST, 400),))
    texts = ("aaaabbbb", "ccccddddeeeeffffgggghhhh", "iiiijjjj")
    for text in texts:
        engine.save(text)
    asked = engine.ask(3, texts[0] + "x")
    for slot, text in ((4, texts[1]), (5, texts[2])):
        engine.add(slot, text + "x")
    rows = Admit([4, 5], flags=[LOAD, LOAD], on_refusal=OnRefusal.SKIP)
    (waits,) = engine.step(Part(admit=rows))
    assert waits.admit_status == [AdmitStatus.DEFERRED] * 2
    engine.cache(jobs_done=asked.result.admit_job)
    (runs,) = engine.step(Part(admit=rows))
    assert runs.admit_status == [AdmitStatus.GRANTED, AdmitStatus.DEFERRED]
    engine.cache(jobs_done=[runs.admit_job[0]])
    (last,) = engine.step(Part(admit=replace(rows, slot=[5], flags=[LOAD])))
    assert last.admit_status == [AdmitStatus.GRANTED]


def test_a_load_needs_room_for_the_whole_request(engine):
    text = evicted(engine)
    engine.admit(5, "o" * 68)
    assert engine.ask(3, text).status is REFUSED
    assert engine.replica.coordinator.tiers.jobs.loads == {}


def test_the_expected_hit_of_a_load_is_that_of_the_union(engine):
    text = evicted(engine)
    assert engine.ask(3, text, expected_hit=0).status is AdmitStatus.STALE_HIT
    assert engine.ask(3, expected_hit=12).status is GRANTED


def test_the_disk_takes_what_the_host_evicts_next():
    engine = Mover(full(), tiers=(TierSpec(TierKind.HOST, 32), replace(DISK, num_blocks=400)))
    text = evicted(engine)
    for at in range(24):
        engine.serve(1, "".join(chr(300 + 16 * at + letter) for letter in range(16)))
        engine.report()
    asked = engine.ask(3, text)
    assert asked.hit == 12
    assert set(asked.result.orders.load_tier) == {1}
    assert engine.tiers.counters.moved > 0


def test_a_loaded_key_is_evicted_from_its_tier_first():
    engine = Mover(full(), tiers=(TierSpec(TierKind.HOST, 200),))
    text = evicted(engine)
    asked = engine.ask(3, text)
    (tier,) = engine.tiers.each
    assert not tier.shadows
    engine.cache(jobs_done=asked.result.admit_job)
    assert len(tier.shadows) == 3
    assert [slot for _, slot in tier.in_order()][:3] == asked.result.orders.load_slot


# -- engine lives, state -----------------------------------------------------------------------------------------------


def test_a_new_life_keeps_the_tiers_where_stamps_are_shown(engine):
    text = evicted(engine)
    stamps = engine.shown()
    engine.replica.begin_epoch(1, stamps)
    assert engine.tiers.has_keys
    engine.replica.begin_epoch(2)
    assert not engine.tiers.has_keys
    inspect.check(engine.replica)
    assert text


def test_new_memory_frees_every_slot(engine):
    engine.serve(0, "aaaabbbbcccc")
    for filler in FILLERS:
        engine.serve(1, filler)
    engine.serve(1, "9999000011112222")
    assert engine.tiers.jobs.saves
    engine.replica.begin_epoch(1, engine.shown(), memory_is_new=True)
    (tier,) = engine.tiers.each
    assert len(tier.free) == tier.num_used
    assert not len(engine.tiers.jobs)


def test_pages_of_a_load_are_busy_in_the_next_life(engine):
    text = evicted(engine)
    asked = engine.ask(3, text)
    engine.replica.begin_epoch(1, engine.shown())
    assert engine.replica.busy_blocks == tuple(sorted(asked.table[0][:3]))
    inspect.check(engine.replica)
    job = asked.result.admit_job[0]
    engine.seq = 0
    engine.step(Part(cache=Cache(jobs_done=[job], loads_over=list(engine.replica.busy_blocks))))
    assert engine.replica.busy_blocks == ()
    assert engine.outside(text) == 0


def test_the_exported_state_has_jobs_slots_and_their_order():
    engine = Mover(full(), window(6), tiers=(TierSpec(TierKind.HOST, 12), DISK), num_blocks=25)
    text = evicted(engine, "aaaabbbbccccdddd")
    asked = engine.ask(3, text)
    engine.serve(1, "mmmmnnnnoooo")
    raw = export_state(engine.replica)
    twin = load_state(engine.spec, raw)
    inspect.check(twin)
    assert export_state(twin) == raw
    jobs = [*asked.result.admit_job, *engine.saved]
    engine.cache(jobs_done=jobs)
    before, engine.replica, engine.seq = engine.replica, twin, engine.seq - 1
    engine.cache(jobs_done=jobs)
    assert export_state(before) == export_state(twin)
    with pytest.raises(InvalidArgument, match="slots"):
        load_state(replace(engine.spec, tiers=(HOST,)), raw)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tiers": (DISK, HOST)}, "tiers"),
        ({"tiers": (HOST, HOST)}, "tiers"),
        ({"tiers": (TierSpec(TierKind.HOST, 0),)}, "tiers[0].num_blocks"),
        ({"tiers": (HOST,), "enable_caching": False}, "tiers"),
        ({"tiers": (HOST,), "commit": CommitRule.REFERENCE}, "tiers"),
        ({"tiers": (HOST,), "hash_algorithm": HashAlgorithm.XXHASH}, "hash_algorithm"),
    ],
)
def test_a_replica_that_cannot_have_its_tiers_is_refused(changes, field):
    with pytest.raises(InvalidArgument) as refused:
        Replica(replica_spec(full(), **changes))
    assert refused.value.field == field


@pytest.mark.parametrize("name", ["jobs_done", "jobs_failed"])
def test_a_job_that_was_never_ordered_is_refused_and_one_that_ended_is_ignored(engine, name):
    text = evicted(engine)
    asked, before = engine.ask(3, text), engine.digest
    job = asked.result.admit_job[0]
    with pytest.raises(InvalidArgument, match="was not ordered") as refused:
        engine.cache(**{name: [job, engine.tiers.last_job + 1]})
    assert (refused.value.field, engine.digest) == (f"parts[0].cache.{name}[1]", before)
    engine.seq -= 1
    engine.cache(jobs_done=[job])
    assert not engine.cache(**{name: [job]}).preempted


def test_jobs_of_earlier_lives_are_ended_together(engine):
    """An engine that begins knows no job of the life before, but that no mover works on one any more."""
    engine.serve(0, "aaaabbbbcccc")
    for filler in FILLERS:
        engine.serve(1, filler)
    old = set(engine.tiers.jobs.numbers())
    assert old
    engine.replica.begin_epoch(1, engine.shown())
    engine.seq = 0
    engine.serve(1, "7777888899990000")
    (first_new, *_) = sorted(set(engine.tiers.jobs.numbers()) - old)
    assert engine.tiers.each[0].num_free + len(engine.tiers.jobs) == 64
    engine.cache(jobs_before=first_new)
    assert min(engine.tiers.jobs.numbers()) == first_new
    assert engine.tiers.counters.failed == len(old)
    inspect.check(engine.replica)


def test_jobs_that_do_not_exist_yet_are_not_ended(engine):
    text = evicted(engine)
    asked = engine.ask(3, text)
    with pytest.raises(InvalidArgument) as refused:
        engine.cache(jobs_before=engine.tiers.last_job + 2)
    assert refused.value.field == "parts[0].cache.jobs_before"
    engine.seq -= 1
    assert engine.cache(jobs_before=engine.tiers.last_job + 1).preempted == [3]
    assert asked.hit
    with pytest.raises(InvalidArgument, match="is not 0 to 1"):
        Engine(full()).cache(jobs_before=2)


def test_a_row_with_load_has_nothing_external(engine):
    engine.add(3, "aaaab")
    for change in ({"external": [4]}, {"flags": [LOAD | int(RowFlag.DELAY_CACHING)]}, {"flags": [LOAD | 8]}):
        columns: dict[str, Any] = {"flags": [LOAD], "expected_hit": [ANY_HIT], **change}
        with pytest.raises(InvalidArgument) as refused:
            engine.step(Part(admit=Admit([3], **columns)))
        assert refused.value.field == "parts[0].admit.flags[0]"
        engine.seq -= 1


def test_a_request_that_loads_registers_nothing_by_itself(engine):
    """A commit says that tokens are computed; those of a load are not there yet."""
    text = evicted(engine)
    asked = engine.ask(3, text)
    engine.cache(evicted=[asked.table[0][0]])  # from here on it would register again
    engine.fact(3, commit=12)
    assert engine.outside(text) == 0
    engine.end(3, how=End.PREEMPTED)
