"""Carries out the orders of each step in a rank's process: stamps, zeroes and copies, exactly once and in order."""

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
    """Zeroes and copies that the device may not have completed yet."""

    def have_ended(self) -> bool:
        """Whether the device has completed all of them. Does not wait."""
        ...

    def wait(self) -> None:
        """Wait until the device has completed all of them."""
        ...


class PageMover(Protocol):
    """Zeroes and copies whole blocks in this rank's pages; the worker package provides one.

    A call may return before the device has completed it. The device runs calls and launches in the order in which this
    rank submits them: on a GPU all go to one stream. So a launch reads copied blocks without waiting; a transfer, which
    does not use that stream, must wait until `moves` have ended.
    """

    @property
    def num_groups(self) -> int:
        """KV cache groups."""
        ...

    def zero(self, group: int, blocks: Sequence[int]) -> None:
        """Set every byte of the blocks to 0."""
        ...

    def copy(self, group: int, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy block src[i] to dst[i], in order: a later copy may read what an earlier one wrote."""
        ...

    def moves(self) -> Moves | None:
        """All calls so far; None if each call is complete when it returns."""
        ...


@dataclass(frozen=True, slots=True)
class _Moving:
    """The zeroes and copies of one part of a step."""

    epoch: int
    seq: int
    moves: Moves

    def is_within(self, epoch: int, seq: int) -> bool:
        """Whether they belong to the epoch's steps up to `seq`, or to an earlier epoch."""
        return self.epoch != epoch or self.seq <= seq


class Rank:
    """One rank of an engine life: writes stamps, then zeroes, then copies, before the launch.

        rank.claim(session.epoch, session.next_seq)
        for at, part in enumerate(result.parts, result.part):
            rank.carry_out(session.epoch, result.seq, at, part.orders)
        ...                                                     # launch, and wait for it
        rank.executed(result.seq)

    A load of a step may start when the step's zeroes and copies have ended on the device. `executed` waits for them;
    `poll` records which have ended. A rank whose launch waits for a load of the same step calls `synchronize`.

    A rank that launches without an answer calls `invalidate` instead of `carry_out`, which ends the engine life.

    The position is stored in the stamp table, so that another `Rank` on the same table continues there and repeats
    nothing. A refusal is raised before anything is written.
    """

    def __init__(self, stamps: StampTable, mover: PageMover) -> None:
        """Continue at the position that is stored in the table."""
        self._stamps = stamps
        self._mover = mover
        self._moving: deque[_Moving] = deque()
        if stamps.moving_from:  # zeroes and copies of another `Rank` in this process
            self._note_moves(stamps.position[0])
            self.poll()

    @property
    def executed_through(self) -> int:
        """The last step that has finished on this rank, with all steps before it."""
        return self._stamps.executed

    def claim(self, epoch: int, next_seq: int = 1) -> None:
        """Make this engine life the owner of the pages. `next_seq`: its first step on this rank (`Session.next_seq`).

        Raises StaleEpoch when a newer engine life owns them.
        """
        self._stamps.claim(epoch, next_seq)

    def carry_out(self, epoch: int, seq: int, part: int, orders: Orders) -> None:
        """Carry out the orders of a part of a step. The device may still zero and copy when this returns.

        Raises:
            StaleEpoch: this engine life does not own the pages.
            SequenceError: the part was already carried out, or an earlier part was not.
            FailedPrecondition: earlier orders were interrupted at an unknown point, or pages were invalidated: begin a
                new engine life.
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

        Waits for the zeroes and copies of these steps, since a step may have had no launch after them. Raises
        FailedPrecondition.
        """
        while self._moving and self._moving[0].is_within(self._stamps.owner_epoch, seq):
            self._moving.popleft().moves.wait()
        self._stamps.set_executed(seq)

    def poll(self) -> None:
        """Record which zeroes and copies have ended on the device, so that loads that wait for them may start."""
        while self._moving and self._moving[0].moves.have_ended():
            self._moving.popleft()
        self._note_ended()

    def synchronize(self) -> None:
        """Wait until all zeroes and copies have ended on the device, and record it."""
        while self._moving:
            self._moving.popleft().moves.wait()
        self._note_ended()

    def _note_moves(self, seq: int) -> bool:
        """Record the moves of this step. Returns whether the device may not have completed them."""
        moves = self._mover.moves()
        if moves is not None:
            self._moving.append(_Moving(self._stamps.owner_epoch, seq, moves))
        return moves is not None

    def _note_ended(self) -> None:
        if self._stamps.moving_from:
            owner, through = self._stamps.owner_epoch, self._stamps.position[0]
            self._stamps.moves_ended(min([through, *(one.seq - 1 for one in self._moving if one.epoch == owner)]))

    def launches_ended(self) -> None:
        """Record that no launch is running on this rank, of this engine life or earlier ones.

        A load of a new engine life requires this, since launches of the previous life may still write its pages, and
        transfers are not ordered after launches. It is not needed once a step of the new life was `executed`, nor in a
        new process that attached to a worker, which has observed that the old process exited. Waits for zeroes and
        copies.
        """
        self.synchronize()
        self._stamps.launches_ended()

    def check_load(self, epoch: int, seq: int, part: int, load_after: int) -> None:
        """Raise unless a load may write this rank's pages; see `StampTable.check_load`. Calls `poll` first.

        It suffices for a transfer that writes only this rank's pages, since a launch also writes only the pages of its
        own rank. A transfer that writes pages of several ranks must use `RankGroup.may_load`.
        """
        self.poll()
        self._stamps.check_load(epoch, seq, part, load_after)

    def invalidate(self, epoch: int, blocks: Sequence[int]) -> None:
        """Write stamp 0 on pages, before a launch without an answer of the service may overwrite them.

        `blocks`: all pages that this and later launches of this engine life may write. A new life keeps no key of
        these pages, even if only one rank invalidated them. Orders of this engine life are refused from now on, since
        a late answer describes the pages as they were before. Begin a new life with `RankGroup.agreed_stamps` and omit
        requests that hold such a page from its image (`Revival.resume`). May be repeated with more pages.

        Do not call it during a call of the session, which may have read the stamps already and begin a life with them.

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
                f"the orders of step {done_seq}, part {done_part} were interrupted, or pages invalidated after them",
                field="seq",
                remedy="begin a new engine life: open a session with epoch 0",
            )
        if (seq, part) in ((done_seq + 1, 0), (done_seq, done_part + 1)):
            return
        why = "was carried out" if (seq, part) <= (done_seq, done_part) else f"does not follow {done_seq}, {done_part}"
        raise SequenceError(
            f"step {seq}, part {part} {why}",
            field="seq",
            remedy="carry out the parts of each answer once, in order",
        )


class RankGroup:
    """All ranks of a replica, by their stamp tables: facts that hold only if they hold on every rank.

    A slow rank, or one whose process died, counts with the position in its table and holds the others back.
    """

    def __init__(self, tables: Sequence[StampTable]) -> None:
        """`tables`: by rank, mapped from the other processes. Raises InvalidArgument for pools of different sizes."""
        if len({table.num_blocks for table in tables}) != 1:
            raise InvalidArgument("no ranks, or pools of different sizes", field="tables", remedy="give equal plans")
        self._tables = tuple(tables)

    @property
    def incarnation(self) -> int:
        """Identifies the memory of all ranks together, for `Revival.incarnation`."""
        first, *others = (table.incarnation for table in self._tables)
        if not others:
            return first
        named = b"".join(each.to_bytes(8, "little") for each in (first, *others))
        return int.from_bytes(blake2b(named, digest_size=8).digest(), "little") or 1

    @property
    def owner_epoch(self) -> int:
        """The newest engine life that owns a rank's memory, 0 = none. For `Revival.owner_epoch`: read it after the
        stamps, so that it is not older than they are.
        """
        return max(table.owner_epoch for table in self._tables)

    def claim(self, epoch: int, next_seq: int = 1) -> None:
        """Make this engine life the owner on every rank, rank 0 first; see `Rank.claim`. Raises StaleEpoch."""
        for table in self._tables:
            table.claim(epoch, next_seq)

    def executed_through(self, epoch: int) -> int:
        """The last step of the epoch that has finished on every rank, 0 = none."""
        return min(table.executed if table.owner_epoch == epoch else 0 for table in self._tables)

    def may_load(self, epoch: int, seq: int, part: int, load_after: int) -> bool:
        """Whether an external load may start, on any rank.

        It may when every rank has carried out the orders of its admission, which came with this part of the answer to
        step `seq`; has completed the zeroes and copies of this step and earlier ones; has finished step `load_after` of
        the same answer; and runs no launch of an earlier engine life (`Rank.launches_ended`).

        False: call again after a rank's progress. True holds until the engine life ends. Do not start a load that was
        already reported as ended: its pages may belong to another request.

        Raises StaleEpoch when a newer engine life owns a rank's pages, so that the load can never start.
        """
        for table in self._tables:
            if table.owner_epoch > epoch:
                table.check_owner(epoch)
        return all(_may_load(table, epoch, seq, part, load_after) for table in self._tables)

    def agreed_stamps(self) -> tuple[int, ...]:
        """One stamp per block, 0 where the ranks differ; for `OpenRequest.stamp_table`."""
        return agreed_stamps([table.reading() for table in self._tables])


def _may_load(table: StampTable, epoch: int, seq: int, part: int, load_after: int) -> bool:
    try:
        table.check_load(epoch, seq, part, load_after)
    except (FailedPrecondition, StaleEpoch):
        return False
    return True


def check_orders(orders: Orders, num_blocks: int, num_groups: int) -> None:
    """Raise InvalidArgument for orders that do not fit a pool of this size; it names the column."""
    for names in (("stamp_block", "stamp"), ("zero_block", "zero_group"), ("copy_src", "copy_dst", "copy_group")):
        if len({len(getattr(orders, name)) for name in names}) != 1:
            raise InvalidArgument("columns of different lengths", field=f"orders.{names[0]}", remedy="send them whole")
    _check_range("orders.stamp_block", orders.stamp_block, NULL_BLOCK, num_blocks - 1)
    for name in ("zero_block", "copy_src", "copy_dst"):
        _check_range(f"orders.{name}", getattr(orders, name), NULL_BLOCK + 1, num_blocks - 1)
    for name in ("zero_group", "copy_group"):
        _check_range(f"orders.{name}", getattr(orders, name), 0, num_groups - 1)
    _check_range("orders.stamp", orders.stamp, 1, MAX_STAMP)


def _check_range(field: str, values: Sequence[int], low: int, high: int) -> None:
    if values and not low <= min(values) <= max(values) <= high:
        raise InvalidArgument(
            f"{min(values)} to {max(values)} is not within {low} to {high}",
            field=field,
            remedy="use the plan and the pool of one registration; block 0 is the null block",
        )


def _runs(groups: list[int]) -> Iterator[tuple[int, slice]]:
    """Consecutive orders of one group, so that each call of the mover gets many and the order is kept."""
    start = 0
    for group, members in groupby(groups):
        end = start + len(list(members))
        yield group, slice(start, end)
        start = end
