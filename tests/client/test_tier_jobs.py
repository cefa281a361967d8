"""The engine's side of tiers: a job counts when every rank has ended it, and what earlier lives left is ended once."""

from __future__ import annotations

from random import Random

import pytest

from kvplane.base.errors import Unavailable
from kvplane.base.job_table import JobKind, JobTable, job_table_bytes
from kvplane.base.step import Cache, Orders, PartResult
from kvplane.tier_jobs import TierJobs
from tests.twins import weakened

EPOCH = 5
JOB = EPOCH << 32


@pytest.fixture
def tables():
    return [JobTable.create(bytearray(job_table_bytes(8)), 8) for _ in range(2)]


@pytest.fixture
def jobs(tables):
    jobs = TierJobs(tables)
    jobs.begin(EPOCH, ())
    return jobs


def load(job, blocks, after=0):
    orders = Orders(
        load_job=[job] * len(blocks),
        load_tier=[0] * len(blocks),
        load_slot=list(range(len(blocks))),
        load_version=[1] * len(blocks),
        load_block=blocks,
        load_group=[0] * len(blocks),
        load_stamp=[9] * len(blocks),
    )
    return PartResult(admit_job=[job], admit_load_after=[after], orders=orders)


def save(job, block):
    return PartResult(
        orders=Orders(save_job=[job], save_block=[block], save_group=[0], save_stamp=[9], save_tier=[0], save_slot=[3])
    )


def saves(jobs):
    numbers, same = list(jobs), [1] * len(jobs)
    orders = Orders(save_job=numbers, save_block=same, save_group=same, save_stamp=same, save_tier=same, save_slot=same)
    return PartResult(orders=orders)


def reported(jobs, executed=0):
    cache = Cache()
    jobs.report(cache, executed)
    return cache


def test_ends_of_a_step_that_was_refused_are_reported_again(jobs, tables):
    jobs.order(1, 0, saves(range(JOB + 1, JOB + 4)))
    for table in tables:
        table.take()
        table.end(JOB + 1, True, 1)
    first, again, after = Cache(), Cache(), Cache()
    jobs.report(first, 0, seq=2)
    for table in tables:
        table.end(JOB + 2, False, 1)
    jobs.report(again, 0, seq=2)
    jobs.report(after, 0, seq=3)
    assert (first.jobs_done, first.jobs_failed) == ([JOB + 1], [])
    assert (again.jobs_done, again.jobs_failed) == ([JOB + 1], [JOB + 2])
    assert (after.jobs_done, after.jobs_failed) == ([], [])


def test_busy_blocks_that_a_refused_step_gave_back_are_given_back_again(tables):
    jobs = TierJobs(tables)
    jobs.begin(EPOCH, (4, 5))
    for table in tables:
        table.begin_life(EPOCH)
    caches = [Cache() for _ in range(3)]
    for cache, seq in zip(caches, (1, 1, 2), strict=True):
        jobs.report(cache, 0, seq)
    assert [cache.loads_over for cache in caches] == [[4, 5], [4, 5], []]
    assert [cache.jobs_before for cache in caches] == [JOB, JOB, 0]


def test_rows_of_a_job_say_what_follows_and_when_it_may_begin(jobs, tables):
    jobs.order(7, 1, load(JOB + 1, [4, 6], after=6))
    for table in tables:
        (rows,) = table.take()
        assert [(row.job, row.kind, row.block) for row in rows] == [(JOB + 1, 1, 4), (JOB + 1, 1, 6)]
        assert {(row.epoch, row.seq, row.part, row.after) for row in rows} == {(EPOCH, 7, 1, 6)}
    jobs.order(8, 0, save(JOB + 2, 3))
    ((row,),) = tables[0].take()
    assert (row.kind, row.slot, row.version, row.block, row.stamp) == (JobKind.SAVE, 3, JOB + 2, 3, 9)


def test_a_job_is_done_when_every_rank_says_so(jobs, tables):
    jobs.order(1, 0, load(JOB + 1, [4, 6]))
    assert jobs.blocks_loading == (4, 6)
    tables[0].end(JOB + 1, is_done=True)
    assert reported(jobs).jobs_done == []
    tables[1].end(JOB + 1, is_done=True)
    assert reported(jobs).jobs_done == [JOB + 1]
    assert (jobs.num_moving, jobs.blocks_loading) == (0, ())


