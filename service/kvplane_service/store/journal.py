"""The changes of one replica that are not yet in the store: decisions come in; chunks go out.

    note(decision)      records the numbers of blocks whose published keys may have changed; reads nothing
    take()              returns the next chunk: the current keys of these blocks, read from the core
    wrote(batch)        records that the chunk is stored

A block that changes ten times between two chunks is written once, and writing it again does no harm, so only block
numbers are queued. If too many numbers are queued, all of them are dropped, and later every block is visited once (a
*resync*), which also restores what a store has lost. A key is *published* once all ranks have computed its block.

The log is kept short: the entries of its oldest chunks that are still current are appended again, and these chunks are
dropped. An entry without a key (*unkeyed*) states that the block has lost its key.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice

from kvplane.base.groups import Medium
from kvplane.base.step import AdmitStatus, EventKind, Part, PartResult
from kvplane_core.face.cache_events import runs_of
from kvplane_core.face.entries import Entries
from kvplane_core.face.interface import ReplicaCore
from kvplane_service.decisions.log import Decision, Entry, Life
from kvplane_service.store.interface import MAX_SEQ, LogName, StoredChunk
from kvplane_service.store.record import ROW_BYTES, pack_chunk

CHUNK_ROWS = 1000
_SLACK_BYTES = 64 << 10  # logs shorter than this are not rewritten
_MAX_USED = 1 << 16  # queued uses of blocks; more are dropped, because they only order evictions after a recovery
_MAX_LOST = 8 * CHUNK_ROWS  # keys lost by a new engine life that are written one by one; more cause a resync
_MAX_LOOKS = 32  # groups of CHUNK_ROWS blocks that one `take` visits, which takes some milliseconds
_MAX_AGE = 0xFFFFFFFF
_ABOVE_LATE = 1 << 20  # numbers left free for chunks that the previous process may append after the log was read
_ABOVE_OTHERS = 1 << 40  # added to the number, in milliseconds: above the chunks of another service, whatever its clock


@dataclass(frozen=True, slots=True)
class Batch:
    """A chunk to append to the log.

    Attributes:
        trim_below: chunks with lower numbers become obsolete when this one is stored.
        rows: number of entries in the chunk.
    """

    log: LogName
    chunk: StoredChunk
    trim_below: int
    rows: int


@dataclass(slots=True)
class _LogChunk:
    """A chunk of the log, without its content.

    Attributes:
        seq: number of the chunk in the log.
        blocks: blocks with an entry in the chunk.
        live: number of blocks whose latest entry is in the chunk.
    """

    seq: int
    num_bytes: int
    blocks: tuple[int, ...]
    live: int = 0


@dataclass(slots=True)
class Past:
    """The state of an existing log, from which a journal continues.

    Attributes:
        chunks: the chunks of the log, oldest first.
        home: by block, the chunk with the block's latest entry.
        age: by block, the time of last use in that entry, counted in chunks.
        tick: the highest age.
    """

    chunks: deque[_LogChunk] = field(default_factory=deque)
    home: dict[int, _LogChunk] = field(default_factory=dict)
    age: dict[int, int] = field(default_factory=dict)
    tick: int = 1

    @classmethod
    def of(cls, chunks: Iterable[tuple[StoredChunk, Entries | None]]) -> Past:
        """Return the state of a log with these chunks; None stands for a chunk that could not be read. Call it in a
        thread if the log is long.
        """
        past = cls()
        for chunk, entries in chunks:
            kept = _LogChunk(chunk.seq, len(chunk.raw), (*entries.block, *entries.unkeyed_block) if entries else ())
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
    """How far the store is behind the replica.

    Attributes:
        entries: number of changes that are not stored.
        waiting_ns: age in nanoseconds of the oldest change that is not stored.
        shed: queued changes were dropped; a resync, which visits every block, will write them.
        resync_left: number of blocks that the resync has not visited yet.
    """

    entries: int
    waiting_ns: int
    shed: bool
    resync_left: int


@dataclass(slots=True)
class Written:
    """Numbers of chunks, entries and bytes written, of resyncs (visits of all blocks), and of changes dropped, since
    the start of the process.
    """

    chunks: int = 0
    rows: int = 0
    num_bytes: int = 0
    resyncs: int = 0
    shed_entries: int = 0


class ReplicaJournal:
    """Changes of one replica on one incarnation (allocation) of the replica's page memory that are not stored yet. The
    journal does no I/O.

    Attributes:
        log: name of the log that has its changes.
        disk_incarnation: number that identifies what the disk tiers hold, 0 = unknown.
        written: what `take` returned.
    """

    def __init__(self, log: LogName, source: ReplicaCore, max_entries: int, clock: Callable[[], int]) -> None:
        """`take` reads keys from `source`; at most `max_entries` changes are queued; `clock` returns monotonic
        nanoseconds.
        """
        self.log, self.disk_incarnation = log, 0
        self.written = Written()
        self._source = source
        # Ids of the first slots of tiers, which are entries as blocks are, with versions as stamps.
        ends = accumulate((tier.num_blocks for tier in source.spec.tiers), initial=source.spec.num_blocks)
        self._first_slots = dict(zip((Medium[tier.kind.name] for tier in source.spec.tiers), ends, strict=False))
        self._max_entries = max_entries
        self._clock = clock
        self._row_bytes = ROW_BYTES + source.digest_size
        self._dirty: dict[int, None] = {}
        self._since_ns = self._taken_ns = 0
        self._waiting: deque[tuple[int, Sequence[int]]] = deque()  # (step not executed yet, blocks that it gave a key)
        self._used: dict[int, None] = {}
        self._age: dict[int, int] = {}  # by block that has an entry in the log
        self._slot_age: dict[int, int] = {}
        self._home: dict[int, _LogChunk] = {}  # by block: the chunk with its latest entry
        self._chunks: deque[_LogChunk] = deque()
        self._log_bytes = 0
        self._seq = 0
        self._tick = 1
        self._pending: Batch | None = None
        self._shedding = False
        self._cursor = 0  # next block of the resync; 0 = no resync is running

    # -- notes: called with every step, so they read nothing ---------------------------------------------------------

    def follow(self, entry: Entry) -> None:
        """Record an entry of the decision log: a step or the beginning of an engine life."""
        if isinstance(entry, Decision):
            self.note(entry)
        else:
            self.note_life(entry)

    def note(self, decision: Decision) -> None:
        """Record which blocks an applied step changed, without reading the keys of these blocks."""
        step, result = decision.step, decision.result
        for part, outcome, events in zip(step.parts, result.parts, decision.events, strict=True):
            if outcome.orders.stamp_block:
                self._mark(filter(self._home.__contains__, outcome.orders.stamp_block))
            for event in outcome.tier_events:
                self._mark(self._first_slots[event.tier] + slot for slot in event.blocks)
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
        """Record the beginning of a new engine life (a new epoch begins). Cached keys may be lost then; a key whose
        step was not yet known to be executed is now either published or lost.
        """
        while self._waiting:
            self._mark(self._waiting.popleft()[1])
        self._slot_age.clear()
        if life.state:
            self.resync()  # any block may have other keys
            return
        lost = [self._home if run.kind is EventKind.CLEARED else run.blocks for run in runs_of(life.events)]
        if sum(map(len, lost)) > _MAX_LOST and not self._shedding:
            self._begin_resync()  # a resync instead of a list of the lost blocks
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

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def lag(self) -> Lag:
        """How far the store is behind the replica."""
        entries = self._num_waiting
        waiting = entries > 0 or self._shedding
        left = self._source.spec.num_stamps - self._cursor if self._cursor else 0
        return Lag(entries, self._clock() - self._since_ns if waiting else 0, self._shedding, left)

    @property
    def _num_waiting(self) -> int:
        """Number of changes that the store does not have, including those of the chunk that is being written."""
        return len(self._dirty) + (self._pending.rows if self._pending else 0)

    @property
    def has_work(self) -> bool:
        """True if `take` may return a chunk."""
        return bool(self._pending or self._dirty or self._cursor or self._shedding or self._is_long)

    @property
    def _is_long(self) -> bool:
        """True if the log is larger than 1.25 times its current entries (each the latest of its block) plus
        _SLACK_BYTES.
        """
        return self._log_bytes > len(self._home) * self._row_bytes * 5 // 4 + _SLACK_BYTES

    # -- chunks ------------------------------------------------------------------------------------------------------

    def take(self) -> Batch | None:
        """Return the next chunk; the same one until `wrote` is called.

        Returns None if nothing is queued, or, while `has_work` is True, if no block visited by this call has changed.
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
            self._filter_unkeyed(entries, rewritten or {})
            if entries.block or entries.unkeyed_block or rewritten is not None:
                self._pending = self._pack(entries)
        return self._pending

    def wrote(self, batch: Batch, count: int) -> bool:
        """Record that the chunk of `take` is stored and that the log in the store has `count` chunks.

        Returns False if, by the journal's own count, the log should have another number of chunks; then a resync (a
        visit of all blocks) writes all entries again.
        """
        if batch is not self._pending:
            return True  # the log was switched meanwhile
        self._pending = None
        self._since_ns = self._taken_ns  # an upper bound of the age of the pending changes
        self.written.chunks += 1
        self.written.rows += batch.rows
        self.written.num_bytes += len(batch.chunk.raw)
        has_all = count == len(self._chunks)
        if not has_all:
            self._restart_log()
        return has_all

    def switch(self, log: LogName, after: int = 0) -> LogName:
        """Start the log of another incarnation of the page memory; return the old log, whose entries are invalid for
        the new memory and which the caller drops.

        New chunks get numbers above `after`: another service may have written chunks of the new log up to that number.
        """
        old, self.log = self.log, log
        self._pending = None
        self._seq = after
        self._clear_log()
        self._dirty.clear()
        self._used.clear()
        self._shedding, self._cursor = False, 1 if self._source.spec.tiers else 0  # a disk has kept what it holds
        return old

    def drop_all(self) -> LogName:
        """Forget everything, because no entry written so far may be used; returns the log, which the caller drops."""
        return self.switch(self.log, self._seq + _ABOVE_LATE)

    def resume(self, past: Past) -> None:
        """Continue a log that another process wrote. Call this method before any change is recorded."""
        assert not self._chunks and not self._dirty, "this journal is in use"
        self._chunks, self._home, self._age = past.chunks, past.home, past.age
        self._log_bytes = sum(kept.num_bytes for kept in past.chunks)
        self._seq = max((kept.seq for kept in past.chunks if kept.seq < MAX_SEQ), default=0) + _ABOVE_LATE
        self._tick = min(past.tick + 1, _MAX_AGE)

    def resync(self) -> None:
        """Drop the queued changes, and write the entries of all blocks again."""
        self._shed()

    def restart_above(self, number: int) -> None:
        """Write all entries again, with chunk numbers above `number`, the last chunk of another process that no longer
        writes.
        """
        self._pending = None
        self._seq = max(self._seq, number)
        self._restart_log()

    def _begin_resync(self) -> None:
        self._shedding, self._cursor = False, 1
        self.written.resyncs += 1

    def _restart_log(self) -> None:
        """Write all entries again, with chunk numbers above any in the store, because the store has lost chunks or has
        chunks of another process.
        """
        self._seq += _ABOVE_OTHERS  # a chunk with an existing number would not be added
        self._clear_log()
        self._shed()

    def _clear_log(self) -> None:
        self._home.clear()
        self._chunks.clear()
        self._log_bytes = 0

    def _changed_blocks(self) -> dict[int, None]:
        """Take up to CHUNK_ROWS blocks that may have changed: queued blocks first, then the next blocks of the resync,
        which visits all blocks.
        """
        blocks = dict.fromkeys(islice(self._dirty, CHUNK_ROWS))
        for block in blocks:
            del self._dirty[block]
        if self._cursor:
            end = self._source.spec.num_stamps
            stop = min(self._cursor + CHUNK_ROWS - len(blocks), end)
            blocks.update(dict.fromkeys(range(self._cursor, stop)))
            self._cursor = stop if stop < end else 0
        return blocks

    def _oldest_blocks(self, room: int) -> dict[int, None]:
        """Return the blocks whose latest entry is in the oldest chunks: in the first chunk, and in the next ones while
        the new chunk has room.
        """
        blocks: dict[int, None] = {}
        for kept in self._chunks:
            if blocks and len(blocks) + kept.live > room:
                break
            blocks.update(dict.fromkeys(block for block in kept.blocks if self._home.get(block) is kept))
        return blocks

    def _filter_unkeyed(self, entries: Entries, rewritten: dict[int, None]) -> None:
        """Keep an unkeyed block (one that has lost its key) in `entries` only if the log has an older entry of this
        block that is not in the chunks to be dropped: otherwise the block's loss of its key need not be stored.
        """
        kept = []
        for block, stamp in zip(entries.unkeyed_block, entries.unkeyed_stamp, strict=True):
            if block in rewritten:
                self._home.pop(block).live -= 1
            elif block in self._home:
                kept.append((block, stamp))
        entries.unkeyed_block, entries.unkeyed_stamp = [block for block, _ in kept], [stamp for _, stamp in kept]

    def _pack(self, entries: Entries) -> Batch:
        self._seq += 1
        self._tick = min(self._tick + 1, _MAX_AGE)
        used = [block for block in self._used if block in self._home]
        self._used.clear()
        self._age.update(dict.fromkeys(used, self._tick))
        entries.used_block, entries.used_age = used, [self._tick] * len(used)
        entries.age = [self._age.get(block, self._tick) for block in entries.block]
        chunk = pack_chunk(self.log, self._seq, entries)
        self._keep(_LogChunk(chunk.seq, len(chunk.raw), (*entries.block, *entries.unkeyed_block)))
        self._drop_finished()
        return Batch(self.log, chunk, self._chunks[0].seq, len(entries) + len(entries.unkeyed_block))

    def _keep(self, kept: _LogChunk) -> None:
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
        """Drop the oldest chunks, as long as no entry in them is the latest of its block. The newest chunk stays."""
        while len(self._chunks) > 1 and not self._chunks[0].live:
            self._log_bytes -= self._chunks.popleft().num_bytes
