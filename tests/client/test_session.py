"""A session through broken streams, refusals, threads and lapsing leases."""

from __future__ import annotations

import random

import pytest

from kvplane import aio
from kvplane.base.errors import (
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    KvplaneError,
    NotFound,
    OtherWriter,
    SequenceError,
    ServiceRestarted,
    StaleEpoch,
    Unavailable,
)
from kvplane.base.session import OpenRequest
from kvplane.base.step import Cache, Part, PartResult, StepResult
from kvplane.blocking.session import Session
from kvplane.sansio.retry import RetryPolicy
from kvplane.session.rows import AdmitRow, NewsRow, RunRow, part_of
from kvplane_service.replicas.host import ReplicaState
from tests.client.flaky import FlakyTransport, breaking, never
from tests.client.loop_thread import Awaited, Blocking, shared_loop
from tests.client.mini_engine import MiniEngine
from tests.client.worlds import InProcessWorld


class Nonces:
    """Counts from a number on."""

    def __init__(self, last):
        self.last = last

    def __call__(self):
        self.last += 1
        return self.last


class Pauses(list[float]):
    """Remembers how long a session would have slept."""

    def policy(self):
        return RetryPolicy(3, first_delay_s=1.0, max_delay_s=3.0, sleep=self.append, jitter=lambda: 0.0)

    async def pause(self, seconds):
        self.append(seconds)


class BlockingFace:
    """Opens `kvplane.Session`."""

    def open(self, transport, request, pauses, nonces):
        return Session(transport, request, retry=pauses.policy(), nonces=nonces, heartbeats=False)


class AsyncioFace:
    """Opens `kvplane.aio.Session`, on the same blocking transport."""

    def open(self, transport, request, pauses, nonces):
        session = aio.Session(Awaited(transport), request, retry=pauses.policy(), pause=pauses.pause, nonces=nonces)
        return Blocking(shared_loop().do(session.open, heartbeats=False))


@pytest.fixture(params=[BlockingFace(), AsyncioFace()], ids=["blocking", "asyncio"])
def face(request):
    return request.param


@pytest.fixture
def open_session(face):
    def open_one(world, transport, pauses=None, nonce=1, **facts):
        nonces = Nonces(nonce - 1)
        request = OpenRequest(world.replica, nonces(), **facts)
        return face.open(transport, request, Pauses() if pauses is None else pauses, nonces)

    return open_one


@pytest.fixture
def world():
    return InProcessWorld()


@pytest.fixture
def transport(world):
    return FlakyTransport(world.transport())


@pytest.fixture
def pauses():
    return Pauses()


@pytest.fixture
def session(world, transport, pauses, open_session):
    with open_session(world, transport, pauses) as session:
        yield session


ASK = part_of(NewsRow(0, range(40)), AdmitRow(0, cap=20))


# ---- broken streams


@pytest.mark.parametrize("call", ["send", "receive"])
def test_a_step_on_a_broken_stream_is_applied_once(session, world, transport, call):
    transport.breaks = breaking(call)
    assert session.apply(ASK).parts[0].admit_granted == [20]
    assert transport.calls.count("open") == 2
    assert session.apply(part_of(RunRow(0))).parts[0].granted == [20]
    assert world.host.seq == 2


def test_steps_in_flight_survive_a_broken_stream(session, transport):
    session.submit(ASK)
    session.submit(part_of(RunRow(0)), executed_through=0)
    transport.breaks = breaking("receive")
    assert session.receive().parts[0].admit_granted == [20]
    transport.breaks = breaking("receive")
    assert session.receive().parts[0].granted == [20]
    assert transport.calls.count("open") == 3


@pytest.mark.parametrize("seed", range(8))
def test_an_engine_gets_equal_answers_over_a_flaky_network(world, transport, seed, open_session):
    expected = MiniEngine(lambda part: calm.apply(part).parts[0], seed)
    with open_session(world, world.transport()) as calm:
        expected.run()
    world.forget()
    with open_session(world, transport) as session:
        rng = random.Random(seed)
        transport.breaks = lambda call: call in ("send", "receive") and rng.random() < 0.2
        actual = MiniEngine(lambda part: session.apply(part).parts[0], seed)
        assert actual.run() == expected.log
        assert transport.calls.count("open") > 10


