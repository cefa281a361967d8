"""Queues that several owners share. Each owner has a share of the places, and the owners are served in turn: a call
waits for at most one item of each other owner.
"""

from __future__ import annotations

from collections import Counter, deque
from contextvars import ContextVar
from typing import Generic, TypeVar

from kvplane.base.errors import Unavailable

OWNER: ContextVar[str] = ContextVar("owner", default="")  # of the call that is served; "" = the service itself

_T = TypeVar("_T")


class Busy(Unavailable):
    """Too many calls wait for the resource that the message names. Client libraries retry automatically."""

    reason = "BUSY"


class Places:
    """Counts the calls that run or wait for a resource, by owner.

    Each owner has all places: the number of owners is configured, and no number of calls of one takes one from another.
    """

    def __init__(self, resource: str, most: int) -> None:
        """`resource` is the name, in errors, of what the calls wait for; `most` is the number of calls of an owner."""
        self._resource = resource
        self._most = most
        self._taken = Counter[str]()

    def take(self, owner: str) -> None:
        """Count a call. Raises Busy if the owner has `most` already."""
        if self._taken[owner] >= self._most:
            raise Busy(
                f"{self._most} calls run or wait for {self._resource}, the most allowed",
                remedy="retry with fewer concurrent calls",
            )
        self._taken[owner] += 1

    def leave(self, owner: str) -> None:
        """Count the end of a call."""
        self._taken[owner] -= 1
        if not self._taken[owner]:
            del self._taken[owner]


class Rota(Generic[_T]):
    """Items that wait, in order of an owner, and by turns of the owners."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[_T]] = {}  # in the order in which the owners have their turns

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, owner: str, item: _T) -> None:
        """Append an item of the owner."""
        self._waiting.setdefault(owner, deque()).append(item)

    def take(self) -> _T:
        """Remove and return the first item of the owner whose turn it is; there must be one."""
        owner = next(iter(self._waiting))
        items = self._waiting.pop(owner)
        item = items.popleft()
        if items:
            self._waiting[owner] = items  # behind the other owners
        return item
