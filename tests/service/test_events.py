"""What others see of a prefix cache: executed content only, in order, resumable, never too slow for too long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.base.errors import InvalidArgument, LimitExceeded, NotFound
from kvplane.base.step import CacheEvent, EventKind, RemoveReason
from kvplane_service.events import Batch, EventLog, PublicationHold


def stored(*blocks: int, domain: str = "") -> CacheEvent:
    hashes = tuple(str(block).encode() for block in blocks)
    return CacheEvent(EventKind.STORED, 0, hashes, blocks, domain, block_starts=tuple(range(len(blocks))))


def removed(block: int, domain: str = "") -> CacheEvent:
    return CacheEvent(EventKind.REMOVED, 0, (str(block).encode(),), (block,), domain, reason=RemoveReason.EVICTED)


CLEARED = CacheEvent(EventKind.CLEARED)


class TestPublicationHold:
    def test_what_a_step_stored_waits_for_its_execution(self):
        hold = PublicationHold()
        assert hold.add(1, [stored(1)]) == []
        assert hold.add(2, [stored(2)]) == []
        assert hold.release(0) == []
        assert hold.release(1) == [stored(1)]
        assert hold.release(2) == [stored(2)]
        assert hold.release(2) == []

    def test_a_published_key_is_removed_at_once(self):
        hold = PublicationHold()
        hold.add(1, [stored(1)])
        hold.release(1)
        assert hold.add(2, [removed(1), stored(2)]) == [removed(1)]

    def test_a_key_that_is_removed_while_held_is_never_shown(self):
        hold = PublicationHold()
        hold.add(1, [stored(1, 2, 3), stored(4)])
        assert hold.add(2, [removed(2), removed(4)]) == []
        (event,) = hold.release(9)
        assert (event.hashes, event.blocks, event.block_starts) == ((b"1", b"3"), (1, 3), (0, 2))

    def test_equal_keys_of_two_domains_are_two(self):
        hold = PublicationHold()
        hold.add(1, [stored(1), stored(1, domain="d")])
        assert hold.add(1, [removed(1, domain="d")]) == []
        assert hold.release(1) == [stored(1)]

    def test_a_key_stored_again_is_shown_once_for_each_step(self):
        hold = PublicationHold()
        hold.add(1, [stored(1)])
        hold.add(2, [removed(1), stored(1)])
        assert hold.release(1) == []
        assert hold.release(2) == [stored(1)]

    def test_a_removal_reaches_every_held_copy_and_no_shown_one(self):
        hold = PublicationHold()
        hold.add(1, [stored(1)])
        hold.add(2, [stored(1)])
        assert hold.release(1) == [stored(1)]
        assert hold.add(3, [removed(1)]) == []
        assert hold.release(3) == []

    def test_clearing_forgets_what_is_held(self):
        hold = PublicationHold()
        hold.add(1, [stored(1)])
        assert hold.add(2, [CLEARED, stored(2)]) == [CLEARED]
        assert hold.release(2) == [stored(2)]

    def test_events_without_hashes_are_passed_on(self):
        hold = PublicationHold()
        hold.add(1, [stored()])
        assert hold.release(1) == [stored()]

    @given(st.lists(st.tuples(st.lists(st.integers(-6, 6), max_size=6), st.integers(0, 3)), max_size=12))
    def test_a_mirror_of_what_is_shown_is_what_is_cached_and_executed(self, steps):
        """Each step stores (positive) and removes (negative) blocks, and lags in being executed."""
        hold, done = PublicationHold(), 0
        mirror: set[int] = set()
        cached: dict[int, int] = {}
        for number, (changes, lag) in enumerate(steps, 1):
            done = max(done, number - lag - 1)
            apply(hold.release(done), mirror)
            apply(hold.add(number, list(events_of(changes, cached, number))), mirror)
            assert mirror == {block for block, since in cached.items() if since <= done}


def events_of(changes, cached, number):
    for change in changes:
        if change == 0:
            cached.clear()
            yield CLEARED
        elif change > 0 and change not in cached:
            cached[change] = number
            yield stored(change)
        elif change < 0 and cached.pop(-change, None):
            yield removed(-change)


def apply(events, mirror):
    for event in events:
        if event.kind is EventKind.STORED:
            mirror.update(event.blocks)
        elif event.kind is EventKind.REMOVED:
            mirror.remove(event.blocks[0])
        else:
            mirror.clear()


def nothing() -> None:
    """For subscribers that look by themselves."""


def numbers(batches) -> list[int]:
    return [batch.seq for batch in batches]


class TestEventLog:
    @pytest.fixture
    def log(self):
        return EventLog(capacity=4, max_bytes=1 << 20, max_subscribers=2)

    def fill(self, log, count):
        for block in range(count):
            log.publish(1, [stored(block)])

    def test_batches_have_numbers_and_nothing_makes_no_batch(self, log):
        subscription = log.subscribe(None, nothing)
        log.publish(1, [])
        log.publish(1, [stored(1)])
        log.publish(2, [stored(2)])
        assert subscription.take() == [Batch(1, 1, (stored(1),)), Batch(2, 2, (stored(2),))]
        assert subscription.take() == []

    def test_a_subscriber_resumes_where_it_was(self, log):
        self.fill(log, 3)
        assert numbers(log.subscribe(1, nothing).take()) == [2, 3]
        assert numbers(log.subscribe(0, nothing).take()) == [1, 2, 3]

    def test_batches_of_many_hashes_leave_sooner_and_the_newest_stays(self):
        log = EventLog(capacity=100, max_bytes=20_000, max_subscribers=9)
        slow = log.subscribe(0, nothing)
        for _ in range(3):
            log.publish(1, [stored(*range(50))])
        assert log.oldest_resumable == 1, "each takes about 9 KB"
        with pytest.raises(LimitExceeded, match="too slow"):
            slow.take()
        log.publish(1, [stored(*range(500))])
        assert numbers(log.subscribe(3, nothing).take()) == [4]
        self.fill(log, 3)
        assert numbers(log.subscribe(4, nothing).take()) == [5, 6, 7]

    def test_from_now_on_shows_nothing_old(self, log):
        self.fill(log, 3)
        subscription = log.subscribe(None, nothing)
        assert subscription.take() == []
        self.fill(log, 1)
        assert numbers(subscription.take()) == [4]

    def test_a_number_from_the_future_is_refused(self, log):
        self.fill(log, 3)
        with pytest.raises(InvalidArgument, match="the last is 3"):
            log.subscribe(4, nothing)

    def test_lost_batches_are_a_gap(self, log):
        self.fill(log, 7)
        gap, *rest = log.subscribe(1, nothing).take()
        assert (gap.gap, gap.seq, gap.events) == (True, 3, ())
        assert numbers(rest) == [4, 5, 6, 7]
        assert numbers(log.subscribe(3, nothing).take()) == [4, 5, 6, 7]

    def test_who_is_too_slow_is_ended_and_told_where_to_go_on(self, log):
        slow, quick = log.subscribe(None, nothing), log.subscribe(None, nothing)
        self.fill(log, 4)
        quick.take()
        self.fill(log, 1)
        assert numbers(quick.take()) == [5]
        with pytest.raises(LimitExceeded, match="too slow") as caught:
            slow.take()
        assert caught.value.metadata == {"after_seq": "0"}

    def test_subscribers_are_counted(self, log):
        first = log.subscribe(None, nothing)
        log.subscribe(None, nothing)
        with pytest.raises(LimitExceeded, match="2 subscribers"):
            log.subscribe(None, nothing)
        first.cancel()
        log.subscribe(None, nothing)

    def test_each_batch_wakes_the_subscribers(self, log):
        woken = []
        log.subscribe(None, lambda: woken.append(1))
        self.fill(log, 2)
        log.withdraw()
        assert len(woken) == 3

    def test_a_lapse_and_the_return_are_told_once(self, log):
        subscription = log.subscribe(None, nothing)
        for act in (log.withdraw, log.withdraw, log.restore, log.restore):
            act()
        assert [(batch.withdrawn, batch.restored) for batch in subscription.take()] == [(True, False), (False, True)]

    def test_who_comes_during_a_lapse_is_told_of_it(self, log):
        log.publish(1, [stored(1)])
        log.withdraw()
        assert [batch.withdrawn for batch in log.subscribe(None, nothing).take()] == [True]
        assert [batch.withdrawn for batch in log.subscribe(1, nothing).take()] == [True]

    @pytest.mark.parametrize("restored", [False, True])
    def test_a_gap_says_whether_the_lapse_was_before_it(self, log, restored):
        log.withdraw()
        if restored:
            log.restore()
        self.fill(log, 4)
        assert log.subscribe(0, nothing).take()[0].withdrawn is not restored

    def test_a_closed_log_ends_its_subscribers_after_the_last_batch(self, log):
        subscription = log.subscribe(None, nothing)
        self.fill(log, 1)
        log.close(NotFound("gone"))
        assert numbers(subscription.take()) == [1]
        with pytest.raises(NotFound, match="gone"):
            subscription.take()
        with pytest.raises(NotFound, match="gone"):
            log.subscribe(None, nothing)