def test_a_job_that_one_rank_fails_is_failed_when_no_rank_works_on_it(jobs, tables):
    jobs.order(1, 0, load(JOB + 1, [4]))
    tables[0].end(JOB + 1, is_done=False)
    assert reported(jobs) == Cache()
    tables[1].end(JOB + 1, is_done=True)
    assert reported(jobs) == Cache(jobs_failed=[JOB + 1])


def test_a_load_is_reported_when_the_step_before_it_is_executed(jobs, tables):
    jobs.order(4, 0, load(JOB + 1, [4], after=3))
    for table in tables:
        table.end(JOB + 1, is_done=True)
    assert reported(jobs, executed=2) == Cache()
    assert reported(jobs, executed=3).jobs_done == [JOB + 1]


def test_where_a_table_is_full_the_jobs_fail(jobs, tables):
    jobs.order(1, 0, load(JOB + 1, list(range(1, 20))))
    tables[0].take()
    jobs.order(2, 0, saves(range(JOB + 2, JOB + 7)))
    assert [[row.job for row in rows] for rows in tables[0].take()] == [list(range(JOB + 2, JOB + 7))]
    assert reported(jobs) == Cache()  # rank 0 works on it
    tables[0].end(JOB + 2, is_done=True, count=5)
    assert reported(jobs).jobs_failed == list(range(JOB + 2, JOB + 7))


def test_jobs_that_ranks_end_in_other_portions_are_over_one_by_one(jobs, tables):
    jobs.order(1, 0, saves([JOB + 1, JOB + 2, JOB + 3, JOB + 5, JOB + 6]))  # 4 is of another kind
    jobs.order(2, 0, load(JOB + 4, [4]))
    assert (jobs.num_moving, jobs.blocks_loading) == (6, (4,))
    tables[0].end(JOB + 1, is_done=True, count=6)
    tables[1].end(JOB + 2, is_done=True, count=2)
    assert reported(jobs).jobs_done == [JOB + 2, JOB + 3]
    tables[1].end(JOB + 4, is_done=False, count=2)
    assert reported(jobs).jobs_failed == [JOB + 4, JOB + 5]
    assert (jobs.num_moving, jobs.blocks_loading) == (2, ())
    tables[1].end(JOB + 6, is_done=True)
    tables[1].end(JOB + 1, is_done=True)
    assert reported(jobs).jobs_done == [JOB + 6, JOB + 1]
    assert jobs.num_moving == 0


def test_ends_that_are_reported_again_or_of_jobs_that_are_not_in_flight_do_not_count(jobs, tables):
    jobs.order(1, 0, saves(range(JOB + 1, JOB + 6)))
    tables[0].end(JOB - 10, is_done=True, count=13)
    for _ in range(2):
        tables[0].end(JOB + 2, is_done=False)
    assert reported(jobs) == Cache()
    tables[1].end(JOB + 1, is_done=True, count=1000)
    assert reported(jobs) == Cache(jobs_done=[JOB + 1, JOB + 2])
    tables[0].end(JOB + 1, is_done=True, count=5)
    assert reported(jobs) == Cache(jobs_done=[JOB + 3, JOB + 4, JOB + 5])
    tables[1].end(JOB + 1, is_done=False, count=5)
    assert reported(jobs) == Cache()


