"""The job table: how an engine gives the jobs of one rank to the movers of its worker, and learns their ends, in memory
that both map.

    byte 0     8         12     16        24      32      40        64
         | magic | version | rows | ordered | taken | ended | life | records of jobs ... | ends of jobs ...

All numbers are little-endian. There are two rings, each with one writer and one reader: the rank writes records and
`ordered`, the movers write ends and the other words. A record has the jobs of one part of an answer in columns, as the
answer has them, so that neither side handles one number at a time:

    | sum | position | epoch | seq | part | loads | rows | saves | moves |   columns of 8 bytes, then of 4, per section

An end is that of jobs with consecutive numbers. A record has a CRC-32 of all that follows it and the position where it
is in the endless row of records; an end has its own sum. A reader that is faster than the memory of the writer's
processor takes neither stale nor half-written words, but asks again: what an earlier record left at this place has
another position, and a mixture of both another CRC.

A ring of ends keeps what was not read, because an engine reads the ends before the service orders further jobs, and at
most MAX_JOBS are in flight.
"""

from __future__ import annotations

import struct
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import repeat
from typing import Any, NamedTuple
from zlib import crc32

from kvplane.base.errors import FailedPrecondition, InvalidArgument
from kvplane.base.step import Orders
from kvplane.base.when_read import given_fields

MAGIC = b"kvpjobs\0"
VERSION = 3  # 1 had rows of words, each with its own sum, and an end per job
WITHOUT_KEYS = 2  # the version whose rows name no keys: of a worker that is older than its engine
MAX_JOBS = 4096  # jobs of a replica in flight
HEADER_BYTES = 64

