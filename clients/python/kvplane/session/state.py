"""The client's side of the order of steps: numbers, what is in flight, and what is undone when a step fails.

Pure: no transport, clock or thread. The blocking and the asyncio session share it.
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
from kvplane.session.reopening import Numbers, Revival


class SessionState:
    """Numbers of one session in one epoch.

    Attributes:
        epoch, spec, kept_keys, lease_ms, max_rows: of the answer that opened it.
        free_blocks: exact after the last answer.
        busy_blocks: ascending; held since this life began, because loads of earlier ones may still write to them.
    """

    def __init__(self, opened: Opened) -> None:
        self.epoch = opened.epoch
        self.spec = opened.spec
        self.kept_keys = opened.kept_keys
        self.lease_ms = opened.lease_ms
        self.max_rows = opened.max_rows
        self.free_blocks = opened.free_blocks
        self.busy_blocks = opened.busy_blocks
        self._max_steps = opened.max_steps_in_flight
        self._next = (opened.seq + 1, opened.next_part)
        self._answered_seq = opened.seq
        self._executed_through = 0
        self._unanswered: deque[Step] = deque()
        self._numbers = Numbers()
        self._num_unsent = 0  # of them, the newest: kept for another service
        self._num_lost = 0  # of them, the oldest: those that such an answer is for
        self._made: deque[StepResult] = deque()  # answers to the oldest of them, which no service will give

    @property
    def next_seq(self) -> int:
        """Number of the next step, or of the one that is incomplete."""
        return self._next[0]

    @property
    def in_flight(self) -> int:
        """Steps with a part that has not been answered."""
        if not self._unanswered:
            return 0
        return self._unanswered[-1].seq - self._unanswered[0].seq + 1

    def register(self, parts: Sequence[Part], last: bool, executed_through: int | None) -> Step:
        """The step of these parts under the next number; it is in flight from now on.

        `executed_through` None says that all steps before it have finished, or what the first part of it
        said.

        Raises:
            LimitExceeded: as many steps or parts of steps are in flight as may be.
            InvalidArgument: no parts, or an executed_through that cannot be.
        """
        seq, part = self._next
        if not parts:
            raise InvalidArgument("a step has at least one part", field="parts", remedy="send Part() to apply nothing")
        if part == 0 and self.in_flight >= self._max_steps:
            raise LimitExceeded(
                f"{self.in_flight} steps are in flight, as many as may be", remedy="receive an answer first"
            )
        if len(self._unanswered) >= self.max_rows:
            raise LimitExceeded(
                f"{len(self._unanswered)} messages are in flight, as many as a step may have rows",
                remedy="receive an answer first",
            )
        for at, given in enumerate(parts):
            if not isinstance(given, Part):
                check(given, Part, f"parts[{at}]")
        check(last, bool, "last")
        step = Step(self.epoch, seq, list(parts), part, last, self._executed(seq, part, executed_through))
        self._unanswered.append(step)
        self._next = (seq + 1, 0) if last else (seq, part + len(step.parts))
        return step

    def keeps_back(self, step: Step, moving: bool) -> bool:
        """Whether this step, registered last, is not sent to a service that the session is about to leave (`moving`).

        Steps that were begun there end there.
        """
        keeps = self._num_unsent > 0 or (moving and step.part == 0)
        self._num_unsent += keeps
        return keeps

    @property
    def is_quiet(self) -> bool:
        """The service has answered all that was sent, and something waits to be sent to another one."""
        return self._num_unsent == len(self._unanswered) > 0

    def withdraw(self, step: Step) -> None:
        """Undo the last `register`: the step could not be sent."""
        withdrawn = self._unanswered.pop()
        assert withdrawn is step, "only the last step can be withdrawn"
        self._next = (step.seq, step.part)

    def answered(self, result: StepResult) -> StepResult:
        """Take the answer of the oldest step in flight. Raises InternalError when it is another's."""
        step = self.oldest
        if (result.seq, result.part) != (step.seq, step.part):
            raise InternalError(
                f"step {step.seq} part {step.part} was answered by step {result.seq} part {result.part}"
            )
        self._unanswered.popleft()
        self._executed_through = step.executed_through
        if step.last:
            self._answered_seq = step.seq
        self.free_blocks = result.parts[-1].free_blocks
        if self._num_lost:
            self._num_lost -= 1
        else:
            self.busy_blocks = _without_ended(self.busy_blocks, [step])
        return result

    @property
    def followers(self) -> int:
        """Parts that were sent behind the oldest one; when that is refused, so is each of them, as out of order."""
        return len(self._unanswered) - 1 - self._num_unsent

    def refused(self) -> None:
        """The oldest step in flight was refused: its number is free again."""
        step = self.oldest
        self._unanswered.clear()
        self._num_unsent = 0
        self._next = (step.seq, step.part)

    def outward(self, step: Step) -> Step:
        """The step as the service counts."""
        return self._numbers.outward(step)

    def inward(self, result: StepResult) -> StepResult:
        """The answer as the engine counts."""
        return self._numbers.inward(result)

    def take_made(self) -> StepResult | None:
        """The next answer that was made here, if that is what comes next."""
        return self._made.popleft() if self._made else None

    def unanswered(self) -> list[Step]:
        """Steps that wait for an answer of the service, in order."""
        return list(self._unanswered)[len(self._made) :]

    def still_busy(self) -> tuple[int, ...]:
        """Those of `busy_blocks` that no step in flight names in `Cache.loads_over`."""
        return _without_ended(self.busy_blocks, self._unanswered)

    def restarted(self, opened: Opened, revival: Revival, told: Sequence[StepResult]) -> None:
        """A new service begins this life anew, and was told so in steps that it answered: answer what it will not."""
        self.epoch, self.spec, self.kept_keys = opened.epoch, opened.spec, opened.kept_keys
        self.lease_ms, self.max_rows, self._max_steps = opened.lease_ms, opened.max_rows, opened.max_steps_in_flight
        self.busy_blocks = tuple(block for block in opened.busy_blocks if block not in revival.taken_over)
        self._num_lost = len(self._unanswered)
        lost = self.unanswered()
        released = {slot for step in lost for part in step.parts for slot in part.cache.released}  # never sent again
        self._made.extend(revival.answers(lost, told))
        self._num_unsent = 0
        self._numbers.restart(self._next, opened.seq + len(told), revival.forgotten_held - released)

    def resumed(self, opened: Opened) -> list[Step]:
        """The stream was opened again: what must be sent again, in order.

        Raises SequenceError when the service is not where this session left it.
        """
        here = self._numbers.position(opened)
        unanswered = self.unanswered()
        oldest = unanswered[0] if unanswered else None
        earliest = (oldest.seq, oldest.part) if oldest else self._next
        if opened.epoch != self.epoch or not earliest <= here <= self._next:
            raise SequenceError(
                f"the service stands before (step, part) {here} of epoch {opened.epoch}, this session "
                f"between {earliest} and {self._next} of epoch {self.epoch}",
                remedy="open a session with a new epoch",
            )
        if not self._unanswered:
            self.free_blocks = opened.free_blocks
        self.busy_blocks = opened.busy_blocks
        self._num_unsent = 0
        return unanswered

    def require_idle(self) -> None:
        """Raise FailedPrecondition when answers are outstanding."""
        if self._unanswered:
            raise FailedPrecondition(
                f"{self.in_flight} steps have not been answered", remedy="receive their answers first"
            )

    def require_in_flight(self) -> None:
        """Raise FailedPrecondition when no answer is outstanding."""
        if not self._unanswered:
            raise FailedPrecondition("no step is in flight", remedy="submit one first")

    def _executed(self, seq: int, part: int, given: int | None) -> int:
        said = self._unanswered[-1].executed_through if self._unanswered else self._executed_through
        if given is None:
            if part:
                return said
            if self._unanswered:
                raise InvalidArgument(
                    f"{self.in_flight} steps before step {seq} are in flight",
                    field="executed_through",
                    remedy="with several steps in flight, say which one has finished on all ranks",
                )
            return seq - 1
        check(given, int, "executed_through")
        if not said <= given <= self._answered_seq:
            raise InvalidArgument(
                f"{given} is not in {said}..{self._answered_seq}",
                field="executed_through",
                remedy="name a step that has been answered and executed; it never goes back",
            )
        return given

    @property
    def oldest(self) -> Step:
        """The step that is answered next."""
        assert self._unanswered, "an answer without a step"
        return self._unanswered[0]


def _without_ended(busy: tuple[int, ...], steps: Iterable[Step]) -> tuple[int, ...]:
    """The blocks that none of these steps names as written no more."""
    if not busy:
        return busy
    ended = {block for step in steps for part in step.parts for block in part.cache.loads_over}
    return tuple(block for block in busy if block not in ended)
