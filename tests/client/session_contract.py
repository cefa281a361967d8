"""The contract of every SessionTransport."""

from __future__ import annotations

import itertools
from typing import Protocol

import pytest

from kvplane.base.errors import (
    InvalidArgument,
    KvplaneError,
    LimitExceeded,
    NotFound,
    OtherWriter,
    SequenceError,
    StaleEpoch,
    Unavailable,
)
from kvplane.base.session import OpenRequest, SessionTransport
from kvplane.base.step import AdmitStatus, Cache, Part, Step, StepResult
from kvplane.blocking.session import Session
from kvplane.session.rows import AdmitRow, NewsRow, PeekRow, RunRow, part_of
from kvplane_core.face.state import digest
from kvplane_core.spec.replica import Replica
from tests.client.mini_engine import HYBRID, MiniEngine
from tests.client.stepper import Stepper

NONCES = itertools.count(1)


class World(Protocol):
    """A service with one replica of spec HYBRID.

    Attributes:
        replica: its name.
    """

    replica: str

    def transport(self) -> SessionTransport:
        """A transport of its own for each session."""
        ...

    def digest(self) -> str:
        """Of the replica's state."""
        ...


class SessionContract:
    """Inherit, and give a fixture `world`."""

    @pytest.fixture
    def world(self) -> World:
        raise NotImplementedError

    @pytest.fixture
    def transport(self, world):
        carrier = world.transport()
        yield carrier
        carrier.close()

    @pytest.fixture
    def session(self, world):
        with self.new_session(world) as session:
            yield session

    def request(self, world, **facts) -> OpenRequest:
        return OpenRequest(world.replica, next(NONCES), **facts)

    def new_session(self, world, **facts) -> Session:
        return Session(world.transport(), self.request(world, **facts))

    # ---- opening and closing

    def test_the_answer_to_open_has_the_position_of_the_replica(self, world, transport):
        opened = transport.open(self.request(world))
        assert (opened.seq, opened.next_part, opened.free_blocks) == (0, 0, HYBRID.num_blocks - 1)
        assert opened.spec == HYBRID
        assert opened.max_steps_in_flight >= 2
        assert opened.max_rows > 0
        assert opened.lease_ms > 0
        assert not transport.draining

    def test_each_engine_life_has_its_own_epoch(self, world):
        epochs = []
        for _ in range(3):
            with self.new_session(world) as session:
                epochs.append(session.epoch)
        assert epochs == sorted(set(epochs))

    def test_open_of_an_unknown_replica_is_refused(self, world, transport):
        with pytest.raises(NotFound, match="unknown"):
            transport.open(OpenRequest("unknown", next(NONCES)))

    def test_open_of_an_old_epoch_is_refused(self, world, transport):
        with pytest.raises(StaleEpoch) as caught:
            transport.open(self.request(world, epoch=77, life_nonce=1))
        assert caught.value.metadata["epoch"]

    def test_open_succeeds_after_a_failed_open(self, world, transport):
        with pytest.raises(StaleEpoch):
            transport.open(self.request(world, epoch=77, life_nonce=1))
        assert transport.open(self.request(world)).seq == 0

    def test_calls_before_open_raise_unavailable(self, world, transport):
        with pytest.raises(Unavailable):
            transport.receive()
        with pytest.raises(Unavailable):
            transport.heartbeat()

    def test_close_frees_the_requests_and_is_idempotent(self, world):
        session = self.new_session(world)
        session.apply(part_of(NewsRow(0, range(40)), AdmitRow(0)))
        assert session.free_blocks < HYBRID.num_blocks - 1
        session.close()
        session.close()
        with self.new_session(world) as after:
            assert after.free_blocks == HYBRID.num_blocks - 1

    def test_a_stamp_table_of_another_pool_is_refused(self, world, transport):
        with pytest.raises(InvalidArgument, match="stamp_table"):
            transport.open(self.request(world, stamp_table=tuple(range(HYBRID.num_blocks + 1))))

    # ---- steps

    def test_an_engine_gets_the_answers_of_the_core(self, world):
        with self.new_session(world, with_events=True) as session:
            reference = core_in_epoch(session.epoch)
            step = Stepper(reference, session.epoch)
            answers = MiniEngine(lambda part: session.apply(part).parts[0], seed=5)
            expected = MiniEngine(lambda part: step(part).parts[0], seed=5)
            assert answers.run() == expected.run()
            assert expected.num_preempted
            assert expected.num_hit
            assert world.digest() == digest(reference)

    def test_answers_arrive_in_the_order_of_the_steps(self, world, transport):
        opened = transport.open(self.request(world))
        for seq in (1, 2):
            part = part_of(NewsRow(seq, range(seq * 10)), AdmitRow(seq))
            transport.send(Step(opened.epoch, seq, [part]))
        answers = [transport.receive() for _ in range(2)]
        assert [answer.seq for answer in answers] == [1, 2]
        assert [answer.parts[0].admit_granted for answer in answers] == [[10], [20]]

    def test_several_steps_can_be_in_flight(self, world, session):
        session.submit(part_of(NewsRow(0, range(20)), AdmitRow(0)))
        session.submit(part_of(PeekRow(0)), executed_through=0)
        assert session.in_flight == 2
        assert [session.receive().seq, session.receive().seq] == [1, 2]
        assert session.in_flight == 0

    def test_a_step_sent_in_parts_has_the_result_of_the_whole_step(self, world):
        parts = [part_of(NewsRow(0, range(40))), part_of(AdmitRow(0, cap=24)), part_of(PeekRow(0))]
        with self.new_session(world, with_events=True) as session:
            assert [session.submit(part, last=part is parts[-1]) for part in parts] == [1, 1, 1]
            answers = [session.receive() for _ in parts]
            assert [answer.part for answer in answers] == [0, 1, 2]
            whole = Stepper(core_in_epoch(session.epoch), session.epoch)(*parts)
            assert [answer.parts[0] for answer in answers] == whole.parts
            assert session.next_seq == 2

    def test_a_step_of_several_parts_has_a_result_for_each(self, session):
        result = session.apply(part_of(NewsRow(0, range(20))), part_of(AdmitRow(0)), part_of(PeekRow(0)))
        assert [len(part.admit_status) for part in result.parts] == [0, 1, 0]
        assert [len(part.peek_hit) for part in result.parts] == [0, 0, 1]
        assert session.free_blocks == result.parts[-1].free_blocks

    def test_running_out_of_blocks_is_an_answer(self, session):
        tokens = range(16 * HYBRID.num_blocks)
        (answer,) = session.apply(part_of(NewsRow(0, tokens), AdmitRow(0))).parts
        assert answer.admit_status == [AdmitStatus.REFUSED] or answer.admit_status == [AdmitStatus.NEVER_FITS]

    def test_events_are_in_the_answer_when_requested(self, world):
        part = part_of(NewsRow(0, range(40)), AdmitRow(0))
        for with_events in (False, True):
            with self.new_session(world, with_events=with_events) as session:
                assert bool(session.apply(part).parts[0].events) is with_events

    # ---- refusals

    @pytest.mark.parametrize(
        ("part", "field"),
        [
            (part_of(RunRow(7)), "parts[0].run.slot[0]"),
            (part_of(NewsRow(0, [2**32]), AdmitRow(0)), "parts[0].news.tokens"),
            (part_of(NewsRow(0, [-1])), "parts[0].news.tokens"),
            (part_of(NewsRow(0, range(2000))), "parts[0].news.num_tokens[0]"),
            (part_of(NewsRow(0, [1]), NewsRow(0, [1])), "parts[0].news.slot[1]"),
            (part_of(cache=Cache(evicted=[HYBRID.num_blocks])), "parts[0].cache.evicted[0]"),
        ],
        ids=["unknown slot", "huge token", "negative token", "too long", "slot twice", "foreign block"],
    )
    def test_an_invalid_step_is_refused_by_field_and_changes_nothing(self, world, session, part, field):
        session.apply(part_of(NewsRow(9, range(20)), AdmitRow(9)))
        before = world.digest()
        with pytest.raises(InvalidArgument) as caught:
            session.apply(part)
        assert caught.value.field == field
        assert world.digest() == before
        assert session.apply(part_of(RunRow(9))).seq == 2

    def test_a_step_with_too_many_rows_is_refused(self, world, session):
        before = world.digest()
        with pytest.raises(LimitExceeded):
            session.apply(part_of(*(NewsRow(slot, [1]) for slot in range(10_000))))
        assert world.digest() == before

    def test_steps_sent_after_a_refused_step_are_not_applied(self, world, session):
        session.submit(part_of(RunRow(7)))
        session.submit(part_of(NewsRow(0, range(20))), last=False, executed_through=0)
        session.submit(part_of(AdmitRow(0)))
        with pytest.raises(InvalidArgument):
            session.receive()
        assert session.in_flight == 0
        assert session.apply(part_of(NewsRow(0, range(20)), AdmitRow(0))).seq == 1

    def test_a_refused_part_leaves_earlier_parts_applied(self, session):
        session.submit(part_of(NewsRow(0, range(20))), last=False)
        session.submit(part_of(RunRow(7)))
        assert session.receive().seq == 1
        with pytest.raises(InvalidArgument):
            session.receive()
        assert session.apply(part_of(AdmitRow(0))).part == 1

    def test_a_step_out_of_order_is_refused(self, world, transport):
        opened = transport.open(self.request(world))
        transport.send(Step(opened.epoch, 3, [Part()]))
        answer = transport.receive()
        assert isinstance(answer, SequenceError)
        transport.send(Step(opened.epoch, 1, [Part()]))
        assert isinstance(transport.receive(), StepResult)

    def test_a_step_of_another_epoch_is_refused(self, world, transport):
        opened = transport.open(self.request(world))
        transport.send(Step(opened.epoch + 1, 1, [Part()]))
        assert isinstance(self.outcome(transport), StaleEpoch)

    # ---- two sessions, broken streams

    def test_a_newer_session_replaces_the_older_one(self, world):
        with self.new_session(world) as old, self.new_session(world) as new:
            with pytest.raises(OtherWriter):
                old.apply(Part())
            with pytest.raises(OtherWriter):
                old.submit(Part())
            assert new.apply(Part()).seq == 1

    def test_a_resumed_engine_keeps_its_requests_and_position(self, world):
        first = world.transport()
        session = Session(first, self.request(world))
        session.apply(part_of(NewsRow(0, range(40)), AdmitRow(0, cap=20)))
        free = session.free_blocks
        with self.new_session(world, epoch=session.epoch, life_nonce=session.life_nonce) as resumed:
            assert (resumed.epoch, resumed.next_seq, resumed.free_blocks) == (session.epoch, 2, free)
            assert resumed.apply(part_of(RunRow(0))).parts[0].granted == [20]
        session.close()

    def test_a_resent_step_gets_the_stored_answer(self, world, transport):
        request = self.request(world)
        opened = transport.open(request)
        step = Step(opened.epoch, 1, [part_of(NewsRow(0, range(40)), AdmitRow(0))])
        transport.send(step)
        first = transport.receive()
        assert transport.open(self.request(world, epoch=opened.epoch, life_nonce=request.nonce)).seq == 1
        before = world.digest()
        transport.send(step)
        assert transport.receive() == first
        assert world.digest() == before

    def test_heartbeats_have_no_answer(self, world, transport):
        opened = transport.open(self.request(world))
        transport.heartbeat()
        transport.send(Step(opened.epoch, 1, [Part()]))
        transport.heartbeat()
        assert transport.receive().seq == 1

    def outcome(self, transport) -> object:
        """The next answer, or what ended the stream in its place."""
        try:
            return transport.receive()
        except KvplaneError as error:
            return error


def core_in_epoch(last: int) -> Replica:
    """A core that has had as many engine lives."""
    replica = Replica(HYBRID)
    for epoch in range(1, last + 1):
        replica.begin_epoch(epoch)
    return replica
