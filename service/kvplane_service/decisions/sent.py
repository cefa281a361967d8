"""A step that came as a message, and its answer, on a core that reads and writes messages itself.

Both are what the service needs of them: numbers, and the bytes. Their parts become Python objects
when they are read: before the step is applied those of the message, later those of its record, the packed decision.
A step that this process made of objects is applied as such, and its answer is of objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import TypeAlias

from kvplane.base.step import CacheEvent, Part, PartResult, Step, StepResult
from kvplane.base.when_read import given_fields
from kvplane_core.face.interface import BEGINS, RESUMES, SCHEDULES, Answer, ReadStep
from kvplane_service.decisions.packing import Decision, drop_events, unpack_decision

OfParts: TypeAlias = tuple[Sequence[CacheEvent], ...]  # events of each part


class Record:
    """A packed decision, with the events of its parts as the core gave them."""

    __slots__ = ("_events", "_made", "_of_tiers", "packed")

    def __init__(self, packed: bytes, events: OfParts, of_tiers: OfParts) -> None:
        self.packed, self._events, self._of_tiers = packed, events, of_tiers
        self._made: Decision | None = None

    def read(self) -> Decision:
        """Return the decision as objects, which are made once."""
        if self._made is None:
            self._made = unpack_decision(self.packed, with_events=False)
            of_parts = zip(self._made.result.parts, self._events, self._of_tiers, strict=True)
            for part, events, of_tiers in of_parts:
                given = vars(part)  # what is missing is empty
                given.update({"events": events} if events else {}, **({"tier_events": of_tiers} if of_tiers else {}))
        return self._made


class SentStep(Step):
    """A step that came as a message.

    Attributes:
        read: the step as the core read it; None once it was applied.
        num_parts, num_rows, num_tokens, kinds, of_service_at, domains: see `ReadStep`.
        with_events: whether its answer has the events of its parts.
        message: kept until the step is applied.
    """

    __slots__ = (
        "_decode",
        "_made",
        "_record",
        "domains",
        "kinds",
        "message",
        "num_parts",
        "num_rows",
        "num_tokens",
        "of_service_at",
        "read",
        "with_events",
    )  # fmt: skip

    def __init__(self, read: ReadStep, message: bytes, decode: Callable[[bytes], list[Part]]) -> None:
        """`decode` reads the parts from the message."""
        self.epoch, self.seq, self.part, self.last = read.epoch, read.seq, read.part, read.last
        self.executed_through, self.traceparent, self.rows = read.executed_through, read.traceparent, None
        self.num_parts, self.num_rows, self.num_tokens = read.num_parts, read.num_rows, read.num_tokens
        self.kinds, self.of_service_at, self.domains = read.kinds, read.of_service_at, read.domains
        self.read, self.with_events, self.message, self._decode = read.form, True, message, decode
        self._made: list[Part] | None = None
        self._record: Record | None = None

    def of(self, parts: list[Part]) -> SentStep:
        """Give the step its parts, which were read already; returns it."""
        self._made = parts
        return self

    @property
    def parts(self) -> list[Part]:  # type: ignore[override]
        """The parts; without token ids once the step was applied."""
        if self._made is None:
            if self._record is not None:
                return self._record.read().step.parts
            self._made = self._decode(self.message)
        return self._made

    def applied(self, record: Record) -> None:
        """The step was applied: forgets its message."""
        self.read, self.message, self._made, self._record = None, b"", None, record


class SentResult(StepResult):
    """The answer to a step that came as a message.

    Attributes:
        message: of the session.
        events, tier_events, is_counted: see `Answer`.
        with_events: whether `parts` have the events.
    """

    __slots__ = ("_record", "events", "is_counted", "message", "tier_events", "with_events")

    def __init__(self, step: Step, answer: Answer) -> None:
        self.seq, self.part, self.published_through = step.seq, step.part, answer.published_through
        self.message, self.is_counted = answer.message, answer.is_counted
        self.events, self.tier_events = answer.events, answer.tier_events
        self._record: Record | None = None
        self.with_events = True

    @property
    def parts(self) -> list[PartResult]:  # type: ignore[override]
        """The results of the parts. They are those of the record, which must be there."""
        assert self._record is not None, "the decision is not packed yet"
        parts = self._record.read().result.parts
        return parts if self.with_events else [drop_events(copy(part)) for part in parts]

    def recorded(self, record: Record) -> None:
        """The decision was packed."""
        self._record = record


def answered(step: Step, answer: StepResult | Answer) -> StepResult:
    """Return the answer of a core to a step."""
    return SentResult(step, answer) if isinstance(answer, Answer) else answer


def step_with(step: Step, parts: list[Part], traceparent: str = "") -> Step:
    """Return a step of objects with the numbers of another one."""
    return Step(step.epoch, step.seq, parts, step.part, step.last, step.executed_through, traceparent)


def result_with(result: StepResult, parts: list[PartResult]) -> StepResult:
    """Return an answer of objects with the numbers of another one."""
    return StepResult(result.seq, result.part, parts, result.published_through)


def kinds_of(step: Step) -> int:
    """Return what a step of objects has, as `ReadStep.kinds` says it; without HAS_KEYS."""
    kinds = 0
    for part in step.parts:
        given = given_fields(part)  # sections that are missing are empty
        kinds |= SCHEDULES if ("run" in given and part.run.slot) or ("admit" in given and part.admit.slot) else 0
        kinds |= BEGINS if "news" in given and part.news.slot else 0
        kinds |= RESUMES if given.get("resume") is not None else 0
    return kinds
