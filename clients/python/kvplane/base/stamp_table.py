"""The stamp table: the stamp (version number) of each page's content, and the engine life (epoch) that may write the
pages.

    byte 0     8         12         16          24          32         40      48      56       64
         | magic | version | blocks | incarnation | owner epoch |    disks   | seq | part+bits | executed | stamps ...

All numbers are little-endian. A stamp is a u64 per block (`kvplane.base.stamps`), 0 = unknown content. Each write has
eight bytes, so that a reader in another process sees either the old or the new value. Of a replica with tiers, the
slots of the tiers are further blocks, whose stamp is the version that the slot holds (`ReplicaSpec.num_stamps`). What
the slots of disks hold outlives the memory: `disks` is the number that identifies it, 0 = there is no disk tier.

The table is in the same memory as the pages, which outlives the engine. So the table also records the epoch of the
engine life that owns the pages (the *owner epoch*, which never decreases), the step and part up to which the rank
carried out orders (to stamp, zero and copy pages), and, as the null block's stamp, the last reset of the cache.
"""

from __future__ import annotations

import struct
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

from kvplane.base.errors import FailedPrecondition, InvalidArgument, StaleEpoch
from kvplane.base.groups import MAX_BLOCKS, NULL_BLOCK
from kvplane.base.stamps import MAX_EPOCH, in_time

MAGIC = b"kvpstamp"
VERSION = 1
HEADER_BYTES = 64
STAMP_BYTES = 8

_PREFIX = struct.Struct("<8sII")
_WORDS_BEFORE = HEADER_BYTES // STAMP_BYTES
_INCARNATION, _OWNER_EPOCH, _DISKS, _SEQ, _PART, _EXECUTED = range(2, 8)
_BUSY = 1 << 32
_ALL_PARTS = _BUSY - 1  # the last part of a step
_EARLIER = 1 << 33  # launches of earlier engine lives may still run on this rank
_ENDED = 1 << 34  # every launch whose orders were carried out so far has ended, successfully or not
_MOVING = 35  # from this bit on: number of steps, ending with the last one, whose zeroes or copies may not have ended
_MOST_MOVING = (1 << 29) - 1
_BELOW_MOVING = (1 << _MOVING) - 1
_MAX_SEQ = (1 << 64) - 1
_exhaust = deque[object](maxlen=0).extend  # of an iterator, without a statement of Python per element


def table_bytes(num_blocks: int) -> int:
    """Return the size in bytes of the stamp table (a version number per page) of a pool with this number of blocks."""
    return HEADER_BYTES + STAMP_BYTES * num_blocks


@dataclass(frozen=True, slots=True)
class StampReading:
    """A copy of one rank's stamp table.

    Attributes:
        incarnation: the random number that identifies the page memory.
        stamps: one stamp, the version number of the page's content, per block; the null block's stamp is the stamp of
            the last reset of the cache.
    """

    incarnation: int
    stamps: Sequence[int]


def agreed_stamps(readings: Sequence[StampReading]) -> tuple[int, ...]:
    """Merge the stamp tables of all ranks into one stamp per block, for `OpenRequest.stamp_table`.

    A block's stamp is 0 unless all ranks have the same stamp for the block and this stamp is newer than the last reset
    of the cache on every rank. The null block's stamp is the stamp of the last reset.

    Raises:
        InvalidArgument: `readings` is empty, or the ranks have pools of different sizes.
    """
    sizes = {len(reading.stamps) for reading in readings}
    if len(sizes) != 1:
        raise InvalidArgument(
            f"the stamp tables have {sorted(sizes)} blocks" if sizes else "there is no stamp table",
            field="readings",
            remedy="give the table of every rank of one replica",
        )
    last_reset = max((reading.stamps[NULL_BLOCK] for reading in readings), key=in_time)
    before = in_time(last_reset)
    first, *others = (reading.stamps for reading in readings)
    if any(other != first for other in others):
        blocks = zip(first, *others, strict=True)
        first = [each[0] if each.count(each[0]) == len(each) else 0 for each in blocks]
    agreed = iter(first)
    stamps = (stamp if stamp and in_time(stamp) > before else 0 for stamp in agreed) if last_reset else agreed
    next(stamps)  # the null block's
    return (last_reset, *stamps)


