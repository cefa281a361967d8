"""The order of the batches of one source, without I/O: each batch is applied once, in sequence, within one engine life.

    live frames ──▶ in sequence ────────────────────────────▶ apply
                 └▶ a gap: wait in the queue ─▶ replay ─────▶ apply ─▶ the queue

A replay asks from the last applied frame on, not from the one after it: if the engine answers with other bytes under
this number, or with nothing, it was restarted, and the place is cleared. If the answer begins later, frames are lost
and the place is cleared too, because they may have removed any entry.

Behind one address there may be two engines, so that frames and replays come from different ones. A live frame that
differs from the replay's of the same number, or that continues a life which a replay declared ended, shows it: the
replay socket is not used any more, and the place has what the live frames state.
"""

from __future__ import annotations

from array import array
from collections import deque
from hashlib import blake2b
from typing import Protocol

from kvplane_fleet.faults import Fault, Faults
from kvplane_fleet.wire.frames import Frame

MAX_QUEUE_BYTES = 16 << 20  # they are applied at once
MAX_REPLAY_BYTES = 2 << 30
REMEMBERED = 1 << 13  # frames whose digests are kept


class Sink(Protocol):
    """What takes the batches."""

    def apply(self, payload: bytes) -> None:
        """Apply the next batch."""

    def clear(self, life_ended: bool) -> None:
        """Forget all entries; if `life_ended`, the next batches are another engine's, which may be set up otherwise."""


