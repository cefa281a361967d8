"""The machine of a session: every schedule of a few calls and faults, without threads, loops or gRPC."""

from __future__ import annotations

import itertools

import pytest

from kvplane.base.errors import DeadlineExceeded, FailedPrecondition, KvplaneError, ServiceRestarted, Unavailable
from kvplane.base.session import OpenRequest
from kvplane.sansio.driver import Pause, drive
from kvplane.sansio.retry import Attempts, RetryPolicy
from kvplane.session.machine import Open, SessionMachine
from kvplane.session.state import SessionState
from tests.client.schedules import ATTEMPTS, Cancelled, World, every_schedule, opened_world
from tests.twins import use_broken_streams

SCRIPTS = [
    ("submit", "receive"),
    ("submit", "submit", "receive"),
    ("bad", "submit", "receive", "beat"),
]
CALLS = ["submit", "receive", "bad", "beat", "drain", "restart", "renew"]


def run_all(script: tuple[str, ...], max_faults: int, can_revive: bool = True) -> list[World]:
    worlds = []
    for choose in every_schedule(max_faults):
        world = opened_world(choose, can_revive)
        try:
            for name in script:
                world.do(name)
            world.finish()
        except BaseException as error:
            error.add_note(f"script {script}, choices {choose.taken}, {world.faults}")
            raise
        worlds.append(world)
    return worlds


@pytest.mark.parametrize("first", CALLS)
def test_the_machine_works_or_has_ended_after_every_schedule(first):
    num = 0
    for rest in itertools.product(CALLS, repeat=2):
        for world in run_all(("submit", first, *rest), 2):
            assert world.machine.ended is None or "abort" in world.faults
            num += 1
    assert num > 1000


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_machine_survives_two_faults_in_a_row(script):
    worlds = run_all(script, 2)
    assert {fault for world in worlds for fault in world.faults} >= {"lost", "late", "cancelled", "abort", "restart"}
    for world in worlds:
        assert world.machine.ended is None or "abort" in world.faults


def test_a_session_without_revive_ends_only_with_its_service():
    for rest in itertools.product(["submit", "receive", "bad", "beat", "drain", "restart"], repeat=2):
        for world in run_all(("submit", *rest), 1, can_revive=False):
            ended = world.machine.ended
            if ended is not None and "abort" not in world.faults:
                assert isinstance(ended, ServiceRestarted)
                assert "restart" in world.faults


@pytest.mark.parametrize("end", ["abort", "close"])
def test_an_ended_session_raises_its_reason_and_opens_nothing(end):
    for world in run_all(("submit", end), 1):
        with pytest.raises(FailedPrecondition):
            world.machine.check()
        with pytest.raises(FailedPrecondition):
            world.run(world.machine.receive())
        world.run(world.machine.beat())


def test_open_retries_with_new_nonces_and_gives_up():
    nonces, opens = iter(range(2, 100)), []
    machine = SessionMachine(OpenRequest("r", 1), RetryPolicy(ATTEMPTS), nonces.__next__, lambda: 0.0, None)

    def act(action):
        if isinstance(action, Open):
            opens.append(action.request.nonce)
            raise DeadlineExceeded("late") if len(opens) % 2 else Unavailable("away")

    with pytest.raises(KvplaneError):
        drive(machine.open(), act)
    assert opens == [1, 2, 3, 4]


def test_retries_are_bounded_in_time():
    clock = [0.0]
    attempts, failed = Attempts(RetryPolicy(None, within_s=5.0, jitter=lambda: 0.0), lambda: clock[0]), Unavailable("x")
    for _ in range(5):
        attempts.pause_s(failed)
        clock[0] += 1.1
    with pytest.raises(Unavailable):
        attempts.pause_s(failed)


def test_a_stream_that_breaks_immediately_is_retried_after_a_pause():
    attempts, failed = Attempts(RetryPolicy(jitter=lambda: 0.0), lambda: 0.0), Unavailable("x")
    assert attempts.pause_s(failed) == 0.0
    attempts.succeeded()
    assert attempts.pause_s(failed) > 0.0