class StampTable:
    """A stamp table (see the module) in a writable buffer of at least `table_bytes` bytes. A method that writes returns
    after the value is in the buffer.
    """

    def __init__(self, buffer: memoryview | bytearray) -> None:
        """Open a table that `create` wrote.

        Raises:
            InvalidArgument: the buffer does not contain a stamp table, or is smaller than its table.
        """
        view = memoryview(buffer).cast("B")
        if len(view) < HEADER_BYTES:
            raise InvalidArgument(
                f"a buffer of {len(view)} bytes is too small for a stamp table's header of {HEADER_BYTES} bytes",
                field="buffer",
                remedy="create the table with StampTable.create",
            )
        magic, version, num_blocks = _PREFIX.unpack_from(view)
        if magic != MAGIC or version != VERSION:
            raise InvalidArgument(
                f"the buffer begins with {magic!r} and version {version}; a table with {MAGIC!r} and version {VERSION}",
                field="buffer",
                remedy="create the table with StampTable.create",
            )
        size = table_bytes(num_blocks)
        if len(view) < size:
            raise InvalidArgument(
                f"a buffer of {len(view)} bytes is too small for the stamps of {num_blocks} blocks",
                field="buffer",
                remedy=f"give {size} bytes",
            )
        assert sys.byteorder == "little", "stamp tables are read as native words"
        self.num_blocks = num_blocks
        self._bytes = view
        self._words = view[:size].cast("Q")
        self._stamps = self._words[_WORDS_BEFORE:]

    @classmethod
    def create(cls, buffer: memoryview | bytearray, num_blocks: int, incarnation: int) -> StampTable:
        """Write an empty table into a buffer and return it.

        Args:
            buffer: at least `table_bytes(num_blocks)` bytes.
            num_blocks: blocks of the pool.
            incarnation: a random number, not 0, chosen when the page memory is allocated.

        Raises:
            InvalidArgument: a value is out of range, or the buffer is too small.
        """
        view = memoryview(buffer).cast("B")
        if not 1 <= num_blocks <= MAX_BLOCKS or len(view) < table_bytes(num_blocks):
            raise InvalidArgument(
                f"a buffer of {len(view)} bytes cannot contain the stamp table of {num_blocks} blocks",
                field="num_blocks",
                remedy=f"give 1 to {MAX_BLOCKS} blocks and a buffer of table_bytes(num_blocks) bytes",
            )
        if not 1 <= incarnation < 1 << 64:
            raise InvalidArgument(
                f"{incarnation} is not an incarnation", field="incarnation", remedy="choose a random u64 that is not 0"
            )
        view[: table_bytes(num_blocks)] = bytes(table_bytes(num_blocks))
        _PREFIX.pack_into(view, 0, MAGIC, VERSION, num_blocks)
        table = cls(view)
        table._words[_INCARNATION] = incarnation
        return table

    @property
    def incarnation(self) -> int:
        """The random number that identifies this page memory."""
        return self._words[_INCARNATION]

    @property
    def owner_epoch(self) -> int:
        """The epoch of the engine life that may write the pages; 0 = none."""
        return self._words[_OWNER_EPOCH]

    def begin_above(self, epoch: int) -> None:
        """Let epochs up to this one own a new table: none of them is used again for what outlived the memory."""
        self._words[_OWNER_EPOCH] = epoch

    @property
    def disk_incarnation(self) -> int:
        """The number that identifies what the slots of disk tiers hold; 0 = there are none, or none is stated."""
        return self._words[_DISKS]

    def name_disks(self, disk_incarnation: int) -> None:
        """State what identifies the content of the disk tiers, a u64: before the table is lent to an engine."""
        self._words[_DISKS] = disk_incarnation

    @property
    def executed(self) -> int:
        """The number of the last step of the owner's engine life (epoch) that has finished on this rank; 0 = none."""
        return self._words[_EXECUTED]

    @property
    def position(self) -> tuple[int, int]:
        """The (step, part) of the last orders (stamp, zero and copy pages) that were carried out; part is 2^32 - 1
        before the first orders of an epoch.
        """
        return self._words[_SEQ], self._words[_PART] & (_BUSY - 1)

    @property
    def moving_from(self) -> int:
        """The first step whose zeroing or copying of pages the rank's device may not have completed yet; 0 = everything
        is complete.
        """
        steps = self._words[_PART] >> _MOVING
        first = 1 if steps == _MOST_MOVING else max(1, self._words[_SEQ] - steps + 1)
        return first if steps else 0

    @property
    def is_busy(self) -> bool:
        """Whether orders (to stamp, zero and copy pages) were interrupted or `invalidate` was called; in both cases the
        rank accepts no further orders of this epoch.
        """
        return bool(self._words[_PART] & _BUSY)

    def claim(self, epoch: int, next_seq: int = 1) -> None:
        """Make an engine life the owner of the pages: the only one that may write them. Claiming the same epoch a
        second time changes nothing.

        The exception is `next_seq`, which may increase before the first orders, since the service claims a rank without
        knowing the engine's step numbers.

        Args:
            epoch: epoch of the engine life.
            next_seq: number of this life's first step on this rank; above 1 if the session continues with another
                service.

        Raises:
            StaleEpoch: a newer engine life owns the table; `metadata["epoch"]` is its epoch.
            InvalidArgument: the epoch or the step number is out of range.
        """
        if not 1 <= epoch <= MAX_EPOCH:
            raise InvalidArgument(
                f"{epoch} is not an epoch", field="epoch", remedy=f"give a number of 1 to {MAX_EPOCH}"
            )
        if not 1 <= next_seq <= _MAX_SEQ:
            raise InvalidArgument(
                f"{next_seq} is not a step number", field="next_seq", remedy=f"give a number of 1 to {_MAX_SEQ}"
            )
        if epoch < self.owner_epoch:
            raise self._stale(epoch, "open a session for a new epoch; the service gives it a higher epoch")
        begins = epoch > self.owner_epoch
        # The owner is written last, so that an interrupted claim does not give one epoch the progress of another.
        if begins:
            self._words[_PART] = _ALL_PARTS | (_EARLIER if self._may_run() else 0)
        if begins or (self.position[1] == _ALL_PARTS and next_seq - 1 > self._words[_SEQ]):
            self._words[_EXECUTED] = self._words[_SEQ] = next_seq - 1
        if begins:
            self._words[_OWNER_EPOCH] = epoch

    def begin_life(self, epoch: int) -> None:
        """Make a new engine life the owner of the pages, as `claim` does, but refuse the epoch that already owns the
        pages.

        Two services that do not know of each other may give two engine lives on the same memory the same epoch.

        Raises:
            StaleEpoch: this or a newer epoch owns the table.
        """
        if epoch == self.owner_epoch:
            raise self._stale(epoch, "open a session for a new epoch; the service gives it a higher epoch")
        self.claim(epoch)

    def check_owner(self, epoch: int) -> None:
        """Raise StaleEpoch if this epoch does not own the pages. A table that was never claimed has no owner, and no
        epoch is refused.
        """
        if epoch != self.owner_epoch or not epoch:
            raise self._stale(epoch, "claim the table first, or end this epoch if a newer one owns it")

    def check_load(self, epoch: int, seq: int, part: int, load_after: int) -> None:
        """Raise an error unless a load (a transfer into pages from outside) may write, on this rank, the pages of an
        admission.

        Args:
            epoch: epoch of the engine life that starts the load.
            seq: number of the step whose answer admitted the request and allocated the pages.
            part: number of the part of that answer.
            load_after: number of the step that must have finished before the pages may be written, from the same
                answer; 0 = none.

        Raises:
            StaleEpoch: this engine life does not own the pages.
            FailedPrecondition: the pages may still be in use on this rank. Either orders up to part `part` of step
                `seq` were not carried out; or the device may not have completed the zeroing or copying of step `seq` or
                of an earlier step; or step `load_after` has not finished; or launches of an earlier engine life may
                still run, since no step of this life has finished and `launches_ended` was not called.
        """
        self.check_owner(epoch)
        if self._words[_PART] & _EARLIER:
            raise FailedPrecondition(
                "launches of an earlier epoch may still write the load's pages on this rank",
                field="epoch",
                remedy="call Rank.launches_ended when they have ended, or load after the first step of this life",
            )
        done = self.position
        if done < (seq, part) or (done == (seq, part) and self.is_busy):
            raise FailedPrecondition(
                f"the orders of step {seq}, part {part} were not carried out on this rank, only those up to {done}",
                field="seq",
                remedy="carry out the orders of the answer that admitted the request, then start the load",
            )
        if 0 < self.moving_from <= seq:
            raise FailedPrecondition(
                f"the pages that step {self.moving_from} zeroes or copies may still be written on this rank",
                field="seq",
                remedy="start the load when that has ended: Rank.poll records it, Rank.synchronize waits for it",
            )
        if self.executed < load_after:
            raise FailedPrecondition(
                f"step {load_after} has not finished on this rank, the last one that has is {self.executed}",
                field="load_after",
                remedy="start the load when that step is executed: its launch or copies may use the load's pages",
            )

    def write(self, blocks: Sequence[int], stamps: Sequence[int]) -> None:
        """Write the stamps of blocks. A stamp written for the null block records a reset of the cache. The blocks must
        be in the pool.
        """
        assert len(blocks) == len(stamps)
        _exhaust(map(self._stamps.__setitem__, blocks, stamps))

    def invalidate(self, blocks: Sequence[int]) -> None:
        """Record that no further orders of this epoch are accepted, then set the stamps of these blocks to 0, unknown
        content. The blocks must be in the pool.
        """
        self._words[_PART] |= _BUSY
        _exhaust(map(self._stamps.__setitem__, blocks, repeat(0)))

    def read(self, block: int) -> int:
        """Return the stamp of a block: the version number of its page's content, 0 = unknown."""
        return self._stamps[block]

    @property
    def words(self) -> memoryview:
        """The stamps of all blocks in place, u64 each: for reading those of many blocks at once; `write` writes. Keep
        no reference to it: the memory could not be unmapped.
        """
        return self._stamps

    def read_all(self) -> tuple[int, ...]:
        """Return the stamps of all blocks: the version number of each page's content, 0 = unknown."""
        return tuple(self._stamps)

    def stamp_bytes(self) -> bytes:
        """Return the stamps of all blocks as bytes, u64 little-endian each."""
        return self._stamps.tobytes()

    def reading(self) -> StampReading:
        """Return a copy of the table's incarnation (the number that identifies the memory) and of its stamps."""
        return StampReading(self.incarnation, self.read_all())

    def begin(self, seq: int, part: int) -> None:
        """Record that the rank begins to carry out the orders of this part. Orders that are interrupted are not carried
        out a second time.
        """
        moving = self._words[_PART] >> _MOVING
        if moving:  # keep the same first step; a reader between the two writes sees an earlier one, which is safe
            moving = min(moving + seq - self._words[_SEQ], _MOST_MOVING)
        self._words[_PART] = (self._words[_PART] & _EARLIER) | part | _BUSY | moving << _MOVING
        self._words[_SEQ] = seq

    def finish(self, moving: bool = False) -> None:
        """Record that the orders whose `begin` was called last are carried out. `moving`: whether the device may still
        zero or copy their pages.
        """
        word = self._words[_PART] & ~_BUSY
        self._words[_PART] = word | 1 << _MOVING if moving and not word >> _MOVING else word

    def moves_ended(self, through: int) -> None:
        """Record that the device has completed the zeroing and copying of pages of all steps up to this one."""
        word = self._words[_PART]
        moving = min(word >> _MOVING, max(0, self._words[_SEQ] - through))
        self._words[_PART] = (word & _BELOW_MOVING) | moving << _MOVING

    def launches_ended(self) -> None:
        """Record that all orders and launches so far have ended, including those of earlier engine lives.

        These launches may have failed, so `executed` does not change.
        """
        self._words[_PART] = (self._words[_PART] & _BELOW_MOVING & ~_EARLIER) | _ENDED

    def _may_run(self) -> bool:
        """Return whether orders or a launch may still run, of the owner's engine life (epoch) or of an earlier engine
        life.
        """
        word = self._words[_PART]
        in_flight = word & (_EARLIER | _BUSY) or word >> _MOVING or self._words[_SEQ] > self._words[_EXECUTED]
        return bool(in_flight) and not word & _ENDED

    def set_executed(self, seq: int) -> None:
        """Record that the orders and launches of all steps up to this one, and of all earlier engine lives (epochs),
        have finished.

        Raises:
            FailedPrecondition: the step is before the last step that finished, or the orders of the given step were not
                carried out.
        """
        if not self.executed <= seq <= self.position[0]:
            raise FailedPrecondition(
                f"step {seq} cannot be recorded as executed: only {self.executed} to {self.position[0]} can",
                field="seq",
                remedy="give a step whose orders were carried out and that is not before the last executed one",
            )
        if seq > self.executed:
            self._words[_PART] &= ~_EARLIER  # launches of a rank end in order
        self._words[_EXECUTED] = seq
        self.moves_ended(seq)

    def snapshot(self) -> bytes:
        """Return a copy of the table as bytes."""
        return bytes(self._words)

    def release(self) -> None:
        """Release the views of the buffer, so that the memory can be unmapped. The table cannot be used afterwards."""
        self._stamps.release()
        self._words.release()
        self._bytes.release()

    def _stale(self, epoch: int, remedy: str) -> StaleEpoch:
        return StaleEpoch(
            f"epoch {epoch} does not own the pages; their owner is epoch {self.owner_epoch}",
            field="epoch",
            remedy=remedy,
            metadata={"epoch": str(self.owner_epoch)},
        )
