"""Pack decisions and cache events into single byte strings, which the cyclic garbage collector need not traverse.

    decision    HEAD (time taken, time of the step: u64, big-endian), then a `kvplane.v1.Decision`, whose results have
                the events of the device
    events      a `kvplane.v1.SubscribeResponse` with the events alone

Events are in runs: a REMOVED event has all consecutive keys that were removed alike. Tokens are omitted, because no log
contains them. The compiled core writes the same bytes (`bind_pack.h`). A packed entry never leaves its process.

Functions that pack are generators: they yield between pieces of about a millisecond, so that one long entry does not
block the event loop, and return what they packed. Short entries have one piece.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterable, Sequence
from copy import copy
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias, TypeVar

from kvplane import wire
from kvplane.base.step import CacheEvent, PartResult, Step, StepResult
from kvplane.base.when_read import given_fields
from kvplane.v1 import admin_pb2 as pb
from kvplane.v1.events_pb2 import SubscribeResponse
from kvplane_core.face.cache_events import CacheEvents, runs_of

HEAD = struct.Struct(">QQ")
_LOGGED = ("hashed_facts", "hashed_news", "taken_back", "went_back")  # fields of results that no engine is sent
_FEW = 1 << 8  # runs of events that are packed between two yields
_PIECE = 1 << 12  # the same, of the keys of a run

_T = TypeVar("_T")
Packing: TypeAlias = Generator[None, None, _T]


class Decision(NamedTuple):
    """A step that was applied, or one message of a step that was sent in several messages.

    Attributes:
        step: the step as the engine sent it, without its tokens.
        result: the answer to the step.
        events: cache events of each part of the step.
        at_ns: time in nanoseconds at which the step was applied, by the clock of the service.
        took_ns: nanoseconds that the core needed to apply the step.
    """

    step: Step
    result: StepResult
    events: tuple[Sequence[CacheEvent], ...]
    at_ns: int
    took_ns: int


class Took(NamedTuple):
    """How long a step took: its nanoseconds, when it was applied, its epoch and number, and its run and admit rows."""

    took_ns: int
    at_ns: int
    epoch: int
    seq: int
    rows: int

    @classmethod
    def of(cls, step: Step, at_ns: int, took_ns: int) -> Took:
        """Return it of a step."""
        rows = sum(len(part.run.slot) + len(part.admit.slot) for part in step.parts)
        return cls(took_ns, at_ns, step.epoch, step.seq, rows)

    @classmethod
    def of_packed(cls, raw: bytes) -> Took:
        """Return it of a packed decision, of which only the step is decoded."""
        took_ns, at_ns = HEAD.unpack_from(raw)
        return cls.of(wire.decode_step(pb.Decision.FromString(raw[HEAD.size :]).step, None), at_ns, took_ns)


# Returns the leading bytes of a packed decision, which sort by the time taken.
slowness_of = itemgetter(slice(8))


def drop_events(part: PartResult) -> PartResult:
    """Take the events out of a part's result; returns it."""
    given = vars(part)  # what is missing is empty
    given.pop("events", None)
    given.pop("tier_events", None)
    return part


def pack_decision(
    step: Step, result: StepResult, of_parts: Iterable[Sequence[CacheEvent]], at_ns: int, took_ns: int
) -> Packing[bytes]:
    """Return the decision as bytes, without its tokens; `of_parts` are the cache events of each part."""
    answer = StepResult(result.seq, result.part, [drop_events(copy(part)) for part in result.parts])
    answer.published_through = result.published_through
    logged = [pb.LoggedPart(**_logged(given_fields(part))) for part in result.parts]
    message = pb.Decision(step=wire.encode_step(step), result=wire.encode_result(answer), logged=logged)
    for part in message.step.parts:
        for section in ("facts", "news"):
            if part.HasField(section):
                getattr(part, section).ClearField("tokens")
    for outcome, events in zip(message.result.parts, of_parts, strict=True):
        yield from _add_runs(outcome.events, events)
    return HEAD.pack(took_ns, at_ns) + message.SerializeToString()


def _logged(given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in _LOGGED if name in given}


def unpack_decision(raw: bytes, with_events: bool = True) -> Decision:
    """Return the decision that `pack_decision` packed; empty columns become empty lists."""
    took_ns, at_ns = HEAD.unpack_from(raw)
    message = pb.Decision.FromString(raw[HEAD.size :])
    of_parts = [
        CacheEvents(map(wire.decode_event, part.events if with_events else ())) for part in message.result.parts
    ]
    for part in message.result.parts:
        part.ClearField("events")
    step, result = wire.decode_step(message.step, None), wire.decode_result(message.result)
    for outcome, logged, events in zip(result.parts, message.logged, of_parts, strict=True):
        given = vars(outcome)  # what is missing is empty
        given.update({"events": events} if with_events else {})
        given.update({one.name: _plain(value) for one, value in logged.ListFields()})
    return Decision(step, result, tuple(of_parts), at_ns, took_ns)


def _plain(value: Any) -> Any:  # noqa: ANN401
    return value if isinstance(value, int) else list(value)


def events_of_packed(raw: bytes) -> list[CacheEvents]:
    """Return the cache events of the parts of a packed decision that have some, and decode nothing else."""
    parts = pb.Decision.FromString(raw[HEAD.size :]).result.parts
    return [CacheEvents(map(wire.decode_event, part.events)) for part in parts if part.events]


def pack_events(events: Sequence[CacheEvent]) -> Packing[bytes]:
    """Return the events as bytes."""
    message = SubscribeResponse()
    yield from _add_runs(message.events, events)
    return message.SerializeToString()


def _add_runs(to: Any, events: Sequence[CacheEvent]) -> Packing[None]:  # noqa: ANN401
    for number, run in enumerate(runs_of(events), start=1):
        message = to.add()
        message.MergeFrom(wire.encode_event(replace(run, hashes=run.hashes[:_PIECE])))
        for start in range(_PIECE, len(run.hashes), _PIECE):
            yield
            message.hashes.extend(run.hashes[start : start + _PIECE])
        if not number % _FEW:
            yield


def unpack_events(raw: bytes, start: int = 0) -> CacheEvents:
    """Return the events that `pack_events` packed; their bytes begin at offset `start` of `raw`."""
    return CacheEvents(map(wire.decode_event, SubscribeResponse.FromString(raw[start:]).events))
