"""What each rank does with the orders of a step's answer: it writes stamps (the version number of each page's content),
zeroes pages and copies pages, once and in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from typing import Protocol

from kvplane.base.errors import FailedPrecondition, InvalidArgument, SequenceError, StaleEpoch
from kvplane.base.groups import NULL_BLOCK
from kvplane.base.stamp_table import StampTable, agreed_stamps
from kvplane.base.step import Orders

MAX_STAMP = (1 << 64) - 1


class Moves(Protocol):
    """Calls of a PageMover that zero and copy pages, and that the device may not have completed yet."""

    def have_ended(self) -> bool:
        """Return whether the device has completed all of these calls, without waiting."""

    def wait(self) -> None:
        """Wait until the device has completed all of these calls."""


class PageMover(Protocol):
    """The interface that zeroes and copies whole blocks in a rank's pages. The worker package implements it.

    A call may return before the device has completed it. The device runs calls and launches in the order in which the
    rank submits them: on a GPU all go to one stream. So a launch reads copied blocks without waiting. A transfer (a
    copy into or out of the pages by a connector or a worker) does not use that stream; it must wait until the `Moves`
    that `moves` returned have ended.
    """

    @property
    def num_groups(self) -> int:
        """The number of KV cache groups."""

    def zero(self, group: int, blocks: Sequence[int]) -> None:
        """Set every byte of the blocks to 0."""

    def copy(self, group: int, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy block src[i] to dst[i], in order: a later copy may read what an earlier one wrote."""

    def moves(self) -> Moves | None:
        """Return a handle of all calls of `zero` and `copy` so far; None if each call is complete when it returns."""


class CallersMoves:
    """The mover of a rank whose engine zeroes and copies pages itself, in the order of the rank's calls of `carry_out`.
    The `Rank` then writes stamps only.

    The rank cannot wait for them. With a call of `Rank.executed`, the engine states that the zeroes and copies of these
    steps have ended too, with `Rank.synchronize` and `Rank.launches_ended` all of them; with `done` it can state so
    earlier, if a load waits for them.
    """

    def __init__(self, num_groups: int) -> None:
        self.num_groups = num_groups
        self._ordered: list[_CallersCalls] = []

    def zero(self, group: int, blocks: Sequence[int]) -> None:
        """Do nothing: the engine zeroes the blocks before its launch."""

    def copy(self, group: int, src: Sequence[int], dst: Sequence[int]) -> None:
        """Do nothing: the engine copies the blocks before its launch."""

    def moves(self) -> Moves:
        """Return a handle of all zeroes and copies that were ordered so far."""
        self._ordered = [one for one in self._ordered if not one.ended]
        self._ordered.append(_CallersCalls())
        return self._ordered[-1]

    def done(self) -> None:
        """State that the device has completed all zeroes and copies of the orders that were carried out so far."""
        for one in self._ordered:
            one.ended = True


@dataclass(slots=True)
class _CallersCalls:
    """The zeroes and copies that one part of a step orders, and all earlier ones."""

    ended: bool = False

    def have_ended(self) -> bool:
        return self.ended

    def wait(self) -> None:
        """Do not wait: who lets the rank wait states that these zeroes and copies have ended."""
        self.ended = True


@dataclass(frozen=True, slots=True)
class _Moving:
    """The zeroing and copying of pages that one part of a step ordered."""

    epoch: int
    seq: int
    moves: Moves

    def is_within(self, epoch: int, seq: int) -> bool:
        """Return whether these calls belong to a step of this epoch up to `seq`, or to an earlier epoch."""
        return self.epoch != epoch or self.seq <= seq