@pytest.mark.parametrize("seed", range(40))
def test_random_ends_are_those_of_a_set_per_rank(jobs, tables, seed):
    rng = Random(seed)
    left: dict[int, list[bool | None]] = {}  # by job and rank: how it ended
    number = JOB
    for at in range(30):
        taken = list[int]()
        for _ in range(rng.randrange(12)):
            number += rng.choice([1, 1, 1, 2, 5])
            taken.append(number)
        for table in tables:
            table.take()
        jobs.order(at + 1, 0, saves(taken))
        left.update((job, [None, None]) for job in taken)
        for _ in range(rng.randrange(6)):
            rank, first, count = rng.randrange(2), rng.randrange(JOB, number + 2), rng.randrange(1, 9)
            is_done = rng.random() < 0.7
            tables[rank].end(first, is_done, count)
            for job in range(first, first + count):
                if job in left and left[job][rank] is None:
                    left[job][rank] = is_done
        over = {job: ends for job, ends in left.items() if None not in ends}
        cache = reported(jobs)
        assert sorted(cache.jobs_done) == [job for job, ends in over.items() if all(ends)]
        assert sorted(cache.jobs_failed) == [job for job, ends in over.items() if not all(ends)]
        left = {job: ends for job, ends in left.items() if job not in over}
        assert jobs.num_moving == len(left)


def test_a_new_life_ends_what_earlier_ones_left_once_no_mover_works_on_it(jobs, tables):
    jobs.order(1, 0, save(JOB + 1, 3))
    jobs.begin(EPOCH + 1, (4, 6))
    assert jobs.blocks_loading == (4, 6)
    for table in tables:
        assert reported(jobs) == Cache()
        table.begin_life(EPOCH + 1)
        table.end(JOB + 1, is_done=True)
    assert reported(jobs) == Cache(jobs_before=(EPOCH + 1) << 32, loads_over=[4, 6])
    assert reported(jobs) == Cache()
    assert jobs.blocks_loading == ()


def test_orders_of_a_new_engine_wait_for_jobs_of_the_one_before(jobs, tables):
    with pytest.raises(Unavailable, match="jobs of an engine before"):
        jobs.await_earlier(0.001)
    for table in tables:
        assert not jobs.may_carry_out
        table.begin_life(EPOCH)
    jobs.await_earlier(60)
    jobs.begin(EPOCH + 1, (4,))  # a session that is reopened lists its loads
    assert jobs.may_carry_out


def test_the_planted_fault_that_waits_for_nothing_is_seen(jobs):
    """The simulation sees it in one of some 400 seeds."""
    assert not jobs.may_carry_out
    with weakened("jobs of an earlier engine not awaited"):
        assert jobs.may_carry_out


def test_a_session_that_breaks_while_an_engine_waits_does_not_end_the_wait(jobs, tables):
    """The loads of the engine before are in no list that the next session of this one gives."""
    tables[0].begin_life(EPOCH)
    jobs.begin(EPOCH + 1, ())
    assert not jobs.may_carry_out
    tables[0].begin_life(EPOCH + 1)
    jobs.begin(EPOCH + 2, ())
    assert not jobs.may_carry_out
    for table in tables:
        table.begin_life(EPOCH + 2)
    jobs.begin(EPOCH + 3, ())
    assert jobs.may_carry_out


def test_waiting_ends_with_a_job(jobs, tables):
    tables[0].begin_life(EPOCH)
    tables[1].begin_life(EPOCH)
    reported(jobs)
    jobs.order(1, 0, save(JOB + 1, 3))
    jobs.wait(0.001)
    tables[0].end(JOB + 1, is_done=True)
    jobs.wait(60)


def test_costs_are_measured_from_the_order_or_the_load_before(tables):
    now = [0]
    jobs = TierJobs(tables, clock=lambda: now[0])
    jobs.begin(EPOCH, ())
    assert jobs.costs_ns(7, 2) == [7, 0, 0]
    jobs.order(1, 0, load(JOB + 1, [4, 6]))
    jobs.order(1, 0, load(JOB + 2, [8]))
    now[0] = 200
    for table in tables:
        table.end(JOB + 1, True)
    reported(jobs)
    assert jobs.costs_ns(7, 2) == [7, 100, 0]
    now[0] = 380
    for table in tables:
        table.end(JOB + 2, True)
    reported(jobs)
    assert jobs.costs_ns(7, 2) == [7, 110, 0], "180 since the load before, an eighth of the way"
    jobs.order(2, 0, load(JOB + 3, [9]))
    now[0] = 10**9
    for table in tables:
        table.end(JOB + 3, False)
    reported(jobs)
    assert jobs.costs_ns(7, 2) == [7, 110, 0], "a load that failed is not measured"
