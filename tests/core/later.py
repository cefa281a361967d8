"""A device that does later what it is given, in order: one stream for zeroes, copies and launches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvplane.rank import PageMover


@dataclass(frozen=True)
class LaterMoves:
    """The first `count` calls of a mover."""

    mover: Later
    count: int

    def have_ended(self) -> bool:
        return self.mover.done >= self.count

    def wait(self) -> None:
        self.mover.run(self.count - self.mover.done)


class Later:
    """Moves pages as another mover does, when the device has come so far.

    Attributes:
        given, done: calls so far, and those that the device has done.
    """

    def __init__(self, sound: PageMover) -> None:
        self.sound = sound
        self.given = self.done = 0
        self._queue: deque[Callable[[], None]] = deque()

    @property
    def num_groups(self) -> int:
        return self.sound.num_groups

    def zero(self, group: int, blocks: Sequence[int]) -> None:
        self._give(lambda: self.sound.zero(group, blocks))

    def copy(self, group: int, src: Sequence[int], dst: Sequence[int]) -> None:
        self._give(lambda: self.sound.copy(group, src, dst))

    def moves(self) -> LaterMoves | None:
        return LaterMoves(self, self.given) if self._queue else None

    def run(self, count: int | None = None) -> None:
        """The device does the next calls, or all: before a launch."""
        for _ in range(len(self._queue) if count is None else min(count, len(self._queue))):
            self._queue.popleft()()
            self.done += 1

    def _give(self, call: Callable[[], None]) -> None:
        self.given += 1
        self._queue.append(call)