class Rank:
    """One rank of an engine: it carries out the orders of each step (write stamps, then zero pages, then copy pages)
    before the launch of that step.

        rank.claim(session.epoch, session.next_seq)
        for at, part in enumerate(result.parts, result.part):
            rank.carry_out(session.epoch, result.seq, at, part.orders)
        ...                                                     # launch, and wait for it
        rank.executed(result.seq)

    A stamp is the version number of a page's content; stamps let a new service or engine detect which pages are
    unchanged. `claim` makes an engine life, the time of one epoch, the only one that may write this rank's pages.

    A load (a transfer into pages from outside, such as from a connector) may start when the device has completed the
    zeroing and copying of the step that allocated its pages. `executed` waits for that zeroing and copying; `poll`
    records without waiting which of it is complete. A rank whose launch waits for a load of the same step calls
    `synchronize` first.

    A rank that launches a step for which the service's answer is missing calls `invalidate` instead of `carry_out`. The
    engine life accepts no orders after that.

    The rank stores the last step and part that it carried out in the stamp table, the stamps' memory next to the pages.
    So another `Rank` on the same table continues there and repeats nothing. All methods check their arguments before
    they write.
    """

    def __init__(self, stamps: StampTable, mover: PageMover) -> None:
        """Continue after the last step and part that the stamp table records as carried out."""
        self._stamps = stamps
        self._mover = mover
        self._moving: deque[_Moving] = deque()
        if stamps.moving_from:  # zeroes and copies of another `Rank` in this process
            self._note_moves(stamps.position[0])
            self.poll()

    @property
    def executed_through(self) -> int:
        """The number of the last step that has finished on this rank, together with all steps before it."""
        return self._stamps.executed

    def claim(self, epoch: int, next_seq: int = 1) -> None:
        """Make the engine life of this epoch the owner of the pages: the only one that may write them. `next_seq` is
        the number of its first step on this rank (`Session.next_seq`).

        Raises StaleEpoch if a newer engine life owns the pages.
        """
        self._stamps.claim(epoch, next_seq)

    def carry_out(self, epoch: int, seq: int, part: int, orders: Orders) -> None:
        """Write the stamps, zero the pages and copy the pages that a part of a step orders. The device may still zero
        and copy pages when this returns.

        Raises:
            StaleEpoch: `epoch` is not the epoch that owns the pages.
            SequenceError: the part was already carried out, or an earlier part was not.
            FailedPrecondition: earlier orders were interrupted at an unknown point, or `invalidate` was called: begin a
                new engine life (epoch).
            InvalidArgument: an order names a page outside the pool.
        """
        table = self._stamps
        table.check_owner(epoch)
        self._check_turn(seq, part)
        check_orders(orders, table.num_blocks, self._mover.num_groups)
        self.poll()
        table.begin(seq, part)
        self._obey(orders)
        moves = orders.zero_block or orders.copy_src
        table.finish(moving=bool(moves) and self._note_moves(seq))

    def executed(self, seq: int) -> None:
        """Record that all launches of steps up to this one, and of earlier engine lives, have finished on this rank.

        Waits until the device has zeroed and copied the pages of these steps: a step may have no launch that is ordered
        after this zeroing and copying.

        Raises:
            FailedPrecondition: the step is before the last one that finished, or the orders of the given step were not
                carried out.
        """
        while self._moving and self._moving[0].is_within(self._stamps.owner_epoch, seq):
            self._moving.popleft().moves.wait()
        self._stamps.set_executed(seq)

    def poll(self) -> None:
        """Record, without waiting, which zeroing and copying of pages the device has completed, so that loads
        (transfers into those pages) may start.
        """
        while self._moving and self._moving[0].moves.have_ended():
            self._moving.popleft()
        self._note_ended()

    def synchronize(self) -> None:
        """Wait until the device has completed all zeroing and copying of pages that was ordered, and record this in the
        stamp table.
        """
        while self._moving:
            self._moving.popleft().moves.wait()
        self._note_ended()

    def _note_moves(self, seq: int) -> bool:
        """Record which pages this step zeroes and copies. Returns whether the device may not have
        completed that yet.
        """
        moves = self._mover.moves()
        if moves is not None:
            self._moving.append(_Moving(self._stamps.owner_epoch, seq, moves))
        return moves is not None

    def _note_ended(self) -> None:
        if self._stamps.moving_from:
            owner, through = self._stamps.owner_epoch, self._stamps.position[0]
            self._stamps.moves_ended(min([through, *(one.seq - 1 for one in self._moving if one.epoch == owner)]))

    def launches_ended(self) -> None:
        """Record that no launch is running on this rank, neither of this engine life nor of earlier ones.

        A load, a transfer into pages from outside, requires this record in a new engine life, since launches of the
        previous life may still write the load's pages, and transfers are not ordered after launches. The call is not
        needed once a step of the new life was `executed`, nor in a new process that attached the pages of a worker: a
        worker lends pages only after the old process has exited. Waits until the device has zeroed and copied all pages
        that were ordered.
        """
        self.synchronize()
        self._stamps.launches_ended()

    def check_load(self, epoch: int, seq: int, part: int, load_after: int) -> None:
        """Raise an error unless a load, a transfer into pages from outside, may write this rank's pages now; see
        `StampTable.check_load`. Calls `poll` first.

        This check is enough for a transfer that writes only this rank's pages, since a launch also writes only the
        pages of its own rank. A transfer that writes pages of several ranks must use `RankGroup.may_load`.
        """
        self.poll()
        self._stamps.check_load(epoch, seq, part, load_after)

    def invalidate(self, epoch: int, blocks: Sequence[int]) -> None:
        """Set the stamps (version numbers) of pages to 0, before a launch for which the service's answer is missing
        overwrites these pages.

        `blocks` must contain all pages that this launch and later launches of this engine life may write. A new engine
        life keeps no prefix cache key of these pages, even if only one rank invalidated them. From now on the rank
        refuses orders of this engine life, since an answer that arrives late describes the pages as they were before
        the launch. Begin a new life with the stamps of `RankGroup.agreed_stamps`, and leave requests that hold an
        invalidated page out of its image (`Revival.resume`). `invalidate` may be called again with more pages.

        Do not call `invalidate` while a method of the session runs: the session may have read the stamps already and
        may begin a new life with them.

        Raises:
            StaleEpoch: this engine life does not own the pages.
            InvalidArgument: a page is outside the pool; nothing was written.
        """
        table = self._stamps
        table.check_owner(epoch)
        _check_range("blocks", blocks, 1, table.num_blocks - 1)
        table.invalidate(blocks)

    def _obey(self, orders: Orders) -> None:
        self._stamps.write(orders.stamp_block, orders.stamp)
        for group, at in _runs(orders.zero_group):
            self._mover.zero(group, orders.zero_block[at])
        for group, at in _runs(orders.copy_group):
            self._mover.copy(group, orders.copy_src[at], orders.copy_dst[at])

    def _check_turn(self, seq: int, part: int) -> None:
        done_seq, done_part = self._stamps.position
        if self._stamps.is_busy:
            raise FailedPrecondition(
                f"after step {done_seq}, part {done_part}, orders were interrupted or pages were invalidated",
                field="seq",
                remedy="begin a new epoch: open a session with epoch 0",
            )
        if (seq, part) in ((done_seq + 1, 0), (done_seq, done_part + 1)):
            return
        done = f"step {done_seq}, part {done_part}"
        why = (
            "was carried out already" if (seq, part) <= (done_seq, done_part) else f"is not the next part after {done}"
        )
        raise SequenceError(
            f"step {seq}, part {part} {why}",
            field="seq",
            remedy="carry out the parts of each answer once, in order",
        )


