"""The order of steps: decides which step is next, stores answers for repeated steps, and checks the limits of each
step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

from kvplane.base.errors import InvalidArgument, LimitExceeded, SequenceError
from kvplane.base.sections import Peers, Retain
from kvplane.base.session import NEW_EPOCH
from kvplane.base.step import Cache, End, Facts, Part, Step, StepResult
from kvplane.base.when_read import given_fields
from kvplane_core.face.interface import RequestColumns
from kvplane_service.config import Config
from kvplane_service.decisions.packing import drop_events
from kvplane_service.decisions.sent import SentResult, SentStep, result_with

# Columns with an entry for each row: the section of a part, and the column.
_COUNTED = (
    *((section, "slot") for section in ("facts", "peers", "news", "run", "admit", "peek", "prefetch", "resume")),
    ("run", "victims"), ("cache", "failed_steps"), ("cache", "evicted"), ("cache", "released"),
    ("resume", "held_slot"), ("retain", "num_hashes"), ("peers", "gone"),
)  # fmt: skip
_NO_RETAIN, _NO_PEERS = Retain(), Peers()


@dataclass(frozen=True, slots=True)
class UnaryStep:
    """States to which step a unary call that changes the replica belongs.

    Attributes:
        epoch: number of the engine life; 0: the current one.
        more: whether further calls belong to the same step.
        executed_through: the last step whose execution has ended, as in Step; None: the step before this one.
    """

    epoch: int = NEW_EPOCH
    more: bool = False
    executed_through: int | None = None


class StepOrder:
    """Ensures that each step, numbered from 1, and each part, from 0, is applied exactly once, and in order.

    Attributes:
        seq: the last step that was applied completely.
        next_part: number of parts of step seq + 1 that were applied.
        rows: number of rows of step seq + 1 that were applied.
    """

    def __init__(self, kept_steps: int) -> None:
        self.seq = 0
        self.next_part = 0
        self.rows = 0
        self._kept_steps = kept_steps
        self._answers: deque[tuple[int, int, bytes, StepResult]] = deque()  # of step, part, with this fingerprint

    def find(self, step: Step, fingerprint: bytes) -> StepResult | None:
        """Return the stored answer if the step was applied before; None if it is the next step.

        Raises SequenceError if earlier steps are missing, the answer is no longer stored, or the step number was used
        with other content.
        """
        if step.seq == self.seq + 1 and step.part == self.next_part:
            return None
        if (step.seq, step.part) > (self.seq + 1, self.next_part):
            raise self._refusal(step, "is ahead of its turn", "send the steps before it first")
        for seq, part, expected, result in self._answers:
            if (seq, part) == (step.seq, step.part):
                if expected != fingerprint:
                    raise self._refusal(step, "was applied with other content", "continue with the next number")
                return result
        raise self._refusal(step, "was applied and its answer is no longer stored", "continue with the next number")

    def make_next(
        self, epoch: int, parts: list[Part], executed_through: int, last: bool = True, traceparent: str = ""
    ) -> Step:
        """Make the next step from these parts; a piece of the next step if `last` is False."""
        return Step(epoch, self.seq + 1, parts, self.next_part, last, executed_through, traceparent)

    def record(self, step: Step, rows: int, fingerprint: bytes, result: StepResult) -> None:
        """Record that the next step was applied, and keep its answer."""
        self._answers.append((step.seq, step.part, fingerprint, result))
        self.advance(step, rows)

    def advance(self, step: Step, rows: int) -> None:
        """Record that the next step was applied, without keeping its answer."""
        if step.last:
            self.seq, self.next_part, self.rows = step.seq, 0, 0
        else:
            num_parts = step.num_parts if isinstance(step, SentStep) else len(step.parts)
            self.next_part, self.rows = step.part + num_parts, self.rows + rows
        while self._answers and self._answers[0][0] <= self.seq - self._kept_steps:
            self._answers.popleft()

    def _refusal(self, step: Step, problem: str, remedy: str) -> SequenceError:
        return SequenceError(
            f"part {step.part} of step {step.seq} {problem}; next is part {self.next_part} of step {self.seq + 1}",
            field="seq",
            remedy=remedy,
            metadata={"seq": str(self.seq), "next_part": str(self.next_part)},
        )


@dataclass(slots=True)
class Turn:
    """The permission to apply a step, which is the next one; used once.

    Attributes:
        order: the order that the step belongs to.
        step: the step.
        rows: number of rows of the step.
        fingerprint: digest of the step's message, to recognize a repeated step.
        with_events: whether the session of the step receives events in the answers.
        on_done: called with the result when the step was applied; None = not needed.
    """

    order: StepOrder
    step: Step
    rows: int
    fingerprint: bytes = b""
    with_events: bool = True
    on_done: Callable[[StepResult], None] | None = None

    def advance(self, result: StepResult) -> StepResult:
        """Record that the step was applied, and return the answer without keeping it."""
        self.order.advance(self.step, self.rows)
        return result

    def done(self, result: StepResult) -> StepResult:
        """Record that the step was applied; keeps and returns the answer, without events if the session wants none."""
        if self.on_done is not None:
            self.on_done(result_with(result, [copy(part) for part in result.parts]))  # with the events
        if isinstance(result, SentResult):
            result.with_events = self.with_events
        elif not self.with_events:
            for part in result.parts:
                drop_events(part)
        self.order.record(self.step, self.rows, self.fingerprint, result)
        return result


def check_step(step: Step, order: StepOrder, executed_through: int, config: Config) -> int:
    """Check the limits of the next step, and return its number of rows. `executed_through`: the highest value reported
    so far.

    Raises:
        InvalidArgument: `executed_through` of the step is below the last reported value, or above the last applied
            step.
        LimitExceeded: too many rows, tokens, or steps in flight.
    """
    done = step.executed_through
    if not executed_through <= done <= order.seq:
        raise InvalidArgument(
            f"{done} is not in {executed_through}..{order.seq}",
            field="executed_through",
            remedy="give the last executed step; it never decreases and is at most the last applied one",
        )
    if step.seq - done > config.max_steps_in_flight:
        raise LimitExceeded(
            f"steps {done + 1} to {step.seq} would be in flight",
            field="executed_through",
            remedy=f"wait for execution: at most {config.max_steps_in_flight} steps may be in flight",
        )
    rows, num_tokens = size_of(step)
    if order.rows + rows > config.max_rows_per_step:
        raise LimitExceeded(
            f"step {step.seq} has {order.rows + rows} rows",
            field="parts",
            remedy=f"send at most {config.max_rows_per_step} rows per step",
        )
    if num_tokens > config.max_tokens_per_message:  # hashing them could delay other replicas
        raise LimitExceeded(
            f"{num_tokens} token ids in one message",
            field="parts",
            remedy=f"send hashes, or at most {config.max_tokens_per_message} tokens per message",
        )
    return rows


def check_parts(num_parts: int, most: int) -> None:
    """Raise LimitExceeded for more parts of a message than there may be rows, before they are decoded."""
    if num_parts > most:
        what = f"the message has {num_parts} parts"
        raise LimitExceeded(what, field="parts", remedy=f"send at most {most} rows per step")


def part_that_ends_all(requests: RequestColumns) -> Part:
    """Make a part that frees every request, except those with a load in progress.

    The blocks of a load in progress stay held, because no mover has confirmed that they are no longer written.
    """
    ending = [slot for slot in requests.slots() if slot not in requests.loading]
    held = [slot for slot in ending if requests.held[slot]]
    free = [slot for slot in ending if not requests.held[slot]]
    return Part(facts=Facts(slot=free, end=[End.FREE] * len(free)), cache=Cache(released=held))


def size_of(step: Step) -> tuple[int, int]:
    """Count the rows and the token ids of a step. A part without rows counts as one, so that the number of parts is
    limited too.
    """
    if isinstance(step, SentStep):
        return step.num_rows, step.num_tokens
    num_rows = num_tokens = 0
    for part in step.parts:
        given = given_fields(part)  # sections that are missing are empty
        columns = (getattr(given[name], column) for name, column in _COUNTED if given.get(name) is not None)
        num_rows += max(1, sum(map(len, columns)))
        num_tokens += sum(len(given[name].tokens) for name in ("facts", "news") if name in given)
    return num_rows, num_tokens


def check_sections(step: Step) -> None:
    """Raise InvalidArgument if an engine sends a section that only the service adds: `retain`, whose times would be
    those of another clock, or `peers`.
    """
    if isinstance(step, SentStep) and step.of_service_at < 0:
        return
    for number, part in enumerate(step.parts):
        given = given_fields(part)
        if given.get("retain", _NO_RETAIN) != _NO_RETAIN:
            what, remedy = "an engine's step retains nothing itself", "call Retain"
            raise InvalidArgument(what, field=f"parts[{number}].retain", remedy=remedy)
        if given.get("peers", _NO_PEERS) != _NO_PEERS:
            what, remedy = "the service says what peers have", "send no rows of peers"
            raise InvalidArgument(what, field=f"parts[{number}].peers", remedy=remedy)
