"""What of one replica the store has not been told yet: between the steps and the chunks.

    note(decision)      blocks whose published keys may have changed, by number; nothing is looked at
    take()              the next chunk: what these blocks carry *now*, read from the core
    wrote(count)        the chunk is stored

A block that changes ten times between two chunks is told once, and a change can be told again without harm. So nothing
is ever queued but block numbers; when too many wait they are shed, and later every block is gone through once (a
*resync*), which is also how a store that lost something gets it back.

The log is kept short by rewriting what is still true of its oldest chunks at its end, and dropping them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kvplane.base.step import AdmitStatus, EventKind, Part, PartResult
from kvplane_service.core.cache_events import runs_of
from kvplane_service.core.entries import Entries
from kvplane_service.core.replica import Replica
from kvplane_service.decisions.log import Decision, Entry, Life
from kvplane_service.store.interface import LogName, StoredChunk
from kvplane_service.store.record import ROW_BYTES, pack_chunk

CHUNK_ROWS = 1000
_SLACK_BYTES = 64 << 10  # a log this short is left as it is
_MAX_USED = 1 << 16  # uses that wait; more are forgotten: they only order evictions
_MAX_LOST = 8 * CHUNK_ROWS  # by a life, told one by one
_MAX_LOOKS = 32  # chunks of blocks that `take` looks at in a row, some milliseconds
_MAX_AGE = 0xFFFFFFFF
_ABOVE_LATE = 1 << 20  # chunks that the process before may still write behind what was read
_ABOVE_OTHERS = 1 << 40  # milliseconds: chunks of another service, whatever its clock says


@dataclass(frozen=True, slots=True)
class Batch:
    """A chunk to append, and which older ones it makes superfluous."""

    log: LogName
    chunk: StoredChunk
    trim_below: int
    rows: int


@dataclass(slots=True)
class _Kept:
    """A chunk of the log: its size, and how many blocks have their last word in it."""

    seq: int
    num_bytes: int
    blocks: tuple[int, ...]
    live: int = 0


@dataclass(slots=True)
class Past:
    """What a journal has to know of a log that is there.

    Attributes:
        chunks: oldest first.
        home: by block, the chunk with its last word.
        age: by block with a last word.
        tick: the highest age.
    """

    chunks: deque[_Kept] = field(default_factory=deque)
    home: dict[int, _Kept] = field(default_factory=dict)
    age: dict[int, int] = field(default_factory=dict)
    tick: int = 1

    @classmethod
    def of(cls, chunks: Iterable[tuple[StoredChunk, Entries | None]]) -> Past:
        """Of the log's chunks; None stands for one that cannot be read. Long logs are for another thread."""
        past = cls()
        for chunk, entries in chunks:
            kept = _Kept(chunk.seq, len(chunk.raw), (*entries.block, *entries.bare_block) if entries else ())
            past.chunks.append(kept)
            past.home.update(dict.fromkeys(kept.blocks, kept))
            if entries:
                past.age.update(zip(entries.block, entries.age, strict=True))
                past.age.update(zip(entries.used_block, entries.used_age, strict=True))
                past.tick = max(past.tick, max(entries.age, default=0), max(entries.used_age, default=0))
        for kept in past.home.values():
            kept.live += 1
        return past


@dataclass(frozen=True, slots=True)
class Lag:
    """How far the store is behind.

    Attributes:
        entries: changes that wait.
        waiting_ns: for how long the oldest has.
        shed: changes were given up; a resync will tell them.
        resync_left: blocks that a resync has not gone through.
    """

    entries: int
    waiting_ns: int
    shed: bool
    resync_left: int


@dataclass(slots=True)
class Written:
    """Since the start."""

    chunks: int = 0
    rows: int = 0
    num_bytes: int = 0
    resyncs: int = 0
    shed_entries: int = 0