_PREFIX = struct.Struct("<8sII")
_ORDERED, _TAKEN, _ENDED, _LIFE = range(2, 6)  # words; the first two count bytes of records, since the table was made
_MASK = (1 << 64) - 1
_ENDS = 2 * MAX_JOBS
_END_WORDS = 3  # first job << 1 | is done, number of jobs, their sum with the position of the end
_SUM = struct.Struct("<II")  # of a record: CRC-32 of what follows, position in words
_HEAD = struct.Struct("<QQIIIII")  # epoch, seq, part, loads, their rows, saves, moves
_POSITION = (1 << 32) - 1
_CODES = "QQQIIII"  # types of the columns of each section
_LOADS = ("load_version", "load_stamp", "load_key", "load_tier", "load_slot", "load_block", "load_group")
_SAVES = ("save_job", "save_stamp", "save_key", "save_tier", "save_slot", "save_block", "save_group")
_MOVES = ("move_job", "move_version", "move_key", "move_tier", "move_slot", "move_to_tier", "move_to_slot")
_KEY = 2  # place of the keys in each section
_JOB_BYTES = 20  # of a load: number, step that it waits for, rows
_ROW_BYTES = {VERSION: 40, WITHOUT_KEYS: 32}  # of a row of any section
# Of a record of one row.
_MOST_ROW_BYTES = {
    version: -(-(_SUM.size + _HEAD.size + _JOB_BYTES + row) // 8) * 8 for version, row in _ROW_BYTES.items()
}


class JobKind(IntEnum):
    """What a mover does with the row of a job."""

    LOAD = 1  # slot of a tier to page
    SAVE = 2  # page to slot
    MOVE = 3  # slot to slot


class JobRow(NamedTuple):
    """One row of a job: a block that moves.

    Attributes:
        job, kind: the job. A row of a save or a move is a job of its own.
        epoch, seq, part: the step and the part whose orders include the job; the rank has carried them out.
        after: step that must be executed before a load may begin (`PartResult.admit_load_after`).
        tier, slot, version: slot that is read, with the version that it must have; of a save, the slot that is written.
        block, stamp: page that is written or read, with the stamp that it must have. Of a move, the tier and the slot
            that are written.
        group: group of the page; 0 for a move.
        key: of the block, as seals have it (`Orders.load_key`).
    """

    job: int
    kind: int
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
    key: int = 0


class JobsEnd(NamedTuple):
    """The end of jobs with consecutive numbers.

    Attributes:
        first, num_jobs: their numbers.
        is_done: all bytes are where they should be and verified; else the jobs failed.
    """

    first: int
    num_jobs: int
    is_done: bool


def rows_for(num_blocks: int) -> int:
    """Return the rows of the table of a pool: more than the blocks that jobs in flight can name."""
    return MAX_JOBS + num_blocks


def job_table_bytes(num_rows: int, version: int = VERSION) -> int:
    """Return the size in bytes of a table with room for this number of rows, however few each record has."""
    return HEADER_BYTES + num_rows * _MOST_ROW_BYTES[version] + 8 * _ENDS * _END_WORDS


def record_of(orders: Orders, step: tuple[int, int, int], after: Mapping[int, int], version: int = VERSION) -> bytes:
    """Return the record of the jobs of a part, for `JobTable.order`; empty if it has none.

    `step`: epoch, seq, part. `after`: the step that each load waits for, 0 if it is not named. `version`: of the table.
    Raises InvalidArgument if columns have different lengths.
    """
    given = given_fields(orders)
    load_jobs, saves, moves = (given.get(name, ()) for name in ("load_job", "save_job", "move_job"))
    if not (load_jobs or saves or moves):
        return b""
    loads = Counter(load_jobs) if load_jobs else {}  # the rows of a job follow each other
    record: list[bytes | array[int]] = [_HEAD.pack(*step, len(loads), len(load_jobs), len(saves), len(moves))]
    if loads:
        jobs = array("Q", loads), array("Q", [after.get(job, 0) for job in loads]), array("I", loads.values())
        record += [*jobs, *_columns(given, _LOADS, len(load_jobs), version)]
    if saves:
        record += _columns(given, _SAVES, len(saves), version)
    if moves:
        record += _columns(given, _MOVES, len(moves), version)
    return b"".join(record)


def _columns(given: Mapping[str, Any], names: Sequence[str], count: int, version: int) -> list[array[int]]:
    """Return the columns of a section; those of an answer that came over the wire are copied as they are."""
    columns = [array(code, given.get(name, ())) for code, name in zip(_CODES, names, strict=True)]
    if not columns[_KEY]:
        columns[_KEY] = array(_CODES[_KEY], bytes(8 * count))  # of a service that names no keys
    if set(map(len, columns)) != {count}:
        lengths = ", ".join(f"{name} {len(column)}" for name, column in zip(names, columns, strict=True))
        raise InvalidArgument(
            f"the columns have different lengths: {lengths}",
            field=f"orders.{names[0]}",
            remedy="give the orders as the service sent them",
        )
    if version == WITHOUT_KEYS:
        del columns[_KEY]
    return columns


class JobTable:
    """A job table (see the module) in a writable buffer of at least `job_table_bytes` bytes.

    Attributes:
        version: VERSION, or WITHOUT_KEYS.
    """

    def __init__(self, buffer: memoryview | bytearray) -> None:
        """Open a table that `create` wrote. Raises InvalidArgument if the buffer has none."""
        view = memoryview(buffer).cast("B")
        magic, version, num_rows = _PREFIX.unpack_from(view) if len(view) >= HEADER_BYTES else (b"", 0, 0)
        if magic != MAGIC or version not in _ROW_BYTES or len(view) < job_table_bytes(num_rows, version):
            raise InvalidArgument(
                f"a buffer of {len(view)} bytes that begins with {magic!r} is no job table of version {VERSION}",
                field="buffer",
                remedy="create the table with JobTable.create",
            )
        self.version: int = version
        first_end = HEADER_BYTES + num_rows * _MOST_ROW_BYTES[version]
        self._words = view[:HEADER_BYTES].cast("Q")
        self._ring = view[HEADER_BYTES:first_end]
        self._ends = view[first_end : job_table_bytes(num_rows, version)].cast("Q")
        self._views = self._ends, self._ring, self._words, view

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

    def order(self, record: bytes, checksum: int | None = None) -> bool:
        """Add the jobs of a `record_of` for the movers, all or none; returns False if the table has too little room.

        `checksum`: `crc32(record)`, if it is known.
        """
        words, ring, at = self._words, self._ring, self._words[_ORDERED]
        size = _SUM.size + len(record)
        if at - words[_TAKEN] + size > len(ring):
            return False
        whole = _SUM.pack(crc32(record) if checksum is None else checksum, at // 8 & _POSITION) + record
        first = at % len(ring)
        room = len(ring) - first
        ring[first : first + size] = whole[:room]
        ring[: max(0, size - room)] = whole[room:]
        words[_ORDERED] = at + -(-size // 8) * 8
        return True

    # -- the movers --------------------------------------------------------------------------------------------------

    def take(self) -> list[tuple[JobRow, ...]]:
        """Return the rows that were added since the last call: those of each load, and the saves and the moves of each
        part.
        """
        words, jobs = self._words, list[tuple[JobRow, ...]]()
        while (at := words[_TAKEN]) != words[_ORDERED]:
            record = self._record(at, words[_ORDERED] - at)
            if record is None:
                break  # not all of it is visible yet
            words[_TAKEN] = at + -(-len(record) // 8) * 8
            jobs += filter(None, _jobs_of(record, self.version))
        return jobs

    def _record(self, at: int, ready: int) -> bytes | None:
        """Return a copy of the record at this position, with its sum; None if it is not the one that was written."""
        size = _size_of(self._copy(at, _SUM.size + _HEAD.size), self.version)
        if size > ready:
            return None
        record = self._copy(at, size)
        checksum, position = _SUM.unpack_from(record)
        is_whole = position == at // 8 & _POSITION and checksum == crc32(memoryview(record)[_SUM.size :])
        return record if is_whole else None

    def _copy(self, at: int, size: int) -> bytes:
        first = at % len(self._ring)
        some = bytes(self._ring[first : first + size])
        return some + bytes(self._ring[: size - len(some)])

    def end(self, job: int, is_done: bool, count: int = 1) -> None:
        """Add the end of jobs with consecutive numbers from `job` on: all bytes are where they should be and verified,
        or they failed. One call at a time.
        """
        words, at = self._ends, self._words[_ENDED]
        first, value = at % _ENDS * _END_WORDS, job << 1 | is_done
        words[first], words[first + 1], words[first + 2] = value, count, (value + count + at) & _MASK
        self._words[_ENDED] = at + 1

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

    def ends_from(self, position: int) -> list[JobsEnd]:
        """Return the ends from this number on.

        Raises FailedPrecondition if the ring has no longer all of them: then begin a new engine life.
        """
        words, ends, last = self._ends, list[JobsEnd](), self._words[_ENDED]
        for at in range(position, last):
            first = at % _ENDS * _END_WORDS
            value, count, check = words[first : first + _END_WORDS]
            if check != (value + count + at) & _MASK:
                break
            ends.append(JobsEnd(value >> 1, count, bool(value & 1)))
        if self._words[_ENDED] - position > _ENDS:
            raise FailedPrecondition(
                f"of {self._words[_ENDED] - position} ends of jobs, the table has the last {_ENDS}",
                field="position",
                remedy="read the ends before every step; begin a new epoch now",
            )
        return ends

    def release(self) -> None:
        """Release the views of the buffer, so that the memory can be unmapped."""
        for view in self._views:
            view.release()


def _size_of(head: bytes, version: int) -> int:
    """Return the size of a record with its sum, of which these are the first bytes."""
    loads, rows, saves, moves = _HEAD.unpack_from(head, _SUM.size)[3:]
    size: int = _SUM.size + _HEAD.size + loads * _JOB_BYTES + (rows + saves + moves) * _ROW_BYTES[version]
    return size


def _jobs_of(record: bytes, form: int) -> Iterator[tuple[JobRow, ...]]:
    """Yield the rows of each load, of all saves, and of all moves of a record; the last two may be none."""
    epoch, seq, part, num_loads, *counts = _HEAD.unpack_from(record, _SUM.size)
    sizes = [("Q", num_loads), ("Q", num_loads), ("I", num_loads)]
    codes = _CODES if form == VERSION else _CODES[:_KEY] + _CODES[_KEY + 1 :]
    sizes += [(code, count) for count in counts for code in codes]
    jobs, after, rows_each, *columns = _columns_of(record, sizes)
    for section, count in enumerate(counts if form == WITHOUT_KEYS else ()):
        columns.insert(section * len(_CODES) + _KEY, (0,) * count)
    step, none = (repeat(epoch), repeat(seq), repeat(part)), repeat(0)
    version, stamp, key, *where = columns[:7]
    first = 0
    for job, load_after, count in zip(jobs, after, rows_each, strict=True):
        at = slice(first, first := first + count)
        tier, slot, block, group = (column[at] for column in where)
        same = repeat(job), repeat(JobKind.LOAD), *step, repeat(load_after)
        yield tuple(map(JobRow, *same, tier, slot, version[at], block, stamp[at], group, key[at]))
    saves, stamp, key, tier, slot, block, group = columns[7:14]
    yield tuple(map(JobRow, saves, repeat(JobKind.SAVE), *step, none, tier, slot, saves, block, stamp, group, key))
    moves, version, key, tier, slot, to_tier, to_slot = columns[14:]
    yield tuple(map(JobRow, moves, repeat(JobKind.MOVE), *step, none, tier, slot, version, to_tier, to_slot, none, key))


def _columns_of(record: bytes, sizes: Sequence[tuple[str, int]]) -> Iterator[tuple[int, ...]]:
    """Yield the columns with these types and numbers of rows."""
    at = _SUM.size + _HEAD.size
    for code, count in sizes:
        yield struct.unpack_from(f"<{count}{code}", record, at)
        at += count * (8 if code == "Q" else 4)