class RankGroup:
    """The stamp tables of all ranks of a replica: page version numbers, and the progress of each rank. Each method
    returns what is true on every rank.

    A rank that is slow, or whose process has exited, counts with the last step in its table, so loads and executed
    steps wait for it.
    """

    def __init__(self, tables: Sequence[StampTable]) -> None:
        """Use these tables, one per rank in rank order, mapped from the ranks' processes.

        Raises InvalidArgument if there is no table, or if the tables belong to pools of different sizes.
        """
        if len({table.num_blocks for table in tables}) != 1:
            sizes = sorted({table.num_blocks for table in tables})
            raise InvalidArgument(
                f"the stamp tables have {sizes} blocks" if sizes else "there is no stamp table",
                field="tables",
                remedy="give the table of every rank of one replica",
            )
        self._tables = tuple(tables)

    @property
    def incarnation(self) -> int:
        """A number that identifies the memory of all ranks together, for `Revival.incarnation`."""
        return _one_number([table.incarnation for table in self._tables])

    @property
    def disk_incarnation(self) -> int:
        """A number that identifies what the disk tiers of all ranks hold, for `Revival`; 0 = unknown."""
        numbers = [table.disk_incarnation for table in self._tables]
        return _one_number(numbers) if all(numbers) else 0

    @property
    def owner_epoch(self) -> int:
        """The highest epoch that owns the memory of any rank; 0 = none. For `Revival.owner_epoch`.

        Read this property after the stamps, so that no stamp has a higher epoch.
        """
        return max(table.owner_epoch for table in self._tables)

    def claim(self, epoch: int, next_seq: int = 1) -> None:
        """Make the engine life of this epoch the owner of the pages of every rank, rank 0 first; see `Rank.claim`.
        Raises StaleEpoch.
        """
        for table in self._tables:
            table.claim(epoch, next_seq)

    def executed_through(self, epoch: int) -> int:
        """Return the number of the last step of this epoch that has finished on every rank; 0 = none."""
        return min(table.executed if table.owner_epoch == epoch else 0 for table in self._tables)

    def may_load(self, epoch: int, seq: int, part: int, load_after: int) -> bool:
        """Return whether a load (a transfer into newly allocated pages from outside) may start, on any rank.

        A load may start when every rank has carried out the orders of the load's admission, which are in part `part` of
        the answer to step `seq`; has zeroed and copied the pages of that step and of earlier ones; has finished step
        `load_after`, a step number in the same answer (0 = none); and runs no launch of an earlier engine life
        (`Rank.launches_ended`).

        If the result is False, call again after a rank has made progress. A result of True stays true until the engine
        life ends. Do not start a load whose end was already reported: its pages may belong to another request.

        Raises:
            StaleEpoch: a newer engine life owns a rank's pages, so the load can never start.
        """
        for table in self._tables:
            if table.owner_epoch > epoch:
                table.check_owner(epoch)
        return all(_may_load(table, epoch, seq, part, load_after) for table in self._tables)

    def agreed_stamps(self) -> tuple[int, ...]:
        """Return one stamp per block, 0 where the ranks differ; for `OpenRequest.stamp_table`."""
        return agreed_stamps([table.reading() for table in self._tables])