def test_a_service_that_breaks_every_stream_is_given_up():
    """Each open succeeds, so attempts are counted from zero each time; the time is not."""
    world, clock = opened_world(next(every_schedule(0))), [0.0]
    machine = world.machine
    machine._clock = lambda: clock[0]
    world.submit()

    def act(action):
        if isinstance(action, Pause):
            clock[0] += action.seconds
            return None
        if isinstance(action, Open):
            return world.service.open(action.request)
        raise Unavailable("broken")

    with pytest.raises(Unavailable):
        drive(machine.receive(), act)
    assert clock[0] < 61.0
    world.finish()


def test_a_silent_service_gets_one_attempt_per_call():
    """A call after a time-out tries once; when a stream is open again, the session is patient again."""
    world, opens = opened_world(next(every_schedule(0))), list[object]()
    away: list[KvplaneError] = [DeadlineExceeded("late")]
    world.submit()

    def act(action):
        if isinstance(action, Pause):
            return None
        opens.append(action)
        if away:
            raise away[0]
        return world._act(action)

    with pytest.raises(DeadlineExceeded):
        drive(world.machine.receive(), act)
    away[0] = Unavailable("nothing came of the handshake")
    for _ in range(2):
        opens.clear()
        with pytest.raises(Unavailable):
            drive(world.machine.receive(), act)
        assert len(opens) == 1
    away.clear()
    assert drive(world.machine.receive(), act).seq == 1
    world.in_flight.clear()
    world.submit()
    away.append(Unavailable("gone"))
    opens.clear()
    with pytest.raises(Unavailable):
        drive(world.machine.receive(), act)
    assert len(opens) == 1 + ATTEMPTS


def test_an_interrupted_refusal_is_raised_by_the_next_call():
    """The answers of the steps behind it were being taken when the call was cancelled."""
    choose = next(every_schedule(0))
    world = opened_world(choose)
    world.bad()
    world.submit()
    receives = []

    def act(action):
        receives.append(action)
        if len(receives) == 2:
            raise Cancelled
        return world._act(action)

    with pytest.raises(Cancelled):
        drive(world.machine.receive(), act)
    assert world.machine.state.in_flight == 2
    world.receive()
    assert world.machine.state.in_flight == 0
    world.finish()


# ---- each of these rules, taken out, is missed


def withdraw_in_any_case(self, step, error):
    """A step whose sending was interrupted may be with the service."""
    del error
    self.state.withdraw(step)


def trust_the_stream(self, ready):
    """A call that was interrupted while it looked for an answer may have lost it."""
    state = self.state
    if not self._is_up or self._refusal is not None or state.synthesized or len(state.waiting) <= state.num_unsent:
        return None
    answer = ready()
    return None if answer is None else self._take(answer)


def look_while_a_step_is_unsent(self, ready):
    """What a new life owes is answered first."""
    answer = ready() if self._is_up else None
    return None if answer is None else self._take(answer)


def remember_the_refusal(self):
    """A step that was sent again is answered again."""
    refusal = self._refusal
    yield from REOPEN(self)
    self._refusal = refusal


def begin_with_nothing(self, opened):
    """What was not answered is sent again."""
    del opened
    return []


REOPEN = SessionMachine._reopen
WEAKENED = {
    "interrupted streams are used": (SessionMachine, "_use", use_broken_streams(SessionMachine._use)),
    "interrupted steps are withdrawn": (SessionMachine, "sending_failed", withdraw_in_any_case),
    "interrupted looks lose nothing": (SessionMachine, "take_ready", trust_the_stream),
    "looks overtake the session's own answers": (SessionMachine, "take_ready", look_while_a_step_is_unsent),
    "refusals outlive their stream": (SessionMachine, "_reopen", remember_the_refusal),
    "unanswered steps are not sent again": (SessionState, "resumed", begin_with_nothing),
    "an end ends nothing": (SessionMachine, "check", lambda self: None),
}


def run_until_caught():
    for script in (*SCRIPTS, *itertools.product(CALLS, repeat=4)):
        run_all(script, 1)


@pytest.mark.parametrize("name", WEAKENED)
def test_a_machine_with_a_planted_fault_is_caught(name, monkeypatch):
    monkeypatch.setattr(*WEAKENED[name])
    with pytest.raises(AssertionError):
        run_until_caught()
