"""The queue of a place, compared with its definition, and what it costs."""

from __future__ import annotations

import math
import time
from random import Random

import pytest

from kvplane_fleet.costs import EngineCosts, Prior
from kvplane_fleet.work import UNREPORTED_S, Booking, Work


def booking(number, at_s, miss_s=0.5, first_token_s=1.0):
    return Booking(str(number), "a", 100, 0, 0, first_token_s, miss_s, math.inf, "", (0, 0), at_s)


def is_due(one, now_s):
    began_s = one.at_s if one.started_s is None else one.started_s
    return now_s >= began_s + max(UNREPORTED_S, 2 * one.first_token_s)


@pytest.mark.parametrize("first_report", [0, 150])
@pytest.mark.parametrize("seed", range(12))
def test_the_queue_is_what_waits_by_definition(seed, first_report):
    """Before the first report a prompt whose time has passed does not wait; from then on it does, unless a later one
    was reported.
    """
    random, work, now_s, token_s, answered_s = Random(seed), Work(EngineCosts(Prior())), 1.0, 0.0, None
    open_, waiting, presumed = dict[str, Booking](), dict[str, Booking](), set[str]()
    for number in range(400):
        now_s += random.choice([0.0, 0.01, 0.5, 1.5])
        what = random.choice(["book", "book", "start", "token", "end", "forget"])
        if what == "book":
            one = booking(number, now_s, random.random(), 2 * random.random())
            work.book(one)
            open_[one.name] = waiting[one.name] = one
        elif open_:
            one = random.choice(list(open_.values()))
            if what == "start":
                work.start(one, now_s)
            elif what == "token" and one.token_s is None and number >= first_report:
                work.first_token(one, now_s)
                if answered_s is None:
                    waiting = {name: it for name, it in waiting.items() if name not in presumed or it.at_s >= one.at_s}
                    presumed.clear()
                answered_s, token_s = max(answered_s or 0.0, one.at_s), max(token_s, now_s)
                waiting.pop(one.name, None)
            elif what in ("end", "forget"):
                work.end(one, now_s, 5) if what == "end" else work.forget(one)
                del open_[one.name]
                waiting.pop(one.name, None)
        late = [one for one in waiting.values() if is_due(one, now_s)]
        if answered_s is None:
            presumed.update(one.name for one in late)
        else:
            for one in late:
                if one.at_s < answered_s:
                    del waiting[one.name]
        counted = [one for one in waiting.values() if one.name not in presumed]
        first, *others = counted or [booking("none", now_s, 0.0)]
        seconds = max(first.miss_s - (now_s - max(token_s, first.at_s)), 0.0) + sum(one.miss_s for one in others)
        assert work.in_flight == len(open_)
        assert work.waiting(now_s) == len(counted)
        assert work.queue_s(now_s) == pytest.approx(seconds, abs=1e-9)


def test_prompts_before_the_first_report_wait_behind_it():
    """A cold engine: 30 prompts of 2 s each, of which the first one has its token after 30 s."""
    work = Work(EngineCosts(Prior()))
    made = [booking(number, float(number), 2.0, 2.0) for number in range(30)]
    for one in made:
        work.queue_s(one.at_s)
        work.book(one)
    work.first_token(made[0], 30.5)
    assert work.waiting(30.6) == 29
    assert work.queue_s(30.6) == pytest.approx(57.9)


def test_prompts_that_ended_leave_nothing_in_the_queue():
    """Answers that are not streamed report no first token, but for one of them."""
    work = Work(EngineCosts(Prior()))
    made = [booking(number, number / 50) for number in range(20_000)]
    work.book(made[0])
    work.first_token(made[0], 0.1)
    for before, one in zip([None] * 150 + made, made[1:], strict=False):
        work.book(one)
        work.waiting(one.at_s)
        if before is not None and before is not made[0]:
            work.end(before, one.at_s, 1)
    queue = work._queue
    assert len(queue._overdue) + len(queue._due) < 1000


def test_a_booking_costs_the_same_however_many_wait():
    def cpu_s(num_open):
        work = Work(EngineCosts(Prior()))
        for number in range(num_open):
            work.book(booking(number, number / 1e6))
        for number in range(0, num_open, 2):  # those that were booked first leave a gap where the oldest is sought
            work.end(booking(number // 2, number / 2e6), 1.0, 1)
        began_s = time.thread_time()
        for _ in range(200):
            work.queue_s(1.0)
        return time.thread_time() - began_s

    few_s = max(cpu_s(100) for _ in range(3))
    assert min(cpu_s(30_000) for _ in range(3)) < 10 * few_s, "100 times if each call passes over them"