class ReplicaJournal:
    """Changes of one replica on one life of its page memory. No I/O; `clock` is monotonic, in nanoseconds."""

    def __init__(self, log: LogName, source: Replica, max_entries: int, clock: Callable[[], int]) -> None:
        """`source` is read by `take`; `max_entries` changes may wait."""
        self.log = log
        self.written = Written()
        self._source = source
        self._max_entries = max_entries
        self._clock = clock
        self._row_bytes = ROW_BYTES + source.digest_size
        self._dirty: dict[int, None] = {}
        self._since_ns = self._taken_ns = 0
        self._waiting: deque[tuple[int, Sequence[int]]] = deque()  # (step, blocks whose keys it stored)
        self._used: dict[int, None] = {}
        self._age: dict[int, int] = {}  # by block with a last word
        self._slot_age: dict[int, int] = {}
        self._home: dict[int, _Kept] = {}  # by block: the chunk with its last word
        self._chunks: deque[_Kept] = deque()
        self._log_bytes = 0
        self._seq = 0
        self._tick = 1
        self._pending: Batch | None = None
        self._shedding = False
        self._cursor = 0  # next block of the resync, 0 = none is under way

    # -- notes: beside every step, so nothing is looked at -----------------------------------------------------------

    def follow(self, entry: Entry) -> None:
        """Note an entry of the decision log."""
        if isinstance(entry, Decision):
            self.note(entry)
        else:
            self.note_life(entry)

    def note(self, decision: Decision) -> None:
        """A step was applied."""
        step, result = decision.step, decision.result
        for part, outcome, events in zip(step.parts, result.parts, decision.events, strict=True):
            if outcome.orders.stamp_block:
                self._mark(filter(self._home.__contains__, outcome.orders.stamp_block))
            if outcome.admit_status:
                self._note_admissions(part, outcome)
            for run in runs_of(events):
                if run.kind is EventKind.STORED:
                    age = self._slot_age.get(run.slot, self._tick)
                    self._age.update(dict.fromkeys(run.blocks, age))
                    self._waiting.append((step.seq, run.blocks))
        waiting = self._waiting
        while waiting and waiting[0][0] <= step.executed_through:
            self._mark(waiting.popleft()[1])

    def note_life(self, life: Life) -> None:
        """A new engine life began: keys may have gone, and what waited for its step is published now, or gone."""
        while self._waiting:
            self._mark(self._waiting.popleft()[1])
        self._slot_age.clear()
        lost = [self._home if run.kind is EventKind.CLEARED else run.blocks for run in runs_of(life.events)]
        if sum(map(len, lost)) > _MAX_LOST and not self._shedding:
            self._begin_resync()  # in pieces; what was lost is not worth a list of its own
            return
        for blocks in lost:
            self._mark(blocks)

    def _note_admissions(self, part: Part, result: PartResult) -> None:
        for slot, status in zip(part.admit.slot, result.admit_status, strict=False):
            if status == AdmitStatus.GRANTED:
                self._slot_age[slot] = self._tick
        if len(self._used) < _MAX_USED:
            self._used.update(dict.fromkeys(filter(self._home.__contains__, result.tables.ids)))

    def _mark(self, blocks: Iterable[int]) -> None:
        if self._shedding:
            return
        if not self._dirty:
            self._since_ns = self._clock()
        self._dirty.update(dict.fromkeys(blocks))
        if self._num_waiting > self._max_entries:
            self._shed()

    def _shed(self) -> None:
        self.written.shed_entries += len(self._dirty)
        self._shedding = True
        self._dirty.clear()
        self._cursor = 0

    # -- what others see ---------------------------------------------------------------------------------------------

    @property
    def lag(self) -> Lag:
        """How far the store is behind."""
        entries = self._num_waiting
        waiting = entries > 0 or self._shedding
        left = self._source.spec.num_blocks - self._cursor if self._cursor else 0
        return Lag(entries, self._clock() - self._since_ns if waiting else 0, self._shedding, left)

    @property
    def _num_waiting(self) -> int:
        """Changes that the store has not, those of the chunk that is on its way among them."""
        return len(self._dirty) + (self._pending.rows if self._pending else 0)

    @property
    def has_work(self) -> bool:
        """Whether `take` may give something."""
        return bool(self._pending or self._dirty or self._cursor or self._shedding or self._is_long)

    @property
    def _is_long(self) -> bool:
        """Longer than the log may be: a quarter more than what is true of it."""
        return self._log_bytes > len(self._home) * self._row_bytes * 5 // 4 + _SLACK_BYTES

    # -- chunks ------------------------------------------------------------------------------------------------------

    def take(self) -> Batch | None:
        """The next chunk, which is given again until `wrote` is called.

        None when there is nothing to tell, or, while `has_work` holds, when nothing was found so far.
        """
        for _ in range(_MAX_LOOKS):
            if self._pending is not None or not self.has_work:
                break
            if self._shedding:
                self._begin_resync()
            self._taken_ns = self._clock()
            blocks = self._changed_blocks()
            rewritten = self._oldest_blocks(CHUNK_ROWS - len(blocks)) if self._is_long else None
            entries = self._source.entries(blocks | rewritten if rewritten else blocks)
            self._keep_bare(entries, rewritten or {})
            if entries.block or entries.bare_block or rewritten is not None:
                self._pending = self._pack(entries)
        return self._pending

    def wrote(self, batch: Batch, count: int) -> bool:
        """The chunk that `take` gave is stored, and the log has `count` chunks now; False when it should have others.

        Then all is told anew.
        """
        if batch is not self._pending:
            return True  # the log was switched meanwhile
        self._pending = None
        self._since_ns = self._taken_ns  # what is left has waited a little longer
        self.written.chunks += 1
        self.written.rows += batch.rows
        self.written.num_bytes += len(batch.chunk.raw)
        has_all = count == len(self._chunks)
        if not has_all:
            self._lost()
        return has_all

    def switch(self, log: LogName, after: int = 0) -> LogName:
        """The page memory is another one: all that was told is void. Returns the log that can be dropped.

        Another service may have written chunks of the new log, which has none with a number above `after`.
        """
        old, self.log = self.log, log
        self._pending = None
        self._seq = after
        self._forget_log()
        self._dirty.clear()
        self._used.clear()
        self._shedding, self._cursor = False, 0
        return old

    def resume(self, past: Past) -> None:
        """Go on with a log that another process wrote, before anything was noted here."""
        assert not self._chunks and not self._dirty, "this journal has begun"
        self._chunks, self._home, self._age = past.chunks, past.home, past.age
        self._log_bytes = sum(kept.num_bytes for kept in past.chunks)
        self._seq = max((kept.seq for kept in past.chunks), default=0) + _ABOVE_LATE
        self._tick = min(past.tick + 1, _MAX_AGE)

    def resync(self) -> None:
        """Tell everything anew."""
        self._shed()

    def restart_above(self, number: int) -> None:
        """Another process wrote this chunk of the log, and no longer writes it: write everything again above it."""
        self._pending = None
        self._seq = max(self._seq, number)
        self._lost()

    def _begin_resync(self) -> None:
        self._shedding, self._cursor = False, 1
        self.written.resyncs += 1

    def _lost(self) -> None:
        """The store has not what it was given, or more: tell everything again, behind whatever is there."""
        self._seq += _ABOVE_OTHERS  # a chunk whose number is there already would not be added
        self._forget_log()
        self._shed()

    def _forget_log(self) -> None:
        self._home.clear()
        self._chunks.clear()
        self._log_bytes = 0

    def _changed_blocks(self) -> dict[int, None]:
        """Up to a chunk's worth of blocks that may have something to tell: changes, then the resync's."""
        blocks = dict.fromkeys(islice(self._dirty, CHUNK_ROWS))
        for block in blocks:
            del self._dirty[block]
        if self._cursor:
            end = self._source.spec.num_blocks
            stop = min(self._cursor + CHUNK_ROWS - len(blocks), end)
            blocks.update(dict.fromkeys(range(self._cursor, stop)))
            self._cursor = stop if stop < end else 0
        return blocks

    def _oldest_blocks(self, room: int) -> dict[int, None]:
        """Blocks with their last word in the oldest chunks: of the first, and of more as far as there is room."""
        blocks: dict[int, None] = {}
        for kept in self._chunks:
            if blocks and len(blocks) + kept.live > room:
                break
            blocks.update(dict.fromkeys(block for block in kept.blocks if self._home.get(block) is kept))
        return blocks

    def _keep_bare(self, entries: Entries, rewritten: dict[int, None]) -> None:
        """A block without a key is told only where the log says otherwise, and not when that is about to go."""
        told = []
        for block, stamp in zip(entries.bare_block, entries.bare_stamp, strict=True):
            if block in rewritten:
                self._home.pop(block).live -= 1
            elif block in self._home:
                told.append((block, stamp))
        entries.bare_block, entries.bare_stamp = [block for block, _ in told], [stamp for _, stamp in told]

    def _pack(self, entries: Entries) -> Batch:
        self._seq += 1
        self._tick = min(self._tick + 1, _MAX_AGE)
        used = [block for block in self._used if block in self._home]
        self._used.clear()
        self._age.update(dict.fromkeys(used, self._tick))
        entries.used_block, entries.used_age = used, [self._tick] * len(used)
        entries.age = [self._age.get(block, self._tick) for block in entries.block]
        chunk = pack_chunk(self.log, self._seq, entries)
        self._keep(_Kept(chunk.seq, len(chunk.raw), (*entries.block, *entries.bare_block)))
        self._drop_finished()
        return Batch(self.log, chunk, self._chunks[0].seq, len(entries) + len(entries.bare_block))

    def _keep(self, kept: _Kept) -> None:
        home = self._home
        for block in kept.blocks:
            before = home.get(block)
            if before is not kept:
                if before is not None:
                    before.live -= 1
                home[block] = kept
                kept.live += 1
        self._chunks.append(kept)
        self._log_bytes += kept.num_bytes

    def _drop_finished(self) -> None:
        """Forget the oldest chunks that nobody's last word is in; the newest stays."""
        while len(self._chunks) > 1 and not self._chunks[0].live:
            self._log_bytes -= self._chunks.popleft().num_bytes
