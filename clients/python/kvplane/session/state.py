"""The client's record of steps: their numbers, which steps are in flight, and what a failed step undoes.

It has no transport, clock or thread. `SessionMachine` uses it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from kvplane.base.errors import (
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    LimitExceeded,
    SequenceError,
)
from kvplane.base.session import Opened
from kvplane.base.step import Part, Step, StepResult
from kvplane.base.typed import check
from kvplane.base.when_read import PACKED
from kvplane.session.reopening import Revival, StepNumbering


class SessionState:
    """The step numbers of one session in one engine life, and the steps in flight: sent and not answered.

    Attributes:
        epoch, spec, kept_keys, lease_ms, max_rows, max_steps: as the service answered when the session opened, see
            Opened.
        free_blocks: number of free blocks, exact after the last answer.
        busy_blocks: blocks that loads (transfers into pages from outside) of earlier engine lives may still write;
            ascending. The service does not allocate these blocks.
        waiting: the steps in flight, that is, without an answer; oldest first.
        num_unsent: how many of them, the newest, are held back for another service.
        synthesized: the answers to the oldest of them that the session makes itself; they come before other answers.
        numbers: converts between the engine's step numbers and those of the current service.
    """

    def __init__(self, opened: Opened) -> None:
        self.epoch = opened.epoch
        self.spec = opened.spec
        self.kept_keys = opened.kept_keys
        self.lease_ms = opened.lease_ms
        self.max_rows = opened.max_rows
        self.free_blocks = opened.free_blocks
        self.busy_blocks = opened.busy_blocks
        self.max_steps = opened.max_steps_in_flight
        self._next = (opened.seq + 1, opened.next_part)
        self._answered_seq = opened.seq
        self._executed_through = 0
        self.waiting: deque[Step] = deque()
        self.numbers = StepNumbering()
        self.num_unsent = 0  # the newest unanswered steps, held back for another service
        self._num_lost = 0  # the oldest unanswered steps, which the session answers itself
        self.synthesized: deque[StepResult] = deque()  # the answers to those

    @property
    def next_seq(self) -> int:
        """The number of the next step, or of the current step if its last part was not sent yet."""
        return self._next[0]

    @property
    def in_flight(self) -> int:
        """The number of steps with a part that has not been answered."""
        if not self.waiting:
            return 0
        return self.waiting[-1].seq - self.waiting[0].seq + 1

    def register(self, parts: Sequence[Part], last: bool, executed_through: int | None) -> Step:
        """Make a step of these parts, give it the next number, and record it as in flight.

        `executed_through` None: all earlier steps have finished; in a later part of a step, the value of its first
        part.

        Raises:
            LimitExceeded: the maximum number of steps or parts is in flight.
            InvalidArgument: there are no parts, or `executed_through` is impossible.
        """
        seq, part = self._next
        if not parts:
            raise InvalidArgument(
                "the step has no parts, but needs at least one",
                field="parts",
                remedy="send Part() for a step without rows",
            )
        unanswered = self.waiting
        if part == 0 and len(unanswered) >= self.max_steps <= self.in_flight:
            raise LimitExceeded(
                f"{self.in_flight} steps are in flight, the maximum is {self.max_steps}",
                remedy="receive an answer first",
            )
        if len(unanswered) >= self.max_rows:
            raise LimitExceeded(
                f"{len(self.waiting)} messages with parts are in flight, the maximum is {self.max_rows}",
                remedy="receive an answer first",
            )
        for at, given in enumerate(parts):
            if not isinstance(given, Part):
                check(given, Part, f"parts[{at}]")
        if last is not True:
            check(last, bool, "last")
        rows = vars(parts[0]).get(PACKED) if len(parts) == 1 else None
        is_alone = executed_through is None and not part and not unanswered
        executed = seq - 1 if is_alone else self._executed(seq, part, executed_through)
        step = Step(self.epoch, seq, list(parts), part, last, executed, "", rows)
        self.waiting.append(step)
        self._next = (seq + 1, 0) if last else (seq, part + len(step.parts))
        return step

    def holds_back(self, step: Step, moving: bool) -> bool:
        """Return whether the last registered step must wait for the next service, because the session changes the
        service (`moving`).

        The later parts of a step are sent to the service that received the step's first part.
        """
        holds = self.num_unsent > 0 or (moving and step.part == 0)
        self.num_unsent += holds
        return holds

    @property
    def is_drained(self) -> bool:
        """Whether the service has answered every step that was sent to it, while further steps wait for another
        service.
        """
        return self.num_unsent == len(self.waiting) > 0

    def withdraw(self, step: Step) -> None:
        """Undo the last `register`, because the step could not be sent."""
        withdrawn = self.waiting.pop()
        assert withdrawn is step, "only the last step can be withdrawn"
        self._next = (step.seq, step.part)

    def answered(self, result: StepResult) -> Step:
        """Record the answer to the oldest step in flight, and return that step. Raises InternalError if it answers
        another step.
        """
        assert self.waiting, "the service sent an answer, but no step is in flight"
        step = self.waiting[0]
        if result.seq != step.seq or result.part != step.part:
            raise InternalError(
                f"the service answered step {result.seq} part {result.part}, expected step {step.seq} part {step.part}",
                remedy="open a new session, and report this bug",
            )
        self.waiting.popleft()
        self._executed_through = step.executed_through
        if step.last:
            self._answered_seq = step.seq
        self.free_blocks = result.parts[-1].free_blocks
        if self._num_lost:
            self._num_lost -= 1
        else:
            self.busy_blocks = _without_ended(self.busy_blocks, [step]) if self.busy_blocks else ()
        return step

    @property
    def followers(self) -> int:
        """The number of messages sent after the oldest unanswered one. If the service refuses the oldest one, it
        refuses all of these too.
        """
        return len(self.waiting) - 1 - self.num_unsent

    def refused(self) -> None:
        """Record that the oldest step in flight was refused. The next step gets that step's number, and all steps after
        it are dropped.
        """
        step = self.oldest
        self.waiting.clear()
        self.num_unsent = 0
        self._next = (step.seq, step.part)

    def take_synthesized(self) -> StepResult | None:
        """Return the next answer if the session itself made it, without the service; None otherwise."""
        return self.synthesized.popleft() if self.synthesized else None

    def unanswered(self) -> list[Step]:
        """Return the steps that the service has not answered, in order."""
        return list(self.waiting)[len(self.synthesized) :]

    def still_busy(self) -> tuple[int, ...]:
        """Return those of `busy_blocks` that no step in flight lists in `Cache.loads_over`."""
        return _without_ended(self.busy_blocks, self.waiting)

    def restarted(self, opened: Opened, revival: Revival, results: Sequence[StepResult]) -> None:
        """Continue in a new engine life (epoch): answer the unanswered steps. `results` are the results of the steps
        that began the new life.
        """
        self.epoch, self.spec, self.kept_keys = opened.epoch, opened.spec, opened.kept_keys
        self.lease_ms, self.max_rows, self.max_steps = opened.lease_ms, opened.max_rows, opened.max_steps_in_flight
        self.busy_blocks = tuple(block for block in opened.busy_blocks if block not in revival.adopted_loads)
        self._num_lost = len(self.waiting)
        lost = self.unanswered()
        released = {slot for step in lost for part in step.parts for slot in part.cache.released}  # not sent again
        self.synthesized.extend(revival.answers(lost, results))
        self.num_unsent = 0
        self.numbers.restart(self._next, opened.seq + len(results), revival.dropped_held - released)

    def resumed(self, opened: Opened) -> list[Step]:
        """Continue after the stream was reopened. Returns the steps to send again, in order.

        Raises SequenceError if the service expects a step that this session cannot send.
        """
        here = self.numbers.position(opened)
        unanswered = self.unanswered()
        oldest = unanswered[0] if unanswered else None
        earliest = (oldest.seq, oldest.part) if oldest else self._next
        if opened.epoch != self.epoch or not earliest <= here <= self._next:
            raise SequenceError(
                f"the service expects (step, part) {here} of epoch {opened.epoch}, this session can send "
                f"{earliest} to {self._next} of epoch {self.epoch}",
                remedy="open a session with a new epoch",
            )
        if not self.waiting:
            self.free_blocks = opened.free_blocks
        self.busy_blocks = opened.busy_blocks
        self.num_unsent = 0
        return unanswered

    def require_idle(self) -> None:
        """Raise FailedPrecondition if a step has not been answered."""
        if self.waiting:
            raise FailedPrecondition(
                f"{self.in_flight} earlier steps have not been answered", remedy="receive their answers first"
            )

    def require_in_flight(self) -> None:
        """Raise FailedPrecondition if no step waits for an answer."""
        if not self.waiting:
            raise FailedPrecondition(
                "no step is in flight, so there is no answer to receive", remedy="submit a step first"
            )

    def _executed(self, seq: int, part: int, given: int | None) -> int:
        latest = self.waiting[-1].executed_through if self.waiting else self._executed_through
        if given is None:
            if part:
                return latest
            if self.waiting:
                raise InvalidArgument(
                    f"it is missing, but {self.in_flight} steps before step {seq} are in flight",
                    field="executed_through",
                    remedy="with several steps in flight, give the last step that has finished on all ranks",
                )
            return seq - 1
        if type(given) is not int:
            check(given, int, "executed_through")
        if not latest <= given <= self._answered_seq:
            raise InvalidArgument(
                f"{given} is not within {latest} to {self._answered_seq}",
                field="executed_through",
                remedy="give a step that was answered and executed; the value never decreases",
            )
        return given

    @property
    def oldest(self) -> Step:
        """The step that is answered next."""
        assert self.waiting, "the service sent an answer, but no step is in flight"
        return self.waiting[0]


def _without_ended(busy: tuple[int, ...], steps: Iterable[Step]) -> tuple[int, ...]:
    """Return the given blocks without those that one of these steps lists in `Cache.loads_over`: the transfers into
    those pages have ended.
    """
    if not busy:
        return busy
    ended = {block for step in steps for part in step.parts for block in part.cache.loads_over}
    return tuple(block for block in busy if block not in ended)
