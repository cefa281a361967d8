"""What an engine that decides in its own process has still to send to the service that mirrors it: no I/O, no clock.

    add(steps) -> next_message() -> answered(progress)

A message stays in the log until the service has applied it. If the service cannot continue from the log, it gets an
image: the engine's whole state after some step, and the later steps. The log is limited: when it is full, it is
emptied, and the service needs an image.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvplane.base.session import Progress
from kvplane.base.step import Step, StepResult

PIECE_BYTES = 256 << 10  # of an image, per message


class ClosedStep(Protocol):
    """A step that has ended, and whose rows can be taken later."""

    @property
    def seq(self) -> int:
        """Number of the step."""

    def recorded(self) -> Step:
        """Return the step with its rows. Any thread may call it."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """The steps of one iteration of the engine with their answers.

    Attributes:
        at_ns: when the engine applied them, in nanoseconds.
        cache_requests: by number of a step, the number of the CacheRequest that it carries out.
    """

    steps: tuple[tuple[Step | ClosedStep, StepResult], ...]
    at_ns: int
    cache_requests: Mapping[int, int] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """Number of the last step."""
        return self.steps[-1][0].seq

    def recorded(self) -> Iterator[tuple[Step, StepResult]]:
        """Yield the steps with their rows, and their answers."""
        for step, result in self.steps:
            yield step if isinstance(step, Step) else step.recorded(), result


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an image."""

    data: bytes
    first: bool
    last: bool


class _Image:
    """An image: pieces that are encoded when they are first sent, and kept for another stream."""

    def __init__(self, seq: int, slices: Iterator[bytes], piece_bytes: int) -> None:
        self.seq = seq
        self._slices, self._piece_bytes = slices, piece_bytes
        self._pieces: list[Piece] = []
        self._at = 0

    def rewind(self) -> None:
        self._at = 0

    @property
    def is_sent(self) -> bool:
        return bool(self._pieces) and self._at == len(self._pieces) and self._pieces[-1].last

    def next_piece(self) -> Piece:
        if self._at == len(self._pieces):
            data = bytearray()
            is_last = True
            for one in self._slices:
                data += one
                if len(data) >= self._piece_bytes:
                    is_last = False
                    break
            self._pieces.append(Piece(bytes(data), not self._pieces, is_last))
        self._at += 1
        return self._pieces[self._at - 1]


class MirrorLog:
    """The messages of one engine that its service has not applied. Its user serializes the calls.

    Attributes:
        newest: number of the last step that the engine has applied.
        applied_through: number of the last step that the service has applied, as far as known.
        image_wanted: the engine must give an image, by `begin_image` after its next iteration.
        num_images: images begun.
    """

    def __init__(self, most: int, piece_bytes: int = PIECE_BYTES) -> None:
        """At most `most` iterations are kept; a piece of an image has about `piece_bytes`."""
        self.newest = self.applied_through = self.num_images = 0
        self.image_wanted = True
        self._most, self._piece_bytes = most, piece_bytes
        self._kept: deque[Iteration] = deque()
        self._num_sent = 0  # of the kept ones, on this stream
        self._image: _Image | None = None
        self._waiting: deque[int] = deque()  # by message without an answer: the image before it
        self.window = 0

    def __len__(self) -> int:
        """Return the number of iterations that the service has not applied."""
        return len(self._kept)

    # -- the engine --------------------------------------------------------------------------------------------------

    def add(self, iteration: Iteration) -> None:
        """Add the steps of an iteration."""
        self.newest = iteration.last
        if self.image_wanted:
            return  # the image has them
        self._kept.append(iteration)
        if len(self._kept) > self._most:
            self._want_image()

    def begin_image(self, seq: int, slices: Iterator[bytes]) -> None:
        """Send the engine's state after step `seq` instead of all steps up to it."""
        self._image = _Image(seq, slices, self._piece_bytes)
        self.image_wanted, self.newest = False, max(self.newest, seq)
        self.num_images += 1
        self._kept.clear()
        self._num_sent = 0

    def _want_image(self) -> None:
        self.image_wanted, self._image = True, None
        self._kept.clear()
        self._num_sent = 0

    # -- the stream --------------------------------------------------------------------------------------------------

    def opened(self, applied_through: int, needs_image: bool, window: int) -> None:
        """A new stream: the service has applied the steps up to `applied_through`, or needs an image."""
        self._waiting.clear()
        self.window = max(1, window)
        self._num_sent = 0
        if self._image is not None:
            self._image.rewind()
        if needs_image:
            if self._image is None and not self.image_wanted:
                self._want_image()
            return
        if self._image is not None and self._image.seq > applied_through:
            return  # the steps before the image are not kept
        self._image = None
        if self.image_wanted:
            self.image_wanted = applied_through != self.newest
            return
        self._applied(applied_through)
        first = self._kept[0].steps[0][0].seq if self._kept else self.newest + 1
        if first > applied_through + 1:
            self._want_image()

    @property
    def has_message(self) -> bool:
        """Whether `next_message` returns one."""
        if self._image is not None and not self._image.is_sent:
            return True
        return not self.image_wanted and self._num_sent < len(self._kept) and len(self._waiting) < self.window

    def next_message(self) -> Iteration | Piece | None:
        """Return what to send now; None if nothing can be sent."""
        image = self._image
        if image is not None and not image.is_sent:
            piece = image.next_piece()
            if piece.last:
                self._waiting.append(self.num_images)
            return piece
        if not self.has_message:
            return None
        self._num_sent += 1
        self._waiting.append(self.num_images)
        return self._kept[self._num_sent - 1]

    def answered(self, progress: Progress) -> None:
        """Process the answer to the oldest message without one."""
        image = self._waiting.popleft() if self._waiting else self.num_images
        if image != self.num_images:
            return  # the answer to a message before the image
        if progress.image_wanted:
            if not self.image_wanted:
                self._want_image()
            return
        self._image = None
        self._applied(progress.applied_through)

    def _applied(self, through: int) -> None:
        self.applied_through = through
        while self._kept and self._kept[0].last <= through:
            self._kept.popleft()
            self._num_sent = max(0, self._num_sent - 1)
