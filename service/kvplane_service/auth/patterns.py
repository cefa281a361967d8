"""Names, and beginnings of names: `acme/*` is every name that begins with `acme/`."""

from __future__ import annotations

ALL = "*"


def is_pattern(pattern: str) -> bool:
    """Whether a star, if there is one, stands at the end."""
    return ALL not in pattern[:-1]


def matches(pattern: str, name: str) -> bool:
    """Whether the name is the pattern's, or one of them."""
    return name.startswith(pattern[:-1]) if pattern.endswith(ALL) else name == pattern


def overlap(one: str, other: str) -> bool:
    """Whether some name matches both."""
    if one.endswith(ALL) and other.endswith(ALL):
        return one.startswith(other[:-1]) or other.startswith(one[:-1])
    return matches(one, other) if one.endswith(ALL) else matches(other, one)
