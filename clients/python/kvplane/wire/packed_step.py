"""The bytes of a decode step's message, written without message objects.

A step whose one part has nothing but facts and run rows is what an engine sends most. Its bytes are those that protobuf
writes: fields in the order of their numbers, without those that have the default.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

from kvplane.base.decode_rows import DecodeRows
from kvplane.base.hashing.native import step_message
from kvplane.base.step import Facts, OnRefusal, Part, Run, Step
from kvplane.base.when_read import given_fields
from kvplane.v1 import step_pb2 as pb
from kvplane.v1.allocation_pb2 import SessionRequest
from kvplane.wire.columns import pack, tag_of, varint
from kvplane.wire.sections import Section
from kvplane.wire.tables import FACTS, RUN

_IS_LITTLE = sys.byteorder == "little"
_NO_COUNTS = array("I")


class _Section:
    """How one section is written: a tag, a name and a typecode per field, in the order of the numbers."""

    __slots__ = ("each", "read", "tag")

    def __init__(self, name: str, message: Any, of: Section) -> None:  # noqa: ANN401
        codes = {column.name: column.code for column in of.columns.each}
        codes |= {other.name: "" for other in of.others.values() if other.kind == "hashes"}
        names = sorted(codes, key=lambda one: tag_of(message, one))
        self.tag = tag_of(pb.Part, name)
        self.each = [(tag_of(message, one), one, codes[one]) for one in names]
        self.read: Callable[[object], tuple[Any, ...]] = attrgetter(*names)

    def write(self, section: object, where: str) -> bytes:
        """Return the section, with its tag; b"" if all its columns are empty. Raises the errors of `pack`."""
        written: list[bytes] = []
        for (tag, name, code), values in zip(self.each, self.read(section), strict=True):
            if values:
                if type(values) is array and values.typecode == code and _IS_LITTLE:
                    raw = values.tobytes()
                else:
                    raw = pack(values, code, where, name) if code else values
                written += (tag, varint(len(raw)), raw)
        if not written:
            return b""
        raw = b"".join(written)
        return b"".join((self.tag, varint(len(raw)), raw))


_FACTS = _Section("facts", pb.Facts, FACTS)
_RUN = _Section("run", pb.Run, RUN)
_PARTS, _TRACEPARENT, _STEP = tag_of(pb.Step, "parts"), tag_of(pb.Step, "traceparent"), tag_of(SessionRequest, "step")
_NUMBERS = [tag_of(pb.Step, name, 0) for name in ("epoch", "seq", "part", "more", "executed_through")]
_NUMBERS.append(_PARTS)  # whose length is the next number
_WRITTEN = {"facts", "run"}


_compiled = cache(step_message)


def step_bytes(step: Step) -> bytes | None:
    """Return the bytes of the message with this step; None if the step has anything else than facts and run rows, or
    values of wrong types. Raises InvalidArgument for a column that cannot be sent.
    """
    written = step.rows.message if step.rows is not None else _sections(step.parts)
    if written is None:
        return None
    if (compiled := _compiled()) is not None and not step.traceparent:
        return compiled(step.epoch, step.seq, step.part, not step.last, step.executed_through, written)
    values = (step.epoch, step.seq, step.part, not step.last, step.executed_through, len(written))
    fields: list[bytes] = []
    for tag, value in zip(_NUMBERS, values):  # noqa: B905 - `strict` is slow, and every step comes here
        if value or tag is _PARTS:
            fields += (tag, varint(value))
    fields.append(written)
    if step.traceparent:
        trace = step.traceparent.encode()
        fields += (_TRACEPARENT, varint(len(trace)), trace)
    raw = b"".join(fields)
    return b"".join((_STEP, varint(len(raw)), raw))


def _sections(parts: Sequence[Part]) -> bytes | None:
    given = given_fields(parts[0])
    if len(parts) > 1 or not given.keys() <= _WRITTEN:
        return None
    try:
        written = _FACTS.write(given["facts"], "parts[0].facts") if "facts" in given else b""
        if "run" in given:
            if given["run"].on_refusal != OnRefusal.PREEMPT:
                return None
            written += _RUN.write(given["run"], "parts[0].run")
    except (AttributeError, TypeError):
        return None
    return written


class RowsWriter:
    """Makes the rows of decode steps of the same requests. What all of them have in common is written once."""

    __slots__ = ("_facts", "_ones", "_run", "_run_with_extra", "_slots")

    def __init__(self, slots: array[int], with_tokens: bool) -> None:
        """`slots` must not change any more. Without tokens, the engine gives hashes when blocks become full."""
        self._slots, self._ones, size = slots, array("I", [1]) * len(slots), 4 * len(slots)
        zeros = array("I", bytes(size if with_tokens else 0))
        facts = _FACTS.write(Facts(slots, appended=self._ones, tokens=zeros), "facts")
        self._facts = facts[: len(facts) - 4 * len(zeros)]  # tokens are the last column, as extra is of run rows
        self._run = _RUN.write(Run(slots), "run")
        self._run_with_extra = _RUN.write(Run(slots, array("i", bytes(size))), "run")[: -size or None]

    def rows(self, appended: bool, tokens: array[int], extra: array[int]) -> DecodeRows:
        """Return rows with these columns, arrays of u32 and i32; an empty one is not sent."""
        facts, run = self._facts if appended else b"", self._run_with_extra if extra else self._run
        message = b"".join((facts, tokens, run, extra))
        return DecodeRows(self._slots, message, appended, len(facts), len(tokens), len(extra), _NO_COUNTS, b"")

    def hashed(self, num_hashes: array[int], hashes: bytes, extra: array[int]) -> DecodeRows:
        """Return rows of requests that got tokens, with the hashes of the blocks that these complete."""
        facts = _FACTS.write(Facts(self._slots, [], self._ones, [], num_hashes, hashes), "facts")
        message = b"".join((facts, self._run_with_extra if extra else self._run, extra))
        return DecodeRows(self._slots, message, True, 0, 0, len(extra), num_hashes, hashes)
