"""The newest session of a replica."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from kvplane.base.errors import KvplaneError

Told: TypeAlias = Callable[[KvplaneError], None]


@dataclass(slots=True)
class SessionSlot:
    """Who may write a replica.

    Attributes:
        told: called with the reason when the replica is taken from it.
        deadline_ns: a session that is silent until then counts as gone.
        broken: its stream ended without a close.
    """

    nonce: int
    with_events: bool
    client: str
    told: Told
    deadline_ns: int
    broken: bool = False
