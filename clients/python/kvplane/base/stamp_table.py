"""The stamp table: the content version of each page, stored next to the pages, and the engine life that may write them.

    byte 0     8         12         16          24          32         40      48      56       64
         | magic | version | blocks | incarnation | owner epoch |      0     | seq | part+bits | executed | stamps ...

All little-endian. A stamp is a u64 per block (`kvplane.base.stamps`), 0 = unknown content. Writes are eight bytes each,
so that a reader in another process sees either the old or the new value.

The table is in memory that outlives the engine. So it also has the engine life that owns the pages (the *owner epoch*,
which never decreases), the position up to which its orders were carried out, and, as the null block's stamp, the last
reset of the cache.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from kvplane.base.errors import FailedPrecondition, InvalidArgument, StaleEpoch
from kvplane.base.groups import MAX_BLOCKS, NULL_BLOCK
from kvplane.base.stamps import MAX_EPOCH, in_time

MAGIC = b"kvpstamp"
VERSION = 1
HEADER_BYTES = 64
STAMP_BYTES = 8

_PREFIX = struct.Struct("<8sII")
_WORDS_BEFORE = HEADER_BYTES // STAMP_BYTES
_INCARNATION, _OWNER_EPOCH, _, _SEQ, _PART, _EXECUTED = range(2, 8)
_BUSY = 1 << 32
_ALL_PARTS = _BUSY - 1  # the last part of a step
_EARLIER = 1 << 33  # launches of earlier engine lives may still run on this rank
_ENDED = 1 << 34  # every launch whose orders were carried out so far has ended, successfully or not
_MOVING = 35  # from this bit on: number of steps, ending with the last one, whose zeroes or copies may not have ended
_MOST_MOVING = (1 << 29) - 1
_BELOW_MOVING = (1 << _MOVING) - 1
_MAX_SEQ = (1 << 64) - 1


def table_bytes(num_blocks: int) -> int:
    """Size in bytes of the table of a pool."""
    return HEADER_BYTES + STAMP_BYTES * num_blocks


@dataclass(frozen=True, slots=True)
class StampReading:
    """A copy of one rank's table.

    Attributes:
        incarnation: identifies the page memory.
        stamps: one per block; the null block's is that of the last reset.
    """

    incarnation: int
    stamps: Sequence[int]


def agreed_stamps(readings: Sequence[StampReading]) -> tuple[int, ...]:
    """One stamp per block on which all ranks agree, else 0; for `OpenRequest.stamp_table`.

    A stamp counts only if all ranks have the same one, and only after the last reset on any rank, which is the null
    block's stamp.

    Raises:
        InvalidArgument: no readings, or pools of different sizes.
    """
    sizes = {len(reading.stamps) for reading in readings}
    if len(sizes) != 1:
        raise InvalidArgument(f"pools of {sorted(sizes)} blocks", field="readings", remedy="read every rank's table")
    last_reset = max((reading.stamps[NULL_BLOCK] for reading in readings), key=in_time)
    before = in_time(last_reset)
    blocks = zip(*(reading.stamps for reading in readings), strict=True)
    agreed = (each[0] if each.count(each[0]) == len(each) else 0 for each in blocks)
    stamps = (stamp if stamp and in_time(stamp) > before else 0 for stamp in agreed) if last_reset else agreed
    next(stamps)  # the null block's
    return (last_reset, *stamps)


class StampTable:
    """The table in a writable buffer of at least `table_bytes`; writes are visible immediately."""

    def __init__(self, buffer: memoryview | bytearray) -> None:
        """Open a table that `create` wrote.

        Raises:
            InvalidArgument: the buffer holds no such table.
        """
        view = memoryview(buffer).cast("B")
        if len(view) < HEADER_BYTES:
            raise InvalidArgument(f"{len(view)} bytes are no stamp table", field="buffer", remedy="create one")
        magic, version, num_blocks = _PREFIX.unpack_from(view)
        if magic != MAGIC or version != VERSION:
            raise InvalidArgument(
                f"the buffer begins with {magic!r}, version {version}",
                field="buffer",
                remedy=f"a stamp table begins with {MAGIC!r}, version {VERSION}",
            )
        size = table_bytes(num_blocks)
        if len(view) < size:
            raise InvalidArgument(
                f"{len(view)} bytes are too few for {num_blocks} blocks", field="buffer", remedy=f"give {size}"
            )
        assert sys.byteorder == "little", "stamp tables are read as native words"
        self.num_blocks = num_blocks
        self._bytes = view
        self._words = view[:size].cast("Q")
        self._stamps = self._words[_WORDS_BEFORE:]

    @classmethod
    def create(cls, buffer: memoryview | bytearray, num_blocks: int, incarnation: int) -> StampTable:
        """Write an empty table. `incarnation`: a random number, not 0, drawn when the page memory is allocated.

        Raises:
            InvalidArgument: a value is out of range, or the buffer too small.
        """
        view = memoryview(buffer).cast("B")
        if not 1 <= num_blocks <= MAX_BLOCKS or len(view) < table_bytes(num_blocks):
            raise InvalidArgument(
                f"{num_blocks} blocks in {len(view)} bytes", field="num_blocks", remedy="use table_bytes(num_blocks)"
            )
        if not 1 <= incarnation < 1 << 64:
            raise InvalidArgument(f"{incarnation}", field="incarnation", remedy="draw a u64 that is not 0")
        view[: table_bytes(num_blocks)] = bytes(table_bytes(num_blocks))
        _PREFIX.pack_into(view, 0, MAGIC, VERSION, num_blocks)
        table = cls(view)
        table._words[_INCARNATION] = incarnation
        return table

    @property
    def incarnation(self) -> int:
        """Identifies this page memory."""
        return self._words[_INCARNATION]

    @property
    def owner_epoch(self) -> int:
        """The engine life that may write the pages."""
        return self._words[_OWNER_EPOCH]

    @property
    def executed(self) -> int:
        """The last step of the owner epoch that has finished on this rank, 0 = none."""
        return self._words[_EXECUTED]

    @property
    def position(self) -> tuple[int, int]:
        """(seq, part) of the last orders carried out; part is 2^32 - 1 before the first orders of an epoch."""
        return self._words[_SEQ], self._words[_PART] & (_BUSY - 1)

    @property
    def moving_from(self) -> int:
        """The first step whose zeroes or copies may not have ended on the rank's device; 0 = all have ended."""
        steps = self._words[_PART] >> _MOVING
        first = 1 if steps == _MOST_MOVING else max(1, self._words[_SEQ] - steps + 1)
        return first if steps else 0

    @property
    def is_busy(self) -> bool:
        """Whether orders were interrupted or pages invalidated: no further orders of this epoch are accepted."""
        return bool(self._words[_PART] & _BUSY)

    def claim(self, epoch: int, next_seq: int = 1) -> None:
        """Make this engine life the owner. Idempotent, except that `next_seq` may increase before the first orders,
        since a service claims without the engine's step numbers.

        Args:
            epoch: of the engine life.
            next_seq: number of its first step on this rank; above 1 when a session continues with another service.

        Raises:
            StaleEpoch: a newer engine life owns the table; `metadata["epoch"]` is its epoch.
            InvalidArgument: an epoch or a step out of range.
        """
        if not 1 <= epoch <= MAX_EPOCH:
            raise InvalidArgument(f"{epoch} is not an epoch", field="epoch", remedy=f"give 1 to {MAX_EPOCH}")
        if not 1 <= next_seq <= _MAX_SEQ:
            raise InvalidArgument(f"{next_seq} is not a step", field="next_seq", remedy=f"give 1 to {_MAX_SEQ}")
        if epoch < self.owner_epoch:
            raise self._stale(epoch, "ask the service for a new epoch")
        begins = epoch > self.owner_epoch
        # The owner is written last, so that an interrupted claim does not give one epoch the progress of another.
        if begins:
            self._words[_PART] = _ALL_PARTS | (_EARLIER if self._may_run() else 0)
        if begins or (self.position[1] == _ALL_PARTS and next_seq - 1 > self._words[_SEQ]):
            self._words[_EXECUTED] = self._words[_SEQ] = next_seq - 1
        if begins:
            self._words[_OWNER_EPOCH] = epoch

    def begin_life(self, epoch: int) -> None:
        """`claim` for a new engine life, which also refuses the epoch that already owns the table.

        Two services that are not aware of each other may give two lives of one memory the same epoch.
        """
        if epoch == self.owner_epoch:
            raise self._stale(epoch, "give a higher epoch")
        self.claim(epoch)

    def check_owner(self, epoch: int) -> None:
        """Raise StaleEpoch when this epoch is not the owner. A table that was never claimed has no owner."""
        if epoch != self.owner_epoch or not epoch:
            raise self._stale(epoch, "claim the table, or end this engine life")

    def check_load(self, epoch: int, seq: int, part: int, load_after: int) -> None:
        """Raise unless a transfer may write, on this rank, the pages that an admission allocated.

        Args:
            epoch: the engine life that starts the transfer.
            seq, part: of the answer with the admission.
            load_after: of that answer, 0 = none.

        Raises:
            StaleEpoch: this engine life does not own the pages.
            FailedPrecondition: on this rank, orders of the admission's part or of an earlier one were not carried out;
                or zeroes and copies of its step or an earlier one may not have ended on the device; or step
                `load_after` has not finished; or launches of an earlier engine life may still run, which `load_after`
                does not cover: no step of this life has finished, and `launches_ended` was not called.
        """
        self.check_owner(epoch)
        if self._words[_PART] & _EARLIER:
            raise FailedPrecondition(
                "launches of an earlier engine life may still write these pages on this rank",
                field="epoch",
                remedy="call Rank.launches_ended when they have ended, or wait for a step of this life",
            )
        done = self.position
        if done < (seq, part) or (done == (seq, part) and self.is_busy):
            raise FailedPrecondition(
                f"the orders of step {seq}, part {part} were not carried out on this rank",
                field="seq",
                remedy="start the load when the stamps, zeroes and copies of its admission are done",
            )
        if 0 < self.moving_from <= seq:
            raise FailedPrecondition(
                f"zeroes or copies of step {self.moving_from} may not have ended on this rank",
                field="seq",
                remedy="start the load when they have ended: Rank.poll records it, Rank.synchronize waits for it",
            )
        if self.executed < load_after:
            raise FailedPrecondition(
                f"step {load_after} has not finished on this rank, only step {self.executed}",
                field="load_after",
                remedy="start the load when that step is executed: its launch or copies may use these pages",
            )

    def write(self, blocks: Sequence[int], stamps: Sequence[int]) -> None:
        """Write stamps; the null block's stamp records a reset. Blocks must be in the pool, stamps u64."""
        entries = self._stamps
        for block, stamp in zip(blocks, stamps, strict=True):
            entries[block] = stamp

    def invalidate(self, blocks: Sequence[int]) -> None:
        """Refuse further orders of this epoch, then write stamp 0 on these blocks, which must be in the pool."""
        self._words[_PART] |= _BUSY
        for block in blocks:
            self._stamps[block] = 0

    def read(self, block: int) -> int:
        """The stamp of a block."""
        return self._stamps[block]

    def read_all(self) -> tuple[int, ...]:
        """The stamp of every block."""
        return tuple(self._stamps)

    def stamp_bytes(self) -> bytes:
        """The stamps, u64 little-endian each."""
        return self._stamps.tobytes()

    def reading(self) -> StampReading:
        """A copy of the incarnation and all stamps."""
        return StampReading(self.incarnation, self.read_all())

    def begin(self, seq: int, part: int) -> None:
        """Record that the orders of this part begin. Interrupted orders are not repeated."""
        moving = self._words[_PART] >> _MOVING
        if moving:  # keep the same first step; a reader between the two writes sees an earlier one, which is safe
            moving = min(moving + seq - self._words[_SEQ], _MOST_MOVING)
        self._words[_PART] = (self._words[_PART] & _EARLIER) | part | _BUSY | moving << _MOVING
        self._words[_SEQ] = seq

    def finish(self, moving: bool = False) -> None:
        """Record that the orders are carried out. `moving`: the device may not have completed zeroes and copies."""
        word = self._words[_PART] & ~_BUSY
        self._words[_PART] = word | 1 << _MOVING if moving and not word >> _MOVING else word

    def moves_ended(self, through: int) -> None:
        """Record that zeroes and copies of steps up to this one have ended on the device."""
        word = self._words[_PART]
        moving = min(word >> _MOVING, max(0, self._words[_SEQ] - through))
        self._words[_PART] = (word & _BELOW_MOVING) | moving << _MOVING

    def launches_ended(self) -> None:
        """Record that all orders carried out so far, and their launches, have ended, of every engine life.

        They may have failed, so `executed` is unchanged.
        """
        self._words[_PART] = (self._words[_PART] & _BELOW_MOVING & ~_EARLIER) | _ENDED

    def _may_run(self) -> bool:
        """Whether orders or a launch, of the owner's life or an earlier one, may still run."""
        word = self._words[_PART]
        in_flight = word & (_EARLIER | _BUSY) or word >> _MOVING or self._words[_SEQ] > self._words[_EXECUTED]
        return bool(in_flight) and not word & _ENDED

    def set_executed(self, seq: int) -> None:
        """Record that steps up to this one have finished, orders and launches, and all steps of earlier engine lives.

        Raises:
            FailedPrecondition: the step is before the last one that finished, or its orders were not carried out.
        """
        if not self.executed <= seq <= self.position[0]:
            raise FailedPrecondition(
                f"step {seq} is not in {self.executed}..{self.position[0]}",
                field="seq",
                remedy="give a step whose orders were carried out; the value never decreases",
            )
        if seq > self.executed:
            self._words[_PART] &= ~_EARLIER  # launches of a rank end in order
        self._words[_EXECUTED] = seq
        self.moves_ended(seq)

    def snapshot(self) -> bytes:
        """The table's bytes."""
        return bytes(self._words)

    def release(self) -> None:
        """Release the buffer, so that it can be closed. The table cannot be used afterwards."""
        self._stamps.release()
        self._words.release()
        self._bytes.release()

    def _stale(self, epoch: int, remedy: str) -> StaleEpoch:
        return StaleEpoch(
            f"epoch {epoch} does not own the pages, {self.owner_epoch} does",
            field="epoch",
            remedy=remedy,
            metadata={"epoch": str(self.owner_epoch)},
        )
