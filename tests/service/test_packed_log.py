"""Decision logs share one budget in bytes: each log drops its oldest entries, and none is cut below its share."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Generator
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.base.errors import NotFound
from kvplane.base.session import OpenRequest
from kvplane.base.step import Admit, CacheEvent, End, EventKind, Facts, News, Part, RemoveReason, Step
from kvplane_core.face.cache_events import CacheEvents
from kvplane_service.config import Config
from kvplane_service.decisions import log as log_module
from kvplane_service.decisions import packing
from kvplane_service.decisions.log import Decision, DecisionLog, Life
from kvplane_service.decisions.packed_log import LogBudget, PackedLog
from kvplane_service.decisions.sent import step_with
from kvplane_service.explain.service import explain_request
from kvplane_service.registry import Registration, Registry
from kvplane_service.replicas.events import EventLog
from kvplane_service.rpc.events import NewestMessages
from kvplane_service.runtime.slices import Turns
from tests.bench.overhead import Side, always_on
from tests.service.hosts import BLOCK, HostWorld, spec_of
from tests.service.test_decisions import decode, new

ENTRY = 64  # overhead of an entry in bytes
LARGEST = 200
PIECE = 64  # bytes that are packed between two yields


class Numbers(PackedLog[int, bytes]):
    """Entries are numbers of bytes."""

    def __init__(self, max_entries: int, budget: LogBudget) -> None:
        super().__init__(max_entries, budget)
        self.began, self.packed = asyncio.Event(), asyncio.Event()

    def add(self, num_bytes: int) -> None:
        self._keep(num_bytes)

    def _pack(self, entry: int) -> Generator[None, None, bytes]:
        for _ in range(entry // PIECE):
            self.began.set()
            yield
        self.packed.set()
        return bytes(entry)

    async def reached(self, num_bytes: int) -> None:
        """Wait until this many bytes are packed."""
        while self.num_bytes < num_bytes:
            self.packed.clear()
            await self.packed.wait()

    @property
    def sizes(self) -> list[int]:
        return [len(kept) if isinstance(kept, bytes) else kept for kept in self._kept]


def pack(budget: LogBudget, pieces: int | None = None) -> None:
    """Pack everything, or some pieces."""
    for _ in islice(budget.pack(), pieces):
        pass


PIECES = st.none() | st.integers(0, 9)
ADDS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, LARGEST), PIECES), max_size=120)


@given(ADDS, st.integers(500, 4000), st.integers(1, 40))
def test_budget_is_kept_and_no_log_loses_below_its_share(adds, max_bytes, max_entries):
    budget = LogBudget(max_bytes)
    logs = [Numbers(max_entries, budget) for _ in range(4)]
    added: list[list[int]] = [[] for _ in logs]
    for number, num_bytes, pieces in adds:
        logs[number].add(num_bytes)
        added[number].append(num_bytes)
        pack(budget, pieces)
        if pieces is None:
            assert budget.used <= max_bytes or not any(log.spare_bytes for log in logs)
        assert budget.used == sum(log.num_bytes for log in logs)
    pack(budget)
    for log, all_of in zip(logs, added, strict=True):
        assert log.sizes == all_of[len(all_of) - len(log) :]
        assert log.num_lost + len(log) == log.num_entries == len(all_of)
        assert log.num_bytes == sum(log.sizes) + ENTRY * len(log)
        assert log.spare_bytes == (log.num_bytes - log.sizes[-1] - ENTRY if log.sizes else 0)
        if log.num_lost and len(all_of) <= max_entries:
            assert log.num_bytes >= max_bytes / len(logs) * 7 / 8 - 3 * (LARGEST + ENTRY)


def test_an_idle_log_keeps_its_entries_while_others_grow():
    budget = LogBudget(100_000)
    quiet, *busy = [Numbers(1 << 20, budget) for _ in range(10)]
    for _ in range(50):
        quiet.add(100)
    for _ in range(2000):
        for log in busy:
            log.add(100)
    pack(budget)
    assert quiet.num_lost == 0
    assert 90_000 < budget.used <= 100_000
    shares = [log.num_bytes for log in busy]
    assert max(shares) < 1.4 * min(shares)


def test_a_large_log_shrinks_when_other_logs_join():
    budget = LogBudget(100_000)
    first, second = Numbers(1 << 20, budget), Numbers(1 << 20, budget)
    for log in (first, second):
        for _ in range(1000):
            log.add(100)
    pack(budget)
    assert 0.8 < first.num_bytes / second.num_bytes < 1.25


def test_the_newest_entry_of_each_log_stays():
    budget = LogBudget(1000)
    logs = [Numbers(9, budget) for _ in range(3)]
    for log in logs:
        log.add(10)
        log.add(5000)
        pack(budget)
    assert [log.sizes for log in logs] == [[5000]] * 3


def test_a_log_that_leaves_returns_its_bytes():
    budget = LogBudget(1 << 20)
    log, other = Numbers(9, budget), Numbers(9, budget)
    for one in (log, other):
        one.add(100)
    log.leave_budget()
    log.leave_budget()
    log.add(100)
    pack(budget)
    assert budget.used == other.num_bytes == 100 + ENTRY
    assert log.sizes == [100, 100]


async def test_entries_are_packed_in_background():
    budget = LogBudget(1 << 20)
    task = asyncio.create_task(budget.pack_in_background())
    logs = [Numbers(1000, budget) for _ in range(3)]
    for round_ in range(3):
        for log in logs:
            log.add(100)
        await asyncio.gather(*(log.reached((round_ + 1) * (100 + ENTRY)) for log in logs))
    task.cancel()


def test_an_entry_dropped_while_it_is_packed_leaves_the_next_entry_whole():
    budget = LogBudget(1 << 20)
    log = Numbers(2, budget)
    for num_bytes in (10 * PIECE, 3 * PIECE):
        log.add(num_bytes)
    pack(budget, 5)
    log.add(1)
    assert (log.num_lost, log.lost_bytes, budget.used) == (1, 0, 0)
    pack(budget)
    assert log.sizes == [3 * PIECE, 1]
    assert budget.used == log.num_bytes == 3 * PIECE + 1 + 2 * ENTRY


def test_a_log_that_leaves_while_its_entry_is_packed_stops_no_other_log():
    budget = LogBudget(1 << 20)
    log, other = Numbers(9, budget), Numbers(9, budget)
    log.add(10 * PIECE)
    other.add(PIECE)
    pieces = budget.pack()
    for _ in range(5):
        next(pieces)
    log.leave_budget()
    list(pieces)
    assert (log.num_bytes, budget.used) == (0, PIECE + ENTRY)
    assert (log.sizes, other.sizes) == ([10 * PIECE], [PIECE])


def test_too_many_entries_wait_while_one_is_packed_in_pieces():
    budget = LogBudget(1 << 20)
    log = Numbers(99, budget)
    log.add(10 * PIECE)
    pack(budget, 5)
    for _ in range(9):
        log.add(PIECE)
    assert log.num_bytes == 10 * PIECE + 2 * ENTRY + PIECE
    pack(budget)
    assert log.sizes == [10 * PIECE] + [PIECE] * 9


async def test_packing_continues_where_a_cancelled_task_stopped():
    budget = LogBudget(1 << 20)
    log = Numbers(9, budget)
    log.add(1 << 22)  # 65,536 pieces
    for _ in range(3):
        log.began.clear()
        task = asyncio.create_task(budget.pack_in_background())
        await log.began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert log.num_bytes == 0
    pieces_left = sum(1 for _ in budget.pack())
    assert pieces_left < (1 << 22) // PIECE
    assert log.num_bytes == budget.used == (1 << 22) + ENTRY


def test_an_entry_whose_packing_fails_is_packed_from_its_start(monkeypatch):
    budget = LogBudget(1 << 20)
    log = Numbers(9, budget)
    log.add(3 * PIECE)

    def fails(_: int) -> Generator[None, None, bytes]:
        yield
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(log, "_pack", fails)
        with pytest.raises(ZeroDivisionError):
            pack(budget)
    pack(budget)
    assert log.sizes == [3 * PIECE]
    assert budget.used == 3 * PIECE + ENTRY


def test_without_background_task_steps_pack_excess_entries():
    log = Numbers(1000, LogBudget(1 << 20))
    for _ in range(100):
        log.add(100)
    assert 80 < log.num_bytes / (100 + ENTRY) < 100


def registry_of(count: int, log_bytes: int) -> Registry:
    registry = Registry(Config(log_bytes=log_bytes), lambda: 0)
    for number in range(count):
        host = registry.register(f"r{number}", Registration(spec_of(300, max_model_len=1 << 12))).host
        host.open(OpenRequest(host.name, nonce=1))
    return registry


def serve_prompts(registry: Registry, first: int, last: int) -> None:
    for seq in range(first, last + 1):
        for entry in registry:
            host = entry.host
            news = News([0], [200 * BLOCK], tokens=[seq] * 200 * BLOCK, request_id=[f"p{seq}"])
            ended = Facts([0], end=[int(End.FREE)]) if seq > 1 else Facts()
            part = Part(facts=ended, news=news, admit=Admit([0]))
            host.step(1, Step(host.epoch, seq, [part], executed_through=seq - 1), b"")
        pack(registry.logs)
        assert registry.logs.used <= registry.logs.max_bytes


async def test_the_logs_of_many_replicas_fit_into_the_budget_and_still_explain():
    registry = registry_of(8, 2 << 20)
    serve_prompts(registry, 1, 40)
    logs = [log for entry in registry for log in (entry.host.decisions, entry.host.events)]
    assert sum(log.num_bytes for log in logs) == registry.logs.used > 1.7 * (1 << 20)
    assert all(log.num_lost for log in logs)

    async def at_once(work):
        return work()

    for entry in registry:
        found = await explain_request(entry.host, "p40", Turns("explanations", 0), at_once)
        assert (found.seq, found.is_complete) == (40, False)
        with pytest.raises(NotFound):
            await explain_request(entry.host, "p1", Turns("explanations", 0), at_once)


async def test_only_the_entries_from_a_request_on_are_unpacked_to_find_its_attempt(monkeypatch):
    registry = registry_of(1, 32 << 20)
    serve_prompts(registry, 1, 40)
    host, real, unpacked = registry.get("r0").host, log_module._unpack, list[object]()
    while host.decisions.pack_oldest():
        pass

    def unpack(kept):
        unpacked.append(kept)
        return real(kept)

    monkeypatch.setattr(log_module, "_unpack", unpack)

    async def at_once(work):
        return work()

    with pytest.raises(NotFound):
        await explain_request(host, "p99", Turns("explanations", 0), at_once)
    assert unpacked == []
    await explain_request(host, "p3", Turns("explanations", 0), at_once)
    assert len(unpacked) <= len(host.decisions) + 4 + 16, "for the keys, its attempt, and where p3 and p30 to p39 came"


def test_a_deregistered_replica_returns_its_log_bytes():
    registry = registry_of(2, 1 << 20)
    serve_prompts(registry, 1, 5)
    host = registry.get("r0").host
    kept = registry.logs.used - host.decisions.num_bytes - host.events.num_bytes
    subscription = host.events.subscribe(0, lambda: None)
    registry.remove("r0")
    assert registry.logs.used == kept
    assert len(subscription.take(3)) == 3, "what was shown can still be read"
    assert [batch.seq for batch in subscription.take()] == list(range(4, host.events.last_seq + 1))


def test_a_life_that_lost_too_much_to_be_packed_empties_the_log():
    log = DecisionLog(99, LogBudget(1 << 20))
    seen: list[object] = []
    log.follow(seen.append)
    few = CacheEvent(EventKind.REMOVED, 0, [b"k"], [1], reason=RemoveReason.UNVERIFIED)
    many = CacheEvent(EventKind.REMOVED, 0, [b"k"] * (1 << 17), [1] * (1 << 17), reason=RemoveReason.UNVERIFIED)
    for epoch, run in enumerate((few, few, many, few), 1):
        log.append(Life(epoch, [7, 8], CacheEvents([run]), at_ns=epoch))
        while log.pack_oldest():
            pass
    assert (len(log), log.num_lost, len(seen)) == (1, 3, 4)
    (life,) = log
    assert life == Life(4, [7, 8], CacheEvents([few]), at_ns=4)


def test_a_reader_sees_a_snapshot_of_the_log():
    world = HostWorld(Config(decision_log_steps=4))
    engine = world.open()
    for _ in range(4):
        engine.step()
    reading = iter(world.host.decisions)
    for _ in range(9):
        engine.step()
    assert [entry.step.seq for entry in reading if isinstance(entry, Decision)] == [1, 2, 3, 4]


def test_a_decision_reads_the_same_while_it_is_packed(monkeypatch):
    monkeypatch.setattr(packing, "_PIECE", 1)
    world = HostWorld(spec=spec_of(num_blocks=99))
    world.host.steps._reader = world.host.steps._pack = None  # as on a Python core
    engine, log = world.open(), world.host.decisions
    engine.step(new(0, 1))
    while log.pack_oldest():
        pass
    engine.step(new(2, tokens=list(range(200))))
    (before,) = [one for one in log if isinstance(one, Decision) and one.step.seq == 2]
    pieces = 0
    while log.pack_oldest():
        pieces += 1
        (during,) = [one for one in log if isinstance(one, Decision) and one.step.seq == 2]
        assert during is before
        assert log.slowest(9)
    assert pieces > 3
    (after,) = [one for one in log if isinstance(one, Decision) and one.step.seq == 2]
    assert (after.step, after.events) == (before.step, before.events)


def test_the_slowest_decisions_are_found_packed_or_not():
    world = HostWorld()
    engine, log = world.open(), world.host.decisions
    engine.step(new(0))
    kept = [one for one in log if isinstance(one, Decision)]
    for took_ns in (5, 900, 70, 300, 2, 800, 11, 600, 4, 850, 60):
        log.append(kept[0]._replace(took_ns=took_ns))
    assert [one.took_ns for one in log.slowest(4)] == [900, 850, 800, 600]


def test_event_messages_are_encoded_once_for_all_subscribers():
    log, messages = EventLog(9, LogBudget(1 << 20), 9), NewestMessages()
    one, other = log.subscribe(0, lambda: None), log.subscribe(0, lambda: None)
    log.publish(1, [CacheEvent(EventKind.STORED, 0, (b"k",), (1,))])
    first, second = (messages.encode(log, batch) for who in (one, other) for batch in who.take())
    assert first is second
    other.cancel()
    (batch,) = log.after(0)
    assert messages.encode(log, batch) == first


def test_packed_logs_have_no_gc_objects():
    side = Side(600, always_on)
    side.begin()
    side.decode(100)
    objects = []
    for _ in range(2):
        gc.collect()
        objects.append(len(gc.get_objects()))
        side.decode(250)
    assert objects[1] - objects[0] < 100


def test_decisions_read_the_same_before_and_after_they_are_packed():
    world = HostWorld(spec=spec_of(num_blocks=15))
    seen: list[object] = []
    world.host.decisions.follow(seen.append)
    engine = world.open()
    engine.step(new(0, 1))
    for token in range(40):
        engine.step(decode(0, 1, token=token))
    while world.host.decisions.pack_oldest():
        pass
    for before, after in zip(seen, world.host.decisions, strict=True):
        if isinstance(before, Decision) and isinstance(after, Decision):
            given = step_with(before.step, before.step.parts, before.step.traceparent)
            assert (after.step, after.events, after.at_ns) == (given, before.events, before.at_ns)
            assert [part.orders for part in after.result.parts] == [part.orders for part in before.result.parts]
            made = [(part.hashed_facts, part.hashed_news) for part in before.result.parts]
            assert [(part.hashed_facts, part.hashed_news) for part in after.result.parts] == made
