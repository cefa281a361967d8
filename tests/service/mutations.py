"""Hypothesis: valid messages, a little broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

SMALL = [0, 1, 2, 3, 5, 15, 16, 17, 40, 41, 64, 255, 1023, 1024, 1025]
INTEGERS = [*SMALL, 2**16, 2**28, 2**30, 2**31 - 1, 2**31, 2**32 - 1]
WIDE = [*INTEGERS, 2**32, 2**53, 2**63 - 1, 2**64 - 1]
SIGNED = [*INTEGERS[:-2], -1, -2, -(2**31)]
TEXTS = ["", "r", "s", "a", "b", "x" * 128, "x" * 129, "unknown", "\x00", "ü/ä", "bfloat16", "c"]
DOUBLES = [0.0, 1.0, 0.999, -0.1, 1e308, float("inf"), float("nan")]
FD = FieldDescriptor
VALUES: dict[int, list[Any]] = {
    FD.TYPE_UINT32: INTEGERS,
    FD.TYPE_SINT32: SIGNED,
    FD.TYPE_UINT64: WIDE,
    FD.TYPE_FIXED64: WIDE,
    FD.TYPE_ENUM: [0, 1, 2, 3, 4, 7, 10, 99],
    FD.TYPE_BOOL: [False, True],
    FD.TYPE_STRING: TEXTS,
    FD.TYPE_DOUBLE: DOUBLES,
}


@st.composite
def mutated(draw: st.DrawFn, message: Message) -> bytes:
    """The bytes of the message after one to three changes, mostly of fields, sometimes of bytes."""
    changed = type(message)()
    changed.CopyFrom(message)
    for _ in range(draw(st.integers(1, 3))):
        places = fields_of(changed)
        owner, field = places[draw(st.integers(0, len(places) - 1))]
        change(draw, owner, field)
    raw = changed.SerializeToString()
    return draw(broken(raw)) if draw(st.integers(0, 5)) == 0 else raw


@st.composite
def broken(draw: st.DrawFn, raw: bytes) -> bytes:
    """Bytes with one of them changed, or without their end."""
    at = draw(st.integers(0, max(0, len(raw) - 1)))
    if draw(st.booleans()):
        return raw[:at]
    return raw[:at] + bytes([draw(st.integers(0, 255))]) + raw[at + 1 :]


def fields_of(message: Message) -> list[tuple[Message, Any]]:
    """Every field of the message and of the messages inside that are there."""
    found = [(message, field) for field in message.DESCRIPTOR.fields]
    for field, value in message.ListFields():
        if field.message_type is not None:
            inner = value if is_list(value) else [value]
            found += [place for one in inner for place in fields_of(one)]
    return found


def is_list(value: Any) -> bool:
    return not isinstance(value, (bool, int, float, str, bytes, Message))


def change(draw: st.DrawFn, owner: Message, field: Any) -> None:
    """Give a field another value, one element more or less, or none."""
    if is_list(getattr(owner, field.name)):
        change_list(draw, getattr(owner, field.name), field)
    elif field.message_type is not None:
        if owner.HasField(field.name):
            owner.ClearField(field.name)
        else:
            getattr(owner, field.name).SetInParent()
    elif draw(st.integers(0, 4)) == 0:
        owner.ClearField(field.name)
    else:
        setattr(owner, field.name, draw(value_of(field, getattr(owner, field.name))))


def change_list(draw: st.DrawFn, values: Any, field: FieldDescriptor) -> None:
    index = draw(st.integers(0, max(0, len(values) - 1)))
    choice = draw(st.integers(0, 3))
    if choice == 0 and len(values):
        del values[index]
    elif choice == 1 and len(values):
        values.extend([values[index]] * draw(st.sampled_from([1, 2, 50])))
    elif field.message_type is not None:
        values.add()
    elif choice == 2 and len(values):
        values[index] = draw(value_of(field, values[index]))
    else:
        values.append(draw(value_of(field, values[0] if len(values) else None)))


def value_of(field: FieldDescriptor, old: Any) -> st.SearchStrategy[Any]:
    if field.type == FD.TYPE_BYTES:
        return st.one_of(st.sampled_from([b"", b"\x00", b"h" * 32, b"h" * 64, b"h" * 65]), columns(old or b""))
    return st.sampled_from(VALUES[field.type])


@st.composite
def columns(draw: st.DrawFn, old: bytes) -> bytes:
    """A packed column with an entry changed, added or taken away."""
    edit: Callable[[list[bytes], int, bytes], list[bytes]]
    entry = draw(st.sampled_from([value % 2**32 for value in (*INTEGERS, -1, -2)])).to_bytes(4, "little")
    entries = [old[at : at + 4] for at in range(0, len(old), 4)]
    at = draw(st.integers(0, len(entries)))
    edit = draw(
        st.sampled_from(
            [
                lambda values, at, value: [*values[:at], value, *values[at + 1 :]],
                lambda values, at, value: [*values[:at], value, *values[at:]],
                lambda values, at, _: [*values[:at], *values[at + 1 :]],
            ]
        )
    )
    return b"".join(edit(entries, at, entry))
