"""Checked access to the JSON records of a trace. Errors name the field, the value found, and the line."""

from __future__ import annotations

import json
from array import array
from typing import NoReturn, cast

from kvplane_tools.replay.workloads.lines import Line, MalformedTrace
from kvplane_tools.replay.workloads.requests import POSITIONS

_MAX_TIME = 10**15  # ms: 30,000 years


class Record:
    """A JSON object on a line of a trace, or nested in such an object."""

    def __init__(self, line: Line, values: object, place: str = "") -> None:
        """Use the parsed `values` of a line. `place` is their position in the line: "" or, for instance,
        "requests[3].".

        Raises MalformedTrace if they are not a JSON object.
        """
        self._line = line
        self._place = place
        if not isinstance(values, dict):
            raise self.malformed(f"{place.rstrip('.') or 'the line'} is not a JSON object")
        self._values: dict[str, object] = values

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def malformed(self, cause: str) -> MalformedTrace:
        """Return a MalformedTrace that names this line."""
        return self._line.malformed(cause)

    def count(self, name: str, least: int = 0) -> int:
        """Return an integer field from `least` to the longest possible text, in tokens. Raises MalformedTrace."""
        value = self._get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._bad(name, f"{_brief(value)} is not an integer")
        if not least <= value <= POSITIONS:
            raise self._bad(name, f"{_brief(value)} is out of {least}..{POSITIONS}")
        return value

    def time(self, name: str) -> float:
        """Return a time field of 0 or more, in the unit of the trace. Raises MalformedTrace."""
        value = self._get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._bad(name, f"{_brief(value)} is not a time")
        if not 0 <= value <= _MAX_TIME:
            raise self._bad(name, f"{_brief(value)} is out of 0..{_MAX_TIME}")
        return float(value)

    def text(self, name: str) -> str:
        """Return a string field that is not empty. Raises MalformedTrace."""
        value = self._get(name)
        if not isinstance(value, str) or not value:
            raise self._bad(name, f"{_brief(value)} is not a non-empty string")
        return value

    def optional(self, name: str) -> str:
        """Return a string field; "" if it is missing or anything else."""
        value = self._values.get(name)
        return value if isinstance(value, str) else ""

    def ids(self, name: str, tokens_per_id: int) -> array[int]:
        """Return a list of hash ids: integers from 0, limited so that the text they stand for fits into a stream (a
        numbered sequence of tokens). Raises MalformedTrace.
        """
        values = self._list(name)
        limit = POSITIONS // tokens_per_id
        try:
            ids = array("I", cast("list[int]", values))
        except (TypeError, OverflowError):
            raise self._bad(name, f"an entry is not an integer of 0..{limit - 1}") from None
        if ids and max(ids) >= limit:
            raise self._bad(name, f"{max(ids)} is above {limit - 1}")
        return ids

    def records(self, name: str) -> list[Record]:
        """Return a list of JSON objects. Raises MalformedTrace."""
        values = self._list(name)
        return [Record(self._line, value, f"{self._place}{name}[{at}].") for at, value in enumerate(values)]

    def _list(self, name: str) -> list[object]:
        value = self._get(name)
        if not isinstance(value, list):
            raise self._bad(name, f"{_brief(value)} is not a list")
        return value

    def _get(self, name: str) -> object:
        if name not in self._values:
            raise self._bad(name, "is missing")
        return self._values[name]

    def _bad(self, name: str, cause: str) -> MalformedTrace:
        return self.malformed(f"{self._place}{name}: {cause}")


def parse(line: Line) -> Record:
    """Return the JSON object on a line.

    Raises:
        MalformedTrace: the line is not a JSON object.
    """
    try:
        values = json.loads(line.text, parse_constant=_refuse_constant)
    except RecursionError:
        raise line.malformed("broken JSON: nested too deeply") from None
    except ValueError as error:
        raise line.malformed(f"broken JSON: {error}") from error
    return Record(line, values)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _brief(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
