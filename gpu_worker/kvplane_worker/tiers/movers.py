"""The movers of a rank: threads that carry out the jobs of its tiers, concurrently with the worker's calls and the
engine's steps.

    load   slot ─ seal verified ─▶ page       only under the epoch of its engine life, checked before every piece
    save   page ─ same stamp before and after ─▶ slot, sealed
    move   slot ─ seal verified ─▶ slot of another tier, sealed

A thread takes all rows of a load, or saves or moves of one part up to PIECE_BYTES: many small blocks cost one wake-up,
one copy for each run of slots, and one end. No lock is held while bytes move. A claim raises the epoch under the lock
of these checks: afterwards no load of an earlier engine life begins another piece, and the pieces that are being
written are known (`written`).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, compress
from operator import and_, attrgetter

import torch
from torch import Tensor

from kvplane.base.errors import FailedPrecondition
from kvplane.base.groups import TierKind
from kvplane.base.job_table import JobKind, JobRow, JobTable
from kvplane.base.stamp_table import StampTable
from kvplane_kernels.interface import PageOps
from kvplane_worker.memory import use_device
from kvplane_worker.pages import PageBuffers
from kvplane_worker.tiers.kept import kept_of
from kvplane_worker.tiers.seal import Content
from kvplane_worker.tiers.slots import Fill, Slots

NUM_THREADS = 4  # verified loads of four read a disk as fast as it is; two leave it idle while they copy
PIECE_BYTES = 4 << 20  # a claim waits for no more than the pieces under way
BUSY_POLL_S, IDLE_POLL_S = 0.0002, 0.005  # between looks at the job table, while jobs wait and while there are none
_PLACE = attrgetter("tier", "group", "slot")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MoverMemory:
    """The memory of a rank between which movers move.

    Attributes:
        pages: the pages.
        stamps: their stamp table.
        tiers: slots of each tier of the replica, in its order.
    """

    pages: PageBuffers
    stamps: StampTable
    tiers: Sequence[Slots]

    def first_id(self, tier: int) -> int:
        """Return where the versions of a tier's slots begin in the stamp table."""
        return self.pages.num_blocks + sum(one.spec.num_blocks for one in self.tiers[:tier])


