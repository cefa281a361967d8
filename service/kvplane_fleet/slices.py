"""Work that is done a slice at a time: a payload of megabytes would hold the event loop for half a second."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

SLICE = 512  # events that are decoded, or applied, at a time: some milliseconds

_T = TypeVar("_T")
Sliced: TypeAlias = Generator[None, None, _T]  # yields after each slice, and returns the result
