"""Intents of a scheduler. Whether and how one is possible follows from the answers so far: see `driver`.

An intent names its request, so it can be left out of a sequence and the rest still makes sense: that is how a
divergence is shrunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Add:
    """A request arrives; the fields are those of kvtrace/1's `new`."""

    name: str
    segments: tuple[tuple[int, int], ...]
    salt: str | None = None
    lora: str | None = None
    items: tuple[tuple[str, int, int], ...] = ()
    skip: bool = False


@dataclass(frozen=True, slots=True)
class Admit:
    """Look up and allocate the first chunk of a waiting request.

    Attributes:
        chunk: most tokens to compute.
        aligned: end the chunk where a recurrent state can be cached.
        external: tokens that come from outside, as far as they are missing.
        load: the external tokens come later: nothing is computed now.
        options: further inputs of `alloc` by their names in kvtrace/1.
    """

    name: str
    chunk: int
    aligned: bool = True
    external: int = 0
    load: bool = False
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Loaded:
    """The external tokens of a request have arrived, except the last `missing`."""

    name: str
    missing: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """Compute more of a running request, preempting the newest until it fits."""

    name: str
    chunk: int
    aligned: bool = True
    drafts: int = 0
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """The oldest step in flight of a request has run; `accepted` of its drafts stay.

    `surprise`: the sampled tokens are not those with which a longer prompt of the same text would continue.
    """

    name: str
    accepted: int = 0
    commit: bool = False
    surprise: bool = False


@dataclass(frozen=True, slots=True)
class Preempt:
    """A running request loses its blocks."""

    name: str


@dataclass(frozen=True, slots=True)
class Finish:
    """A request ends; `hold`: its blocks stay until `Release`."""

    name: str
    hold: bool = False


@dataclass(frozen=True, slots=True)
class Release:
    """The blocks of a held request return."""

    name: str


@dataclass(frozen=True, slots=True)
class Step:
    """A scheduler step begins."""


@dataclass(frozen=True, slots=True)
class Evict:
    """Blocks lose their keys, held or free."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reset:
    """Drop the prefix cache."""


@dataclass(frozen=True, slots=True)
class Look:
    """Compare the whole state."""


Intent = (
    Add | Admit | Loaded | Run | Result | Preempt | Finish | Release | Step | Evict | Reset | Look
)  # fmt: skip
