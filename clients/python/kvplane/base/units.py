"""Sizes and durations with units, as operators write them: "8GiB", "80 GB", "250ms", "10s", "1h"."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvplane.base.errors import InvalidArgument

_QUANTITY = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)
_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BYTES |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_NANOSECONDS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "min": 60 * 10**9}
_NANOSECONDS |= {"h": 3600 * 10**9, "d": 24 * 3600 * 10**9}


def parse_bytes(text: str, field: str = "memory", unit: str = "B") -> int:
    """Return the number of bytes of a size. A number without a unit is in `unit`. Raises InvalidArgument."""
    number = _parse(text, _BYTES, unit)
    if number is None:
        raise InvalidArgument(f"{text[:40]!r} is not a size in bytes", field=field, remedy="write a size such as 40GiB")
    return number


def parse_duration(text: str, field: str, unit: str = "s") -> float:
    """Return the length of a duration in `unit`, which is also that of a number without one. Raises InvalidArgument."""
    number = _parse(text, _NANOSECONDS, unit)
    if number is None:
        raise InvalidArgument(
            f"{text[:40]!r} is not a duration", field=field, remedy="write one such as 500ms, 10s or 2h"
        )
    return number / _NANOSECONDS[unit]


def _parse(text: str, factors: Mapping[str, int], unit: str) -> int | None:
    found = _QUANTITY.fullmatch(text.strip())
    factor = factors.get((found[2] or unit).lower()) if found else None
    if found is None or factor is None:
        return None
    return round(float(found[1]) * factor) if "." in found[1] else int(found[1]) * factor
