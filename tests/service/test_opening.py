"""Sessions are opened in slices: other replicas are served, one opening runs at a time, and a cancelled caller costs
nothing.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.base.errors import InvalidArgument, KvplaneError, NotFound, OtherWriter, ReplicaLapsed, StaleEpoch
from kvplane.base.session import OpenRequest
from kvplane.base.step import CacheEvent, End, EventKind, Part, Step
from kvplane.session.rows import AdmitRow, FactRow, NewsRow, part_of
from kvplane_core.face import inspect
from kvplane_service.replicas import engine_lives as lives
from kvplane_service.replicas.host import ReplicaState
from kvplane_service.replicas.step_order import UnaryStep
from tests.core.follower import Follower
from tests.core.specification import specification_of
from tests.service.hosts import NONCES, HostWorld, spec_of
from tests.service.rig import core_class, needs_slices

BLOCKS = 61


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    """A turn of the event loop after every few blocks."""
    with suppress(ImportError):  # the compiled core
        monkeypatch.setattr("kvplane_core.face.native.SLICE_BLOCKS", 4)
    monkeypatch.setattr(lives, "SLICE_NS", 0)


def used_world(prompts=6):
    """A replica with keys, whose last engine broke off; what its memory shows."""
    world = HostWorld(spec=spec_of(BLOCKS))
    engine = world.open(incarnation=5)
    for slot in range(prompts):
        engine.step(part_of(NewsRow(slot, [slot] * 64), AdmitRow(slot)))
        engine.step(part_of(FactRow(slot, end=End.FREE)))
    engine.step()
    return world, engine, memoryview(bytes(specification_of(world.host.replica).coordinator.pool.stamp)).cast("Q")


def request(stamps=(), incarnation=5, epoch=0):
    return OpenRequest("r", next(NONCES), epoch, stamp_table=stamps, incarnation=incarnation)


def opening(world, asked, on_end=None):
    return asyncio.ensure_future(world.host.open_in_slices(asked, on_end or [].append))


async def turns(count):
    for _ in range(count):
        await asyncio.sleep(0)


async def count_turns(work):
    """Of the event loop until it is done."""
    count = 0
    while not work.done():
        await asyncio.sleep(0)
        count += 1
    return count


def half(stamps):
    return [0 if number % 2 else stamp for number, stamp in enumerate(stamps)]


@needs_slices
async def test_other_replicas_are_served_between_slices():
    world, _, stamps = used_world()
    other = HostWorld()
    engine, work, steps = other.open(), opening(world, request(stamps)), 0
    await turns(1)
    while not work.done():
        engine.step()
        steps += 1
        await turns(1)
    assert steps > 10
    assert (await work).kept_keys == 24


@pytest.mark.parametrize("stamped", [True, False])
async def test_sliced_opening_equals_opening_at_once(stamped):
    (world, _, stamps), (mirror, _, _) = used_world(), used_world()
    table = half(stamps) if stamped else ()
    asked = request(table)
    opened = await opening(world, asked)
    assert mirror.host.open(asked) == opened
    assert (opened.kept_keys > 0) == stamped
    assert world.digest == mirror.digest


async def test_an_untouched_pool_is_opened_at_once():
    world = HostWorld(spec=spec_of(1 << 16))
    work = opening(world, request([0] * (1 << 16)))
    assert await count_turns(work) <= 2


async def test_a_replica_that_is_opening_refuses_other_calls():
    world, engine, stamps = used_world()
    work = opening(world, request(stamps))
    await turns(2)
    assert world.host.state.value == "opening"
    assert [type(reason) for reason in engine.ended] == [OtherWriter]
    before = world.host.epoch
    with world.refuses(OtherWriter, "newer writer"):
        engine.step()
    with world.refuses(ReplicaLapsed, "is beginning a new life"):
        world.host.check_readable()
    with world.refuses(OtherWriter, "opening"):
        world.apply_unary(UnaryStep(), [Part()])
    with world.refuses(StaleEpoch):
        world.host.check_open(replace(request(epoch=before), life_nonce=engine.nonce))
    assert world.host.events.subscribe(None, lambda: None).take()[-1].withdrawn
    assert (await work).epoch == before + 1
    assert world.host.state is ReplicaState.LIVE
    assert world.host.events.subscribe(None, lambda: None).take() == []


@needs_slices
async def test_the_newest_of_two_openings_wins_and_one_life_begins():
    world, _, stamps = used_world()
    ended: list[KvplaneError] = []
    before = world.host.epoch
    first = opening(world, request(stamps), ended.append)
    await turns(3)
    second = opening(world, request(stamps))
    with pytest.raises(OtherWriter, match="newer session"):
        await first
    opened = await second
    assert (len(ended), opened.epoch, opened.kept_keys) == (1, before + 1, 24)
    assert world.host.state is ReplicaState.LIVE


async def test_a_nonce_is_used_once():
    world, _, stamps = used_world()
    asked = request(stamps)
    first = opening(world, asked)
    await turns(2)
    with world.refuses(InvalidArgument, field="nonce"):
        world.host.open(asked)
    assert (await first).kept_keys == 24


async def test_a_cancelled_opening_pauses_and_the_next_one_continues_it():
    world, _, stamps = used_world()
    whole = await count_turns(opening(used_world()[0], request(stamps)))
    first = opening(world, request(stamps))
    await turns(whole // 2)
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first
    assert world.host.state is ReplicaState.IDLE
    left, digest = world.host._lives.opening, world.digest
    await turns(50)
    assert (world.host._lives.opening, world.digest) == (left, digest), "no work without a caller"
    second = opening(world, request(stamps))
    assert await count_turns(second) <= whole - whole // 2 + 2
    assert (await second).kept_keys == 24


@needs_slices
@pytest.mark.parametrize("incarnation", [5, 6])
async def test_an_opening_with_another_memory_starts_over(incarnation):
    world, _, stamps = used_world()
    first = opening(world, request(half(stamps)))
    await turns(4)
    first.cancel()
    await turns(1)
    kept = (await opening(world, request(stamps, incarnation))).kept_keys
    assert (12 < kept < 24) if incarnation == 5 else kept == 0
    assert world.digest


async def test_a_unary_call_begins_a_new_life_after_a_cancelled_opening():
    world, _, stamps = used_world()
    first = opening(world, request(stamps))
    await turns(4)
    first.cancel()
    await turns(1)
    await world.host.begin_unary()
    world.apply_unary(UnaryStep(), [Part()])
    assert (world.host.state, world.host.replica.count_keys()) == (ReplicaState.IDLE, 0)
    world.host.check_readable()


@needs_slices
async def test_a_removed_replica_ends_its_opening():
    world, _, stamps = used_world()
    ended: list[KvplaneError] = []
    work = opening(world, request(stamps), ended.append)
    await turns(3)
    world.host.retire(NotFound("gone"))
    with pytest.raises(NotFound, match="gone"):
        await work
    assert len(ended) == 1


async def test_a_replica_that_failed_while_opening_refuses_every_call(monkeypatch):
    world, _, stamps = used_world()
    work = opening(world, request(half(stamps)))
    await turns(3)

    def breaks(*_):
        raise AssertionError("a bug")

    monkeypatch.setattr(core_class(), "enter_epoch", breaks)
    with pytest.raises(AssertionError, match="a bug"):
        await work
    with pytest.raises(KvplaneError, match="broke"):
        world.host.check_readable()
    assert world.host.state is ReplicaState.IDLE


class Schedule:
    """Openings, callers who leave, turns, steps, silence and unary calls in any order, and a follower of all events."""

    def __init__(self, seed):
        self.chance = Random(seed)
        self.world, _, self.stamps = used_world(4)
        self.host = self.world.host
        self.follower, self.subscription = Follower(), self.host.events.subscribe(0, lambda: None)
        self.works: list[tuple[OpenRequest, asyncio.Future[Any]]] = []
        self.epochs = [self.host.epoch]

    async def run(self, count):
        acts = (self.open, self.open, self.leave, self.turn, self.turn, self.turn, self.step, self.lapse, self.unary)
        for _ in range(count):
            await self.chance.choice((*acts, self.close))()
            self.look()
        for _, work in self.works[:-1]:
            with suppress(KvplaneError, asyncio.CancelledError):
                await work
        opened = await opening(self.world, request(self.memory()))
        self.look()
        assert opened.epoch == self.host.epoch
        assert self.host.state is ReplicaState.LIVE
        self.follower.check(self.host.replica, 0)
        assert not self.follower.withdrawn

    def look(self):
        inspect.check(self.host.replica)
        self.follower.read(self.subscription.take())
        if self.host.epoch != self.epochs[-1]:
            assert self.host.epoch > self.epochs[-1]
            self.epochs.append(self.host.epoch)
        live = [asked for asked, work in self.works if work.done() and not work.cancelled() and not work.exception()]
        if self.host.state is ReplicaState.LIVE and live:
            assert self.host._session is not None

    def memory(self):
        stamps = specification_of(self.host.replica).coordinator.pool.stamp
        return self.chance.choice((memoryview(bytes(stamps)).cast("Q"), tuple(half(stamps)), ()))

    async def open(self):
        asked = request(self.memory(), self.chance.choice((5, 5, 5, 6, 0)))
        self.works.append((asked, opening(self.world, asked)))

    async def leave(self):
        if self.works:
            self.chance.choice(self.works)[1].cancel()

    async def turn(self):
        await turns(self.chance.randrange(8))

    async def step(self):
        if self.works:
            nonce, seq = self.works[-1][0].nonce, self.host.seq + 1
            news = part_of(NewsRow(seq, [seq] * 40), AdmitRow(seq))
            with suppress(KvplaneError):
                self.host.step(nonce, Step(self.host.epoch, seq, [news], executed_through=seq - 1), b"")

    async def lapse(self):
        self.world.pass_lease()
        self.host.expire()

    async def close(self):
        if self.works:
            with suppress(KvplaneError):
                self.host.close(self.works[-1][0].nonce)

    async def unary(self):
        with suppress(KvplaneError):
            await self.host.idle()
            self.host.check_unary(UnaryStep())
            if self.host.has_left:
                await self.host.begin_unary()
            self.world.apply_unary(UnaryStep(), [Part()])


@given(st.integers(0), st.integers(0, 40))
def test_random_openings_and_cancellations_leave_one_life_and_a_correct_view(seed, count):
    asyncio.run(Schedule(seed).run(count))


@pytest.mark.parametrize(("busy", "kept"), [((), [1, 2, 3]), ((2,), [1, 3]), ((1, 2, 3), [])])
def test_recovered_keys_of_busy_blocks_are_left_out_of_an_event(busy, kept):
    digests, starts = {1: b"one", 2: b"two", 3: b"three"}, {1: 0, 2: 16, 3: 32}
    event = CacheEvent(EventKind.STORED, hashes=list(digests.values()), blocks=[1, 2, 3], block_starts=[0, 16, 32])
    shown = lives._without(event, frozenset(busy))
    assert (list(shown.blocks), list(shown.hashes)) == (kept, [digests[block] for block in kept])
    assert list(shown.block_starts) == [starts[block] for block in kept]
    without_starts = lives._without(replace(event, block_starts=()), frozenset(busy))
    assert (list(without_starts.blocks), list(without_starts.block_starts)) == (kept, [])
