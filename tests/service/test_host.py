"""The host of a replica: which session may write to it and when; a refusal changes nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvplane.base.errors import (
    InternalError,
    InvalidArgument,
    LimitExceeded,
    NotFound,
    OtherWriter,
    ReplicaLapsed,
    SequenceError,
    ServiceRestarted,
    StaleEpoch,
)
from kvplane.base.session import OpenRequest
from kvplane.base.stamps import MAX_EPOCH
from kvplane.base.step import AdmitStatus, Cache, End, EventKind, Part, RemoveReason, RowFlag, Step
from kvplane.session.rows import AdmitRow, FactRow, NewsRow, PeekRow, RunRow, part_of
from kvplane_service.config import Config
from kvplane_service.replicas.host import ReplicaHost, ReplicaState, new_replica
from kvplane_service.replicas.recovery import Recovering
from kvplane_service.replicas.stamps import Contents
from kvplane_service.replicas.step_order import UnaryStep
from tests.service.hosts import HostWorld, spec_of

PROMPT = list(range(40))  # two full blocks and a half
LOAD = AdmitRow(0, cap=0, external=32, flags=RowFlag.DELAY_CACHING)


@pytest.fixture
def world():
    return HostWorld()


def admit(slot: int = 0, tokens=PROMPT) -> Part:
    return part_of(NewsRow(slot, tokens), AdmitRow(slot))


def shown(world) -> list[Any]:
    """Every event and notice that others have seen."""
    seen: list[Any] = []
    for batch in world.host.events.subscribe(0, lambda: None).take():
        seen.extend((event.kind, event.hashes) for event in batch.events)
        seen.extend(name for name in ("withdrawn", "restored") if getattr(batch, name))
    return seen


class TestOpening:
    def test_a_new_life_gets_a_new_epoch_and_an_empty_replica(self, world):
        first = world.open()
        first.step(admit())
        second = world.open()
        assert second.opened.epoch == first.opened.epoch + 1
        assert (second.opened.seq, second.opened.next_part, second.opened.free_blocks) == (0, 0, 20)
        assert second.opened.kept_keys == 0

    def test_open_returns_the_limits(self):
        config = Config(max_steps_in_flight=3, max_rows_per_step=7, lease_ms=11)
        opened = HostWorld(config).open().opened
        assert (opened.max_steps_in_flight, opened.max_rows, opened.lease_ms) == (3, 7, 11)

    def test_a_resumed_life_continues_at_its_step(self, world):
        engine = world.open()
        engine.step(admit())
        engine.step(part_of(RunRow(0)), last=False)
        world.host.lost(engine.nonce)
        again = world.open(engine.opened.epoch, life_nonce=engine.nonce)
        assert (again.opened.epoch, again.opened.seq, again.opened.next_part) == (engine.opened.epoch, 1, 1)
        again.step(Part(), part=1)

    def test_a_newer_session_replaces_and_notifies_the_older_one(self, world):
        older = world.open()
        newer = world.open(older.opened.epoch, life_nonce=older.nonce)
        assert [type(error) for error in older.ended] == [OtherWriter]
        with world.refuses(OtherWriter, "newer"):
            older.step(admit())
        newer.step(admit())
        assert newer.ended == []

    def test_a_broken_older_session_is_not_notified(self, world):
        older = world.open()
        world.host.lost(older.nonce)
        world.open()
        assert older.ended == []

    def test_a_broken_stream_of_an_older_session_has_no_effect(self, world):
        older = world.open()
        world.open()
        world.host.lost(older.nonce)
        assert world.host.state is ReplicaState.LIVE

    @pytest.mark.parametrize("epoch", [1, 3, 99, 2**64 - 1])
    def test_only_the_current_life_can_be_resumed(self, world, epoch):
        assert world.open().opened.epoch == 2
        with world.refuses(StaleEpoch, field="epoch"):
            world.open(epoch, life_nonce=1)

    def test_a_life_without_a_session_cannot_be_resumed(self, world):
        with world.refuses(ServiceRestarted):
            world.open(world.host.epoch, life_nonce=1)

    def test_a_nonce_is_used_once(self, world):
        engine = world.open()
        with world.refuses(InvalidArgument, "in use", "nonce"):
            world.host.open(OpenRequest("r", engine.nonce))
        engine.step()

    @pytest.mark.parametrize("version", [1, 3])
    def test_open_with_another_step_version_is_refused(self, world, version):
        with world.refuses(InvalidArgument, f"steps of version {version}", "step_version"):
            world.open(step_version=version)

    def test_client_name_length_is_limited(self, world):
        with world.refuses(InvalidArgument, field="client"):
            world.open(client="x" * 129)
        world.open(client="x" * 128)
        assert world.host.client == "x" * 128

    @pytest.mark.parametrize("size", [1, 20, 22])
    def test_a_stamp_table_of_another_size_is_refused(self, world, size):
        with world.refuses(InvalidArgument, field="stamp_table"):
            world.open(stamp_table=(0,) * size)

    @pytest.mark.parametrize("named", [(0,), (21,), (3, 99)])
    def test_busy_blocks_outside_of_the_pool_are_refused(self, world, named):
        with world.refuses(InvalidArgument, "blocks", field="busy_blocks"):
            world.open(busy_blocks=named)

    def test_a_new_epoch_is_above_the_owner_epoch_of_the_memory(self, world):
        assert world.open(owner_epoch=40).opened.epoch == 41
        assert world.open(owner_epoch=7).opened.epoch == 42
        engine = world.open(owner_epoch=9)
        assert engine.opened.epoch == 43
        assert world.open(43, life_nonce=engine.nonce, owner_epoch=50).opened.epoch == 43, "who resumes begins no life"

    def test_a_life_of_equal_epoch_begun_by_another_session_is_not_resumed(self, world):
        engine = world.open(owner_epoch=40)
        with world.refuses(ServiceRestarted, "another epoch with this number", field="epoch"):
            world.open(41, life_nonce=engine.nonce + 1)
        again = world.open(41, life_nonce=engine.nonce)
        assert world.open(41, life_nonce=engine.nonce).opened.epoch == 41
        with world.refuses(ServiceRestarted, field="epoch"):
            world.open(41, life_nonce=again.nonce)

    def test_an_epoch_without_the_nonce_of_its_life_is_refused(self, world):
        """Another service may have begun the life that the engine means."""
        epoch = world.open().opened.epoch
        for named in (epoch, epoch + 1):
            with world.refuses(InvalidArgument, "does not identify", field="life_nonce"):
                world.open(named)

    @pytest.mark.parametrize("owner", [-1, MAX_EPOCH, 1 << 63])
    def test_the_maximum_owner_epoch_is_refused(self, world, owner):
        with world.refuses(InvalidArgument, "owner_epoch"):
            world.open(owner_epoch=owner)

    def test_opening_beyond_the_last_epoch_is_refused(self, world):
        world.host.epoch = MAX_EPOCH
        with world.refuses(LimitExceeded, "epochs are used"):
            world.open()


class TestLoads:
    """Blocks that loads of an earlier engine life may still write."""

    @pytest.fixture
    def engine(self, world):
        engine = world.open(incarnation=5)
        engine.step(part_of(NewsRow(0, PROMPT), LOAD))
        return engine

    def test_a_new_life_gets_the_busy_blocks(self, world, engine):
        opened = world.open(incarnation=5).opened
        assert (opened.busy_blocks, opened.free_blocks) == ((1, 2), 18)

    def test_a_resumed_session_gets_the_busy_blocks(self, world, engine):
        following = world.open(incarnation=5)
        assert world.open(following.opened.epoch, life_nonce=following.nonce).opened.busy_blocks == (1, 2)
        again = world.open(following.opened.epoch, life_nonce=following.nonce)
        again.step(Part(cache=Cache(loads_over=[1])))
        assert world.open(following.opened.epoch, life_nonce=following.nonce).opened.busy_blocks == (2,)

    def test_busy_blocks_of_the_engine_are_held(self, world, engine):
        assert world.open(busy_blocks=(2, 7)).opened.busy_blocks == (1, 2, 7)

    def test_new_memory_has_no_busy_blocks(self, world, engine):
        assert world.open(incarnation=6).opened.busy_blocks == ()

    def test_memory_without_incarnation_keeps_busy_blocks(self, world, engine):
        assert world.open().opened.busy_blocks == (1, 2)

    def test_with_several_ranks_another_incarnation_keeps_busy_blocks(self):
        world = HostWorld()
        world.host = ReplicaHost("r", new_replica(spec_of()), world.config, lambda: 0, num_ranks=2)
        world.open(incarnation=5).step(part_of(NewsRow(0, PROMPT), LOAD))
        assert world.open(incarnation=6).opened.busy_blocks == (1, 2)

    def test_busy_blocks_stay_held_after_a_close(self, world, engine):
        engine.step(part_of(NewsRow(1, PROMPT), AdmitRow(1)))
        engine.step(part_of(NewsRow(2, PROMPT), AdmitRow(2), FactRow(1, end=End.HELD)))
        world.host.close(engine.nonce)
        assert world.host.replica.free_blocks == 18
        assert world.open(incarnation=5).opened.busy_blocks == (1, 2)

    def test_reset_and_unary_calls_work_with_busy_blocks(self, world, engine):
        world.host.close(engine.nonce)
        asyncio.run(world.host.begin_unary())
        (result,) = world.apply_unary(UnaryStep(), [Part(cache=Cache(reset=True))]).parts
        assert result.reset_done
        assert world.host.replica.busy_blocks == (1, 2)

    def test_after_a_restart_only_reported_busy_blocks_are_held(self):
        world = HostWorld()
        world.host.recover(Recovering(1, Contents(5), loading=False))
        assert world.open(incarnation=5, busy_blocks=(4,)).opened.busy_blocks == (4,)


class TestSteps:
    @pytest.fixture
    def engine(self, world):
        return world.open()

    def test_a_repeat_is_answered_and_not_applied(self, world, engine):
        first = engine.step(admit(), content=b"a")
        before = world.digest
        assert engine.step(admit(), seq=1, executed_through=0, content=b"a") is first
        assert world.digest == before

    def test_a_step_number_with_other_content_is_refused(self, world, engine):
        engine.step(admit(), content=b"a")
        with world.refuses(SequenceError, "other content"):
            engine.step(admit(1), seq=1, executed_through=0, content=b"b")

    @pytest.mark.parametrize(("seq", "part"), [(0, 0), (3, 0), (2, 1), (2**64 - 1, 0)])
    def test_a_step_out_of_turn_is_refused(self, world, engine, seq, part):
        engine.step(admit())
        with world.refuses(SequenceError, field="seq"):
            engine.step(seq=seq, part=part)

    def test_a_repeat_without_a_stored_answer_is_refused(self, world, engine):
        for _ in range(5):
            engine.step()
        engine.step(seq=2)
        with world.refuses(SequenceError, "no longer stored"):
            engine.step(seq=1)

    def test_a_refused_step_may_be_sent_again_corrected(self, world, engine):
        with world.refuses(InvalidArgument, field="parts[0].admit.slot[0]"):
            engine.step(part_of(AdmitRow(7)), content=b"a")
        assert engine.step(admit(), content=b"b").parts[0].admit_status == [AdmitStatus.GRANTED]

    @pytest.mark.parametrize("epoch", [0, 1, 3])
    def test_a_step_of_another_life_is_refused(self, world, engine, epoch):
        with world.refuses(StaleEpoch):
            engine.step(epoch=epoch)

    @pytest.mark.parametrize("through", [0, 3, 4, 2**64 - 1])
    def test_executed_through_is_monotonic_and_at_most_the_last_step(self, world, engine, through):
        engine.step()
        engine.step(executed_through=1)
        with world.refuses(InvalidArgument, field="executed_through"):
            engine.step(executed_through=through)

    def test_steps_in_flight_are_limited(self, world, engine):
        for _ in range(4):
            engine.step(executed_through=0)
        with world.refuses(LimitExceeded, field="executed_through"):
            engine.step(executed_through=0)
        engine.step(executed_through=1)

    def test_rows_of_a_step_are_limited_over_its_parts(self, world):
        engine = HostWorld(Config(max_rows_per_step=5)).open()
        engine.step(part_of(*(NewsRow(slot, [1]) for slot in range(3))), last=False)
        with pytest.raises(LimitExceeded, match="6 rows"):
            engine.step(part_of(*(PeekRow(slot) for slot in range(3))), part=1)
        engine.step(part_of(PeekRow(0), PeekRow(1)), part=1)
        with pytest.raises(LimitExceeded, match="6 rows"):
            engine.step(*[Part() for _ in range(6)])

    def test_a_step_of_10000_rows_is_refused(self, world, engine):
        with world.refuses(LimitExceeded, "10000 rows", "parts"):
            engine.step(part_of(*(NewsRow(slot, [1]) for slot in range(10_000))))

    def test_events_are_answered_when_asked_for(self, world, engine):
        assert engine.step(admit()).parts[0].events == []
        with_events = world.open(with_events=True)
        (event,) = with_events.step(admit()).parts[0].events
        assert event.kind is EventKind.STORED

    def test_published_through_follows_executed_through(self, engine):
        assert engine.step(admit(), executed_through=0).published_through == 0
        assert engine.step(executed_through=1).published_through == 1


class TestTokens:
    def test_too_many_tokens_in_one_message_are_refused(self):
        world = HostWorld(Config(max_tokens_per_message=40))
        engine = world.open()
        many = [part_of(NewsRow(slot, range(20))) for slot in range(3)]
        with world.refuses(LimitExceeded, "60 token ids in one message", "parts"):
            engine.step(*many)
        engine.step(*many[:2])
        with world.refuses(LimitExceeded, "41 token ids"):
            engine.step(part_of(FactRow(0, tokens=range(41))))


class TestLease:
    def test_a_silent_session_lapses_and_any_message_restores_it(self, world):
        engine = world.open()
        engine.step(admit())
        engine.step()
        for message in (engine.step, lambda: world.host.heartbeat(engine.nonce)):
            world.pass_lease()
            with world.refuses(ReplicaLapsed):
                world.host.check_readable()
            message()
            world.host.check_readable()
            assert world.host.state is ReplicaState.LIVE

    def test_each_message_renews_the_lease(self, world):
        engine = world.open()
        for _ in range(3):
            world.now_ns += world.config.lease_ms * 1_000_000
            assert world.host.state is ReplicaState.LIVE
            engine.step()

    def test_a_refused_message_renews_the_lease(self, world):
        engine = world.open()
        world.pass_lease()
        with pytest.raises(SequenceError):
            engine.step(seq=9)
        assert world.host.state is ReplicaState.LIVE

    def test_subscribers_are_notified_once_of_lapse_and_restoration(self, world):
        engine = world.open()
        world.host.expire()
        world.pass_lease()
        world.host.expire()
        world.host.expire()
        engine.step()
        assert shown(world) == ["withdrawn", "restored"]

    def test_a_broken_stream_lapses_at_once(self, world):
        engine = world.open()
        engine.step(admit())
        before = world.digest
        world.host.lost(engine.nonce)
        assert world.host.state is ReplicaState.LAPSED
        assert shown(world) == ["withdrawn"]
        assert world.digest == before

    def test_an_idle_replica_does_not_lapse(self, world):
        world.pass_lease()
        world.host.expire()
        assert world.host.state is ReplicaState.IDLE
        assert shown(world) == []

    def test_the_next_session_restores_a_lapsed_replica(self, world):
        engine = world.open()
        engine.step(admit())
        engine.step()
        world.host.lost(engine.nonce)
        new = world.open()
        kinds = [one if isinstance(one, str) else one[0] for one in shown(world)]
        assert kinds == [EventKind.STORED, "withdrawn", EventKind.CLEARED, "restored"]
        assert new.opened.free_blocks == 20


class TestPublication:
    def test_keys_are_published_once_their_step_is_executed(self, world):
        engine = world.open()
        engine.step(admit())
        assert shown(world) == []
        engine.step(executed_through=0)
        assert shown(world) == []
        engine.step(executed_through=1)
        ((kind, hashes),) = shown(world)
        assert (kind, len(hashes)) == (EventKind.STORED, 2)

    def test_keys_of_a_failed_step_are_never_published(self, world):
        engine = world.open(with_events=True)
        engine.step(admit())
        answer = engine.step(Part(cache=Cache(failed_steps=[1])), executed_through=0)
        assert [event.reason for event in answer.parts[0].events] == [RemoveReason.WITHDRAWN] * 2
        engine.step(executed_through=2)
        assert shown(world) == []

    def test_a_dropped_key_is_removed_at_once(self, world):
        engine = world.open()
        blocks = engine.step(admit()).parts[0].new_blocks.ids
        engine.step()
        engine.step(Part(cache=Cache(evicted=blocks[:1])), executed_through=1)
        assert [kind for kind, _ in shown(world)] == [EventKind.STORED, EventKind.REMOVED]

    def test_a_new_life_keeps_verified_keys_and_removes_others(self, world):
        engine = world.open()
        orders = engine.step(admit()).parts[0].orders
        engine.step()
        stamps = [0] * 21
        for block, stamp in zip(orders.stamp_block, orders.stamp, strict=True):
            stamps[block] = stamp
        stamps[orders.stamp_block[0]] = 0
        new = world.open(stamp_table=tuple(stamps))
        assert new.opened.kept_keys == 1
        assert world.open(new.opened.epoch, life_nonce=new.nonce).opened.kept_keys == 1
        (_, (_, lost)) = shown(world)
        assert len(lost) == 1

    def test_a_replica_without_events_shows_none(self):
        world = HostWorld(spec=spec_of(events=False))
        engine = world.open()
        engine.step(admit())
        engine.step()
        world.open()
        assert shown(world) == []


class TestClosing:
    def test_close_frees_the_requests(self, world):
        engine = world.open()
        engine.step(part_of(NewsRow(0, PROMPT), NewsRow(1, PROMPT), NewsRow(2, PROMPT), AdmitRow(0), AdmitRow(1)))
        engine.step(part_of(FactRow(0, end=End.HELD)), executed_through=0)
        world.host.close(engine.nonce)
        replica = world.host.replica
        assert (replica.free_blocks, replica.num_running, replica.requests.slots()) == (20, 0, [])
        assert world.host.state is ReplicaState.IDLE
        assert world.digest

    def test_close_frees_the_requests_in_the_middle_of_a_step(self, world):
        engine = world.open()
        engine.step(admit(), last=False)
        world.host.close(engine.nonce)
        assert world.host.replica.free_blocks == 20

    def test_keys_are_kept_until_a_new_life_verifies_them(self, world):
        engine = world.open()
        orders = engine.step(admit()).parts[0].orders
        engine.step()
        world.host.close(engine.nonce)
        stamps = [0] * 21
        for block, stamp in zip(orders.stamp_block, orders.stamp, strict=True):
            stamps[block] = stamp
        assert world.open(stamp_table=tuple(stamps)).opened.kept_keys == 2

    def test_reads_are_refused_after_a_close(self, world):
        engine = world.open()
        engine.step(admit())
        engine.step()
        world.host.close(engine.nonce)
        with world.refuses(ReplicaLapsed):
            world.host.check_readable()
        assert shown(world)[-1] == "withdrawn"

    def test_calls_of_a_closed_session_are_refused(self, world):
        engine = world.open()
        world.host.close(engine.nonce)
        for act in (engine.step, lambda: world.host.heartbeat(engine.nonce), lambda: world.host.close(engine.nonce)):
            with world.refuses(OtherWriter):
                act()
        with world.refuses(StaleEpoch):
            world.open(engine.opened.epoch, life_nonce=engine.nonce)

    def test_unary_calls_after_a_close_begin_a_new_life(self, world):
        engine = world.open()
        engine.step(admit())
        engine.step()
        world.host.close(engine.nonce)
        with world.refuses(StaleEpoch, "which has ended"):
            world.host.check_unary(UnaryStep(epoch=engine.opened.epoch))
        asyncio.run(world.host.begin_unary())
        assert world.host.epoch == engine.opened.epoch + 1
        hit = world.apply_unary(UnaryStep(), [part_of(NewsRow(0, PROMPT), PeekRow(0))])
        assert hit.parts[0].peek_hit == [0]
        assert shown(world)[-2:] == [(EventKind.CLEARED, ()), "restored"]

    def test_removal_ends_session_and_subscriptions(self, world):
        engine = world.open()
        subscription = world.host.events.subscribe(None, lambda: None)
        gone = NotFound("gone")
        world.host.retire(gone)
        assert engine.ended == [gone]
        with pytest.raises(NotFound):
            subscription.take()

    def test_calls_of_a_removed_host_are_refused(self, world):
        engine = world.open()
        world.host.retire(NotFound("r was deregistered"))
        acts = (
            engine.step,
            world.open,
            world.host.check_readable,
            lambda: world.host.heartbeat(engine.nonce),
            lambda: world.host.close(engine.nonce),
            lambda: world.apply_unary(UnaryStep(), [Part()]),
        )
        for act in acts:
            with world.refuses(NotFound, "r was deregistered"):
                act()


class TestUnaryWriters:
    def test_unary_calls_are_consecutive_steps(self, world):
        results = [world.apply_unary(UnaryStep(), [Part()]) for _ in range(2)]
        assert [(one.seq, one.part) for one in results] == [(1, 0), (2, 0)]
        assert world.host.replica.executed_through == 1

    def test_unary_calls_with_more_are_one_step(self, world):
        results = [world.apply_unary(UnaryStep(more=more), [Part()]) for more in (True, True, False, True)]
        assert [(one.seq, one.part) for one in results] == [(1, 0), (1, 1), (1, 2), (2, 0)]

    @pytest.mark.parametrize("lapsed", [False, True])
    def test_unary_calls_are_refused_during_a_session(self, world, lapsed):
        engine = world.open()
        if lapsed:
            world.host.lost(engine.nonce)
        with world.refuses(OtherWriter, "session"):
            world.apply_unary(UnaryStep(), [Part()])

    @pytest.mark.parametrize("epoch", [2, 99])
    def test_unary_calls_of_another_epoch_are_refused(self, world, epoch):
        with world.refuses(StaleEpoch, field="epoch"):
            world.apply_unary(UnaryStep(epoch), [Part()])
        world.apply_unary(UnaryStep(1), [Part()])

    def test_unary_calls_have_the_limits_of_steps(self, world):
        with world.refuses(InvalidArgument, field="executed_through"):
            world.apply_unary(UnaryStep(executed_through=1), [Part()])
        for _ in range(4):
            world.apply_unary(UnaryStep(executed_through=0), [Part()])
        with world.refuses(LimitExceeded):
            world.apply_unary(UnaryStep(executed_through=0), [Part()])


class TestBrokenCore:
    def test_a_replica_whose_core_failed_refuses_every_call(self, world, monkeypatch):
        engine = world.open()

        def breaks(_: Step):
            raise AssertionError("a bug")

        monkeypatch.setattr(world.host.replica, "apply", breaks)
        with pytest.raises(AssertionError, match="a bug"):
            engine.step()
        monkeypatch.undo()
        acts = (
            engine.step,
            world.open,
            world.host.check_readable,
            lambda: world.host.heartbeat(engine.nonce),
            lambda: world.apply_unary(UnaryStep(), [Part()]),
        )
        for act in acts:
            with pytest.raises(InternalError, match="broke"):
                act()
