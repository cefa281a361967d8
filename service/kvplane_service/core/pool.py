"""The block pool of one replica: references, keys and stamps of every block, in columns by block id.

A block is free (no reference) or held; either way it may carry keys, under which look-ups find it. Blocks are shared by
references, never copied; the same content may lie in several blocks under one key, since tables are append-only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvplane.base.stamps import MAX_COUNTER, MAX_GENERATION, Stamp
from kvplane.base.step import CacheEvent, EventKind, RemoveReason
from kvplane_service.core.cache_events import CacheEvents
from kvplane_service.core.columns import U32, U64, Ints, put_range, put_zeros, zeros
from kvplane_service.core.counters import Residency
from kvplane_service.core.dropping import forget_all_keys, keyed_blocks
from kvplane_service.core.freelist import FreeList
from kvplane_service.core.keys import NULL_BLOCK, UNTOUCHED, Key
from kvplane_service.core.keytable import KeyTable
from kvplane_service.core.refusals import Refusals
from kvplane_service.core.regained import Regained

INSIDE = 1 << 62  # look-up horizon of the replica's own requests: tentative keys are seen


class BlockPool:
    """Hands out blocks, counts references, and keeps the map from keys to blocks.

    Args:
        num_blocks: blocks with the null block.
        num_groups: KV cache groups.
        enable_caching: off: no key is ever registered.
        with_events: tell of removed keys.
    """

    def __init__(self, num_blocks: int, num_groups: int, enable_caching: bool, with_events: bool = True) -> None:
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.with_events = with_events
        self.free = FreeList(num_blocks)
        self.references = [0] * num_blocks
        self.key: list[Key | None] = [None] * num_blocks  # the primary key, see `key_of`
        self.key_tokens = zeros(U32, num_blocks)  # tokens of the prefix that the primary key names, 0 = no key
        self.key_step = zeros(U64, num_blocks)  # step that registered it; tentative while that has not been executed
        self.more_keys: dict[int, dict[Key, int]] = {}  # further keys: prefixes that end inside the block, their tokens
        self.index: dict[str, list[dict[bytes, int | list[int]]]] = {}
        self.untouched: KeyTable | None = None  # what came back from a store; such keys are not in `index`
        self.num_groups = num_groups
        self.stamp = zeros(U64, num_blocks)
        self.stamped: dict[int, None] = {}  # blocks whose stamp changed since the last drain, in order
        self.generation = 0
        self.epoch = 0
        self._counter = 0
        self._stamp_base = 0  # a stamp without its counter
        self.step = 0  # the step under way
        self.executed_through = 0
        self.registered: list[tuple[int, Key]] = []  # since the last drain, by the ledger
        self.events = CacheEvents()
        self.refusals = Refusals()
        self.reserved: list[int] = []  # blocks held for the life of the pool (sinks)
        self.busy: set[int] = set()  # blocks that loads of earlier engine lives may still write; one reference each
        self.num_evictable = 0  # free blocks that carry a key
        self.evicted_keys = [0] * num_groups
        self.residency = Residency.empty()
        self._age_base = 0  # of this epoch: ages count from it, so that a new epoch need not zero their columns
        self._born = [0] * num_blocks  # _age_base + the step that handed the block out; up to _age_base: none did
        self._used = [0] * num_blocks  # ... that used it last
        self._last_use = [0] * num_blocks  # ... that may read or write it for an earlier owner

    # -- blocks ------------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        return self.free.count

    @property
    def is_unused(self) -> bool:
        """Whether no request holds a block. Busy blocks do not count: they carry no key."""
        return self.num_free == self.num_blocks - 1 - len(self.reserved) - len(self.busy)

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks with one reference each; what they held is forgotten."""
        blocks = self.free.pop(count)
        references, key, born, used = self.references, self.key, self._born, self._used
        lifetime, base = self.residency.lifetime, self._age_base
        now = base + self.step
        for block in blocks:
            if key[block] is not None:
                self._evict(block)
            assert not references[block], f"block {block} is handed out and held"
            references[block] = 1
            if born[block] > base:
                lifetime[(now - born[block]).bit_length()] += 1
            born[block] = used[block] = now
            self.restamp(block)
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block but the null block; free ones leave the free list."""
        references, used, reuse_gap = self.references, self._used, self.residency.reuse_gap
        base, now = self._age_base, self._age_base + self.step
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if references[block] == 0:
                self.free.remove(block)
                key = self.key[block]
                self.num_evictable -= key is not None
                if block in self.refusals.by_block:
                    self.refusals.forget_blocks([block])
                if key is UNTOUCHED:
                    self._move_to_index(block)
            references[block] += 1
            reuse_gap[(now - max(used[block], base)).bit_length()] += 1
            used[block] = now

    def release(self, blocks: Iterable[int]) -> None:
        """Drop a reference of each block; what becomes free joins the free list in the given order.

        Blocks without a key go to the front, keyed ones to the back: the first given is evicted first at either end.
        """
        references, key = self.references, self.key
        unkeyed: list[int] = []
        keyed: list[int] = []
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            assert references[block] > 0, f"block {block} released without a reference"
            references[block] -= 1
            if references[block] == 0:
                (unkeyed if key[block] is None else keyed).append(block)
        self.num_evictable += len(keyed)
        if self.refusals.by_block:
            self.refusals.forget_blocks(keyed)
        self.free.prepend(unkeyed)
        self.free.append(keyed)

    def note_use(self, blocks: Iterable[int], step: int) -> None:
        """The launch or the copies of this step may still read or write blocks that their owner gives up now."""
        if step <= self.executed_through:
            return
        last_use, use = self._last_use, self._age_base + step
        for block in blocks:
            if block != NULL_BLOCK and last_use[block] < use:
                last_use[block] = use

    def last_use(self, blocks: Iterable[int]) -> int:
        """The last step in flight that may read or write one of these blocks for an earlier owner; 0 = none."""
        step = max((self._last_use[block] for block in blocks), default=0) - self._age_base
        return step if step > self.executed_through else 0

    def reserve(self, count: int) -> list[int]:
        """Hold blocks for the life of the pool."""
        blocks = self.take(count)
        self.reserved.extend(blocks)
        return blocks

    def hold_busy(self, blocks: Iterable[int]) -> None:
        """Keep these blocks from being handed out: a load of an earlier engine life may still write them.

        Their keys go, since what the pages hold is not known. For a new engine life, in which no request has blocks.
        """
        for block in blocks:
            if block in self.busy or block in self.reserved:
                continue
            self.drop_keys(block, RemoveReason.UNVERIFIED)
            self.touch([block])
            self.busy.add(block)

    def release_busy(self, blocks: Sequence[int]) -> None:
        """The loads into these busy blocks are over, or belong to a request of this engine life from now on."""
        self.busy.difference_update(blocks)
        self.release(blocks)

    def count_evictable(self, blocks: Sequence[int]) -> int:
        """How many of these blocks are free now, so that adopting them takes from the free count."""
        references = self.references
        return sum(1 for block in blocks if block != NULL_BLOCK and references[block] == 0)

    def is_private(self, block: int) -> bool:
        """Whether its one owner may write into it: exactly one reference and no key."""
        return block != NULL_BLOCK and self.references[block] == 1 and self.key[block] is None

    # -- keys --------------------------------------------------------------------------------------------------------

    def find(self, domain: str, groups: Sequence[int], digest: bytes, horizon: int = INSIDE) -> list[int] | None:
        """The first block registered under the digest in each of the groups, or None if one lacks it.

        Keys registered by steps after `horizon` are not seen.
        """
        maps = self.index.get(domain)
        if maps is None:
            return None
        found = []
        for group in groups:
            entry = maps[group].get(digest)
            if entry is None:
                if self.untouched is None:
                    return None
                entry = self.untouched.find(domain, group, digest)
                if entry == NULL_BLOCK:
                    return None
            block = entry if isinstance(entry, int) else entry[0]
            if self.key_step[block] > horizon:
                block = self._first_within(entry, horizon)
                if block == NULL_BLOCK:
                    return None
            found.append(block)
        return found

    def blocks_of(self, key: Key) -> list[int]:
        """All blocks registered under the key."""
        maps = self.index.get(key.domain)
        entry = maps[key.group].get(key.digest, NULL_BLOCK) if maps is not None else NULL_BLOCK
        if entry == NULL_BLOCK and self.untouched is not None:
            entry = self.untouched.find(*key)
        blocks = [entry] if isinstance(entry, int) else list(entry)
        return blocks if blocks != [NULL_BLOCK] else []

    def key_of(self, block: int) -> Key | None:
        """The block's primary key."""
        key = self.key[block]
        if key is UNTOUCHED:
            assert self.untouched is not None, f"the key of block {block} is nowhere"
            return self.untouched.key_of(block)
        return key

    def _first_within(self, entry: int | list[int], horizon: int) -> int:
        blocks = [entry] if isinstance(entry, int) else entry
        return next((block for block in blocks if self.key_step[block] <= horizon), NULL_BLOCK)

    def has_key(self, block: int, key: Key) -> bool:
        """Whether the block is registered under the key, as its primary or a further one."""
        return self.key_of(block) == key or key in self.more_keys.get(block, ())

    def register(self, block: int, key: Key, num_tokens: int) -> None:
        """Let the block be found under the key; the first key of a block is its primary one."""
        if self.has_key(block, key):
            return
        if self.key[block] is None:
            assert num_tokens > 0, f"block {block}: a first key that names no token"
            self.key[block] = key
            self.key_tokens[block] = num_tokens
            self.key_step[block] = self.step
            self.num_evictable += self.references[block] == 0
        else:
            if self.key[block] is UNTOUCHED:
                self._move_to_index(block)
            self.more_keys.setdefault(block, {})[key] = num_tokens
        if self.untouched is not None:
            before = self.untouched.find(*key)
            if before != NULL_BLOCK:
                self._move_to_index(before)
        self._add_to_index(block, key)
        self.registered.append((block, key))

    def restore(self, regained: Regained) -> None:
        """Take back what was proven, see `recovery`; the pool is unused."""
        assert not self.index, "a pool with keys needs no recovery"
        stamps_of_reserved = [(block, self.stamp[block]) for block in self.reserved]
        self.key, self.key_tokens, self.stamp = regained.key, regained.key_tokens, regained.stamp
        for block, stamp in stamps_of_reserved:
            self.stamp[block] = stamp
        self.free.replace(regained.links)
        table = regained.table
        if not table.num_keys:
            return
        self.untouched, self.num_evictable = table, table.num_keys
        self.index = {domain: [{} for _ in range(self.num_groups)] for domain in table.domains()}
        for blocks in regained.shared:
            for block in blocks:
                self._move_to_index(block)
        for block, key in regained.further:
            self.register(block, key, 0)
        self.registered.clear()

    def _move_to_index(self, block: int) -> None:
        """The block's key is no longer one of those that nobody touched."""
        self.key[block] = key = self._take_untouched(block)
        self._add_to_index(block, key)

    def _take_untouched(self, block: int) -> Key:
        table = self.untouched
        assert table is not None, f"the key of block {block} is nowhere"
        key = table.take(block)
        self._let_go_of_empty_table()
        return key

    def _let_go_of_empty_table(self) -> None:
        if self.untouched is not None and not self.untouched.num_keys:
            self.untouched = None
            self.index = {domain: maps for domain, maps in self.index.items() if any(maps)}

    def _add_to_index(self, block: int, key: Key) -> None:
        if key.digest in self.refusals.by_digest:
            self.refusals.forget_keys((key,))
        maps = self.index.get(key.domain)
        if maps is None:
            maps = self.index[key.domain] = [{} for _ in range(self.num_groups)]
        by_digest = maps[key.group]
        entry = by_digest.get(key.digest)
        if entry is None:
            by_digest[key.digest] = block
        elif isinstance(entry, int):
            by_digest[key.digest] = [entry, block]
        else:
            entry.append(block)

    def prefer(self, key: Key, blocks: Sequence[int]) -> None:
        """Let the blocks of a key be hit in this order; nothing when it has others."""
        maps = self.index.get(key.domain)
        entry = maps[key.group].get(key.digest, NULL_BLOCK) if maps is not None else NULL_BLOCK
        if not isinstance(entry, int) and sorted(entry) == sorted(blocks):
            entry[:] = blocks
            self.refusals.clear()

    def unregister(self, block: int) -> list[Key]:
        """Take every key from the block, primary first; the page is as if it held nothing. No event, no stamp."""
        primary = self.key[block]
        if primary is None:
            return []
        if primary is UNTOUCHED:
            keys = [self._take_untouched(block)]
        else:
            keys = [primary, *self.more_keys.pop(block, ())]
            for key in keys:
                self._forget(block, key)
        if self.refusals.by_digest:
            self.refusals.forget_keys(keys)
        self.key[block] = None
        self.key_tokens[block] = 0
        self.key_step[block] = 0
        self.num_evictable -= self.references[block] == 0
        return keys

    def unregister_untouched(self, blocks: list[int]) -> Iterator[tuple[str, int, Sequence[bytes], Sequence[int]]]:
        """As `unregister` for blocks whose keys nobody touched since they came back: by domain and group."""
        table = self.untouched
        assert table is not None, "there are no such keys"
        taken = list(table.take_all(blocks))
        self._let_go_of_empty_table()
        self.lose_primary("", blocks)
        yield from taken

    def lose_primary(self, domain: str, blocks: list[int]) -> None:
        """These blocks' only keys, of this domain, have been taken out of the index."""
        self.refusals.clear()
        key = self.key
        for block in blocks:
            key[block] = None
        put_zeros(self.key_tokens, blocks)
        put_zeros(self.key_step, blocks)
        self.num_evictable -= list(map(self.references.__getitem__, blocks)).count(0)
        self._drop_empty(domain)

    def _drop_empty(self, domain: str) -> None:
        if self.untouched is None and domain in self.index and not any(self.index[domain]):
            del self.index[domain]

    def _forget(self, block: int, key: Key) -> None:
        maps = self.index[key.domain]
        entry = maps[key.group][key.digest]
        if isinstance(entry, int):
            assert entry == block, f"key of block {block} leads to block {entry}"
            del maps[key.group][key.digest]
            self._drop_empty(key.domain)
            return
        entry.remove(block)
        if len(entry) == 1:
            maps[key.group][key.digest] = entry[0]

    def drop_keys(self, block: int, reason: RemoveReason) -> bool:
        """Take every key from a block that stays where it is; restamps it and tells. False if it had none."""
        keys = self.unregister(block)
        if not keys:
            return False
        self.tell_removed(keys, block, reason)
        self.restamp(block)
        return True

    def move_keys(self, source: int, target: int) -> list[tuple[Key, int]]:
        """Let the content under the source's keys live in the target; both are restamped, and the caller tells of it.

        Returns the keys, and the tokens of the prefixes that they name.
        """
        assert self.key[target] is None, f"block {target} already has a key"
        moved: list[tuple[Key, int]] = []
        if self.key[source] is not None:  # it may have been dropped meanwhile
            num_tokens = [self.key_tokens[source], *self.more_keys.get(source, {}).values()]
            moved = list(zip(self.unregister(source), num_tokens, strict=True))
            for key, count in moved:
                self.register(target, key, count)
        self.restamp(source)
        self.restamp(target)
        return moved

    def reset(self) -> bool:
        """Forget every key, unless a request holds a block; the order of the free list stays."""
        if not self.is_unused:
            return False
        self.clear()
        # A store may bring back keys that are not known here: nothing that was stamped before this proves any of them.
        self.restamp(NULL_BLOCK)
        if self.with_events:
            self.events.append(CacheEvent(EventKind.CLEARED))
        return True

    def clear(self) -> None:
        """Take every key from every block and restamp them, without an event."""
        for blocks in keyed_blocks(self):
            forget_all_keys(self, blocks)
            self.stamped.update(dict.fromkeys(blocks.tolist()))

    def _evict(self, block: int) -> None:
        keys = self.unregister(block)
        for key in keys:
            self.evicted_keys[key.group] += 1
        idle = self._age_base + self.step - max(self._used[block], self._age_base)
        self.residency.idle_before_evict[idle.bit_length()] += 1
        self.tell_removed(keys, block, RemoveReason.EVICTED)

    def tell_removed(self, keys: Iterable[Key], block: int, reason: RemoveReason) -> None:
        """The block has lost these keys."""
        if self.with_events:
            self.events.removed(block, keys, reason)

    def count_keys(self) -> int:
        """Distinct (domain, group, digest) keys."""
        return sum(self.count_keys_of(group) for group in range(self.num_groups))

    def count_untouched(self) -> int:
        """Keys that came back from a store and that nobody touched since."""
        return self.untouched.num_keys if self.untouched is not None else 0

    def count_keys_of(self, group: int) -> int:
        """Distinct (domain, digest) keys of a group."""
        untouched = self.untouched.count_keys(group) if self.untouched is not None else 0
        return untouched + sum(len(maps[group]) for maps in list(self.index.values()))  # metrics read it at any time

    @property
    def has_keys(self) -> bool:
        """Whether any block carries a key."""
        return bool(self.index or self.untouched)

    # -- stamps and ages ---------------------------------------------------------------------------------------------

    def restamp(self, block: int) -> None:
        """Give the page a content version that was never used before."""
        if self._counter == MAX_COUNTER:
            self._next_generation()
            self._counter = 0
        self._counter += 1
        self.stamp[block] = self._stamp_base + self._counter
        self.stamped[block] = None

    def restamp_all(self, blocks: Ints) -> None:
        """As `restamp` for each of these blocks, in this order; `stamped` is the caller's."""
        if self._counter + len(blocks) > MAX_COUNTER:
            for block in blocks.tolist():
                self.restamp(block)
            return
        put_range(self.stamp, blocks, self._stamp_base + self._counter + 1)
        self._counter += len(blocks)

    def _next_generation(self) -> None:
        """The counter of this epoch is used up."""
        assert self.generation < MAX_GENERATION, "10^12 stamps in one epoch"
        self.generation += 1
        self._stamp_base = Stamp(self.generation, self.epoch, 0).pack()

    @property
    def last_counter(self) -> int:
        """Counter of the last stamp."""
        return self._counter

    def begin_epoch(self, epoch: int) -> None:
        """Stamps from now on carry the epoch; counters and steps start again. The keys that are left are executed."""
        assert epoch > self.epoch, f"epoch {epoch} after {self.epoch}: stamps would be used twice"
        self.epoch, self.generation = epoch, 0
        self._stamp_base = Stamp(0, epoch, 0).pack()
        self._age_base += self.step
        self._counter = self.step = self.executed_through = 0
        self.residency = Residency.empty()
        self.stamped.clear()