def _one_number(numbers: Sequence[int]) -> int:
    """Return a number, not 0, that names these numbers of the ranks together."""
    if len(numbers) == 1:
        return numbers[0]
    named = b"".join(each.to_bytes(8, "little") for each in numbers)
    return int.from_bytes(blake2b(named, digest_size=8).digest(), "little") or 1


def _may_load(table: StampTable, epoch: int, seq: int, part: int, load_after: int) -> bool:
    try:
        table.check_load(epoch, seq, part, load_after)
    except (FailedPrecondition, StaleEpoch):
        return False
    return True


def check_orders(orders: Orders, num_blocks: int, num_groups: int) -> None:
    """Raise InvalidArgument if the orders do not fit a pool of this size; the error's field names the column."""
    for names in (("stamp_block", "stamp"), ("zero_block", "zero_group"), ("copy_src", "copy_dst", "copy_group")):
        if len({len(getattr(orders, name)) for name in names}) != 1:
            lengths = ", ".join(f"{name} {len(getattr(orders, name))}" for name in names)
            raise InvalidArgument(
                f"the columns have different lengths: {lengths}",
                field=f"orders.{names[0]}",
                remedy="give the orders as the service sent them",
            )
    _check_range("orders.stamp_block", orders.stamp_block, NULL_BLOCK, num_blocks - 1)
    for name in ("zero_block", "copy_src", "copy_dst"):
        _check_range(f"orders.{name}", getattr(orders, name), NULL_BLOCK + 1, num_blocks - 1)
    for name in ("zero_group", "copy_group"):
        _check_range(f"orders.{name}", getattr(orders, name), 0, num_groups - 1)
    _check_range("orders.stamp", orders.stamp, 1, MAX_STAMP)


def _check_range(field: str, values: Sequence[int], low: int, high: int) -> None:
    if values and not low <= min(values) <= max(values) <= high:
        raise InvalidArgument(
            f"the values are {min(values)} to {max(values)}, but must be within {low} to {high}",
            field=field,
            remedy="use orders and pages of the same registration; block 0 is the null block, which has no page",
        )


def _runs(groups: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield each run of consecutive equal groups as (group, slice), so that one call of the mover handles
    many blocks.
    """
    start = 0
    for group, members in groupby(groups):
        end = start + len(list(members))
        yield group, slice(start, end)
        start = end