def test_each_stream_has_a_new_nonce_and_resumes_the_epoch(world, transport, open_session):
    with open_session(world, transport, stamp_table=(0,) * 40) as session:
        transport.breaks = breaking("receive")
        session.apply(ASK)
        first, second = transport.opens
        assert (first.nonce, second.nonce) == (1, 2)
        assert (first.epoch, second.epoch) == (0, session.epoch)
        assert second.stamp_table == ()


def test_retries_are_bounded_and_pauses_grow(session, transport, pauses):
    transport.breaks = lambda call: True
    with pytest.raises(Unavailable, match="cannot connect"):
        session.apply(ASK)
    assert pauses == [0.0, 1.0, 2.0]
    assert transport.calls.count("open") == 4


def test_retry_pauses_are_capped_and_jittered():
    steady = RetryPolicy(6, first_delay_s=1.0, max_delay_s=3.0, jitter=lambda: 0.0)
    assert list(steady.delays_s()) == [0.0, 1.0, 2.0, 3.0, 3.0, 3.0]
    spread = RetryPolicy(3, first_delay_s=1.0, max_delay_s=3.0, jitter=lambda: 0.5)
    assert list(spread.delays_s()) == [0.0, 0.75, 1.5]


def test_a_step_without_an_answer_stays_in_flight(session, transport, world):
    transport.breaks = lambda call: True
    with pytest.raises(Unavailable):
        session.apply(ASK)
    assert session.in_flight == 1
    with pytest.raises(FailedPrecondition, match="receive their answers first"):
        session.apply(ASK)
    transport.breaks = never
    assert session.receive().parts[0].admit_granted == [20]
    assert world.host.seq == 1


def test_open_retries_until_the_service_is_up(world, transport, pauses, open_session):
    transport.breaks = breaking("open", times=2)
    with open_session(world, transport, pauses) as session:
        assert session.epoch
    assert pauses == [0.0, 1.0]
    assert [request.nonce for request in transport.opens] == [1, 2, 3]


def test_open_raises_after_its_last_retry(world, transport, open_session):
    transport.breaks = breaking("open", times=99)
    with pytest.raises(Unavailable):
        open_session(world, transport)


def test_a_refusal_is_raised_although_the_stream_breaks_after_it(session, transport):
    session.submit(part_of(RunRow(7)))
    session.submit(ASK, executed_through=0)
    seen = []

    def break_at_the_second(call):
        seen.append(call)
        return seen.count("receive") == 2

    transport.breaks = break_at_the_second
    with pytest.raises(InvalidArgument):
        session.receive()
    transport.breaks = never
    assert session.in_flight == 0
    assert session.apply(ASK).seq == 1


# ---- the end of a session


def ends_with(session, cls):
    """Every call raises the same from now on."""
    for call in (lambda: session.apply(Part()), lambda: session.submit(Part()), session.receive):
        with pytest.raises(cls):
            call()


def test_a_restarted_service_ends_a_session_without_revive(session, world, transport):
    session.apply(ASK)
    world.forget()
    transport.breaks = breaking("receive")
    with pytest.raises(StaleEpoch):
        session.apply(part_of(RunRow(0)))
    ends_with(session, StaleEpoch)


def test_a_deregistered_replica_ends_the_session(session, world):
    world.registry.remove(world.replica)
    with pytest.raises(NotFound):
        session.apply(ASK)
    ends_with(session, NotFound)


def test_a_service_at_another_position_ends_the_session(session, world, transport, open_session):
    session.apply(ASK)
    with open_session(world, world.transport(), nonce=50, epoch=session.epoch, life_nonce=session.life_nonce) as thief:
        thief.apply(part_of(RunRow(0)))
        thief.apply(Part())
        transport.breaks = breaking("receive")
        with pytest.raises(SequenceError):
            session.apply(Part())
        ends_with(session, SequenceError)


def test_the_heartbeat_detects_a_newer_session(session, world, open_session):
    with open_session(world, world.transport(), nonce=50):
        session.beat()
        ends_with(session, OtherWriter)


class Scripted:
    """A transport that gives the answers of a script."""

    draining = can_move = False

    def __init__(self, inner, answers):
        self._inner = inner
        self._answers = iter(answers)

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def send(self, step):
        del step

    def receive(self):
        return next(self._answers)


@pytest.mark.parametrize("refusal", [StaleEpoch("old"), OtherWriter("gone")])
def test_a_fatal_refusal_ends_the_session(world, open_session, refusal):
    with open_session(world, Scripted(world.transport(), [refusal])) as session:
        with pytest.raises(type(refusal)):
            session.apply(Part())
        assert session.ended is refusal
        ends_with(session, type(refusal))


