"""The session's machine against a minimal model of a service, through every schedule of a few calls and faults.

There is no thread, loop or gRPC. At each action of the machine a choice is made: it succeeds, or one of its possible
faults happens. `every_schedule` tries all choices with a limited number of faults.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from kvplane.base.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    KvplaneError,
    SequenceError,
    ServiceRestarted,
    Unavailable,
)
from kvplane.base.groups import GroupKind, GroupSpec, ReplicaSpec
from kvplane.base.session import NEW_EPOCH, Opened, OpenRequest
from kvplane.base.step import Part, PartResult, Peek, Step, StepResult
from kvplane.sansio.driver import Pause, drive
from kvplane.sansio.retry import RetryPolicy
from kvplane.session.machine import Action, Close, Doing, Heartbeat, Open, Receive, Revive, Send, SessionMachine
from kvplane.session.reopening import Revival

SPEC = ReplicaSpec((GroupSpec(GroupKind.FULL_ATTENTION, 16),), 10, 1024, 16, 16, 1024)
BAD = 99  # the service refuses a step with it
ATTEMPTS = 3


class Cancelled(BaseException):
    """Ctrl-C, or the cancellation of a task."""


class Chooser:
    """Takes the choices of a prefix, then the first one each time."""

    def __init__(self, prefix: list[int], max_faults: int) -> None:
        self._prefix, self._left = prefix, max_faults
        self.taken: list[int] = []
        self.widths: list[int] = []
        self.is_calm = False

    def __call__(self, *options: str) -> str:
        """The first of the options is no fault."""
        if self.is_calm:
            return options[0]
        at = len(self.taken)
        index = self._prefix[at] if at < len(self._prefix) else 0
        self.taken.append(index)
        self.widths.append(len(options) if self._left else 1)
        self._left -= index > 0
        return options[index]


def every_schedule(max_faults: int) -> Iterator[Chooser]:
    """Choosers for all runs; each must have been used when the next one is asked for."""
    prefix: list[int] = []
    while True:
        chooser = Chooser(prefix, max_faults)
        yield chooser
        taken, widths = chooser.taken, chooser.widths
        while taken and taken[-1] + 1 >= widths[len(taken) - 1]:
            taken.pop()
        if not taken:
            return
        prefix = [*taken[:-1], taken[-1] + 1]


class Service:
    """One replica. `applied` are the numbers that the steps of the present engine life carried, in order."""

    def __init__(self) -> None:
        self.epoch = 0
        self.nonce = -1
        self.applied: list[int] = []
        self.knows_engine = True

    def restart(self) -> None:
        self.knows_engine, self.nonce = False, -1

    def open(self, request: OpenRequest) -> Opened:
        if request.epoch == NEW_EPOCH:
            self.epoch, self.applied, self.knows_engine = self.epoch + 1, [], True
        elif request.epoch != self.epoch or not self.knows_engine:
            raise ServiceRestarted("restarted")
        assert request.nonce != self.nonce, "each stream has a nonce of its own"
        self.nonce = request.nonce
        return Opened(self.epoch, len(self.applied), 0, 4, 100, 10_000, SPEC, 9, 0)

    def step(self, nonce: int, step: Step) -> StepResult | KvplaneError | None:
        """None: of a stream that is no longer the newest one."""
        if nonce != self.nonce:
            return None
        assert step.epoch in (self.epoch, step.epoch), "epochs are checked by the open"
        (number,) = step.parts[0].peek.slot or [0]
        if step.seq > len(self.applied) + 1:
            return SequenceError("from the future")
        if step.seq <= len(self.applied):
            assert self.applied[step.seq - 1] == number, "a number was used for two steps"
        elif number == BAD:
            return InvalidArgument("bad", field="peek")
        else:
            self.applied.append(number)
        return StepResult(step.seq, 0, [PartResult(peek_hit=[number] if number else [], free_blocks=5)])


class World:
    """A machine and its service.

    Attributes:
        outcomes: (number, what the engine received), in order: the number itself, 0 for "nothing granted", or an error.
        faults: names of what befell.
    """

    def __init__(self, choose: Chooser, can_revive: bool = True) -> None:
        self.choose, self.service = choose, Service()
        self.faults: list[str] = []
        self.outcomes: list[tuple[int, object]] = []
        self.in_flight: list[int] = []
        self.moving = False
        self.actions = 0  # of the call under way
        self._answers: list[StepResult | KvplaneError | None] | None = None  # None: no stream
        self._nonce = -1
        self._numbers = itertools.count(1)
        nonces = itertools.count(2)
        retry = RetryPolicy(ATTEMPTS, jitter=lambda: 0.0)
        self.machine = SessionMachine(
            OpenRequest("r", 1), retry, nonces.__next__, lambda: 0.0, Revival if can_revive else None
        )

    # -- the engine --------------------------------------------------------------------------------------------------

    def do(self, name: str) -> None:
        """One call of the engine, or one thing that happens between its calls."""
        getattr(self, name)()

    def run(self, work: Doing[Any]) -> Any:
        self.actions = 0
        return drive(work, self._act)

    def submit(self, number: int | None = None) -> None:
        machine = self.machine
        if machine.ended or machine.state.in_flight == 3:
            return
        number = number or next(self._numbers)
        before = machine.state.in_flight
        part = Part(peek=Peek([number]))
        try:
            self.run(machine.submit([part], True, 0, self.moving))
        except Cancelled:
            assert machine.state.in_flight in (before, before + 1)
        if machine.state.in_flight > before:
            self.in_flight.append(number)

    def bad(self) -> None:
        self.submit(BAD)

    def receive(self) -> None:
        machine = self.machine
        if machine.ended or not self.in_flight:
            return
        try:
            result = machine.take_ready(self._look) or self.run(machine.receive())
        except (Unavailable, DeadlineExceeded, Cancelled):
            assert machine.state.in_flight == len(self.in_flight), "steps in flight stay in flight"
        except KvplaneError as refusal:
            if machine.ended is None:
                self._refused(refusal)
        else:
            number = self.in_flight.pop(0)
            (received,) = result.parts[0].peek_hit
            assert received in (number, 0), "the answer of another step"
            self.outcomes.append((number, received))

    def _refused(self, refusal: KvplaneError) -> None:
        assert self.in_flight[0] == BAD, f"{refusal!r} though nothing was wrong"
        self.outcomes += [(number, refusal) for number in self.in_flight]
        self.in_flight = []
        assert self.machine.state.in_flight == 0

    def beat(self) -> None:
        if self.machine.ended is None:
            self._shielded(self.machine.beat())

    def drain(self) -> None:
        self.moving = True

    def restart(self) -> None:
        """The service dies and restarts."""
        self.faults.append("restart")
        self.service.restart()
        self._answers = None

    def renew(self) -> None:
        if self.machine.ended is None:
            self.machine.begin_new_life()

    def abort(self) -> None:
        self.faults.append("abort")
        self.machine.end(FailedPrecondition("aborted"))
        self._answers = None

    def close(self) -> None:
        self.faults.append("abort")
        self._shielded(self.machine.close())

    def _shielded(self, work: Doing[None]) -> None:
        try:
            self.run(work)
        except Cancelled:
            return

    # -- the transport -----------------------------------------------------------------------------------------------

    def _act(self, action: Action) -> object:
        self.actions += 1
        assert self.actions < 100, "the call does not come to an end"
        if self.machine.ended is not None:
            assert not isinstance(action, Open | Revive | Pause), "it is over"
        act: Callable[[Any], object] = getattr(self, f"_{type(action).__name__.lower()}")
        return act(action)

    def _befalls(self, *options: str) -> str:
        what = self.choose("ok", *options)
        if what != "ok":
            self.faults.append(what)
        return what

    def _open(self, action: Open) -> Opened:
        self._answers = None
        what = self._befalls("lost", "late", "answer lost", "cancelled", "cancelled late", "abort", "restart")
        if what == "restart":
            self.restart()
        if what in ("lost", "restart"):
            raise Unavailable(what)
        if what == "cancelled":
            raise Cancelled
        opened = self.service.open(action.request)
        self._end(what)
        self._answers, self._nonce = [], action.request.nonce
        return opened

    def _send(self, action: Send) -> None:
        what = self._befalls("lost", "cancelled", "cancelled late", "abort")
        if what in ("lost", "cancelled"):
            self._answers = None
        elif self._answers is not None:
            self._answers.append(self.service.step(self._nonce, action.step))
        if what.startswith("cancelled"):
            raise Cancelled
        if what == "abort":
            self.abort()

    def _receive(self, _: Receive) -> StepResult | KvplaneError:
        if self._answers is None:
            raise Unavailable("broken")
        what = self._befalls("lost", "late", "cancelled", "answer lost", "abort", "restart")
        if what == "answer lost":  # Ctrl-C lost it, and the stream is intact
            self._answers.pop(0)
            raise Cancelled
        self._end(what)
        assert self._answers, "it waits for an answer that does not come"
        answer = self._answers.pop(0)
        if answer is None:
            raise Unavailable("a newer stream is open")
        return answer

    def _look(self) -> StepResult | None:
        """An answer is here already, or not yet."""
        if not self._answers or not isinstance(self._answers[0], StepResult):
            return None
        what = self._befalls("answer not here", "answer lost")
        if what == "answer not here":
            return None
        answer = self._answers.pop(0)
        if what == "answer lost":  # Ctrl-C lost it, and the stream is intact
            raise Cancelled
        assert isinstance(answer, StepResult)
        return answer

    def _heartbeat(self, _: Heartbeat) -> None:
        if self._answers is None:
            raise Unavailable("broken")
        self._end(self._befalls("lost", "cancelled"))

    def _close(self, _: Close) -> None:
        self._answers, self.service.nonce = None, -1
        self.moving = False
        if self._befalls("cancelled") != "ok":
            raise Cancelled

    def _pause(self, _: Pause) -> None:
        what = self._befalls("cancelled", "abort")
        if what == "cancelled":
            raise Cancelled
        if what == "abort":
            self.abort()

    def _revive(self, _: Revive) -> Revival:
        what = self._befalls("lost", "cancelled")
        if what == "lost":
            raise Unavailable("a launch is running")
        if what == "cancelled":
            raise Cancelled
        return Revival()

    def _end(self, what: str) -> None:
        """What ends a stream in the middle of an action."""
        if what == "ok":
            return
        self._answers = None
        if what == "restart":
            self.restart()
        if what == "abort":
            self.abort()
        if what.startswith("cancelled"):
            raise Cancelled
        raise DeadlineExceeded(what) if what == "late" else Unavailable(what)

    # -- what must hold ----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Nothing befalls it any more: then the session works, or it has ended for a reason that was given."""
        self.choose.is_calm = True
        while self.in_flight and self.machine.ended is None:
            self.receive()
        if self.machine.ended is None:
            self.submit()
            self.receive()
            if self.outcomes[-1][1] == 0:  # the new life began with it
                self.submit()
                self.receive()
            number, received = self.outcomes[-1]
            assert received == number, "it does not work"
            assert self.machine.state.epoch == self.service.epoch
            answered = [hit for _, hit in self.outcomes if isinstance(hit, int) and hit]
            mine = [number for number in self.service.applied if number]
            assert mine == answered[len(answered) - len(mine) :], "applied and answered differ"
        numbers = [number for number, _ in self.outcomes if number != BAD]
        assert numbers == sorted(set(numbers)), "answers come in order, each once"


def opened_world(choose: Chooser, can_revive: bool = True) -> World:
    """A world whose session is open; nothing befalls that."""
    world = World(choose, can_revive)
    choose.is_calm = True
    world.run(world.machine.open())
    choose.is_calm = False
    return world
