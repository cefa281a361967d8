"""Plants faults in recordings, so that a test can see them found."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.conformance.forms import Record
from tests.conformance.header import read_records

Place = tuple[Any, ...]


def places(value: Any, path: Place = ()) -> Iterator[Place]:
    """Every single value below a JSON value, as the keys that lead to it."""
    if not isinstance(value, dict | list):
        yield path
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from places(item, (*path, key))


def changed(value: Any) -> Any:
    """Another value of the same sort."""
    if value is None:
        return 1
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return value + "x"
    return value + (1 if isinstance(value, int) else 1e-6)


def with_change(record: Record, place: Place) -> Record:
    """The record with another value there."""
    planted = copy.deepcopy(record)
    *way, last = place
    holder = planted
    for key in way:
        holder = holder[key]
    holder[last] = changed(holder[last])
    return planted


def changes(record: Record, field: str) -> Iterator[Record]:
    """The record with each single value of the field changed, one at a time, and with a value more and one less."""
    value = record[field]
    for place in places(value):
        yield with_change(record, (field, *place))
    if isinstance(value, list):
        yield record | {field: [*value, 7]}
        if value:
            yield record | {field: value[:-1]}


def records_of(path: Path) -> list[Record]:
    """All lines."""
    return list(read_records(path))


def write_records(path: Path, records: Sequence[Record]) -> Path:
    """A recording of these lines."""
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode(), compresslevel=1))
    return path
