"""The base class of group managers, with the parts that are common to all kinds of attention: block tables, allocation,
registration.

    an admission    |<-- hit -->|<- external ->|<--- new --->|<- lookahead ->|
                     adopted     allocated in   allocated in `allocate`
                     by `adopt`  `allocate_external`

    a running one   |<- computed ->|<--- new --->|<- lookahead ->|
                     blocks it has  allocated in `allocate`

Positions are tokens from the start of the request. A table entry covers `block_size` tokens; it is the null block where
this kind of attention does not need the block any more, or never needed it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

from kvplane.base.groups import DENSE_RETENTION, CommitRule, EvictionPolicy
from kvplane.base.step import CacheEvent, EventKind, RemoveReason
from kvplane_core.face.interface import Need
from kvplane_core.face.keys import NULL_BLOCK, Key
from kvplane_core.spec.eviction import note_copied, split_left
from kvplane_core.spec.managers.questions import GroupSetup, Query, RequestProgress

NOT_TRACKED = -1
FOREVER = 1 << 62


class GroupManager:
    """Manages the blocks of one group: allocates, releases, registers and finds blocks as its kind of attention
    requires.
    """

    # Attributes on which decisions depend; the spec determines the others.
    STATE: ClassVar[tuple[str, ...]] = ("table", "num_cached", "partial_hit", "copies", "stores_empty_ranges")

    has_window: ClassVar[bool] = True  # what a running request gives up was read by its attention, not overwritten
    takes_states: ClassVar[bool] = False  # its blocks are states

    def __init__(self, setup: GroupSetup) -> None:
        self.group = setup.group
        self.spec = setup.spec
        self.replica = setup.replica
        self.pool = setup.pool
        self.requests = setup.requests
        self.orders = setup.orders
        classes = setup.replica.lookup_classes
        joint = zip(setup.replica.groups, classes, strict=True)
        self.drops_last_block = any(one.drops_last_block for one, number in joint if number == classes[self.group])
        self._admission_cap = setup.spec.admission_cap(setup.replica.max_model_len)
        self.block_size = setup.spec.block_size
        self.hash_size = setup.replica.hash_block_size
        self.table: list[list[int]] = []
        # Leading blocks that need no further registration; NOT_TRACKED: nothing was adopted or registered yet.
        self.num_cached: list[int] = []
        self.partial_hit: dict[int, tuple[int, int]] = {}  # slot -> (index, shared block) to copy before a write
        self.copies: list[tuple[int, int]] = []  # (source, target) of this step; both are held until it is executed
        self.stores_empty_ranges = not self._safe  # as vLLM: emit STORED even if nothing was registered
        self.allocated = 0
        self.adopted = 0

    # -- tables ------------------------------------------------------------------------------------------------------

    def grow(self, slot: int) -> None:
        """Extend the columns so that they have an entry for this slot."""
        missing = slot + 1 - len(self.table)
        self.table.extend([] for _ in range(missing))
        self.num_cached.extend([NOT_TRACKED] * missing)

    def take_all(self, slot: int) -> list[int]:
        """Empty the slot's table and return its blocks in order, without leading null blocks.

        The references to these blocks pass to the caller.
        """
        blocks = self.table[slot]
        self.table[slot] = []
        self.num_cached[slot] = NOT_TRACKED
        self.partial_hit.pop(slot, None)
        first = next((i for i, block in enumerate(blocks) if block != NULL_BLOCK), len(blocks))
        return blocks[first:]

    def new_step(self) -> None:
        """Clear what the manager records per step; called before the first allocation of a step."""
        return

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # -- allocation --------------------------------------------------------------------------------------------------

    def blocks_needed(self, need: Need, hit: Sequence[int]) -> int:
        """Return by how many blocks the allocation lowers the pool's number of free blocks.

        New blocks, free blocks of the hit, and the target of a copy count. `hit`: the blocks of this group that the
        request would take references to, with null blocks in front.
        """
        required = self._blocks_for(need.num_slots)
        if need.capped and self._admission_cap:
            required = min(required, self._admission_cap)
        has = len(self.table[need.slot])
        if self.num_cached[need.slot] != NOT_TRACKED:
            return max(required - has, 0)
        skipped = max(self.skipped_tokens(need.total_computed), 0) // self.block_size
        new = max(required - max(skipped, len(hit) + has), 0)
        new += int(self._ends_inside_block(hit, need.local_computed))
        return new + self.pool.count_evictable(hit[max(0, skipped - has) :])

    def blocks_to_extend(self, slot: int, num_slots: int, num_main: int) -> int:
        """Return how many more blocks a running request needs for `num_slots` token positions, lookahead included.

        `num_main`: the same positions without lookahead.
        """
        return max(-(-num_slots // self.block_size) - len(self.table[slot]), 0)

    def adopt(self, slot: int, hit: Sequence[int], local_computed: int, total_computed: int) -> None:
        """Begin the table with the blocks of the hit; null blocks stand for blocks that are outside the attention
        window.

        If the hit ends inside a block, this block is recorded in `partial_hit`: it must be copied before the request
        writes.
        """
        table = self.table[slot]
        assert not table, f"slot {slot} already has blocks"
        skipped = max(self.skipped_tokens(total_computed), 0) // self.block_size
        adopted = list(hit[skipped:])
        self.pool.touch(adopted)
        self.adopted += sum(1 for block in adopted if block != NULL_BLOCK)
        table.extend([NULL_BLOCK] * skipped)
        table.extend(adopted)
        self.num_cached[slot] = len(table)
        if self._ends_inside_block(adopted, local_computed):
            index = local_computed // self.block_size
            self.partial_hit[slot] = (index, adopted[-1])
            self.num_cached[slot] = index

    def allocate_external(self, slot: int, local_computed: int, total_computed: int) -> None:
        """Allocate blocks for the external tokens (loaded instead of computed) that are inside the attention window."""
        external = total_computed - max(local_computed, self.skipped_tokens(total_computed))
        if external <= 0:
            return
        table = self.table[slot]
        self._extend(table, max(0, self._blocks_for(total_computed) - len(table)))

    def allocate(self, slot: int, num_slots: int, num_main: int, num_encoder: int) -> list[int]:
        """Extend the table to `num_slots` token positions, lookahead included; returns the new blocks, targets of
        copies first.

        `num_main`: the same positions without lookahead. The caller must check that the pool has enough free blocks.
        """
        copies = self._redirect_partial_hit(slot)
        table = self.table[slot]
        missing = self._blocks_for(num_slots) - len(table)
        return copies + self._extend(table, missing) if missing > 0 else copies

    def _extend(self, table: list[int], count: int) -> list[int]:
        blocks = self._take(count, table[-1] if table else NULL_BLOCK)
        table.extend(blocks)
        if self.spec.zero_new_blocks:
            self._order_zero(blocks)
        return blocks

    def _take(self, count: int, after: int = NULL_BLOCK) -> list[int]:
        self.allocated += count
        return self.pool.take_states(count) if self.takes_states else self.pool.take(count, after)

    def _order_zero(self, blocks: list[int]) -> None:
        self.orders.zero_block.extend(blocks)
        self.orders.zero_group.extend([self.group] * len(blocks))

    def blocks_between(self, slot: int, first: int, end: int) -> list[int]:
        """Return the request's blocks for the tokens [first, end)."""
        return self.table[slot][first // self.block_size : self._blocks_for(end)]

    def zero_unloaded(self, slot: int, num_tokens: int) -> None:
        """Order the zeroing of the request's private blocks after `num_tokens` tokens, if the group zeroes
        new blocks.
        """
        if self.spec.zero_new_blocks:
            rest = self.table[slot][self._blocks_for(num_tokens) :]
            self._order_zero([block for block in rest if self.pool.is_private(block)])

    def _ends_inside_block(self, hit: Sequence[int], num_tokens: int) -> bool:
        return len(hit) > 0 and num_tokens % self.block_size != 0

    def _redirect_partial_hit(self, slot: int) -> list[int]:
        """Replace a shared block in which the hit ends by a private copy; returns the block of the copy, if there is
        one.

        Both blocks are held until the copy has run.
        """
        partial = self.partial_hit.pop(slot, None)
        if partial is None:
            return []
        index, source = partial
        target = self._take(1)[0]
        self._copy_into_table(slot, index, source, target)
        self._order_zero([target])
        return [target]

    def _copy_into_table(self, slot: int, index: int, source: int, target: int) -> None:
        assert self.table[slot][index] == source, f"slot {slot}: block {source} is not at {index}"
        self.table[slot][index] = target
        self._order_copy(source, target)
        self.pool.touch([target])
        note_copied(self, slot, source)

    def _order_copy(self, source: int, target: int) -> None:
        """Add a copy to the orders, which ranks carry out in this sequence; `copies` keeps the references to both
        blocks.
        """
        self.copies.append((source, target))
        self.orders.copy_src.append(source)
        self.orders.copy_dst.append(target)
        self.orders.copy_group.append(self.group)

    def blocks_alone(self, num_tokens: int, num_encoder: int) -> int:
        """Return the largest number of blocks that a request of `num_tokens` tokens holds at one time."""
        need = self._blocks_for(num_tokens)
        return min(need, self._admission_cap) if self._admission_cap else need

    # -- image -------------------------------------------------------------------------------------------------------

    def normalize_table(self, table: list[int], at: RequestProgress) -> list[int] | None:
        """Return the table with null blocks where no block is needed any more; None if a needed block is missing."""
        read, first = self.first_read(at.computed), max(self.skipped_tokens(at.computed), 0) // self.block_size
        if len(table) < self._blocks_for(at.computed) or NULL_BLOCK in table[read:]:
            return None
        first = max(first, *(index + 1 for index in range(read) if table[index] == NULL_BLOCK), 0)
        return [NULL_BLOCK] * first + table[first:]

    def sealed_prefix(self, slot: int, index: int, at: RequestProgress) -> bytes:
        """Return the digest of the prefix that ends with the block at `index`; b"" if the request may write other
        content into this block.

        A request that computes known tokens again writes the content that the page has.
        """
        digests = self.requests.content[slot].digests
        known = self.spec.is_cached and (index + 1) * self.block_size <= len(digests) * self.hash_size
        return self._digest(digests, index) if known else b""

    def resume(self, slot: int, table: list[int], at: RequestProgress, num_cached_blocks: int | None) -> None:
        """Continue a request with a table from `normalize_table`; removes keys that do not match the content of their
        block.

        The slot holds the references already. `num_cached_blocks`: leading blocks that need no further registration;
        None: all blocks up to the last one that has a key, and of
        full attention up to the first one without.
        """
        self.table[slot] = table
        pool, size, last, first_bare = self.pool, self.block_size, 0, FOREVER
        for index, block in enumerate(table):
            if block == NULL_BLOCK:
                continue
            if pool.key[block] is not None and not self._key_fits(slot, index, at):
                pool.drop_keys(block, RemoveReason.DROPPED)
            if pool.key[block] is not None and pool.key_tokens[block] == (index + 1) * size:
                last = index + 1
            else:
                first_bare = min(first_bare, index)
        if self.is_downward_closed():  # a hit needs every block, and an eviction can leave one without a key
            last = min(last, first_bare)
        # Safe at any number, because a block with the key of its end is not registered twice.
        self.num_cached[slot] = last if num_cached_blocks is None else min(num_cached_blocks, len(table))

    def _key_fits(self, slot: int, index: int, at: RequestProgress) -> bool:
        """Whether the primary key of the block at this index names the content that the request has at
        this position.
        """
        block = self.table[slot][index]
        key, num_tokens = self.pool.key[block], self.pool.key_tokens[block]
        count, rest = divmod(num_tokens, self.hash_size)
        in_block = index * self.block_size < num_tokens <= (index + 1) * self.block_size
        known = not rest and 0 < count <= len(self.requests.content[slot].digests)
        return self.spec.is_cached and in_block and known and key == self.key(slot, count)

    # -- window ------------------------------------------------------------------------------------------------------

    def skipped_tokens(self, num_computed: int) -> int:
        """Return the number of leading tokens that the token after `num_computed` tokens does not attend to."""
        return 0

    def first_read(self, num_computed: int) -> int:
        """Return the index of the first block that the token after `num_computed` tokens needs; others may be kept."""
        return max(self.skipped_tokens(num_computed), 0) // self.block_size

    def release_skipped(self, slot: int, num_processed: int) -> None:
        """Release the blocks that no later token attends to.

        `num_processed`: tokens that are computed and whose steps are executed.
        """
        skipped = self.skipped_tokens(num_processed)
        if skipped > 0:
            last = min(skipped // self.block_size, len(self.table[slot]))
            self._release_range(slot, 0, last)

    def _release_range(self, slot: int, first: int, last: int) -> None:
        table = self.table[slot]
        freed = []
        for index in range(min(last, len(table)) - 1, first - 1, -1):
            if table[index] == NULL_BLOCK:
                break  # safe: earlier calls released from `first` on, and a hit has its nulls in front
            freed.append(index)
        if freed:
            self._give_up(slot, freed)

    def _give_up(self, slot: int, indices: Sequence[int]) -> None:
        """Release the blocks at these indices, which a running request does not need any more; records that launches in
        flight may still read them.
        """
        table = self.table[slot]
        blocks = [table[index] for index in indices]
        for index in indices:
            table[index] = NULL_BLOCK
        # Launches of earlier steps: that of the present step does not read what it skips.
        self.pool.note_use(blocks, min(self.requests.granted_step[slot], self.pool.step - 1))
        if self.replica.eviction is not EvictionPolicy.LRU:
            left, blocks = split_left(self, slot, indices, blocks)
            self.pool.release(left, left_window=True)
        self.pool.release(blocks)

    # -- prefix cache ------------------------------------------------------------------------------------------------

    def register_blocks(self, slot: int, num_tokens: int, boundaries: Sequence[int]) -> None:
        """Register the full blocks of the first `num_tokens` tokens that can be part of a hit.

        `boundaries`: positions from which a later request with this prompt can continue.
        """
        digests = self.requests.content[slot].digests
        start = max(self.num_cached[slot], 0)
        hashed = len(digests) * self.hash_size
        end = min(min(num_tokens, hashed) // self.block_size, len(self.table[slot]))
        if start >= end:
            return
        single_group_hit = self.requests.single_group_hit[slot]
        reachable = list(boundaries)
        if single_group_hit:
            reachable.append(single_group_hit)
            if self.drops_last_block:
                reachable.append(single_group_hit - self.block_size)
        keep = self.reachable_blocks(start, end, reachable)
        self.register_range(slot, start, end, keep)
        self.num_cached[slot] = end

    def register_range(self, slot: int, start: int, end: int, keep: list[bool] | None) -> None:
        """Register the request's blocks with indices [start, end) that are in the mask; None: all of them."""
        table, digests = self.table[slot], self.requests.content[slot].digests
        per_block = self.block_size // self.hash_size
        domain = self.requests.domain[slot]
        hashes, blocks, starts = [], [], []
        for index in range(start, end):
            block = table[index]
            if block == NULL_BLOCK or (keep is not None and not keep[index - start]):
                continue
            if self.pool.key_tokens[block] == (index + 1) * self.block_size:
                continue  # registered already, and kept when a block before it lost its key
            digest = digests[(index + 1) * per_block - 1]
            self.promote(block, (index + 1) * self.block_size)
            self.pool.register(block, (domain, self.group, digest), (index + 1) * self.block_size)
            hashes.append(digest)
            blocks.append(block)
            starts.append(index * self.block_size)
        if self.replica.events and (hashes or self.stores_empty_ranges):
            parent = digests[start * per_block - 1] if start else b""
            self.pool.events.append(
                CacheEvent(
                    EventKind.STORED,
                    self.group,
                    tuple(hashes),
                    tuple(blocks),
                    domain,
                    parent,
                    self.block_size,
                    slot,
                    start * self.block_size,
                    end * self.block_size,
                    tuple(starts),
                )
            )

    def register_again(self, blocks: Collection[int]) -> None:
        """Let requests that hold one of these blocks register their blocks from that one on again."""
        for slot, table in enumerate(self.table):
            first = next((index for index, block in enumerate(table) if block in blocks), FOREVER)
            self.num_cached[slot] = min(self.num_cached[slot], first)

    def key(self, slot: int, num_hashes: int) -> Key:
        """Return the key, in this group, of the prefix that consists of the request's first `num_hashes`
        hash blocks.
        """
        return self.requests.domain[slot], self.group, self.requests.content[slot].digests[num_hashes - 1]

    def promote(self, block: int, num_tokens: int) -> None:
        """Remove the keys of a block that now holds more tokens, because the primary key names a shorter prefix."""
        if self.pool.key[block] is not None:
            assert self.pool.key_tokens[block] < num_tokens, f"block {block} has a key of as many tokens or more"
            self.pool.drop_keys(block, RemoveReason.PROMOTED)

    def reachable_blocks(self, start: int, end: int, boundaries: Sequence[int]) -> list[bool] | None:
        """Return a mask: which of the blocks with indices [start, end) can be part of a hit; None: all of them."""
        return None

    def find(self, query: Query) -> tuple[list[list[int]], int]:
        """Find the longest cached prefix. Groups that are never cached are not asked.

        Returns the blocks of the prefix per group, with null blocks in front, and its length in tokens.
        """
        raise AssertionError(f"{type(self).__name__} was asked for a hit, and nothing of it is ever cached")

    def is_downward_closed(self) -> bool:
        """Whether a hit of n tokens implies every shorter aligned hit; one look-up then answers for all lengths."""
        return False

    def drop_margin(self) -> int:
        """Return how many tokens a look-up reads behind the wanted length, if it leaves out the last matched block."""
        return self.block_size

    def may_have_keys(self, count: int) -> bool:
        """Whether one block can have `count` keys, each of a prefix that ends at another position inside the block."""
        return True

    def hit_is_ready(self, hit: Sequence[int], num_tokens: int) -> bool:
        """Whether a request can take references to the blocks of a hit of `num_tokens` tokens in this step.

        A block in which the hit ends is copied before the launch of this step, so it must be written by an earlier
        step. vLLM does not check this.
        """
        if not self._safe or not self._ends_inside_block(hit, num_tokens):
            return True
        return hit[-1] == NULL_BLOCK or self.pool.key_step[hit[-1]] < self.pool.step

    def can_rewind(self, slot: int, num_computed: int) -> bool:
        """Whether the table still has all blocks that the tokens after the first `num_computed` need again."""
        return NULL_BLOCK not in self.table[slot][self.first_read(num_computed) :]

    def rewind(self, slot: int, num_computed: int) -> None:
        """Prepare to compute the tokens after the first `num_computed` again.

        Attention needs no preparation: the pages get the same content again.
        """

    def note_written(self, slot: int) -> None:
        """Record that steps before the current one wrote the blocks that the request registered."""
        return

    def _digest(self, digests: Sequence[bytes], index: int) -> bytes:
        return digests[(index + 1) * (self.block_size // self.hash_size) - 1]

    def is_sound(self, slot: int) -> bool:
        """Whether the manager's record of the request is consistent with its table; used by the check of invariants."""
        return True

    # -- options -----------------------------------------------------------------------------------------------------

    @property
    def _dense(self) -> bool:
        return self.replica.retention_interval == DENSE_RETENTION

    @property
    def _safe(self) -> bool:
        return self.replica.commit is CommitRule.SAFE
