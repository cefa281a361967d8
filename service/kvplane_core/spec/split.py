"""Split pages: a pool whose blocks are those of attention, and in which a state takes several consecutive ones.

A *superblock* is `blocks_per_state` consecutive blocks, such as 34 blocks of 16 tokens under a state of Qwen3-Next. A
state takes a whole one; blocks of attention are cut from one, and share it with those of other requests and groups:

    superblock     0           1            2               3
    blocks      0 1 2 3     4 5 6 7     8 9 10 11     12 13 14 15
                 null        state       a  b  -  c      (whole)        a, b, c are held, - is free: slack

The first block of a superblock names the state in it. Of a superblock under a state, the other blocks are neither free
nor held. So every rule of the pool holds for blocks as for those of an ordinary pool, with one addition: two names, of
a state and of a block of attention, can have the same memory. It never has two contents with a key, because

- a superblock changes between the two only while none of its blocks is held, and loses all its keys then;
- each of its blocks gets another stamp before a state is written: what a store still has of them proves nothing. The
  first block is handed out first, so that the state's stamp changes before any part of the state is overwritten. A new
  engine life relies on no stamp that the one before it ordered.

Free blocks of a superblock that is not whole are of use for attention only: without a key they are slack. A table
continues behind its last block, so that blocks of one request stay together, and become whole together. Where that is
not possible, a whole superblock is cut, the one that was used least recently, except

- while more than 1/SLACK of all blocks are slack: then one of these is taken;
- while fewer than 1/SCARCE of the superblocks are whole: then slack, and behind it what is cached in cut superblocks.
  It was used more recently than what is cached in whole ones, but these are needed for states.

A superblock is as recent as the block of it that was released last, a state is not: so that states are not evicted
before the blocks which are useless without them, they count as used when their request ends (`renew_states`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvplane.base.groups import ReplicaSpec
from kvplane.base.step import RemoveReason
from kvplane_core.face.keys import NULL_BLOCK
from kvplane_core.face.recovery import RecoveredState
from kvplane_core.face.setup import SLACK, state_groups
from kvplane_core.spec.freelist import FreeList
from kvplane_core.spec.pool import BlockPool

SCARCE = 8
NEVER = 1 << 62  # a number of blocks that no pool has free


class SplitPool(BlockPool):
    """A block pool in which the blocks of states are superblocks."""

    free: SplitList

    def __init__(self, spec: ReplicaSpec) -> None:
        super().__init__(spec.num_blocks, len(spec.groups), spec.enable_caching, spec.events)
        self.size = spec.blocks_per_state
        self.state_groups = state_groups(spec)
        self.free = SplitList(self, self.size)
        self.reserved.extend(range(1, self.size))  # under the null block: a launch may write the null state
        for block in self.reserved:
            self.references[block] = 1

    @property
    def is_unused(self) -> bool:
        """Whether no request holds a block."""
        return sum(self.free.held[1:]) == len(self.busy)

    def take(self, count: int, after: int = NULL_BLOCK) -> list[int]:
        """As in `BlockPool`: blocks of attention, if possible behind `after`, the last block of the same table."""
        return self._hand_out(self.free.pop_behind(count, after))

    def take_states(self, count: int) -> list[int]:
        """Allocate superblocks for states; returns their first blocks. The caller must check `demand`."""
        return self._hand_out([self.free.pop_whole() for _ in range(count)])

    def demand(self, counts: Sequence[int], hit: Sequence[Sequence[int]] = ()) -> int:
        """As in `BlockPool`; NEVER, if too few superblocks are whole for the states.

        Blocks of the allocation that follows are taken so that superblocks for its states are left.
        """
        states = sum(counts[group] for group in self.state_groups)
        cut = {
            block // self.size
            for group, blocks in enumerate(hit)
            if group not in self.state_groups
            for block in blocks
            if not self.free.held[block // self.size]
        }
        if states > self.free.whole.count - len(cut):
            return NEVER
        self.free.wanted = states
        return self.in_blocks(counts)

    def in_blocks(self, counts: Sequence[int]) -> int:
        """Return how many blocks these numbers of blocks and states, one per group, are."""
        return sum(counts) + (self.size - 1) * sum(counts[group] for group in self.state_groups)

    def last_use(self, blocks: Iterable[int]) -> int:
        """As in `BlockPool`, of all blocks that have memory in common with one of these."""
        overlapping = set[int]()
        for block in blocks:
            first = block - block % self.size
            overlapping.update(range(first, first + self.size) if self.free.has_state[first // self.size] else (block,))
            overlapping.add(first)
        return super().last_use(overlapping)

    def hold_busy(self, blocks: Iterable[int]) -> None:
        """As in `BlockPool`. The first block of a superblock may be a state, also if another load writes others of it:
        none of them is handed out before the load of the first one has ended.

        Their blocks without a key get other stamps: those that the ended life gave them may be in no memory.
        """
        fresh = {block for block in blocks if not self.references[block]} - {NULL_BLOCK}
        for block in sorted(fresh):
            self.drop_keys(block, RemoveReason.UNVERIFIED)
        for number in sorted({block // self.size for block in fresh}):
            if not self.free.held[number]:  # else it stays what it is
                self._make(number, is_state=number * self.size in fresh)
        super().hold_busy(sorted(fresh))
        for number in sorted({block // self.size for block in self.busy}):
            for block in self.free.blocks(number):
                if self.key[block] is None:
                    self.restamp(block)

    def begin_epoch(self, epoch: int) -> None:
        """As in `BlockPool`. What a state gave other stamps to may have the old ones: the ended life need not have
        carried out its last orders. If the state still has its key, it has.
        """
        super().begin_epoch(epoch)
        for number, held in enumerate(self.free.held):
            if not held and not self.key_tokens[number * self.size]:
                self.free.has_state[number] = False

    # -- superblocks -------------------------------------------------------------------------------------------------

    def empty(self, first: int) -> None:
        """Evict all keys of the superblock that begins with this block."""
        for block in range(first, first + self.size):
            if self.key[block] is not None:
                self._evict(block)
                self.restamp(block)

    def assume(self, blocks: Sequence[int]) -> None:
        """Prepare to hold blocks of an image, each of which may be a state or not.

        The first block of a superblock counts as a state if nothing else of the superblock has a key or is among them.
        """
        given = set(blocks) - {NULL_BLOCK}
        for block in sorted(given):
            first = block - block % self.size
            if self.references[block] or (block == first and self.key[block] is not None):
                continue  # what holds it, or its key, has said what it is
            others = set(range(first + 1, first + self.size))
            shared = given & others or any(self.references[other] or self.key[other] is not None for other in others)
            self.assign([block], is_state=block == first and not shared)

    def assign(self, blocks: Iterable[int], is_state: bool) -> None:
        """Prepare to hold blocks of earlier engine lives that are states, or are not."""
        for block in blocks:
            number = block // self.size
            if block == NULL_BLOCK or bool(self.free.has_state[number]) == is_state:
                continue
            if self.free.held[number]:
                assert not is_state, f"block {block} is held as a block of attention"
                self.free.recut(number)
            else:
                self._make(number, is_state)

    def _make(self, number: int, is_state: bool) -> None:
        """Let a whole superblock have a state, or blocks of attention: what it cannot be any more has no key and no
        proof.
        """
        if bool(self.free.has_state[number]) != is_state:
            for block in self.free.blocks(number):
                if not self.drop_keys(block, RemoveReason.DROPPED) and block % self.size:
                    self.restamp(block)
            self.free.has_state[number] = is_state

    def install(self, state: RecoveredState) -> None:
        """As in `BlockPool`; also records which superblocks have states."""
        for pair, block in zip(state.pair.tolist(), state.block.tolist(), strict=True):
            if state.names[pair][1] in self.state_groups:
                self.free.has_state[block // self.size] = True
        super().install(state)


class SplitList(FreeList):
    """The free blocks of a split pool: whole superblocks in the order of eviction, and the free blocks of all others.

    A superblock becomes whole when the last of its blocks is released, so that this order is that of the last use of
    its youngest block.

    Attributes:
        whole: superblocks, by number, of which no block is held.
        bare: free blocks of all others that have no key.
        cached: those that have a key, in the order of their release.
        held: by superblock, how many of its blocks are held; a state counts as one.
        has_state: by superblock, whether a state took it last; its other blocks are not handed out until it is cut.
        wanted: states that the present allocation may still take.
    """

    def __init__(self, pool: SplitPool, size: int) -> None:
        self._pool, self._size = pool, size
        self.whole = FreeList(pool.num_blocks // size)
        self.bare, self.cached = FreeList(pool.num_blocks), FreeList(pool.num_blocks)
        self._list_of: list[FreeList | None] = [None] * pool.num_blocks
        self.bare.rebuild(())
        self.cached.rebuild(())
        self.held = [0] * (pool.num_blocks // size)
        self.held[0] = size - 1
        self.has_state = bytearray(pool.num_blocks // size)
        self.wanted = 0

    def __iter__(self) -> Iterator[int]:
        """Yield the block ids: those of cut superblocks, without a key first, then whole superblocks; each in eviction
        order.
        """
        yield from self.bare
        yield from self.cached
        for number in self.whole:
            yield from self.blocks(number)

    @property
    def count(self) -> int:
        """Number of free blocks, those of whole superblocks included."""
        return self.bare.count + self.cached.count + self.whole.count * self._size

    def blocks(self, number: int) -> range:
        """Return the blocks of a superblock."""
        return range(number * self._size, (number + 1) * self._size)

    # -- blocks that are handed out ----------------------------------------------------------------------------------

    def pop(self, count: int) -> list[int]:
        """Remove and return `count` blocks for attention."""
        return self.pop_behind(count, NULL_BLOCK)

    def pop_behind(self, count: int, after: int) -> list[int]:
        """Remove and return `count` blocks for attention, if possible each behind the one before, the first behind
        `after`.
        """
        assert count <= self.count, f"{count} blocks requested, {self.count} free"
        taken = []
        for _ in range(count):
            after = self._choose(after + 1)
            taken.append(after)
        return taken

    def pop_whole(self) -> int:
        """Remove a superblock for a state; returns its first block."""
        (number,) = self.whole.pop(1)
        blocks = self.blocks(number)
        self._pool.empty(blocks[0])
        if not self.has_state[number]:  # otherwise no key was registered for the others since the last state
            for block in blocks:
                self._pool.restamp(block)
            self.has_state[number] = True
        self.held[number] = 1
        self.wanted = max(self.wanted - 1, 0)
        return blocks[0]

    def _choose(self, following: int) -> int:
        """Take a block, if possible this one, which follows the last one in the same superblock."""
        bare, whole = self.bare, self.whole.count
        if following % self._size and self._list_of[following] is bare:
            block = following
        elif bare.count * SLACK > self._pool.num_blocks:
            block = next(iter(bare))
        elif whole > self.wanted and whole * SCARCE > len(self.held):
            return self._cut()
        elif bare.count or self.cached.count:
            block = next(iter(bare if bare.count else self.cached))
        else:
            return self._cut()
        self._remove(block)
        self.held[block // self._size] += 1
        return block

    def _cut(self) -> int:
        (number,) = self.whole.pop(1)
        first, *others = self.blocks(number)
        self._pool.empty(first)
        self.has_state[number] = False
        self.held[number] = 1
        self._add(others)
        return first

    # -- blocks that are held again, or released ---------------------------------------------------------------------

    def remove(self, block: int) -> None:
        """Remove this block, which must be free, or under a state of an earlier engine life: it is held again."""
        number, of_state = block // self._size, self.has_state[block // self._size]
        if not self.held[number]:
            self.whole.remove(number)
        if not of_state:
            if self.held[number]:
                self._remove(block)
            else:
                self._add([other for other in self.blocks(number) if other != block])
        self.held[number] += 1

    def recut(self, number: int) -> None:
        """Make the blocks behind the first one free: it turned out that no state holds the superblock."""
        self.has_state[number] = False
        self._add([block for block in self.blocks(number)[1:] if not self._pool.references[block]])

    def prepend(self, blocks: Sequence[int]) -> None:
        """Release blocks without a key; blocks[0] is evicted next."""
        for block in reversed(blocks):
            self._release(block, self.bare)

    def append(self, blocks: Iterable[int]) -> None:
        """Release blocks with a key; blocks[-1] is evicted last."""
        for block in blocks:
            self._release(block, self.cached)

    def forget(self, block: int) -> None:
        """Put a free block that loses its keys before those of cut superblocks that have one."""
        if self._list_of[block] is self.cached:
            self._remove(block)
            self._put(block, self.bare)

    def _release(self, block: int, joins: FreeList) -> None:
        number = block // self._size
        if self._list_of[block] is not None:  # it is released together with the first block, which came before it
            self._remove(block)
        self.held[number] -= 1
        if self.held[number] and self.has_state[number]:  # a load of an earlier life, and others wrote the same memory
            if block % self._size == 0:
                self.recut(number)
                self._put(block, joins)
        elif self.held[number]:
            self._put(block, joins)
        else:
            blocks = self.blocks(number)
            for other in () if self.has_state[number] else blocks:
                if other != block:
                    self._remove(other)
            has_key = any(self._pool.key_tokens[blocks[0] : blocks[-1] + 1])
            (self.whole.append if has_key else self.whole.prepend)([number])

    def _add(self, blocks: Sequence[int]) -> None:
        """Add the free blocks of a superblock that is not whole any more."""
        for block in blocks:
            self._put(block, self.bare if self._pool.key[block] is None else self.cached)

    def _put(self, block: int, joins: FreeList) -> None:
        joins.append([block])
        self._list_of[block] = joins

    def _remove(self, block: int) -> None:
        joined = self._list_of[block]
        assert joined is not None, f"block {block} is not free, or its superblock is whole"
        joined.remove(block)
        self._list_of[block] = None

    # -- the whole list ----------------------------------------------------------------------------------------------

    def put_unkeyed_first(self, key_tokens: Sequence[int]) -> None:
        """Move superblocks without a key to the front, as in `FreeList`; of other free blocks they always are."""
        self.whole.put_unkeyed_first(
            [max(key_tokens[block] for block in self.blocks(one)) for one in range(len(self.held))]
        )

    def rebuild(self, order: Iterable[int], num_first: int | None = None) -> None:
        """Replace the list by that of a pool of which no block is held: in the order of the youngest block."""
        youngest = dict.fromkeys(block // self._size for block in reversed(list(order)))
        self.whole.rebuild(reversed(youngest))

    def state(self) -> list[Any]:
        """Return what the list has in addition to the order of its blocks; `load` takes it."""
        return [self.bare.count, self.cached.count, bytes(self.has_state)]

    def load(self, order: Sequence[int], num_bare: int, num_cached: int, has_state: bytes) -> None:
        """Replace the content of the list, after the references of the pool."""
        num_loose = num_bare + num_cached
        if len(has_state) != len(self.held) or (len(order) - num_loose) % self._size:
            raise ValueError(f"{len(has_state)} superblocks, {len(order)} free blocks, {num_loose} of them loose")
        self.has_state = bytearray(has_state)
        self.whole.rebuild([block // self._size for block in order[num_loose :: self._size]])
        self._list_of = [None] * self._pool.num_blocks
        for blocks, joins in ((order[:num_bare], self.bare), (order[num_bare:num_loose], self.cached)):
            joins.rebuild(blocks)
            for block in blocks:
                self._list_of[block] = joins
        self.held = [
            sum(map(bool, map(self._pool.references.__getitem__, self.blocks(one)))) for one in range(len(self.held))
        ]

    def list_of(self, block: int) -> FreeList | None:
        """Return the list of cut superblocks in which the block is: `bare`, `cached` or none."""
        return self._list_of[block]
