"""A host follows an engine that decides itself: equal states, divergence, images, lag."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplane.base.errors import (
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    LimitExceeded,
    OtherWriter,
    ReplicaLapsed,
)
from kvplane.base.groups import CommitRule
from kvplane.base.session import CORE_VERSION
from kvplane_service.config import Config
from kvplane_service.decisions.recording import MAGIC, header_of, message_of, write_frame
from kvplane_service.replicas.step_order import UnaryStep
from kvplane_service.store.interface import LogName
from kvplane_service.store.journal import ReplicaJournal
from kvplane_tools.replay.from_log import replay_log
from tests.core.follower import Follower, _published
from tests.core.specification import specification_of
from tests.core.test_step_law import MIXES
from tests.service.hosts import HostWorld
from tests.service.mirrors import DecidingEngine, open_request, same_state, spec_of
from tests.service.rig import core_class


async def offload(call):
    return call()


class Mirrored:
    """A host, and an engine that it mirrors."""

    def __init__(self, mix="window and full", seed=1, config=None):
        self.engine = DecidingEngine(spec_of(mix), seed)
        self.world = HostWorld(config, self.engine.spec)
        self.host, self.mirror = self.world.host, self.world.host.mirror
        self.follower = Follower()
        self.subscription = self.host.events.subscribe(0, lambda: None)
        self.ended = []
        self.nonce = 0

    def attach(self, **fields):
        self.nonce += 1
        return self.host.attach(open_request(self.nonce, **fields), self.ended.append)

    async def send_image(self, raw=None):
        raw = raw or self.engine.image()
        half = len(raw) // 2
        assert await self.mirror.add_piece(raw[:half], True, False, offload) is None
        return await self.mirror.add_piece(raw[half:], False, True, offload)

    async def start(self, steps=5):
        for _ in range(steps):
            self.engine.run_step()
        self.attach()
        return await self.send_image()

    async def send(self, message, newest=0, age_ms=0):
        self.host.heartbeat(self.nonce)
        return await self.mirror.apply(message, newest, age_ms, offload)

    async def run(self, steps):
        for _ in range(steps):
            self.engine.run_step()
            progress = await self.send(self.engine.message(), self.engine.replica.seq)
            assert progress.applied_through == self.engine.replica.seq
            assert not progress.image_wanted
            assert same_state(specification_of(self.host.replica), self.engine.replica)
            self.check_view()

    def check_view(self):
        self.follower.read(self.subscription.take())
        published = set(_published(specification_of(self.host.replica)))
        assert self.follower.view <= published
        assert not self.follower.withdrawn
        if self.host.replica.executed_through >= self.host.seq:
            assert self.follower.view == published


def planted(message):
    (one,) = message
    return [replace(one, digest=bytes(16))]


class TestSteps:
    @pytest.mark.parametrize("mix", MIXES)
    async def test_a_mirror_has_the_state_and_the_events_of_its_engine(self, mix):
        for seed in range(3):
            one = Mirrored(mix, seed)
            progress = await one.start()
            assert (progress.applied_through, progress.image_wanted) == (5, False)
            assert same_state(specification_of(one.host.replica), one.engine.replica)
            await one.run(20)
            assert one.host.epoch == one.engine.epoch
            assert one.host.decisions.num_entries == 21

    async def test_a_repeated_step_is_ignored(self):
        one = Mirrored()
        await one.start()
        await one.run(3)
        for at in (-3, -2, -1):
            progress = await one.send(one.engine.message(at))
            assert (progress.applied_through, progress.image_wanted) == (one.engine.replica.seq, False)
        assert same_state(specification_of(one.host.replica), one.engine.replica)

    async def test_a_missing_step_needs_an_image(self):
        one = Mirrored()
        await one.start()
        one.engine.run_step()
        one.engine.run_step()
        progress = await one.send(one.engine.message())
        assert progress.image_wanted
        assert one.host.state.value == "diverged"
        await one.send_image()
        await one.run(3)


class TestDivergence:
    async def test_nothing_of_a_diverged_step_is_published_or_logged(self):
        one = Mirrored()
        lost = []
        one.mirror.on_lost.append(lambda: lost.append(one.host.seq))
        await one.start()
        await one.run(4)
        lost.clear()
        decisions, events = one.host.decisions.num_entries, one.host.events.last_seq
        one.engine.run_step()
        progress = await one.send(planted(one.engine.message()))
        assert (progress.applied_through, progress.reason) == (9, "DIVERGED")
        assert progress.image_wanted
        assert (await one.send(one.engine.message())).image_wanted  # the core has applied the step already
        assert one.host.decisions.num_entries == decisions
        batches = one.host.events.after(events)
        assert [batch.withdrawn for batch in batches] == [True]
        assert lost == [9]
        assert one.mirror.divergences == 1
        last = one.mirror.last
        assert last is not None
        assert (last.step.step.seq, len(last.before)) == (10, decisions)
        with pytest.raises(ReplicaLapsed):
            one.host.check_readable()

    async def test_steps_are_ignored_until_an_image_is_in(self):
        one = Mirrored()
        await one.start()
        one.engine.run_step()
        await one.send(planted(one.engine.message()))
        for _ in range(3):
            one.engine.run_step()
            assert (await one.send(one.engine.message())).image_wanted
            assert one.host.state.value == "diverged"
        progress = await one.send_image()
        assert (progress.applied_through, progress.image_wanted) == (one.engine.replica.seq, False)
        assert one.host.state.value == "live"
        await one.run(5)

    async def test_an_image_with_steps_in_flight_publishes_their_keys_later(self):
        """Keys that a step in flight registered are published once this step is executed."""
        found = 0
        for seed in range(12):
            one = Mirrored(seed=seed)
            await one.start()
            pool = specification_of(one.host.replica).coordinator.pool
            found += any(step > pool.executed_through for step in pool.key_step)
            one.check_view()
            await one.run(6)
        assert found > 3

    @pytest.mark.parametrize("cut", [0, 40, -9])
    async def test_a_damaged_image_is_refused(self, cut):
        one = Mirrored()
        one.engine.run_step()
        one.attach()
        with pytest.raises(InvalidArgument):
            await one.send_image(one.engine.image()[:cut] + b"x")
        assert one.host.state.value == "diverged"
        await one.send_image()
        await one.run(2)

    async def test_an_image_replaces_a_state_that_an_exception_left_undefined(self, monkeypatch):
        one = Mirrored()
        await one.start()
        one.engine.run_step()
        with monkeypatch.context() as broken:
            broken.setattr(core_class(), "apply", lambda *_: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                await one.send(one.engine.message())
        with pytest.raises(InternalError):
            one.host.heartbeat(one.nonce)
        with pytest.raises(FailedPrecondition):
            one.attach(core_version=CORE_VERSION + 1)
        with pytest.raises(InternalError):
            one.host.heartbeat(one.nonce)
        assert one.attach().image_wanted
        await one.send_image()
        await one.run(3)


class TestAttach:
    @pytest.mark.parametrize("terms", [{"core_version": CORE_VERSION + 1}, {"commit": CommitRule.REFERENCE}])
    async def test_an_engine_that_decides_by_other_rules_is_refused(self, terms):
        one = Mirrored()
        with one.world.refuses(FailedPrecondition, match="this service has"):
            one.attach(**terms)

    async def test_the_same_engine_continues_without_an_image(self):
        one = Mirrored()
        await one.start()
        await one.run(3)
        one.host.lost(one.nonce)
        assert one.host.state.value == "lapsed"
        one.engine.run_step()
        opened = one.attach()
        assert (opened.seq, opened.image_wanted) == (8, False)
        progress = await one.send(one.engine.message())
        assert progress.applied_through == 9
        await one.run(3)

    async def test_a_second_engine_is_refused_while_the_first_is_live(self):
        one = Mirrored()
        await one.start()
        with one.world.refuses(OtherWriter):
            one.attach(life=99)
        one.host.lost(1)
        assert one.attach(life=99).image_wanted
        assert one.host.state.value == "diverged"

    async def test_unary_calls_are_refused(self):
        one = Mirrored()
        await one.start()
        with one.world.refuses(OtherWriter):
            one.host.check_unary(UnaryStep())

    async def test_a_closed_mirror_leaves_the_replica_to_others(self):
        one = Mirrored()
        await one.start()
        await one.host.close_aside(one.nonce, offload)
        assert one.host.state.value == "idle"
        opened = one.world.open().opened
        assert (opened.epoch, opened.free_blocks) == (one.engine.epoch + 1, 19)
        assert not one.mirror.is_attached


class TestLag:
    async def test_entries_are_withdrawn_while_the_mirror_lags(self):
        one = Mirrored(config=Config(mirror_max_lag_ms=100))
        await one.start()
        one.engine.run_step()
        await one.send(one.engine.message(), newest=20, age_ms=101)
        assert (one.mirror.lag_steps, one.mirror.lag_ms) == (14, 101)
        assert one.host.state.value == "lapsed"
        with pytest.raises(ReplicaLapsed):
            one.host.check_readable()
        one.engine.run_step()
        await one.send(one.engine.message(), newest=7, age_ms=100)
        assert one.host.state.value == "live"
        one.check_view()

    async def test_a_lapsed_lease_hides_the_entries(self):
        one = Mirrored()
        await one.start()
        one.world.pass_lease()
        one.host.expire()
        assert one.host.events.after(one.host.events.last_seq - 1)[0].withdrawn
        await one.run(2)

    async def test_a_step_over_the_limit_cuts_the_replica_off(self):
        one = Mirrored(config=Config(max_rows_per_step=1))
        await one.start()

        async def run_on():
            while True:
                one.engine.run_step()
                await one.send(one.engine.message())

        with pytest.raises(LimitExceeded):
            await run_on()
        assert one.host.state.value == "diverged"


class TestRecords:
    async def test_a_recording_replays_from_the_image(self, tmp_path):
        one = Mirrored("hits inside blocks")
        await one.start()
        await one.run(6)
        one.engine.run_step()
        await one.send(planted(one.engine.message()))
        await one.send_image()
        await one.run(4)
        path = tmp_path / "log"
        with path.open("wb") as file:
            file.write(MAGIC)
            write_frame(file, header_of("r", one.engine.spec))
            for entry in one.host.decisions:
                write_frame(file, message_of(entry, one.host.scheme.digest.size))
        outcome = replay_log(path)
        assert (outcome.decisions, outcome.identical, outcome.first_difference) == (10, 10, "")

    async def test_a_journal_drops_what_it_has_of_a_diverged_replica_and_writes_it_again(self):
        one = Mirrored()
        log = LogName("r", b"", 9)
        journal = ReplicaJournal(log, one.host.replica, 1000, lambda: 0)
        one.host.decisions.follow(journal.follow)
        dropped = []
        one.mirror.on_lost.append(lambda: dropped.append(journal.drop_all()))
        await one.start()
        await one.run(8)
        first = drain(journal)
        assert first
        one.engine.run_step()
        await one.send(planted(one.engine.message()))
        assert dropped[-1] == log
        assert drain(journal) == []
        await one.send_image()
        again = drain(journal)
        assert sum(batch.rows for batch in again) >= len(one.host.replica.entries()) > 0
        assert again[0].chunk.seq > first[-1].chunk.seq


def drain(journal):
    """The chunks that a writer would store now."""
    found = []
    while journal.has_work and (batch := journal.take()) is not None:
        journal.wrote(batch, len(journal._chunks))
        found.append(batch)
    return found
