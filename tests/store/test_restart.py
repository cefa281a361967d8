"""A service that is killed and restarted: published keys hit again, and an engine sees a pause, never an error."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest

from kvplane.base.errors import NotFound, ReplicaLapsed, ServiceRestarted, StaleEpoch, Unavailable
from kvplane.base.session import Opened, OpenRequest
from kvplane.base.stamps import Stamp
from kvplane.base.step import CacheEvent, End, EventKind, Part, Resume
from kvplane.blocking.session import Session
from kvplane.sansio.retry import RetryPolicy
from kvplane.session.reopening import Revival
from kvplane.session.rows import AdmitRow, FactRow, NewsRow, RunRow, part_of
from kvplane_core.face.inspect import check, take_snapshot
from kvplane_service.config import Config
from kvplane_service.registry import Registration, Registry
from kvplane_service.replicas.host import ReplicaHost, ReplicaState
from kvplane_service.replicas.step_order import UnaryStep
from kvplane_service.runtime.reports import StoreState
from kvplane_service.store.errors import StoreUnavailable
from kvplane_service.store.keeper import Entropy, Keeper
from kvplane_service.store.memory import MemoryStore
from kvplane_service.store.offloaded import Offloaded
from kvplane_service.store.seals import guarded
from kvplane_service.store.writer import Runtime
from tests.client.lasting import HYBRID, STATE, LastingEngine, PageMemory
from tests.service.inprocess import InProcessTransport
from tests.service.rig import core_class

NAME = "small"
NONCES = itertools.count(1000)
TEXT = list(range(100))


async def inline(call):
    return call()


async def no_pause(seconds):
    await asyncio.sleep(0)


class Life:
    """One service process on a store."""

    def __init__(self, store, now_ms=1_000_000, loads=True, **config):
        self.config = Config(store="memory", **config)
        self.registry = Registry(self.config, lambda: 0)
        runtime = Runtime(lambda: 0, no_pause, inline, lambda: 0.0)
        counter = itertools.count(7)
        self.keeper = Keeper(self.registry, self.config, runtime, Entropy(lambda: now_ms, lambda: next(counter)))
        asyncio.run(self.keeper.start(guarded(Offloaded(lambda: store, inline), self.config.store_key_file, inline)))
        if loads:
            asyncio.run(self.load())

    async def load(self):
        """Read the store, and retry until all entries are read."""
        await self.keeper.load()
        await asyncio.gather(*self.keeper._loads.tasks)

    def flush(self):
        assert self.keeper._writer is not None
        assert asyncio.run(self.keeper._writer.write_all())

    @property
    def host(self) -> ReplicaHost:
        return self.registry.get(NAME).host

    def report(self):
        return self.keeper.report(self.registry.get(NAME))


class World:
    """A store, the current service process, and streams that break when it is killed."""

    def __init__(self, spec=HYBRID, **config):
        self.store = MemoryStore()
        self.config = config
        self.life = Life(self.store, **config)
        self.life.registry.register(NAME, Registration(spec))
        self.deaths = 0

    def restart(self, **config):
        """Kill the process, and start another one."""
        self.deaths += 1
        self.life = Life(self.store, **{**self.config, **config})

    def session(self, revive=None) -> Session:
        first = revive() if revive else None
        request = OpenRequest(NAME, next(NONCES))
        if first is not None:
            request = replace(request, stamp_table=first.stamp_table, incarnation=first.incarnation)
        retry = RetryPolicy(3, sleep=lambda _: None)
        return Session(Wire(self), request, retry=retry, nonces=NONCES.__next__, heartbeats=False, revive=revive)


class Wire(InProcessTransport):
    """A stream that breaks with the process at its other end."""

    def __init__(self, world):
        super().__init__(lambda name: world.life.registry.get(name).host)
        self._world = world
        self._opened_in = -1

    @property
    def is_broken(self):
        return self._opened_in != self._world.deaths

    def open(self, request) -> Opened:
        opened = super().open(request)
        self._opened_in = self._world.deaths
        return opened

    def send(self, step):
        if not self.is_broken:
            super().send(step)

    def receive(self):
        if self.is_broken:
            raise Unavailable("the stream is broken")
        return super().receive()

    def heartbeat(self, waiting_requests=None):
        if self.is_broken:
            raise Unavailable("the stream is broken")
        super().heartbeat()


def serve(session, memory, slot=0, tokens=TEXT):
    """Run one request to its end; returns its hit."""
    part = part_of(NewsRow(slot, tokens), AdmitRow(slot))
    (result,) = session.apply(part).parts
    memory.carry_out(result)
    session.apply(part_of(FactRow(slot, end=End.FREE)))
    session.apply(Part())
    return result.admit_hit[0]


def shown(memory) -> Revival:
    """A revival without requests, with the stamps of the memory."""
    return Revival(tuple(memory.stamps))


def used_world(**config):
    world = World(**config)
    memory = PageMemory(HYBRID.num_blocks)
    session = world.session()
    assert serve(session, memory) == 0
    world.life.flush()
    return world, memory, session


def reopen(world, memory, **changes):
    request = OpenRequest(NAME, next(NONCES), stamp_table=tuple(memory.stamps), incarnation=0)
    return world.life.host.open(replace(request, **changes))


# -- entries


@pytest.mark.parametrize(("changed", "proofs"), [(False, 1), (True, 2)], ids=["the same memory", "another memory"])
def test_verified_entries_are_prepared_and_used_for_their_memory_only(changed, proofs, monkeypatch):
    world, memory, _ = used_world()
    world.restart()
    calls, real = [], core_class().verify_entries

    def verify_entries(self, *given):
        calls.append(given)
        return real(self, *given)

    monkeypatch.setattr(core_class(), "verify_entries", verify_entries)
    ahead = OpenRequest(NAME, next(NONCES), stamp_table=tuple(memory.stamps))
    asyncio.run(world.life.host.prove_ahead(ahead, inline))
    assert (world.life.host.state, len(calls)) == (ReplicaState.RECOVERING, 1)
    stamps = [0] * len(memory.stamps) if changed else memory.stamps
    opened = reopen(world, memory, stamp_table=tuple(stamps))
    assert (opened.kept_keys > 0, len(calls)) == (not changed, proofs)
    check(world.life.host.replica)


def test_event_subscribers_receive_the_recovered_keys():
    world, memory, _ = used_world()
    world.restart()
    subscription = world.life.host.events.subscribe(0, lambda: None)
    world.life.host.events.publish(0, [CacheEvent(EventKind.STORED, 0, (b"old" * 8,), (1,))])
    reopen(world, memory)
    known: dict[tuple[str, int, bytes], set[int]] = {}
    for event in (event for batch in subscription.take() for event in batch.events):
        if event.kind is EventKind.CLEARED:
            known.clear()
        for digest, block in zip(event.hashes, event.blocks, strict=True):
            known.setdefault((event.domain, event.group, digest), set()).add(block)
    keys = take_snapshot(world.life.host.replica).keys
    assert known == {tuple(one.key): {one.block} for one in keys} != {}


def test_the_first_request_after_a_restart_hits_as_before():
    world, memory, session = used_world()
    hit = serve(session, memory, 1)
    assert hit == 96
    world.restart()
    assert world.life.host.state is ReplicaState.RECOVERING
    revived = world.session(lambda: shown(memory))
    assert serve(revived, memory) == hit
    assert world.life.host.recovered.recovered == revived.kept_keys > 0
    check(world.life.host.replica)


def test_no_entry_is_used_before_the_stamps_are_known():
    world, memory, _ = used_world()
    world.restart()
    host = world.life.host
    with pytest.raises(ReplicaLapsed):
        host.check_readable()
    assert host.replica.count_keys() == 0
    reopen(world, memory)
    host.check_readable()


def test_overwritten_memory_gives_no_hit():
    world, memory, _ = used_world()
    world.restart()
    memory.stamps = [stamp + 1 if stamp else 0 for stamp in memory.stamps]
    assert reopen(world, memory).kept_keys == 0


def test_another_memory_with_equal_stamps_gives_no_hit():
    world, memory, _ = used_world()
    reopen(world, memory, incarnation=5)
    world.life.flush()
    world.restart()
    assert reopen(world, memory, incarnation=6).kept_keys == 0


def test_another_memory_gives_no_hit_without_a_restart():
    world, memory, _ = used_world()
    assert reopen(world, memory, incarnation=5).kept_keys > 0, "the first stated incarnation"
    assert reopen(world, memory, incarnation=5).kept_keys > 0
    assert reopen(world, memory, incarnation=0).kept_keys > 0, "without an incarnation it is the same memory"
    assert reopen(world, memory, incarnation=6).kept_keys == 0


def test_entries_of_an_incarnation_stay_with_it():
    world = World()
    memory = PageMemory(HYBRID.num_blocks)
    reopen(world, memory, incarnation=5)
    session = world.session()
    serve(session, memory)
    world.life.flush()
    assert {log.incarnation for log in world.store.logs} == {5}
    reopen(world, memory, incarnation=6)
    world.life.flush()
    assert {log.incarnation for log, chunks in world.store.logs.items() if chunks} == set()


def test_epochs_and_stamps_continue_above_those_of_the_memory():
    world, memory, session = used_world()
    world.restart()
    memory.stamps[30] = Stamp(0, 900, 5).pack()
    opened = reopen(world, memory)
    assert opened.epoch > 900 > session.epoch


def test_a_service_with_an_emptied_store_starts_above_the_epoch_of_the_memory():
    """Otherwise an earlier engine life would have the number of the new one."""
    world, memory, session = used_world()
    world.store = MemoryStore()
    world.restart()
    world.life.registry.register(NAME, Registration(HYBRID))
    assert reopen(world, memory).epoch > session.epoch


def test_an_epoch_unknown_to_the_store_is_not_reused():
    """The store has no record of it, and no page was stamped in it."""
    world, memory, _ = used_world()
    epochs = [reopen(world, memory).epoch for _ in range(3)]
    world.restart()
    assert reopen(world, memory).epoch > max(epochs)
    world.restart()
    with pytest.raises(ServiceRestarted):
        reopen(world, memory, epoch=5000, life_nonce=1)
    assert reopen(world, memory).epoch > 5000


def test_unary_calls_after_a_restart_begin_with_an_empty_cache():
    world, _, _ = used_world()
    world.restart()
    host = world.life.host
    asyncio.run(host.begin_unary())
    host.apply_unary(host.next_unary(UnaryStep(), [Part()]))
    assert host.replica.count_keys() == 0
    world.life.flush()
    world.restart()
    assert reopen(world, PageMemory(HYBRID.num_blocks)).kept_keys == 0


def test_a_deregistered_replica_is_removed_from_the_store():
    world, _, _ = used_world()
    world.life.registry.remove(NAME)
    world.life.flush()
    assert (world.store.logs, world.store.records_by_name) == ({}, {})
    world.restart()
    with pytest.raises(NotFound):
        world.life.registry.get(NAME)


def test_a_second_restart_without_any_engine_loses_nothing():
    world, memory, session = used_world()
    kept = serve(session, memory, 1)
    for _ in range(3):
        world.restart()
        world.life.flush()
    revived = world.session(lambda: shown(memory))
    assert serve(revived, memory) == kept


def test_no_session_opens_while_the_store_is_read():
    world, memory, _ = used_world()
    world.restart()
    recovering = world.life.host.recovering
    assert recovering is not None
    recovering.loading = True
    with pytest.raises(Unavailable, match="recovering"):
        reopen(world, memory)
    with pytest.raises(Unavailable, match="recovering"):
        asyncio.run(world.life.host.begin_unary())
    recovering.loading = False
    reopen(world, memory)


class Meddled(MemoryStore):
    """A store that calls a function during its first load, which then fails."""

    def __init__(self, logs, records):
        super().__init__()
        self.logs, self.records_by_name = logs, records
        self.meanwhile = lambda: None
        self.failures = 1

    def load(self, log):
        self.meanwhile()
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("not yet")
        yield from super().load(log)


def test_a_store_that_fails_during_the_load_is_retried():
    world, memory, _ = used_world()
    world.store = Meddled(world.store.logs, world.store.records_by_name)
    world.restart()
    assert world.store.failures == 0
    assert reopen(world, memory).kept_keys > 0


def test_a_replica_deregistered_during_the_load_is_not_recovered():
    world, _, _ = used_world()
    world.store = Meddled(world.store.logs, world.store.records_by_name)
    world.store.failures = 0
    world.restart(loads=False)
    life = world.life
    world.store.meanwhile = lambda: life.registry.remove(NAME)
    asyncio.run(life.keeper.load())
    assert len(life.registry) == 0
    life.flush()
    assert world.store.records_by_name == {}


def test_damaged_chunks_cost_hits_and_are_counted():
    world, memory, session = used_world()
    serve(session, memory, 1, list(range(500, 600)))
    world.life.flush()
    (chunks,) = world.store.logs.values()
    first = min(chunks)
    chunks[first] = chunks[first][:-1]
    world.restart()
    opened = reopen(world, memory)
    assert world.life.host.recovered.refused == {"truncated": 1}
    assert opened.kept_keys > 0


def test_a_damaged_record_is_skipped():
    world, _, _ = used_world()
    world.store.records_by_name[NAME] = world.store.records_by_name[NAME][:-3]
    world.restart()
    assert len(world.life.registry) == 0


def test_a_record_from_the_future_is_not_used_and_named(caplog):
    world, _, _ = used_world()
    world.restart(now_ms=400_000)
    assert len(world.life.registry) == 0
    assert "it was written 600 s after this machine's time: check the clock of this machine" in caplog.text
    world.life.flush()
    world.restart(now_ms=900_000)
    assert len(world.life.registry) == 1


def test_a_service_without_a_store_reports_it_as_off():
    registry = Registry(Config(), lambda: 0)
    entry = registry.register(NAME, Registration(HYBRID))
    keeper = Keeper(registry, Config(), Runtime(lambda: 0, no_pause, inline, lambda: 0.0), Entropy(int, int))
    assert keeper.report(entry).state is StoreState.OFF
    world = World()
    assert world.life.report().state is StoreState.OK


# -- sessions


def test_a_session_without_a_revival_ends():
    world, _, session = used_world()
    world.restart()
    with pytest.raises(ServiceRestarted, match="was restarted"):
        session.apply(Part())
    with pytest.raises(StaleEpoch):
        session.apply(Part())


@pytest.mark.parametrize("spec", [HYBRID, STATE], ids=["hybrid", "state"])
@pytest.mark.parametrize("every", [3, 10, 25])
def test_an_engine_outlives_its_service(spec, every):
    """Killed repeatedly: every request ends, prefixes hit, and step numbers continue."""
    world = World(spec)
    engine = LastingEngine(world.session, spec.num_blocks, seed=every)
    numbers, hits = [], 0
    for turn in itertools.count(1):
        if not (engine._waiting or engine.running or engine._facts):
            break
        numbers.append(engine.session.next_seq)
        before = engine.revivals
        engine.step()
        check(world.life.host.replica)
        hits += engine.num_hit > engine.hits_at_revival and engine.revivals > 0
        if turn % 2 == 0:
            world.life.flush()
        if turn % every == 0 and engine.revivals == before:
            world.restart()
        assert turn < 3000, "it makes no progress"
    assert engine.revivals >= 2
    assert hits > 0, "a run without a hit after a restart proves nothing"
    assert numbers == list(range(1, len(numbers) + 1))
    assert engine.session.spec == spec


@pytest.mark.parametrize("spec", [HYBRID, STATE], ids=["hybrid", "state"])
def test_requests_keep_their_blocks_over_restarts(spec):
    """As above, with an engine that lists their blocks: restarts preempt no request and allocate no block twice."""
    world = World(spec)
    engine = LastingEngine(world.session, spec.num_blocks, seed=2, resumes=True)
    resumed = 0
    for turn in itertools.count(1):
        if not (engine._waiting or engine.running or engine._facts):
            break
        running, revivals = set(engine.running), engine.revivals
        engine.step()
        check(world.life.host.replica)
        if engine.revivals > revivals:
            assert not engine.log[-1].preempted
            assert running <= set(engine.running) | {row.slot for row in engine._facts}
            resumed += world.life.host.replica.num_running
        if turn % 3 == 0:
            world.life.flush()
            world.restart()
    assert resumed > 10
    assert engine.session.resume_refused is None
    assert world.life.host.replica.free_blocks == spec.num_blocks - 1


def test_held_pages_stay_held_until_released():
    world, memory = World(), PageMemory(HYBRID.num_blocks)
    resume = Resume(held_slot=[5])
    session = world.session(lambda: Revival(tuple(memory.stamps), held=(5,), resume=resume))
    (result,) = session.apply(part_of(NewsRow(5, TEXT), AdmitRow(5))).parts
    memory.carry_out(result)
    resume.held_blocks = sorted({block for table in result.tables.by_row()[0].values() for block in table if block})
    resume.held_count = [len(resume.held_blocks)]
    session.apply(part_of(FactRow(5, end=End.HELD)))
    world.life.flush()
    world.restart()
    assert session.apply(Part()).parts[0].free_blocks == HYBRID.num_blocks - 1 - len(resume.held_blocks)
    check(world.life.host.replica)
    released = Part()
    released.cache.released = [5]
    assert session.apply(released).parts[0].free_blocks == HYBRID.num_blocks - 1


def test_steps_in_flight_at_a_restart_are_answered():
    world, memory, _ = used_world()
    news = part_of(NewsRow(3, TEXT), NewsRow(4, TEXT)).news
    session = world.session(lambda: Revival(tuple(memory.stamps), 0, news, (3,), (5,)))
    session.apply(part_of(NewsRow(3, TEXT), NewsRow(5, [1, 2]), AdmitRow(3), AdmitRow(5)))
    session.apply(part_of(FactRow(5, end=End.HELD)))
    done = session.next_seq - 1
    world.life.flush()
    world.restart()
    session.submit(part_of(RunRow(3)), executed_through=done)
    session.submit(part_of(NewsRow(4, TEXT), AdmitRow(4)), executed_through=done)
    first, second = session.receive().parts[0], session.receive().parts[0]
    assert (first.granted, first.preempted, first.free_blocks) == ([0], [3], HYBRID.num_blocks - 1)
    assert (second.admit_status, second.preempted) == ([0], [])
    part = part_of(FactRow(3, tokens=[7], fence=0), AdmitRow(3), AdmitRow(4))
    part.cache.released = [5]
    part.cache.failed_steps = [done]
    answer = session.apply(part)
    assert answer.parts[0].admit_status == [1, 1]
    assert answer.parts[0].admit_hit == [96, 96]
    assert answer.seq == done + 3


def test_a_restart_inside_a_step_of_several_parts():
    world, memory, _ = used_world()
    session = world.session(lambda: shown(memory))
    session.submit(part_of(NewsRow(0, TEXT)), last=False)
    session.receive()
    world.restart()
    session.submit(Part(), last=False)
    assert session.receive().part == 1
    session.submit(part_of(NewsRow(1, TEXT)), last=False)
    assert (session.receive().seq, session.next_seq) == (1, 1)
    session.submit(part_of(AdmitRow(1)))
    assert session.receive().parts[0].admit_hit == [96]
    assert session.next_seq == 2
    session.apply(Part())


def test_pages_of_failed_loads_stay_without_keys():
    """The engine reported the failure in a step that the old service never answered; the entries were stored before."""
    world, memory, _ = used_world()
    session = world.session(lambda: shown(memory))
    blocks = [block for block, stamp in enumerate(memory.stamps) if stamp]
    part = Part()
    part.cache.evicted = blocks
    world.restart()
    answer = session.apply(part)
    assert world.life.host.replica.count_keys() == 0
    assert set(answer.parts[0].orders.stamp_block) <= set(blocks)
    assert answer.parts[0].orders.stamp_block, "the page memory must be stamped"


def test_a_restart_during_the_revival_repeats_it():
    world, memory, _ = used_world()
    deaths = iter([True, True, False])

    def revive():
        revival = shown(memory)
        if next(deaths, False):
            world.restart()
        return revival

    session = world.session(revive)
    world.restart()
    session.apply(Part())
    assert world.deaths >= 2
    assert serve(session, memory) == 96


def test_a_heartbeat_leaves_the_revival_to_the_engine():
    world, memory, _ = used_world()
    session = world.session(lambda: shown(memory))
    epoch = session.epoch
    world.restart()
    session.beat()
    assert session.ended is None
    assert session.epoch == epoch
    session.apply(Part())
    assert session.epoch > epoch


def test_more_requests_than_a_step_has_rows():
    world, memory, _ = used_world(max_rows_per_step=4)
    news = part_of(*(NewsRow(slot, TEXT, request_id=str(slot)) for slot in range(11))).news
    session = world.session(lambda: Revival(tuple(memory.stamps), 0, news))
    world.restart()
    session.apply(Part())
    requests = world.life.host.replica.requests
    assert [requests.request_id[slot] for slot in requests.slots()] == [str(slot) for slot in range(11)]
    assert session.apply(part_of(AdmitRow(10))).parts[0].admit_hit == [96]
