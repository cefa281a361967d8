"""Images of replicas as values, which tests change."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from random import Random
from typing import Any

from kvplane_core.face.packed_values import pack_value
from kvplane_core.face.state import MAGIC, read_entries

EXTREME = (-1, 101, 1 << 14, 1 << 20, 1 << 31, (1 << 32) - 1, 1 << 61, (1 << 63) - 1)


def values_of(image: bytes) -> dict[str, list[Any]]:
    """The values of an image, by name."""
    entries: dict[str, list[Any]] = {}
    for name, value in read_entries(image):
        entries.setdefault(name, []).append(value)
    return entries


def image_of(values: dict[str, list[Any]]) -> bytes:
    """An image with these values."""
    return MAGIC + b"".join(pack_value(name) + pack_value(one) for name, each in values.items() for one in each)


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    return enumerate(sorted(value) if isinstance(value, set) else value)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all numbers in a value, and of its bytes and arrays."""
    if isinstance(value, dict | list | tuple | set):
        for key, one in _items(value):
            yield from places(one, (*path, key))
    elif isinstance(value, int | bytes | array) and value != b"":
        yield path


def changed(value: Any, path: tuple[Any, ...], rng: Random) -> Any:
    """The value with an extreme number at a place."""
    if not path:
        number = rng.choice(EXTREME)
        if isinstance(value, int):
            return number
        if not len(value):
            return value
        at = rng.randrange(len(value))
        if isinstance(value, bytes):
            return value[:at] + bytes([number & 0xFF]) + value[at + 1 :]
        return value[:at] + array(value.typecode, [number & ((1 << 8 * value.itemsize) - 1)]) + value[at + 1 :]
    each = dict(_items(value))
    each[path[0]] = changed(each[path[0]], path[1:], rng)
    return each if isinstance(value, dict) else type(value)(each.values())
