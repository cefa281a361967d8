"""The forms of records: the fields of each and their values. Any other field or value is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvplane.base.errors import KvplaneError

Record = dict[str, Any]


class BadRecording(Exception):
    """The file is not a recording that this program can replay; the message names the place and the reason."""


@dataclass(frozen=True, slots=True)
class Value:
    """The values that a field of a recording may have."""

    says: str
    holds: Callable[[Any], bool]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


COUNT = Value("a count", _is_count)
POSITIVE = Value("a count above 0", lambda value: _is_count(value) and value > 0)
NUMBER = Value("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool))
FLAG = Value("true or false", lambda value: isinstance(value, bool))
TEXT = Value("a text", lambda value: isinstance(value, str))
ANYTHING = Value("anything", lambda value: True)


def one_of(*values: Any) -> Value:
    """One of these values, of the same type."""
    return Value(
        "one of " + ", ".join(map(repr, values)),
        lambda value: any(value == one and type(value) is type(one) for one in values),
    )


def maybe(value: Value) -> Value:
    """Null or this."""
    return Value(f"null or {value.says}", lambda given: given is None or value.holds(given))


def list_of(value: Value) -> Value:
    """A list of any length."""
    return Value(
        f"a list of which each is {value.says}",
        lambda given: isinstance(given, list) and all(value.holds(one) for one in given),
    )


def row_of(*values: Value) -> Value:
    """A list of exactly these."""
    return Value(
        f"a list of {', '.join(value.says for value in values)}",
        lambda given: (
            isinstance(given, list)
            and len(given) == len(values)
            and all(value.holds(one) for value, one in zip(values, given, strict=True))
        ),
    )


@dataclass(frozen=True, slots=True)
class Form:
    """The fields of one sort of record.

    Attributes:
        inputs: required fields.
        optional: fields that may be left out.
        outputs: required fields; their values are compared, not validated.
        sometimes: outputs that are left out when they are empty.
    """

    inputs: Mapping[str, Value] = field(default_factory=dict)
    optional: Mapping[str, Value] = field(default_factory=dict)
    outputs: frozenset[str] = frozenset()
    sometimes: frozenset[str] = frozenset()

    @property
    def all_outputs(self) -> frozenset[str]:
        """Everything that is compared."""
        return self.outputs | self.sometimes

    @property
    def all_inputs(self) -> frozenset[str]:
        """Everything that is given."""
        return frozenset(self.inputs) | frozenset(self.optional)

    def check(self, record: Any, where: str) -> None:
        """Raise BadRecording for a field that is unknown, missing, or has an unknown value."""
        if not isinstance(record, dict):
            raise BadRecording(f"{where}: {_short(record)} is no record")
        self._check_names(record, where)
        for name, value in (*self.inputs.items(), *self.optional.items()):
            if name in record and not value.holds(record[name]):
                raise BadRecording(f"{where}: {name} is {_short(record[name])}, not {value.says}")

    def _check_names(self, record: Record, where: str) -> None:
        unknown = sorted(record.keys() - self.all_inputs - self.all_outputs)
        if unknown:
            raise BadRecording(f"{where}: unknown field {unknown[0]!r}")
        missing = sorted((self.inputs.keys() | self.outputs) - record.keys())
        if missing:
            raise BadRecording(f"{where}: field {missing[0]!r} is missing")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."


@contextmanager
def refusals_named(where: str) -> Iterator[None]:
    """Convert a refusal by the service in the block into BadRecording; `where` names the line."""
    try:
        yield
    except KvplaneError as error:
        raise BadRecording(f"{where}: refused: {error}") from error


def outputs(*names: str) -> frozenset[str]:
    """Names of outputs."""
    return frozenset(names)