@dataclass(frozen=True, slots=True)
class Job:
    """What a thread carries out at a time: all rows of a load, or saves or moves of one part, each a job of its own."""

    rows: tuple[JobRow, ...]

    @property
    def number(self) -> int:
        """The number of the first job."""
        return self.rows[0].job

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of the jobs."""
        return tuple(dict.fromkeys(row.job for row in self.rows))

    @property
    def kind(self) -> int:
        """What is done with the rows (`JobKind`)."""
        return self.rows[0].kind

    @property
    def epoch(self) -> int:
        """The epoch of the engine life that ordered it."""
        return self.rows[0].epoch


class Movers:
    """The threads that carry out the jobs of one job table."""

    def __init__(self, place: MoverMemory, ops: PageOps, table: JobTable, num_threads: int = NUM_THREADS) -> None:
        """Start the threads."""
        self._place = place
        self._ops = ops
        self._table = table
        self._lock = threading.Condition()
        self._loads: deque[Job] = deque()
        self._writes: deque[Job] = deque()  # saves and moves
        self._working: list[Job] = []
        self._written: list[tuple[int, ...]] = []  # blocks of the pieces that are being written
        self._is_closed = self._someone_looks = False
        self._threads = [
            threading.Thread(target=self._run, name=f"kvplane-mover-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def claim(self, epoch: int) -> tuple[int, ...]:
        """Make a new engine life the owner of the pages (`StampTable.begin_life`), and return the blocks that loads of
        earlier lives are still writing. Waits for no transfer. Raises StaleEpoch.
        """
        with self._lock:
            self._place.stamps.begin_life(epoch)
            return self._blocks_written()

    @property
    def tiers(self) -> Sequence[Slots]:
        """The slots of each tier."""
        return self._place.tiers

    @property
    def written(self) -> tuple[int, ...]:
        """The blocks that loads are writing."""
        with self._lock:
            return self._blocks_written()

    def close(self, keep: bool = False, erase: bool = False) -> None:
        """Stop the threads, each after its job, and release the slots. Jobs that are left never end. `keep`: what
        disks hold is for the next worker; no engine may use the stamp table any more. `erase`: it is removed.
        """
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()
        for thread in self._threads:
            thread.join()
        for number, tier in enumerate(self._place.tiers):
            first = self._place.first_id(number)
            kept = kept_of(self._place.stamps, first, tier.spec.num_blocks) if keep and not erase else None
            tier.close(kept, erase)

    def _blocks_written(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(chain.from_iterable(self._written)))

    # -- which job is next ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        use_device(str(self._place.pages.memory.device))
        with self._a_stream():
            while (job := self._next()) is not None:
                done: Collection[int] = ()
                try:
                    done = self._carry_out(job)
                except Exception:  # the outermost shell of the thread: the job has failed, others follow
                    _log.exception("jobs from %d on failed", job.number)
                self._end(job, done)

    def _end(self, job: Job, done: Collection[int]) -> None:
        """End a job, and its thread's work on it. `done`: the numbers that are done; the others failed."""
        with self._lock:
            self._working.remove(job)
            self._note_ends(job, done)
            if self._table.life != self._place.stamps.owner_epoch:
                self._lock.notify_all()  # jobs of a new engine life wait for it

    def _note_ends(self, job: Job, done: Collection[int]) -> None:
        """Write the ends of a job's numbers, those of consecutive ones with the same result together."""
        first = count = 0
        was_done = False
        for number in job.numbers:
            if count and number == first + count and (number in done) == was_done:
                count += 1
                continue
            if count:
                self._table.end(first, was_done, count)
            first, count, was_done = number, 1, number in done
        self._table.end(first, was_done, count)

    def _a_stream(self) -> AbstractContextManager[object]:
        device = self._place.pages.memory.device
        if device.type != "cuda":
            return nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def _next(self) -> Job | None:
        """Wait for the next job that may begin; None after `close`. One thread at a time looks at the job table; the
        others sleep until it takes a job.
        """
        with self._lock:
            while not self._is_closed:
                if self._someone_looks:
                    self._lock.wait()
                    continue
                self._take()
                job = self._first()
                if job is not None:
                    self._working.append(job)
                    self._lock.notify()  # another thread looks for further jobs
                    return job
                self._someone_looks = True
                self._lock.wait(BUSY_POLL_S if self._loads or self._writes else IDLE_POLL_S)
                self._someone_looks = False
            return None

    def _take(self) -> None:
        """Take new jobs from the table; end those of other engine lives than the owner's, which will not begin."""
        owner, new = self._place.stamps.owner_epoch, self._table.take()
        for rows in new:
            if rows[0].kind == JobKind.LOAD:
                self._loads.append(Job(rows))
            else:
                self._writes.extend(self._shares(rows))
        if self._table.life != owner or any(rows[0].epoch != owner for rows in new):
            self._loads, self._writes = self._of_life(owner, self._loads), self._of_life(owner, self._writes)
        if self._table.life != owner and not any(job.epoch != owner for job in self._working):
            self._table.begin_life(owner)

    def _shares(self, rows: tuple[JobRow, ...]) -> Iterator[Job]:
        """Yield saves or moves of a part in jobs of at most PIECE_BYTES, so that a load waits for no more than that."""
        widest = max((tier.slot_bytes for tier in self._place.tiers), default=1)
        most = max(1, PIECE_BYTES // widest)
        for first in range(0, len(rows), most):
            yield Job(rows[first : first + most])

    def _of_life(self, owner: int, jobs: deque[Job]) -> deque[Job]:
        """Return the jobs of this engine life; end the others."""
        for job in jobs:
            if job.epoch != owner:
                self._note_ends(job, ())
        return deque(job for job in jobs if job.epoch == owner)

    def _first(self) -> Job | None:
        """Remove and return the first job that may begin, loads before others. No job begins while one of an earlier
        engine life is worked on, which may have the same slots.
        """
        if self._table.life != self._place.stamps.owner_epoch:
            return None
        for job in self._loads:
            if self._may_begin(job):
                self._loads.remove(job)
                return job
        return self._writes.popleft() if self._writes else None

    def _may_begin(self, load: Job) -> bool:
        """Whether no launch and no order of an earlier step writes the pages of a load any more, on this rank."""
        first = load.rows[0]
        try:
            self._place.stamps.check_load(first.epoch, first.seq, first.part, first.after)
        except FailedPrecondition:
            return False
        return True

    # -- what it does --------------------------------------------------------------------------------------------------

    def _carry_out(self, job: Job) -> Collection[int]:
        """Do a job; returns the numbers that are done: all is where it should be, and verified."""
        rows = [row for row in job.rows if self._names_slots(row)]
        if len(rows) < len(job.rows):
            _log.error("job %d names a slot or a page that is not there", job.number)
        if job.kind == JobKind.LOAD:
            is_done = len(rows) == len(job.rows) and all(self._load(piece) for piece in self._pieces(rows))
            return {job.number} if is_done else ()
        if job.kind == JobKind.SAVE:
            return {number for piece in self._pieces(rows) for number in self._save(piece)}
        return {row.job for row in rows if self._move(row)}

    def _names_slots(self, row: JobRow) -> bool:
        """Whether there are the slots of a row, where a file would grow by a write behind its end, and the page."""
        tiers, places = self._place.tiers, [(row.tier, row.slot)]
        if row.kind == JobKind.MOVE:
            places.append((row.block, row.stamp))
        elif row.block >= self._place.pages.num_blocks:
            return False
        return all(tier < len(tiers) and slot < tiers[tier].spec.num_blocks for tier, slot in places)

    def _pieces(self, rows: Sequence[JobRow]) -> Iterator[list[JobRow]]:
        """Yield runs of rows of one group in consecutive slots of one tier, of at most PIECE_BYTES."""
        piece: list[JobRow] = []
        for row in sorted(rows, key=_PLACE):
            most = PIECE_BYTES // max(1, self._place.pages.group(row.group).bytes_per_block)
            place = (row.tier, row.group, row.slot)
            if piece and (len(piece) >= most or place != (piece[-1].tier, piece[-1].group, piece[-1].slot + 1)):
                yield piece
                piece = []
            piece.append(row)
        if piece:
            yield piece

    def _load(self, piece: list[JobRow]) -> bool:
        first = piece[0]
        tier, pages = self._place.tiers[first.tier], self._place.pages.group(first.group)
        contents = [self._content(row.tier, row.slot, row.group, row.version, row.key) for row in piece]
        rows = tier.read(contents, pages.bytes_per_block)
        if rows is None:
            _log.warning("tier %d: slots %d to %d are not what they should be", first.tier, first.slot, piece[-1].slot)
            tier.note_unread(contents)
            return False
        blocks = tuple(row.block for row in piece)
        with self._writing(first.epoch, blocks) as may_write:
            if not may_write or not all(self._are_as_ordered(piece)):
                tier.counts.discarded += len(piece)
                return False
            if pages.layers:
                self._ops.scatter(pages, blocks, rows)
                self._wait()
        tier.counts.loaded += len(piece)
        tier.counts.loaded_bytes += rows.numel()
        return True

    @contextmanager
    def _writing(self, epoch: int, blocks: tuple[int, ...]) -> Iterator[bool]:
        """Whether this engine life owns the pages; if it does, `written` has the blocks until the end."""
        with self._lock:
            may_write = self._place.stamps.owner_epoch == epoch
            self._written.append(blocks if may_write else ())
        try:
            yield may_write
        finally:
            with self._lock:
                self._written.remove(blocks if may_write else ())

    def _are_as_ordered(self, piece: Sequence[JobRow]) -> list[bool]:
        """Whether the page of each row has its stamp."""
        stamps = self._place.stamps.words
        return [stamps[row.block] == row.stamp for row in piece]

    def _save(self, piece: list[JobRow]) -> list[int]:
        """Save pages into consecutive slots of one tier; returns the jobs that are done.

        A page whose stamp is wrong before or after the copy is discarded, whatever the copy of it is.
        """
        first = piece[0]
        tier, pages = self._place.tiers[first.tier], self._place.pages.group(first.group)

        def fill(target: Tensor) -> list[bool]:
            before = self._are_as_ordered(piece)
            if not any(before):
                return before
            if pages.layers:
                self._ops.gather(pages, [row.block for row in piece], target)
                self._wait()
            return list(map(and_, before, self._are_as_ordered(piece)))

        contents = [self._content(row.tier, row.slot, row.group, row.job, row.key) for row in piece]
        good = self._write(contents, pages.bytes_per_block, fill)
        done = [row.job for row in compress(piece, good)]
        tier.counts.saved += len(done)
        tier.counts.saved_bytes += len(done) * pages.bytes_per_block
        tier.counts.discarded += len(piece) - len(done)
        return done

    def _move(self, row: JobRow) -> bool:
        source, target = self._place.tiers[row.tier], self._place.tiers[row.block]
        group, num_bytes = source.held(row.slot)
        held = [self._content(row.tier, row.slot, group, row.version, row.key)]
        payload = source.read(held, num_bytes)

        def was_taken() -> bool:
            if source.spec.kind is TierKind.PEERS:
                return False  # what was read is a copy, and verified
            # The core may give the slot away while its copy is moved. Then its version is another one, or none, from
            # before the first byte changes on; a slot that still has its version is damaged.
            return self._place.stamps.words[self._place.first_id(row.tier) + row.slot] != row.version

        if payload is None:
            if was_taken():
                source.counts.discarded += 1
            else:
                source.note_unread(held)
            return False
        content = self._content(row.block, row.stamp, group, row.job, row.key)

        def fill(to: Tensor) -> list[bool]:
            to.copy_(payload)
            return [not was_taken()]  # what was read is the slot itself, where another job may have written meanwhile

        (is_good,) = self._write([content], num_bytes, fill)
        source.counts.discarded += not is_good and was_taken()
        target.counts.saved += is_good
        target.counts.saved_bytes += is_good * num_bytes
        return is_good

    def _write(self, contents: Sequence[Content], num_bytes: int, fill: Fill) -> list[bool]:
        """Write consecutive slots of a tier, as `Slots.write`; meanwhile and after a failure the stamp table says that
        they hold nothing.
        """
        first, stamps = contents[0], self._place.stamps
        base = self._place.first_id(first.tier)
        stamps.write([base + content.slot for content in contents], [0] * len(contents))
        good = self._place.tiers[first.tier].write(contents, num_bytes, fill)
        written = list(compress(contents, good))
        stamps.write([base + content.slot for content in written], [content.version for content in written])
        return good

    def _content(self, tier: int, slot: int, group: int, version: int, key: int) -> Content:
        return Content(self._place.tiers[tier].identity, tier, slot, group, version, key)

    def _wait(self) -> None:
        """Wait until the device has copied: on a GPU, operations are asynchronous."""
        device = self._place.pages.memory.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
