"""The block pool of one replica: reference counts, keys and stamps of all blocks.

Columns have one entry per block id. A block is free (no reference) or held; in both cases it may have keys, under which
look-ups find it. Several requests may hold the same block. Several blocks may have the same key: a request that
computed content which is already cached keeps its own block, since block tables are append-only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvplane.base.stamps import MAX_COUNTER, MAX_GENERATION, Stamp, in_time
from kvplane.base.step import EVICTIONS, CacheEvent, EventKind, RemoveReason
from kvplane_core.face.cache_events import CacheEvents
from kvplane_core.face.columns import U32, U64, zeros
from kvplane_core.face.counters import Residency
from kvplane_core.face.interface import INSIDE
from kvplane_core.face.keys import NULL_BLOCK, Key
from kvplane_core.face.recovery import RecoveredState
from kvplane_core.spec.freelist import FreeList
from kvplane_core.spec.retained import RetainedBlocks


class BlockPool:
    """Allocates blocks, counts references, and maps keys to blocks.

    Args:
        num_blocks: number of blocks, the null block included.
        num_groups: number of KV cache groups.
        enable_caching: whether keys are registered.
        with_events: whether removed keys are reported as events.
    """

    def __init__(self, num_blocks: int, num_groups: int, enable_caching: bool, with_events: bool = True) -> None:
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.with_events = with_events
        self.free = FreeList(num_blocks)
        self.retained = RetainedBlocks(self)  # the free blocks that are evicted after those of `free`
        self.references = [0] * num_blocks
        self.key: list[Key | None] = [None] * num_blocks  # the primary key
        self.key_tokens = zeros(U32, num_blocks)  # tokens of the primary key's prefix; 0: no key
        self.key_step = zeros(U64, num_blocks)  # step that registered the key; tentative until it is executed
        self.more_keys: dict[int, dict[Key, int]] = {}  # keys of prefixes that end inside the block: their tokens
        self.index: dict[Key, list[int]] = {}  # the blocks that have a key, in the order in which they got it
        self.num_groups = num_groups
        self.stamp = zeros(U64, num_blocks)
        self.stamped: dict[int, None] = {}  # blocks whose stamp changed since the orders were last taken, in order
        self.generation = 0
        self.epoch = 0
        self._counter = 0
        self._stamp_base = 0  # generation and epoch of new stamps, packed
        self.step = 0  # number of the step being applied
        self.executed_through = 0
        self.registered: list[tuple[int, Key]] = []  # (block, key) since InFlightTracker last cleared it
        self.events = CacheEvents()
        self.reserved: list[int] = []  # blocks that are never released (sinks)
        self.busy: set[int] = set()  # blocks that loads of earlier engine lives may still write; each has one reference
        self.evicted_keys = [0] * num_groups
        self.residency = Residency.empty()
        self._age_base = 0  # added to this epoch's steps, so that a new epoch need not zero the columns
        self._born = [0] * num_blocks  # _age_base + step of the allocation; up to _age_base: none so far
        self._used = [0] * num_blocks  # the same for the last use
        self._last_use = [0] * num_blocks  # the same for the last step whose launch may use it for an earlier request

    # -- blocks ------------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated now; blocks that have a key but no reference are included."""
        return self.free.count + self.retained.num_free

    @property
    def is_unused(self) -> bool:
        """Whether no request holds a block. Reserved blocks, and those of `hold_busy`, do not count."""
        return self.num_free == self.num_blocks - 1 - len(self.reserved) - len(self.busy)

    def take(self, count: int, after: int = NULL_BLOCK) -> list[int]:
        """Allocate `count` blocks with one reference each; removes their keys. The caller must check `num_free`.

        `after`: the last block of the same table, for a `SplitPool`.
        """
        assert count <= self.num_free, f"{count} blocks are taken, {self.num_free} are free"
        return self._hand_out(self.retained.next_victims(count))

    def take_states(self, count: int) -> list[int]:
        """Do what `take` does, for states."""
        return self.take(count)

    def demand(self, counts: Sequence[int], hit: Sequence[Sequence[int]] = ()) -> int:
        """Return how many free blocks an allocation takes that needs these numbers of blocks, one per group.

        `hit`: per group, the blocks of a hit that it adopts; a number counts those of them that are free.
        """
        return self.in_blocks(counts)

    def in_blocks(self, counts: Sequence[int]) -> int:
        """Return how many blocks these numbers of blocks, one per group, are."""
        return sum(counts)

    def _hand_out(self, blocks: list[int]) -> list[int]:
        references, key, born, used = self.references, self.key, self._born, self._used
        lifetime, base = self.residency.lifetime, self._age_base
        now = base + self.step
        for block in blocks:
            if key[block] is not None:
                self._evict(block)
            assert not references[block], f"block {block} is in the free list and has references"
            references[block] = 1
            if born[block] > base:
                lifetime[(now - born[block]).bit_length()] += 1
            born[block] = used[block] = now
            self.restamp(block)
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block except the null block; blocks that were free leave the free list."""
        references, used, reuse_gap = self.references, self._used, self.residency.reuse_gap
        base, now = self._age_base, self._age_base + self.step
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if references[block] == 0:
                self.retained.leave_free(block)
            references[block] += 1
            reuse_gap[(now - max(used[block], base)).bit_length()] += 1
            used[block] = now

    def release(self, blocks: Iterable[int], left_window: bool = False) -> None:
        """Remove one reference from each block except the null block; blocks without references become free.

        Freed blocks join the free list in the given order: without a key at its front, with one at its back
        (`left_window`: where the policy puts such blocks). So of each kind, the first one in `blocks` is evicted first.
        """
        references, key = self.references, self.key
        unkeyed, keyed = list[int](), list[int]()
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            assert references[block] > 0, f"block {block} released without a reference"
            references[block] -= 1
            if references[block] == 0:
                (unkeyed if key[block] is None else keyed).append(block)
        if unkeyed:
            self.free.prepend(unkeyed)
        if keyed:
            (self.free.append_left_window if left_window else self.free.append)(self.retained.enter(keyed))

    def note_use(self, blocks: Iterable[int], step: int) -> None:
        """Record that launches or copies up to this step may still use the blocks; a request releases them now."""
        if step <= self.executed_through:
            return
        last_use, use = self._last_use, self._age_base + step
        for block in blocks:
            if block != NULL_BLOCK and last_use[block] < use:
                last_use[block] = use

    def last_use(self, blocks: Iterable[int]) -> int:
        """Return the last step in flight in which an earlier request may use one of these blocks; 0 if none."""
        step = max((self._last_use[block] for block in blocks), default=0) - self._age_base
        return step if step > self.executed_through else 0

    def reserve(self, count: int) -> list[int]:
        """Allocate `count` blocks that are never released."""
        blocks = self.take(count)
        self.reserved.extend(blocks)
        return blocks

    def hold_busy(self, blocks: Iterable[int]) -> None:
        """Hold blocks that a load of an earlier engine life (epoch) may still write, so that they are not allocated.

        Their keys are removed: the content is not known. Call it when an engine life begins, without requests.
        """
        for block in blocks:
            if block in self.busy or block in self.reserved:
                continue
            self.drop_keys(block, RemoveReason.UNVERIFIED)
            self.touch([block])
            self.busy.add(block)

    def release_busy(self, blocks: Sequence[int]) -> None:
        """Release blocks of `hold_busy`: their loads have ended, or belong to a request of this engine life (epoch)."""
        self.busy.difference_update(blocks)
        self.release(blocks)

    def count_evictable(self, blocks: Sequence[int]) -> int:
        """Count how many of these blocks are free; `num_free` falls by this number if a request adopts all of them."""
        references = self.references
        return sum(1 for block in blocks if block != NULL_BLOCK and references[block] == 0)

    def is_private(self, block: int) -> bool:
        """Whether the block has exactly one reference and no key: its request may then write into it."""
        return block != NULL_BLOCK and self.references[block] == 1 and self.key[block] is None

    # -- keys --------------------------------------------------------------------------------------------------------

    def find(self, domain: str, groups: Sequence[int], digest: bytes, horizon: int = INSIDE) -> list[int] | None:
        """Return, for each of the groups, the first block registered under the digest; None if some group has none.

        Keys that steps after `horizon` registered are ignored. Changes nothing.
        """
        found = []
        for group in groups:
            blocks = self.index.get((domain, group, digest), ())
            block = next((block for block in blocks if self.key_step[block] <= horizon), None)
            if block is None:
                return None
            found.append(block)
        return found

    def blocks_of(self, key: Key) -> list[int]:
        """Return all blocks that are registered under the key."""
        return list(self.index.get(key, ()))

    def key_of(self, block: int) -> Key | None:
        """Return the block's primary key, None if it has no key."""
        return self.key[block]

    def has_key(self, block: int, key: Key) -> bool:
        """Whether the block is registered under this key, as its primary key or a further one."""
        return self.key[block] == key or key in self.more_keys.get(block, ())

    def register(self, block: int, key: Key, num_tokens: int) -> None:
        """Add a key to the block, unless the block has it. The first key of a block is its primary key."""
        if self.has_key(block, key):
            return
        if self.key[block] is None:
            assert num_tokens > 0, f"block {block}: a primary key of 0 tokens"
            self.key[block] = key
            self.key_tokens[block] = num_tokens
            self.key_step[block] = self.step
        else:
            self.more_keys.setdefault(block, {})[key] = num_tokens
        self.index.setdefault(key, []).append(block)
        self.registered.append((block, key))

    def unregister(self, block: int) -> list[Key]:
        """Remove and return all keys of the block, the primary key first. Emits no event; the stamp is kept."""
        primary = self.key[block]
        if primary is None:
            return []
        keys = [primary, *self.more_keys.pop(block, ())]
        for key in keys:
            self.index[key].remove(block)
            if not self.index[key]:
                del self.index[key]
        self.free.forget(block)
        self.retained.note_lost(block, keys)
        self.key[block] = None
        self.key_tokens[block] = 0
        self.key_step[block] = 0
        return keys

    def drop_keys(self, block: int, reason: RemoveReason) -> bool:
        """Remove all keys of a block that is not being allocated; emits REMOVED and changes its stamp. False: none."""
        keys = self.unregister(block)
        if not keys:
            return False
        self.report_removed(keys, block, reason)
        self.restamp(block)
        return True

    def move_keys(self, source: int, target: int) -> list[tuple[Key, int]]:
        """Move all keys of the source block to the target; gives both a new stamp (version). Emits no event.

        Returns each key with the number of tokens of its prefix; an empty list if the source has no key.
        """
        assert self.key[target] is None, f"block {target} already has a key"
        moved: list[tuple[Key, int]] = []
        if self.key[source] is not None:
            num_tokens = [self.key_tokens[source], *self.more_keys.get(source, {}).values()]
            moved = list(zip(self.unregister(source), num_tokens, strict=True))
            for key, count in moved:
                self.register(target, key, count)
        self.restamp(source)
        self.restamp(target)
        return moved

    def reset(self) -> bool:
        """Remove all keys, emit CLEARED, keep the eviction order. False, and no change, if a request holds a block."""
        if not self.is_unused:
            return False
        self.retained.clear()
        self.clear()
        # Recovery accepts no stamp from before this one: a store may have keys that this pool does not have.
        self.restamp(NULL_BLOCK)
        if self.with_events:
            self.events.append(CacheEvent(EventKind.CLEARED))
        return True

    def clear(self) -> None:
        """Remove all keys of all blocks, and give these blocks a new stamp. Emits no events."""
        for block in self.keyed():
            self.unregister(block)
            self.restamp(block)

    def keyed(self) -> list[int]:
        """Return the blocks that have a key, ascending."""
        return [block for block, key in enumerate(self.key) if key is not None]

    def drop_unproven(self, shown: Sequence[int]) -> None:
        """Drop the keys whose content the page memory does not have any more; the others count as executed.

        `shown`: by block, the stamp in the memory. The memory has the content if this is the stamp of the pool and was
        issued after the last reset of the memory, and if the step that registered the key is executed.
        """
        for block in self.keyed():
            proven = block < len(shown) and shown[block] == self.stamp[block]
            proven = proven and (not shown[NULL_BLOCK] or in_time(shown[block]) > in_time(shown[NULL_BLOCK]))
            if proven and self.key_step[block] <= self.executed_through:
                self.key_step[block] = 0
            else:
                self.drop_keys(block, RemoveReason.UNVERIFIED)

    def _evict(self, block: int) -> None:
        keys = self.unregister(block)
        for _, group, _ in keys:
            self.evicted_keys[group] += 1
        idle = self._age_base + self.step - max(self._used[block], self._age_base)
        self.residency.idle_before_evict[idle.bit_length()] += 1
        self.report_removed(keys, block, EVICTIONS[block in self.free.let_go])

    def report_removed(self, keys: Iterable[Key], block: int, reason: RemoveReason) -> None:
        """Emit REMOVED events for keys that were removed from the block."""
        if self.with_events:
            self.events.removed(block, keys, reason)

    def count_keys(self) -> int:
        """Count the distinct (domain, group, digest) keys."""
        return len(self.index)

    def count_keys_of(self, group: int) -> int:
        """Count the distinct (domain, digest) keys of a group."""
        return sum(1 for key in list(self.index) if key[1] == group)  # metrics read it at any time

    @property
    def num_evictable(self) -> int:
        """Number of free blocks with a key."""
        return sum(1 for block in self.keyed() if not self.references[block])

    def install(self, state: RecoveredState) -> None:
        """Install recovered keys in this pool, which was not used; it takes ownership of the columns."""
        assert not self.index, "a pool with keys needs no recovery"
        stamps_of_reserved = [(block, self.stamp[block]) for block in self.reserved]
        self.key_tokens, self.stamp = state.key_tokens, state.stamp
        for block, stamp in stamps_of_reserved:
            self.stamp[block] = stamp
        for pair, block, digest in zip(state.pair.tolist(), state.block.tolist(), state.digest, strict=True):
            self.key[block] = key = (*state.names[pair], digest.tobytes())
            self.index.setdefault(key, []).append(block)
        self.free.rebuild(state.free.tolist(), state.num_bare)
        for block, key in state.further:
            self.register(block, key, 0)
        self.registered.clear()

    # -- stamps and ages ---------------------------------------------------------------------------------------------

    def restamp(self, block: int) -> None:
        """Give the block a new stamp: a version number of its content that was never used in this page memory."""
        self.stamp[block] = self.draw()
        self.stamped[block] = None

    def draw(self) -> int:
        """Return a version number that was never used in this page memory, nor in the slots of its tiers."""
        if self._counter == MAX_COUNTER:
            self._next_generation()
        self._counter += 1
        return self._stamp_base + self._counter

    def _next_generation(self) -> None:
        """Raise the generation number, a part of each stamp, since the counter in the stamps is at its maximum."""
        assert self.generation < MAX_GENERATION, "the stamps of this epoch are used up"
        self.generation, self._counter = self.generation + 1, 0
        self._stamp_base = Stamp(self.generation, self.epoch, 0).pack()

    def begin_epoch(self, epoch: int) -> None:
        """Begin an engine life numbered `epoch`: stamps contain this number from now on, and steps count from 1.

        Remaining keys count as executed, since the stamps of their blocks were verified.
        """
        assert epoch > self.epoch, f"epoch {epoch} after {self.epoch}: stamps would repeat"
        self.epoch, self.generation = epoch, 0
        self._stamp_base = Stamp(0, epoch, 0).pack()
        self._age_base += self.step
        self._counter = self.step = self.executed_through = 0
        self.residency = Residency.empty()
        self.stamped.clear()
