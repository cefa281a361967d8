"""The job table: how an engine gives the jobs of one rank to the movers of its worker, and learns their ends, in memory
that both map.

    byte 0     8         12     16        24      32      40        64
         | magic | version | rows | ordered | taken | ended | life | rows of jobs ... | ends of jobs ...

All numbers are little-endian. There are two rings, each with one writer and one reader: the rank writes rows and
`ordered`, the movers write ends and the other words. A row and an end contain their own sum: a reader that is faster
than the memory of the writer's processor takes neither stale nor half-written words, but asks again.

A ring of ends keeps what was not read, because an engine reads the ends before the service orders further jobs, and at
most MAX_JOBS are in flight.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from kvplane.base.errors import FailedPrecondition, InvalidArgument

MAGIC = b"kvpjobs\0"
VERSION = 1
MAX_JOBS = 4096  # jobs of a replica in flight
HEADER_BYTES = 64

_PREFIX = struct.Struct("<8sII")
_ORDERED, _TAKEN, _ENDED, _LIFE = range(2, 6)
_WORDS_BEFORE = HEADER_BYTES // 8
_MASK = (1 << 64) - 1
_ENDS = 2 * MAX_JOBS
_END_WORDS = 2


class JobKind(IntEnum):
    """What a mover does with the row of a job."""

    LOAD = 1  # slot of a tier to page
    SAVE = 2  # page to slot
    MOVE = 3  # slot to slot


class JobRow(NamedTuple):
    """One row of a job: a block that moves.

    Attributes:
        job, kind: the job. A row of a save or a move is a job of its own.
        left: further rows of the job, which follow this one.
        epoch, seq, part: the step and the part whose orders include the job; the rank has carried them out.
        after: step that must be executed before a load may begin (`PartResult.admit_load_after`).
        tier, slot, version: slot that is read, with the version that it must have; of a save, the slot that is written.
        block, stamp: page that is written or read, with the stamp (version number of its content) that it must have. Of
            a move, the tier and the slot that are written.
        group: group of the page; 0 for a move.
    """

    job: int
    kind: int
    left: int
    epoch: int
    seq: int
    part: int
    after: int
    tier: int
    slot: int
    version: int
    block: int
    stamp: int
    group: int


_ROW_WORDS = len(JobRow._fields) + 1  # and their sum
_ROW = struct.Struct(f"{_ROW_WORDS}Q")


def rows_for(num_blocks: int) -> int:
    """Return the rows of the table of a pool: more than the blocks that jobs in flight can name."""
    return MAX_JOBS + num_blocks


def job_table_bytes(num_rows: int) -> int:
    """Return the size in bytes of a table with this number of rows."""
    return HEADER_BYTES + 8 * (num_rows * _ROW_WORDS + _ENDS * _END_WORDS)


class JobTable:
    """A job table (see the module) in a writable buffer of at least `job_table_bytes` bytes."""

    def __init__(self, buffer: memoryview | bytearray) -> None:
        """Open a table that `create` wrote. Raises InvalidArgument if the buffer has none."""
        view = memoryview(buffer).cast("B")
        magic, version, num_rows = _PREFIX.unpack_from(view) if len(view) >= HEADER_BYTES else (b"", 0, 0)
        if magic != MAGIC or version != VERSION or len(view) < job_table_bytes(num_rows):
            raise InvalidArgument(
                f"a buffer of {len(view)} bytes that begins with {magic!r} is no job table of version {VERSION}",
                field="buffer",
                remedy="create the table with JobTable.create",
            )
        self._num_rows = num_rows
        self._bytes = view
        self._words = view[: job_table_bytes(num_rows)].cast("Q")
        self._first_end = _WORDS_BEFORE + num_rows * _ROW_WORDS

    @classmethod
    def create(cls, buffer: memoryview | bytearray, num_rows: int) -> JobTable:
        """Write an empty table into a buffer and return it. Raises InvalidArgument if the buffer is too small."""
        view = memoryview(buffer).cast("B")
        if num_rows < 1 or len(view) < job_table_bytes(num_rows):
            raise InvalidArgument(
                f"a buffer of {len(view)} bytes has no room for {num_rows} rows",
                field="num_rows",
                remedy="give a buffer of job_table_bytes(num_rows) bytes",
            )
        view[: job_table_bytes(num_rows)] = bytes(job_table_bytes(num_rows))
        _PREFIX.pack_into(view, 0, MAGIC, VERSION, num_rows)
        return cls(view)

    # -- the rank ----------------------------------------------------------------------------------------------------

    def order(self, rows: Sequence[JobRow]) -> bool:
        """Add rows for the movers, all or none; returns False if the table has too little room."""
        words, position = self._words, self._words[_ORDERED]
        if position - words[_TAKEN] + len(rows) > self._num_rows:
            return False
        for at, row in enumerate(rows, position):
            first_byte = HEADER_BYTES + at % self._num_rows * _ROW.size
            _ROW.pack_into(self._bytes, first_byte, *row, _sum_of(row, at))
        words[_ORDERED] = position + len(rows)
        return True

    # -- the movers --------------------------------------------------------------------------------------------------

    def take(self) -> list[JobRow]:
        """Return the rows that were added since the last call."""
        words, position, rows = self._words, self._words[_TAKEN], list[JobRow]()
        for at in range(position, words[_ORDERED]):
            first = _WORDS_BEFORE + at % self._num_rows * _ROW_WORDS
            row = JobRow(*words[first : first + _ROW_WORDS - 1])
            if words[first + _ROW_WORDS - 1] != _sum_of(row, at):
                break  # not all of it is visible yet
            rows.append(row)
        words[_TAKEN] = position + len(rows)
        return rows

    def end(self, job: int, is_done: bool) -> None:
        """Add the end of a job: all bytes are where they should be and verified, or it failed. One call at a time."""
        words, at = self._words, self._words[_ENDED]
        first = self._first_end + at % _ENDS * _END_WORDS
        value = job << 1 | is_done
        words[first], words[first + 1] = value, (value + at) & _MASK
        words[_ENDED] = at + 1

    def begin_life(self, epoch: int) -> None:
        """Record that the jobs of this engine life begin: none of an earlier one is worked on, or will begin."""
        self._words[_LIFE] = epoch

    # -- the engine --------------------------------------------------------------------------------------------------

    @property
    def life(self) -> int:
        """The epoch of the engine life whose jobs the movers carry out. They work on no job of an earlier one."""
        return self._words[_LIFE]

    @property
    def num_ended(self) -> int:
        """The number of ends that were added since the table was created."""
        return self._words[_ENDED]

    def ends_from(self, position: int) -> list[tuple[int, bool]]:
        """Return the ends from this number on, as (job, whether it is done).

        Raises FailedPrecondition if the ring has no longer all of them: then begin a new engine life.
        """
        words, ends = self._words, list[tuple[int, bool]]()
        for at in range(position, words[_ENDED]):
            first = self._first_end + at % _ENDS * _END_WORDS
            value, check = words[first], words[first + 1]
            if check != (value + at) & _MASK:
                break
            ends.append((value >> 1, bool(value & 1)))
        if words[_ENDED] - position > _ENDS:
            raise FailedPrecondition(
                f"of {words[_ENDED] - position} jobs that ended, the table has the last {_ENDS}",
                field="position",
                remedy="read the ends before every step; begin a new engine life now",
            )
        return ends

    def release(self) -> None:
        """Release the views of the buffer, so that the memory can be unmapped."""
        self._words.release()
        self._bytes.release()


def _sum_of(row: Sequence[int], at: int) -> int:
    return (sum(row) + at) & _MASK