class SourceOrder:
    """Decides about each frame of one source.

    Attributes:
        faults: what was wrong with the source.
        partial: batches before the first applied one are unknown, so that entries may be missing. No entry is wrong.
        wanted: the sequence number from which a replay is to be requested now; None if none is. The caller requests it,
            sets this to None, and reports the answer by `replayed`, and then `replay_ended` or `replay_failed`.
        replaying: whether a replay is wanted or under way.
        lives: engine lives seen.
        last: sequence number of the last applied frame; None if there is none.
    """

    def __init__(self, sink: Sink, faults: Faults, can_replay: bool) -> None:
        self._sink, self.faults, self._can_replay = sink, faults, can_replay
        self.partial = False
        self.wanted: int | None = None
        self.replaying = False
        self.lives = 1
        self.last: int | None = None
        self._last_digest = b""
        self._digests = array("Q", bytes(8 * REMEMBERED))  # of applied frames, by their number modulo REMEMBERED
        self._first = 0  # frame of the life, after which all were applied
        self._ended_live: int | None = None  # last live frame of a life that a replay declared ended
        self._live: Frame | None = None  # last live frame
        self._queue: deque[Frame] = deque()
        self._queue_bytes = 0
        self._start = 0  # of the replay
        self._previous: int | None = None  # last frame of the replay
        self._replay_bytes = 0
        self._check_again = False
        self._reconnected = False  # since the last replay that was answered
        self._owes_history = False  # a replay was not answered, so that the next one begins at 0

    # -- connections -------------------------------------------------------------------------------------------------

    def connected(self) -> None:
        """The source was connected, for the first time or again: its engine may be another one."""
        self._reconnected = True
        if self.replaying:
            self._check_again = True  # the replay under way may have been answered before the connection was lost
        elif self._can_replay:
            self._request()
        elif self.last is not None:
            self._restart()

    def given_up(self) -> None:
        """The source is not followed for now: forget the engine, and begin again with what is connected next."""
        self._restart()

    def check(self) -> None:
        """Ask whether frames were lost since the last one, or the engine was restarted; called after a silence."""
        if self._can_replay and not self.replaying:
            self._request()

    def learn_again(self) -> None:
        """Drop all entries, and learn them from the replay: the engine's hits contradict them."""
        self.faults.count(Fault.HITS_CONTRADICT)
        self._forget()
        if self._can_replay and not self.replaying:
            self._request()

    # -- live frames -------------------------------------------------------------------------------------------------

    def live(self, frame: Frame) -> None:
        """Take a frame of the publisher."""
        before, self._live = self._live, frame
        ended, self._ended_live = self._ended_live, None
        if ended is not None and frame.sequence == ended + 1:
            self._distrust_replays()
            self._live = frame
        if before is not None and frame.sequence <= before.sequence:
            if frame == before:
                self.faults.count(Fault.FRAME_REPEATED)
                return
            self.faults.count(Fault.LIFE_ENDED)
            self._restart()
            self._live = frame
        if self.last is None and self._can_replay and not self.replaying:
            self._request()
        if self.replaying:
            self._wait(frame)
        else:
            self._accept(frame)

    def _wait(self, frame: Frame) -> None:
        self._queue.append(frame)
        self._queue_bytes += len(frame.payload)
        if self._queue_bytes > MAX_QUEUE_BYTES:
            self.faults.count(Fault.QUEUE_FULL)
            self._drop_queue()  # the next frame finds a gap

    def _drop_queue(self) -> None:
        self._queue.clear()
        self._queue_bytes = 0

    def _accept(self, frame: Frame) -> None:
        if self.last is None:
            self.partial = frame.sequence > 0
        elif frame.sequence <= self.last:
            is_kept = max(self._first, self.last - REMEMBERED + 1) <= frame.sequence
            if not is_kept or self._digests[frame.sequence % REMEMBERED] == _short(_digest(frame.payload)):
                return  # the replay had it
            self._distrust_replays()
            self._live, self.partial = frame, frame.sequence > 0
        elif frame.sequence > self.last + 1:
            self.faults.count(Fault.FRAMES_LOST, frame.sequence - self.last - 1)
            if self._can_replay:
                self._request()
                self._wait(frame)
                return
            self._forget()
        self._apply(frame)

    def _apply(self, frame: Frame) -> None:
        self._sink.apply(frame.payload)
        if self.last is None:
            self._first = frame.sequence
        self.last, self._last_digest = frame.sequence, _digest(frame.payload)
        self._digests[frame.sequence % REMEMBERED] = _short(self._last_digest)

    # -- replays -----------------------------------------------------------------------------------------------------

    def _request(self) -> None:
        self._start = self.wanted = 0 if self.last is None or self._owes_history else self.last
        self._previous = None
        self._replay_bytes = 0
        self.replaying, self._check_again = True, False

    def replayed(self, frame: Frame) -> None:
        """Take a frame of the replay. The replay is abandoned (`replaying` is False, or another one is `wanted`) if the
        frame shows that its answer is useless.
        """
        before, self._previous = self._previous, frame.sequence
        self._replay_bytes += len(frame.payload)
        if frame.sequence < self._start if before is None else frame.sequence != before + 1:
            self.faults.count(Fault.REPLAY_ORDER)
            self._give_up()
        elif self._replay_bytes > MAX_REPLAY_BYTES:
            self.faults.count(Fault.REPLAY_TOO_LONG)
            self._give_up()
        elif before is None and self.last is not None and not self._owes_history:
            self._continue_life(frame)
        else:
            if before is None:
                self._begin_history(frame)
            self._apply(frame)

    def _begin_history(self, frame: Frame) -> None:
        """Begin again with the first batch that the engine still has."""
        if self.last is not None:
            self._forget()
        self.partial, self._owes_history = frame.sequence > 0, False

    def _continue_life(self, frame: Frame) -> None:
        """Compare the first frame of a replay with the last applied one."""
        assert self.last is not None
        if frame.sequence > self.last:
            self.faults.count(Fault.FRAMES_GONE, frame.sequence - self.last)
            self._forget()
            self._apply(frame)
        elif _digest(frame.payload) != self._last_digest:
            self._end_life()

    def replay_ended(self) -> None:
        """Take note that the replay was answered completely."""
        if self._previous is None and self.last is not None:
            self._end_life()
            return
        self._finish_replay()

    def replay_failed(self) -> None:
        """Take note that the replay was not answered in time."""
        self.faults.count(Fault.REPLAY_TIMEOUT)
        self._give_up()

    def _give_up(self) -> None:
        if self.last is None or (self._previous is None and self._reconnected):
            self._forget()  # nothing proves that the life continues
            self._owes_history = True
        self._finish_replay()

    def _finish_replay(self) -> None:
        """Apply the frames that waited."""
        self.replaying, self.wanted, self._reconnected = False, None, False
        waiting = list(self._queue)
        self._drop_queue()
        if waiting and self.last is not None and waiting[0].sequence > self.last + 1:
            self.faults.count(Fault.FRAMES_GONE, waiting[0].sequence - self.last - 1)
            self._forget()
        for frame in waiting:
            if self.replaying:
                self._wait(frame)
            else:
                self._accept(frame)
        if self._check_again and not self.replaying:
            self._request()

    # -- lives -------------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        """Drop all entries of a life that continues."""
        self._sink.clear(life_ended=False)
        self.last, self.partial = None, True

    def _end_life(self) -> None:
        """A replay shows that the engine was restarted, or that it is another one than that of the live frames."""
        self.faults.count(Fault.LIFE_ENDED)
        live, is_connected = self._live, not self._reconnected
        self._restart()
        self._ended_live = live.sequence if live is not None and is_connected else None

    def _distrust_replays(self) -> None:
        self.faults.count(Fault.SOURCES_MIXED)
        self._can_replay = False
        self._restart()

    def _restart(self) -> None:
        """Begin with another engine life."""
        self._sink.clear(life_ended=True)
        self.lives += 1
        self.last, self.partial, self._live, self._owes_history = None, False, None, False
        self._drop_queue()
        self.replaying, self.wanted = False, None
        if self._can_replay:
            self._request()


def _digest(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=16).digest()


def _short(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")
