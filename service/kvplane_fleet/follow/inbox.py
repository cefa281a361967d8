"""What the order of a source has decided, and is not applied to its place yet: it is applied a slice at a time."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from kvplane_fleet.slices import Sliced


class Target(Protocol):
    """What the batches are applied to."""

    def applying(self, payload: bytes) -> Sliced[None]:
        """Apply the next batch."""

    def clear(self, life_ended: bool) -> None:
        """Forget all entries; if `life_ended`, also what is known of the engine."""


class Inbox:
    """Batches, and what clears the place, in their order. A Sink: see `order`, which bounds what waits."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._waiting = deque[bytes | None]()  # None clears the entries of a life that continues
        self._work: Sliced[None] | None = None  # of the first batch

    def __bool__(self) -> bool:
        return self._work is not None or bool(self._waiting)

    def apply(self, payload: bytes) -> None:
        """Let a batch be applied after what waits."""
        self._waiting.append(payload)

    def clear(self, life_ended: bool) -> None:
        """Forget all entries after what waits; nothing of it is left if the life has ended."""
        if life_ended:
            self._waiting.clear()
            self._work = None
            self._target.clear(life_ended=True)
        elif self:
            self._waiting.append(None)
        else:
            self._target.clear(life_ended=False)

    def advance(self) -> None:
        """Do the next slice."""
        if self._work is None and self._waiting:
            payload = self._waiting.popleft()
            if payload is None:
                self._target.clear(life_ended=False)
            else:
                self._work = self._target.applying(payload)
        if self._work is not None:
            try:
                next(self._work)
            except StopIteration:
                self._work = None
