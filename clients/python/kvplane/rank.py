"""What runs in each rank's process of an engine: the orders of a step, exactly once and in order."""

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
    """Zeroes and copies that a device may still be working on."""

    def have_ended(self) -> bool:
        """Whether the device has done all of them; waits for nothing."""
        ...

    def wait(self) -> None:
        """Return when the device has done all of them."""
        ...


class PageMover(Protocol):
    """Zeroes and copies whole blocks in this rank's pages; the worker package provides it.

    A call may return before the device has done it. The device does calls one after the other, behind every launch that
    this rank gave it before and in front of every launch after: on a GPU all go to one stream. So a launch reads what
    was copied for it without waiting; a transfer, which goes by another way, waits until `moves` have ended.
    """

    @property
    def num_groups(self) -> int:
        """KV cache groups."""
        ...

    def zero(self, group: int, blocks: Sequence[int]) -> None:
        """Set every byte of the blocks to 0."""
        ...

    def copy(self, group: int, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy block src[i] to dst[i], as if one after the other."""
        ...

    def moves(self) -> Moves | None:
        """All calls so far; None where each has ended when it returns."""
        ...


@dataclass(frozen=True, slots=True)
class _Moving:
    """What the device was given for one part of a step."""

    epoch: int
    seq: int
    moves: Moves

    def is_within(self, epoch: int, seq: int) -> bool:
        """Whether it is of the epoch's steps up to this one, or of an earlier epoch."""
        return self.epoch != epoch or self.seq <= seq


class Rank:
    """One rank of an engine life: stamps, then zeroes, then copies, before the launch.

        rank.claim(session.epoch, session.next_seq)
        for at, part in enumerate(result.parts, result.part):
            rank.carry_out(session.epoch, result.seq, at, part.orders)
        ...                                                     # launch, and wait for it
        rank.executed(result.seq)

    A load of a step may start when the step's zeroes and copies have ended on the device. `executed` waits for those of
    its steps; `poll` notes what has ended; a rank whose launch waits for a load of the same step calls `synchronize`.

    A rank that launches without an answer calls `invalidate` in place of `carry_out`, which ends the engine life.

    How far it is stands in the stamp table, so another `Rank` on the same table goes on where this one ended and
    repeats nothing. Every refusal is made before anything is written.
    """

    def __init__(self, stamps: StampTable, mover: PageMover) -> None:
        """Go on where the table stands."""
        self._stamps = stamps
        self._mover = mover
        self._moving: deque[_Moving] = deque()
        if stamps.moving_from:  # of another `Rank` in this process
            self._note_moves(stamps.position[0])
            self.poll()

    @property
    def executed_through(self) -> int:
        """Steps up to this one have finished here."""
        return self._stamps.executed

    def claim(self, epoch: int, next_seq: int = 1) -> None:
        """Make this engine life the owner of the pages; `next_seq` is its first step here (`Session.next_seq`).

        Raises StaleEpoch when a newer engine life owns them.
        """
        self._stamps.claim(epoch, next_seq)

    def carry_out(self, epoch: int, seq: int, part: int, orders: Orders) -> None:
        """Do what a part of a step orders; the device may be zeroing and copying when this returns.

        Raises:
            StaleEpoch: this engine life does not own the pages.
            SequenceError: the part was carried out before, or one before it was not.
            FailedPrecondition: earlier orders were cut short, nobody knows where, or pages were invalidated: begin a
                new engine life.
            InvalidArgument: an order names a page that is not in the pool.
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
        """All launches of steps up to this one have finished here, and with them those of earlier engine lives.

        Waits for zeroes and copies of these steps: no launch may have come behind them. Raises FailedPrecondition.
        """
        while self._moving and self._moving[0].is_within(self._stamps.owner_epoch, seq):
            self._moving.popleft().moves.wait()
        self._stamps.set_executed(seq)

    def poll(self) -> None:
        """Note which zeroes and copies have ended on the device, so that loads behind them may start."""
        while self._moving and self._moving[0].moves.have_ended():
            self._moving.popleft()
        self._note_ended()

    def synchronize(self) -> None:
        """Return when all zeroes and copies have ended on the device, and note it."""
        while self._moving:
            self._moving.popleft().moves.wait()
        self._note_ended()

    def _note_moves(self, seq: int) -> bool:
        """Remember what the device was given for this step; whether it may still be at it."""
        moves = self._mover.moves()
        if moves is not None:
            self._moving.append(_Moving(self._stamps.owner_epoch, seq, moves))
        return moves is not None

    def _note_ended(self) -> None:
        if self._stamps.moving_from:
            owner, through = self._stamps.owner_epoch, self._stamps.position[0]
            self._stamps.moves_ended(min([through, *(one.seq - 1 for one in self._moving if one.epoch == owner)]))

    def launches_ended(self) -> None:
        """No launch runs here any more whose orders were carried out so far, of this engine life or earlier ones.

        A load of a new engine life waits for that: launches of the life before may still write its pages, and nothing
        orders a transfer behind a launch. Not needed once a step of the new life was `executed`, nor in a new process
        that attached to a worker, which has seen the old one exit. Waits for zeroes and copies.
        """
        self.synchronize()
        self._stamps.launches_ended()

    def check_load(self, epoch: int, seq: int, part: int, load_after: int) -> None:
        """Raise unless a load may write this rank's pages; as `StampTable.check_load`.

        This is enough for a mover that writes the pages of this rank alone: a launch, too, writes those of its own rank
        alone. Notes first what has ended on the device. Who writes pages of several ranks asks `RankGroup.may_load`,
        which holds for all of them.
        """
        self.poll()
        self._stamps.check_load(epoch, seq, part, load_after)

    def invalidate(self, epoch: int, blocks: Sequence[int]) -> None:
        """Write stamp 0 on pages, before a launch without an answer of the service may overwrite them.

        `blocks` are all pages that this and every further launch of this engine life may write to. No new life keeps a
        key of theirs, also where only one rank got here. Orders of this engine life are refused from now on: an answer
        that arrives late speaks of pages as they were. Begin a new life with `RankGroup.agreed_stamps`; requests that
        hold such a page are not part of its image (`Revival.resume`). Again, with more pages, is allowed.

        Not while a call of the session is under way: it may have sent stamps of before, and go on with their life.

        Raises:
            StaleEpoch: this engine life does not own the pages.
            InvalidArgument: a page is not in the pool. Nothing was written.
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
                f"the orders of step {done_seq}, part {done_part} were begun and not finished, or a launch without an "
                "answer came behind them",
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
    """All ranks of a replica as their stamp tables show them: what only all of them together can say.

    A rank that lags, or whose process died, stays where its table stands and holds the others back.
    """

    def __init__(self, tables: Sequence[StampTable]) -> None:
        """Tables by rank; those of other processes are mapped. Raises InvalidArgument for pools of different sizes."""
        if len({table.num_blocks for table in tables}) != 1:
            raise InvalidArgument("no ranks, or pools of different sizes", field="tables", remedy="give equal plans")
        self._tables = tuple(tables)

    @property
    def incarnation(self) -> int:
        """Names the life of all ranks' memory together, for `Revival.incarnation`."""
        first, *others = (table.incarnation for table in self._tables)
        if not others:
            return first
        named = b"".join(each.to_bytes(8, "little") for each in (first, *others))
        return int.from_bytes(blake2b(named, digest_size=8).digest(), "little") or 1

    @property
    def owner_epoch(self) -> int:
        """The newest engine life that owns a rank's memory, 0 = none: for `Revival.owner_epoch`, read behind stamps."""
        return max(table.owner_epoch for table in self._tables)

    def claim(self, epoch: int, next_seq: int = 1) -> None:
        """Make this engine life the owner on every rank, rank 0 first; as `Rank.claim`. Raises StaleEpoch."""
        for table in self._tables:
            table.claim(epoch, next_seq)

    def executed_through(self, epoch: int) -> int:
        """Steps of the epoch up to this one have finished on every rank."""
        return min(table.executed if table.owner_epoch == epoch else 0 for table in self._tables)

    def may_load(self, epoch: int, seq: int, part: int, load_after: int) -> bool:
        """Whether an external load may start, on whatever rank.

        Every rank has carried out the orders of its admission, which came with this part of the answer to step `seq`;
        its device has ended the zeroes and copies of this step and those before; it has finished step `load_after` of
        the same answer; and it may run no launch of an earlier engine life (`Rank.launches_ended`).

        While it may not, ask again when a rank has moved on; once it may, it may until the engine life ends. Start no
        load that is over already: its pages may be another request's.

        Raises StaleEpoch when a newer engine life owns a rank's pages: such a load never starts.
        """
        for table in self._tables:
            if table.owner_epoch > epoch:
                table.check_owner(epoch)
        return all(_may_load(table, epoch, seq, part, load_after) for table in self._tables)

    def agreed_stamps(self) -> tuple[int, ...]:
        """One stamp per block that every rank shows, 0 where they differ: for `OpenRequest.stamp_table`."""
        return agreed_stamps([table.reading() for table in self._tables])


def _may_load(table: StampTable, epoch: int, seq: int, part: int, load_after: int) -> bool:
    try:
        table.check_load(epoch, seq, part, load_after)
    except (FailedPrecondition, StaleEpoch):
        return False
    return True


def check_orders(orders: Orders, num_blocks: int, num_groups: int) -> None:
    """Raise InvalidArgument naming the column of an order that a pool of this size cannot mean."""
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
            remedy="block 0 is the null block; plan and pool must be of one registration",
        )


def _runs(groups: list[int]) -> Iterator[tuple[int, slice]]:
    """Runs of orders for one group, so that a mover gets many at once and the order stays."""
    start = 0
    for group, members in groupby(groups):
        end = start + len(list(members))
        yield group, slice(start, end)
        start = end
