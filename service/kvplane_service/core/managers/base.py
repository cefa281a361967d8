"""The interface of a group manager, and what the kinds share: block tables by slot, allocation, registration.

    |<- computed ->|<-- hit -->|<- external ->|<--- new --->|<- lookahead ->|
    |                          |              |             |               |
    blocks it has   adopted     allocated in   allocated in `allocate`       |
                    by `adopt`  `allocate_external`

Positions are tokens from the start of the request. A table entry covers `block_size` tokens; it is the null block where
the kind needs no block any more, or never needed one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence

from kvplane.base.groups import DENSE_RETENTION, CommitRule
from kvplane.base.step import CacheEvent, EventKind, RemoveReason
from kvplane_service.core.keys import NULL_BLOCK, Key
from kvplane_service.core.managers.questions import GroupSetup, Need, Query, RequestProgress
from kvplane_service.core.setup import is_cached

NOT_TRACKED = -1
FOREVER = 1 << 62


class GroupManager(ABC):
    """The blocks of one group: allocates, releases, registers and finds them as its kind of attention requires."""

    def __init__(self, setup: GroupSetup) -> None:
        self.group = setup.group
        self.spec = setup.spec
        self.replica = setup.replica
        self.pool = setup.pool
        self.requests = setup.requests
        self.orders = setup.orders
        joint = [group for group in setup.replica.groups if group.lookup_class == setup.spec.lookup_class]
        self.drops_last_block = any(group.drops_last_block for group in joint)
        self.block_size = setup.spec.block_size
        self.hash_size = setup.replica.hash_block_size
        self.table: list[list[int]] = []
        self.num_cached: list[int] = []  # leading blocks that need no registration; NOT_TRACKED: none yet
        self.partial_hit: dict[int, tuple[int, int]] = {}  # slot -> (index, shared block) to copy before a write
        self.copies: list[tuple[int, int]] = []  # (source, target) of this step; both are held until it is executed
        self.stores_empty_ranges = not self._safe  # as the reference: STORED also where nothing was registered
        self.allocated = 0
        self.adopted = 0

    # -- tables ------------------------------------------------------------------------------------------------------

    def grow(self, slot: int) -> None:
        """Make room for the slot."""
        missing = slot + 1 - len(self.table)
        self.table.extend([] for _ in range(missing))
        self.num_cached.extend([NOT_TRACKED] * missing)

    def take_all(self, slot: int) -> list[int]:
        """Empty the slot's table; its blocks in order without leading nulls, whose references the caller now owns."""
        blocks = self.table[slot]
        self.table[slot] = []
        self.num_cached[slot] = NOT_TRACKED
        self.partial_hit.pop(slot, None)
        first = next((i for i, block in enumerate(blocks) if block != NULL_BLOCK), len(blocks))
        return blocks[first:]

    def new_step(self) -> None:
        """Called before the first allocation of a step."""
        return

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # -- allocation --------------------------------------------------------------------------------------------------

    def blocks_needed(self, need: Need, hit: Sequence[int]) -> int:
        """Blocks that the allocation would take from the free count: new ones, adopted free ones, a copy target.

        `hit`: the blocks of this group that it would adopt, nulls in front.
        """
        required = self._blocks_for(need.num_slots)
        if need.capped and self.spec.admission_cap_blocks:
            required = min(required, self.spec.admission_cap_blocks)
        has = len(self.table[need.slot])
        if self.num_cached[need.slot] != NOT_TRACKED:
            return max(required - has, 0)
        skipped = max(self.skipped_tokens(need.total_computed), 0) // self.block_size
        new = max(required - max(skipped, len(hit) + has), 0)
        new += int(self._ends_inside_block(hit, need.local_computed))
        return new + self.pool.count_evictable(hit[max(0, skipped - has) :])

    def blocks_to_extend(self, slot: int, num_slots: int, num_main: int) -> int:
        """Blocks that a running request needs to reach `num_slots` slots, of which `num_main` are not lookahead."""
        del num_main
        return max(-(-num_slots // self.block_size) - len(self.table[slot]), 0)

    def adopt(self, slot: int, hit: Sequence[int], local_computed: int, total_computed: int) -> None:
        """Start the table with the hit, nulls for skipped blocks; note a block that must be copied before a write."""
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
        """Allocate blocks for external tokens, as far as these are inside the window."""
        external = total_computed - max(local_computed, self.skipped_tokens(total_computed))
        if external <= 0:
            return
        table = self.table[slot]
        self._extend(table, max(0, self._blocks_for(total_computed) - len(table)))

    def allocate(self, slot: int, num_slots: int, num_main: int, num_encoder: int) -> list[int]:
        """Extend the table to `num_slots` tokens; the new blocks, a copy target first. `blocks_needed` are free."""
        del num_main, num_encoder
        copies = self._redirect_partial_hit(slot)
        table = self.table[slot]
        missing = self._blocks_for(num_slots) - len(table)
        return copies + self._extend(table, missing) if missing > 0 else copies

    def _extend(self, table: list[int], count: int) -> list[int]:
        blocks = self._take(count)
        table.extend(blocks)
        if self.spec.zero_new_blocks:
            self._order_zero(blocks)
        return blocks

    def _take(self, count: int) -> list[int]:
        self.allocated += count
        return self.pool.take(count)

    def _order_zero(self, blocks: list[int]) -> None:
        self.orders.zero_block.extend(blocks)
        self.orders.zero_group.extend([self.group] * len(blocks))

    def blocks_between(self, slot: int, first: int, end: int) -> list[int]:
        """The request's blocks for the tokens [first, end)."""
        return self.table[slot][first // self.block_size : self._blocks_for(end)]

    def zero_unloaded(self, slot: int, num_tokens: int) -> None:
        """Order zeroes for the request's own blocks behind these tokens, where the kind zeroes new blocks."""
        if self.spec.zero_new_blocks:
            rest = self.table[slot][self._blocks_for(num_tokens) :]
            self._order_zero([block for block in rest if self.pool.is_private(block)])

    def _ends_inside_block(self, hit: Sequence[int], num_tokens: int) -> bool:
        return len(hit) > 0 and num_tokens % self.block_size != 0

    def _redirect_partial_hit(self, slot: int) -> list[int]:
        """Replace a shared block in which the hit ends by a private copy; both are held until the copy has run."""
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

    def _order_copy(self, source: int, target: int) -> None:
        """Add a copy to the orders. Ranks copy in row order; `copies` keeps the references of both blocks."""
        self.copies.append((source, target))
        self.orders.copy_src.append(source)
        self.orders.copy_dst.append(target)
        self.orders.copy_group.append(self.group)

    def blocks_alone(self, num_tokens: int, num_encoder: int) -> int:
        """Most blocks that a request of `num_tokens` tokens holds at once."""
        del num_encoder
        need = self._blocks_for(num_tokens)
        return min(need, self.spec.admission_cap_blocks) if self.spec.admission_cap_blocks else need

    # -- image -------------------------------------------------------------------------------------------------------

    def normalize_table(self, table: list[int], at: RequestProgress) -> list[int] | None:
        """The table with nulls for blocks that are not needed any more; None: a block that is needed is missing."""
        first = max(self.skipped_tokens(at.computed), 0) // self.block_size
        if len(table) < self._blocks_for(at.computed) or NULL_BLOCK in table[first:]:
            return None
        return [NULL_BLOCK] * first + table[first:]

    def sealed_prefix(self, slot: int, index: int, at: RequestProgress) -> bytes:
        """Digest of the prefix that ends with this block of the table; b"" while the request may still write it."""
        end = (index + 1) * self.block_size
        if not is_cached(self.spec) or end > at.computed:
            return b""
        digests = self.requests.content[slot].digests
        return self._digest(digests, index) if end <= len(digests) * self.hash_size else b""

    def resume(self, slot: int, table: list[int], at: RequestProgress, num_cached_blocks: int) -> None:
        """Continue with a normalized table whose references the slot owns; removes keys that do not fit its content.

        `num_cached_blocks`: leading blocks that need no registration, as far as known.
        """
        self.table[slot] = table
        self.num_cached[slot] = min(num_cached_blocks, len(table))
        pool, size = self.pool, self.block_size
        for index, block in enumerate(table):
            if block == NULL_BLOCK:
                continue
            if pool.key[block] is not None and not self._key_fits(slot, index, at):
                pool.drop_keys(block, RemoveReason.DROPPED)
            is_named = pool.key[block] is not None and pool.key_tokens[block] == (index + 1) * size
            if is_named or pool.references[block] > 1:  # of several requests that share it, the first registers it
                self.num_cached[slot] = max(self.num_cached[slot], index + 1)

    def _key_fits(self, slot: int, index: int, at: RequestProgress) -> bool:
        """Whether the primary key of the block at this index fits the content of the request."""
        del at
        block = self.table[slot][index]
        key, num_tokens = self.pool.key[block], self.pool.key_tokens[block]
        count, rest = divmod(num_tokens, self.hash_size)
        in_block = index * self.block_size < num_tokens <= (index + 1) * self.block_size
        known = not rest and 0 < count <= len(self.requests.content[slot].digests)
        return is_cached(self.spec) and in_block and known and key == self.key(slot, count)

    # -- window ------------------------------------------------------------------------------------------------------

    def skipped_tokens(self, num_computed: int) -> int:
        """Leading tokens that the next token does not attend to, after `num_computed` tokens."""
        del num_computed
        return 0

    def release_skipped(self, slot: int, num_processed: int) -> None:
        """Release blocks of skipped tokens only; `num_processed`: tokens that are computed and not in flight."""
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
            freed.append(table[index])
            table[index] = NULL_BLOCK
        self._give_up(slot, freed)

    def _give_up(self, slot: int, blocks: list[int]) -> None:
        """Release blocks that a running request does not need any more; its launches in flight may still read them."""
        self.pool.note_use(blocks, self.requests.granted_step[slot])
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
        self._register_range(slot, start, end, keep)
        self.num_cached[slot] = end

    def _register_range(self, slot: int, start: int, end: int, keep: list[bool] | None) -> None:
        table, digests = self.table[slot], self.requests.content[slot].digests
        per_block = self.block_size // self.hash_size
        domain = self.requests.domain[slot]
        hashes, blocks, starts = [], [], []
        for index in range(start, end):
            block = table[index]
            if block == NULL_BLOCK or (keep is not None and not keep[index - start]):
                continue
            key = Key(domain, self.group, digests[(index + 1) * per_block - 1])
            if self.pool.key_tokens[block] == (index + 1) * self.block_size:
                continue  # registered already, and kept when a block before it lost its key
            self.promote(block, (index + 1) * self.block_size)
            self.pool.register(block, key, (index + 1) * self.block_size)
            hashes.append(key.digest)
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
        """Registration of requests that have one of these blocks starts again at that block."""
        for slot, table in enumerate(self.table):
            first = next((index for index, block in enumerate(table) if block in blocks), FOREVER)
            self.num_cached[slot] = min(self.num_cached[slot], first)

    def key(self, slot: int, num_hashes: int) -> Key:
        """The key of the request's first `num_hashes` hash blocks in this group."""
        return Key(self.requests.domain[slot], self.group, self.requests.content[slot].digests[num_hashes - 1])

    def promote(self, block: int, num_tokens: int) -> None:
        """Remove the key of a block that is filled further: it names a shorter prefix. No key: nothing to do."""
        if self.pool.key[block] is not None:
            assert self.pool.key_tokens[block] < num_tokens, f"block {block} has a key of as many tokens or more"
            self.pool.drop_keys(block, RemoveReason.PROMOTED)

    def reachable_blocks(self, start: int, end: int, boundaries: Sequence[int]) -> list[bool] | None:
        """Which of the blocks [start, end) can be part of a hit; None: all."""
        del start, end, boundaries
        return None

    @abstractmethod
    def find(self, query: Query) -> tuple[list[list[int]], int]:
        """The longest cached prefix of at most query.max_tokens: blocks per group, nulls in front; its tokens."""

    def is_downward_closed(self) -> bool:
        """Whether a hit of n tokens implies every shorter aligned hit, so that one look-up serves all lengths."""
        return False

    def drop_margin(self) -> int:
        """Tokens behind the wanted length that a look-up reads when it drops its last block."""
        return self.block_size

    def needed_ends(self, found: int, wanted: int) -> Iterator[int]:
        """Ends of the prefixes that a hit of `wanted` tokens needs and one of `found` tokens may lack, ascending."""
        del found
        first = max(self.skipped_tokens(wanted), 0) // self.block_size
        for index in range(first, self._blocks_for(wanted)):
            yield min((index + 1) * self.block_size, wanted)

    def may_have_keys(self, count: int) -> bool:
        """Whether one block can have this number of keys: of prefixes that end at different tokens inside it."""
        del count
        return True

    def hit_is_ready(self, hit: Sequence[int], num_tokens: int) -> bool:
        """Whether a hit of `num_tokens` tokens can be adopted in this step.

        A hit that ends inside a block is copied before the launch, so its page must not be written by this step's own
        launch. The reference does not check this.
        """
        if not self._safe or not self._ends_inside_block(hit, num_tokens):
            return True
        return hit[-1] == NULL_BLOCK or self.pool.key_step[hit[-1]] < self.pool.step

    def can_rewind(self, slot: int, num_computed: int) -> bool:
        """Whether the table still has all blocks that computing from `num_computed` on reads or writes."""
        first = max(self.skipped_tokens(num_computed), 0) // self.block_size
        return NULL_BLOCK not in self.table[slot][first:]

    def rewind(self, slot: int, num_computed: int) -> None:
        """Tokens from `num_computed` on will be computed again; an attention page then gets the same content."""
        del slot, num_computed

    def note_written(self, slot: int) -> None:
        """The blocks that the request registered were written before this step."""
        return

    def _digest(self, digests: Sequence[bytes], index: int) -> bytes:
        return digests[(index + 1) * (self.block_size // self.hash_size) - 1]

    # -- fast path ---------------------------------------------------------------------------------------------------

    def alloc_bound(self, slot: int) -> int:
        """Slots up to which the table needs no further block."""
        if slot in self.partial_hit:
            return 0
        return len(self.table[slot]) * self.block_size

    def window_bound(self, slot: int, num_processed: int) -> int:
        """Processed tokens below which no block leaves the window, after `release_skipped(slot, num_processed)`."""
        del slot, num_processed
        return FOREVER

    def register_bound(self, slot: int) -> int:
        """Tokens below which no block becomes registrable with the present hashes; new hashes end the fast path."""
        end = (max(self.num_cached[slot], 0) + 1) * self.block_size
        hashed = len(self.requests.content[slot].digests) * self.hash_size
        return end if end <= hashed else FOREVER

    def is_sound(self, slot: int) -> bool:
        """Whether the notes about the request agree with its table; for `inspect.check`."""
        del slot
        return True

    # -- digest ------------------------------------------------------------------------------------------------------

    def slot_state(self, slot: int) -> tuple[object, ...]:
        """The state of this request that later decisions depend on; for digests."""
        return self.table[slot], self.num_cached[slot], self.partial_hit.get(slot)

    def step_state(self) -> tuple[object, ...]:
        """The state of the present step that decisions depend on; for digests."""
        return ()

    # -- options -----------------------------------------------------------------------------------------------------

    @property
    def _dense(self) -> bool:
        return self.replica.retention_interval == DENSE_RETENTION

    @property
    def _safe(self) -> bool:
        return self.replica.commit is CommitRule.SAFE
