"""The events of a prefix cache: executed content only, in order, resumable, and slow subscribers are ended."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.base.errors import InvalidArgument, LimitExceeded, NotFound
from kvplane.base.step import CacheEvent, EventKind, RemoveReason
from kvplane_core.face.cache_events import CacheEvents
from kvplane_service.decisions.packed_log import LogBudget
from kvplane_service.replicas.events import Batch, EventLog, PublicationHold
from tests.core.follower import Follower, Shown


def stored(*blocks: int, domain: str = "") -> CacheEvent:
    hashes = tuple(str(block).encode() for block in blocks)
    return CacheEvent(EventKind.STORED, 0, hashes, blocks, domain, block_starts=tuple(range(len(blocks))))


def removed(block: int, domain: str = "") -> CacheEvent:
    return CacheEvent(EventKind.REMOVED, 0, (str(block).encode(),), (block,), domain, reason=RemoveReason.EVICTED)


CLEARED = CacheEvent(EventKind.CLEARED)


class TestPublicationHold:
    def test_stored_keys_are_held_until_execution(self):
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

    def test_a_key_removed_while_held_is_never_published(self):
        hold = PublicationHold()
        hold.add(1, [stored(1, 2, 3), stored(4)])
        assert hold.add(2, [removed(2), removed(4)]) == []
        (event,) = hold.release(9)
        assert (event.hashes, event.blocks, event.block_starts) == ((b"1", b"3"), (1, 3), (0, 2))

    def test_equal_keys_of_two_domains_are_published_separately(self):
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

    def test_a_shown_key_is_removed_while_its_content_is_held_under_another_block(self):
        hold = PublicationHold()
        shown, held = copy_of(b"x", 1), copy_of(b"x", 2)
        hold.add(1, [shown])
        hold.release(1)
        hold.add(2, [held])
        (gone,) = hold.add(3, [gone_from(b"x", 1)])
        assert gone.blocks == (1,)
        assert hold.release(3) == [held]

    def test_a_run_of_removals_publishes_only_published_keys(self):
        hold = PublicationHold()
        hold.add(1, [stored(1, 2)])
        hold.release(1)
        hold.add(2, [stored(3), copy_of(b"longer", 2)])
        run = CacheEvents()
        for block in (1, 3, 2):
            run.removed(block, [("", 0, str(block).encode())], RemoveReason.EVICTED)
        (removal,) = hold.add(3, run.runs)
        assert list(removal.blocks) == [1, 2]
        assert hold.release(2) == [copy_of(b"longer", 2)]

    def test_a_new_life_publishes_held_keys_that_it_kept(self):
        hold = PublicationHold()
        hold.add(1, [stored(1)])
        hold.release(1)
        hold.add(2, [stored(2, 3)])
        assert hold.begin_life([removed(1), removed(2)]) == [
            removed(1),
            CacheEvent(EventKind.STORED, 0, (b"3",), (3,), block_starts=(1,)),
        ]
        assert hold.release(9) == []

    def test_a_cleared_event_drops_held_keys(self):
        hold = PublicationHold()
        hold.add(1, [stored(1)])
        assert hold.add(2, [CLEARED, stored(2)]) == [CLEARED]
        assert hold.release(2) == [stored(2)]

    def test_events_without_hashes_are_passed_on(self):
        hold = PublicationHold()
        hold.add(1, [stored()])
        assert hold.release(1) == [stored()]


def copy_of(digest: bytes, block: int) -> CacheEvent:
    return CacheEvent(EventKind.STORED, 0, (digest,), (block,))


def gone_from(digest: bytes, block: int) -> CacheEvent:
    return CacheEvent(EventKind.REMOVED, 0, (digest,), (block,), reason=RemoveReason.EVICTED)


class Cache:
    """A prefix cache without any cleverness: which step stored each key of each block. Its changes are events."""

    def __init__(self) -> None:
        self.since: dict[Shown, int] = {}
        self.events = CacheEvents()

    def store(self, seq: int, blocks: list[int], name: int) -> None:
        """One content in each block: group, domain and digest follow from `name`."""
        domain, group, digest = ("", "blue")[name % 2], name // 2 % 2, bytes([name // 4])
        new = [block for block in dict.fromkeys(blocks) if Shown(block, domain, group, digest) not in self.since]
        self.events.append(CacheEvent(EventKind.STORED, group, (digest,) * len(new), tuple(new), domain))
        self.since |= {Shown(block, domain, group, digest): seq for block in new}

    def drop(self, block: int, reason: RemoveReason) -> list[Shown]:
        """A block loses all its keys."""
        gone = [one for one in self.since if one.block == block]
        for one in gone:
            del self.since[one]
        self.events.removed(block, [(one.domain, one.group, one.digest) for one in gone], reason)
        return gone

    def move(self, seq: int, source: int, target: int) -> None:
        """The content of one block lives in another from this step on."""
        self.drop(target, RemoveReason.EVICTED)
        for one in self.drop(source, RemoveReason.MOVED):
            self.events.append(CacheEvent(EventKind.STORED, one.group, (one.digest,), (target,), one.domain))
            self.since[one._replace(block=target)] = seq

    def fail(self, since: int) -> None:
        """Steps from this one on never ran."""
        for block in dict.fromkeys(one.block for one, seq in self.since.items() if seq >= since):
            self.drop(block, RemoveReason.WITHDRAWN)

    def clear(self) -> None:
        self.since.clear()
        self.events.append(CLEARED)

    def take(self) -> CacheEvents:
        events, self.events = self.events, CacheEvents()
        return events


class Watched:
    """A cache that is published, and two followers of its log: one reads at once, the other sometimes."""

    def __init__(self) -> None:
        self.cache, self.hold = Cache(), PublicationHold()
        self.log = EventLog(1 << 20, LogBudget(1 << 40), max_subscribers=2)
        self.followers = [(Follower(), self.log.subscribe(0, nothing)) for _ in range(2)]
        self.epoch, self.seq, self.done = 1, 0, 0

    def act(self, kind: str, one: int, other: int) -> None:
        """A step, or what else can happen; numbers choose blocks, contents and how far execution is behind."""
        if kind in ("withdraw", "restore"):
            getattr(self.log, kind)()
        elif kind == "life":
            self.begin_life(one % 4)
        else:
            self.step(kind, one, other)
        self.read(0)

    def step(self, kind: str, one: int, other: int) -> None:
        self.seq += 1
        self.done = max(self.done, self.seq - 1 - one % 4)
        cache, block = self.cache, one % 5
        match kind:
            case "store":
                cache.store(self.seq, [block, other % 5], other % 16)
            case "evict":
                cache.drop(block, RemoveReason.EVICTED)
                cache.store(self.seq, [block], other % 16)
            case "move" if block != other % 5:
                cache.move(self.seq, block, other % 5)
            case "fail":
                cache.fail(max(self.done + 1, self.seq - other % 4))
            case "clear":
                cache.clear()
        self.log.publish(self.epoch, self.hold.step(self.seq, self.done, [cache.take()]))

    def begin_life(self, keeps: int) -> None:
        """Keys of blocks from `keeps` on are not proven, nor what was not executed."""
        self.cache.fail(self.done + 1)
        if not keeps:
            self.cache.clear()
        for block in {one.block for one in self.cache.since if one.block > keeps}:
            self.cache.drop(block, RemoveReason.UNVERIFIED)
        self.cache.since = dict.fromkeys(self.cache.since, 0)
        self.epoch, self.seq, self.done = self.epoch + 1, 0, 0
        self.log.publish(self.epoch, self.hold.begin_life(self.cache.take().runs))

    def read(self, number: int) -> None:
        """A follower reads all that there is: it knows every key whose step was executed, and no other."""
        follower, subscription = self.followers[number]
        follower.read(subscription.take())
        assert follower.view == {one for one, since in self.cache.since.items() if since <= self.done}


KINDS = ("store", "store", "store", "evict", "evict", "move", "fail", "clear", "life", "withdraw", "restore", "")
ACTS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 15), st.integers(0, 15)), max_size=40)


@given(ACTS)
def test_a_subscriber_view_equals_the_executed_cache(acts):
    watched = Watched()
    for number, act in enumerate(acts):
        watched.act(*act)
        if number % 7 == 6:
            watched.read(1)
    watched.read(1)


def nothing() -> None:
    """For subscribers that look by themselves."""


def numbers(batches) -> list[int]:
    return [batch.seq for batch in batches]


class TestEventLog:
    @pytest.fixture
    def log(self):
        return EventLog(4, LogBudget(1 << 20), max_subscribers=2)

    def fill(self, log, count):
        for block in range(count):
            log.publish(1, [stored(block)])

    def test_batches_are_numbered_and_never_empty(self, log):
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

    def test_event_log_is_bounded_in_hashes_and_keeps_the_newest_batch(self):
        budget = LogBudget(1_500)
        log = EventLog(100, budget, max_subscribers=9)
        slow = log.subscribe(0, nothing)

        def publish(*blocks: int) -> None:
            log.publish(1, [stored(*blocks)])
            for _ in budget.pack():
                pass

        for _ in range(3):
            publish(*range(50))
        assert log.oldest_resumable == 1, "each takes about 600 bytes"
        with pytest.raises(LimitExceeded, match="too slow"):
            slow.take()
        publish(*range(500))
        assert numbers(log.subscribe(3, nothing).take()) == [4]
        for block in range(3):
            publish(block)
        assert numbers(log.subscribe(4, nothing).take()) == [5, 6, 7]

    def test_subscribing_from_now_skips_old_batches(self, log):
        self.fill(log, 3)
        subscription = log.subscribe(None, nothing)
        assert subscription.take() == []
        self.fill(log, 1)
        assert numbers(subscription.take()) == [4]

    def test_subscribing_after_an_unreached_batch_is_refused(self, log):
        self.fill(log, 3)
        with pytest.raises(InvalidArgument, match="the last batch, 3"):
            log.subscribe(4, nothing)

    def test_lost_batches_are_a_gap(self, log):
        self.fill(log, 7)
        gap, *rest = log.subscribe(1, nothing).take()
        assert (gap.gap, gap.seq, gap.events) == (True, 3, ())
        assert numbers(rest) == [4, 5, 6, 7]
        assert numbers(log.subscribe(3, nothing).take()) == [4, 5, 6, 7]

    def test_a_slow_subscriber_is_ended_with_its_position(self, log):
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

    def test_lapse_and_restoration_are_published_once(self, log):
        subscription = log.subscribe(None, nothing)
        for act in (log.withdraw, log.withdraw, log.restore, log.restore):
            act()
        assert [(batch.withdrawn, batch.restored) for batch in subscription.take()] == [(True, False), (False, True)]

    def test_a_late_subscriber_gets_the_lapse(self, log):
        log.publish(1, [stored(1)])
        log.withdraw()
        assert [batch.withdrawn for batch in log.subscribe(None, nothing).take()] == [True]
        assert [batch.withdrawn for batch in log.subscribe(1, nothing).take()] == [True]

    @pytest.mark.parametrize("restored", [False, True])
    def test_a_gap_has_the_lapse_state_before_it(self, log, restored):
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