def test_a_step_applied_after_a_refused_one_ends_the_session(world, open_session):
    answers = [InvalidArgument("no"), StepResult(2, 0, [PartResult()])]
    with open_session(world, Scripted(world.transport(), answers)) as session:
        session.submit(Part())
        session.submit(Part(), executed_through=0)
        with pytest.raises(InternalError, match="applied step 2"):
            session.receive()
        ends_with(session, InternalError)


def test_an_answer_to_another_step_is_an_internal_error(world, open_session):
    transport = Scripted(world.transport(), [StepResult(7, 0, [PartResult()])])
    with (
        open_session(world, transport) as session,
        pytest.raises(InternalError, match="answered step 7"),
    ):
        session.apply(Part())


def test_a_closed_session_refuses_calls(session, transport):
    session.close()
    ends_with(session, FailedPrecondition)
    session.beat()
    assert transport.calls[-1] == "close"


def test_another_engine_life_with_the_same_epoch_is_not_resumed(session, world, transport):
    """As two services begin them that do not know of each other."""
    session.apply(ASK)
    epoch, _ = session.epoch, world.forget()
    world.host.open(OpenRequest(world.replica, 99, owner_epoch=epoch - 1))
    world.host.lost(99)
    assert world.host.epoch == epoch
    transport.breaks = breaking("receive")
    ends_with(session, ServiceRestarted)


# ---- leases


def test_beat_keeps_the_lease(session, world):
    for _ in range(3):
        world.now_ns += 9 * 10**9
        assert world.host.state is ReplicaState.LIVE
        session.beat()


def test_beat_reopens_a_broken_stream(session, world, transport):
    world.host.lost(1)
    assert world.host.state.value == "lapsed"
    transport.breaks = breaking("heartbeat")
    session.beat()
    assert world.host.state.value == "live"
    assert transport.calls.count("open") == 2


def test_a_failed_beat_is_followed_by_another(session, world, transport):
    transport.breaks = lambda call: True
    session.beat()
    transport.breaks = never
    session.beat()
    assert session.apply(ASK).seq == 1


# ---- attributes of the session


def test_a_session_shows_its_epoch_spec_and_free_blocks(session, world):
    assert session.spec == world.host.replica.spec
    assert (session.epoch, session.kept_keys, session.next_seq) == (world.host.epoch, 0, 1)
    session.apply(ASK)
    assert session.free_blocks == world.host.replica.free_blocks


def test_a_session_shows_busy_blocks(world, transport, open_session):
    """Also when the stream was opened again before the answer came that says which are not."""
    with open_session(world, transport, busy_blocks=(3, 5, 8)) as session:
        assert session.busy_blocks == (3, 5, 8)
        session.apply(Part(cache=Cache(loads_over=[5])))
        assert session.busy_blocks == (3, 8)
        transport.breaks = breaking("receive")
        session.apply(Part(cache=Cache(loads_over=[3])))
        assert session.busy_blocks == world.host.replica.busy_blocks == (8,)
        with pytest.raises(InvalidArgument, match="block 3"):
            session.apply(Part(cache=Cache(loads_over=[8, 3])))
        assert session.busy_blocks == (8,)


def test_a_step_that_cannot_be_encoded_is_withdrawn(world, open_session):
    class Choosy:
        def __init__(self, inner):
            self._inner = inner

        def __getattr__(self, name):
            return getattr(self._inner, name)

        def send(self, step):
            if step.parts[0].news.slot:
                raise InvalidArgument("no", field="parts[0].news.tokens")
            self._inner.send(step)

    with open_session(world, Choosy(world.transport())) as session:
        with pytest.raises(KvplaneError, match="news"):
            session.apply(ASK)
        assert session.in_flight == 0
        assert session.apply(Part()).seq == 1


@pytest.mark.parametrize("error", [TypeError, AttributeError, RuntimeError])
def test_a_step_whose_send_failed_is_not_in_flight(session, transport, monkeypatch, error):
    with monkeypatch.context() as patch:
        patch.setattr(transport, "send", raising(error))
        with pytest.raises(error):
            session.apply(ASK)
    assert session.in_flight == 0
    assert session.apply(ASK).parts[0].admit_granted == [20]


def raising(error):
    def send(_step):
        raise error

    return send
