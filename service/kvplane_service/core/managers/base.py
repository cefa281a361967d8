"""What every group manager does: a block table per slot, and the questions that the coordinator asks.

    |<- computed ->|<-- hit -->|<- external ->|<--- new --->|<- lookahead ->|
    |                          |              |             |               |
    blocks it has   adopted     allocated in   allocated in `allocate`       |
                    by `adopt`  `allocate_external`

Positions are tokens from the start of the request. A table entry covers `block_size` tokens; the null block stands
where the kind needs no block any more, or never needed one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvplane.base.groups import DENSE_RETENTION, CommitRule, GroupSpec, ReplicaSpec
from kvplane.base.step import CacheEvent, EventKind, Orders, RemoveReason
from kvplane_service.core.keys import NULL_BLOCK, Key
from kvplane_service.core.pool import BlockPool
from kvplane_service.core.requests import Requests

NOT_TRACKED = -1
FOREVER = 1 << 62


@dataclass(frozen=True, slots=True)
class GroupSetup:
    """What a manager is made of.

    Attributes:
        drops: look-ups of its class drop the last matched block.
        any_drops: some group of the replica drops.
    """

    group: int
    spec: GroupSpec
    replica: ReplicaSpec
    pool: BlockPool
    requests: Requests
    orders: Orders
    drops: bool
    any_drops: bool


@dataclass(frozen=True, slots=True)
class Need:
    """A question for blocks: what would one allocation take from the free count?

    Attributes:
        slot: the request.
        num_slots: tokens that need a slot in all, lookahead included.
        num_main: the same without lookahead.
        total_computed: tokens computed already, hit and external included.
        local_computed: of these, not external.
        num_encoder: encoder tokens.
        capped: count what the whole sequence holds at once at most (admission), not what this call takes.
    """

    slot: int
    num_slots: int
    num_main: int
    total_computed: int
    local_computed: int
    num_encoder: int = 0
    capped: bool = False


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a request stands with nothing in flight.

    Attributes:
        computed: leading tokens whose pages are written.
        launch_end: tokens of the last launch, rejected drafts included.
        num_prompt: tokens it was first admitted with.
    """

    computed: int
    launch_end: int
    num_prompt: int


@dataclass(frozen=True, slots=True)
class Query:
    """A prefix look-up in groups that are looked up jointly.

    Attributes:
        digests: hashes of the request's full hash blocks.
        domain: of the request.
        groups: ids of the groups.
        max_tokens: longest hit asked for.
        drop_last: drop the last matched unit.
        horizon: keys registered by later steps are not seen.
    """

    digests: Sequence[bytes]
    domain: str
    groups: tuple[int, ...]
    max_tokens: int
    drop_last: bool
    horizon: int


class GroupManager(ABC):
    """Blocks of one group: tables by slot, and how its kind allocates, releases, caches and finds them."""

    downward_closed = False  # a hit of n tokens implies every shorter aligned hit
    cacheable = True
    fine_grained = False  # look-ups can end inside a block
    holds_one_prefix = False  # a page is overwritten whole, so it can have one key
    never_drops = False  # look-ups ignore drop_last (no draft layers of this kind)

    def __init__(self, setup: GroupSetup) -> None:
        self.group = setup.group
        self.spec = setup.spec
        self.replica = setup.replica
        self.pool = setup.pool
        self.requests = setup.requests
        self.orders = setup.orders
        self.drops = setup.drops
        self.any_drops = setup.any_drops
        self.block_size = setup.spec.block_size
        self.hash_size = setup.replica.hash_block_size
        self.table: list[list[int]] = []
        self.num_cached: list[int] = []  # leading blocks whose caching is settled; NOT_TRACKED before the first
        self.partial_hit: dict[int, tuple[int, int]] = {}  # slot -> (index, shared block) that must be copied
        self.copies: list[tuple[int, int]] = []  # (source, target) of this step; both ends are held
        self.stores_empty_ranges = not self._safe  # the reference emits STORED also where nothing was registered
        self.allocated = 0
        self.adopted = 0

    # -- tables ------------------------------------------------------------------------------------------------------

    def grow(self, slot: int) -> None:
        """Make room for the slot."""
        missing = slot + 1 - len(self.table)
        self.table.extend([] for _ in range(missing))
        self.num_cached.extend([NOT_TRACKED] * missing)

    def take_all(self, slot: int) -> list[int]:
        """Empty the slot's table; its blocks in order without leading nulls, references with the caller."""
        blocks = self.table[slot]
        self.table[slot] = []
        self.num_cached[slot] = NOT_TRACKED
        self.partial_hit.pop(slot, None)
        first = next((i for i, block in enumerate(blocks) if block != NULL_BLOCK), len(blocks))
        return blocks[first:]

    def new_step(self) -> None:
        """A step begins to allocate."""
        return

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # -- allocation --------------------------------------------------------------------------------------------------

    def blocks_needed(self, need: Need, hit: Sequence[int]) -> int:
        """Blocks that the allocation would take from the free count: new ones, adopted free ones, a copy target.

        `hit` is what it would adopt of this group, nulls in front.
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
        """Blocks that a running request would take to have `num_slots` slots, `num_main` of them not lookahead."""
        del num_main
        return max(-(-num_slots // self.block_size) - len(self.table[slot]), 0)

    def adopt(self, slot: int, hit: Sequence[int], local_computed: int, total_computed: int) -> None:
        """Take over hit blocks, nulls for what is skipped; note a block that must be copied before it is written."""
        table = self.table[slot]
        assert not table, f"slot {slot} has blocks and adopts more"
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
        """Allocate blocks for tokens that come from outside, as far as they lie inside the window."""
        external = total_computed - max(local_computed, self.skipped_tokens(total_computed))
        if external <= 0:
            return
        table = self.table[slot]
        self._extend(table, max(0, self._blocks_for(total_computed) - len(table)))

    def allocate(self, slot: int, num_slots: int, num_main: int, num_encoder: int) -> list[int]:
        """Extend the table to `num_slots` tokens; the new blocks, a copy target first. `blocks_needed` was granted."""
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
        """The request's blocks that hold some of the tokens [first, end)."""
        return self.table[slot][first // self.block_size : self._blocks_for(end)]

    def zero_unloaded(self, slot: int, num_tokens: int) -> None:
        """Zero the request's own blocks behind these tokens, where new blocks are zeroed."""
        if self.spec.zero_new_blocks:
            rest = self.table[slot][self._blocks_for(num_tokens) :]
            self._order_zero([block for block in rest if self.pool.is_private(block)])

    def _ends_inside_block(self, hit: Sequence[int], num_tokens: int) -> bool:
        return len(hit) > 0 and num_tokens % self.block_size != 0

    def _redirect_partial_hit(self, slot: int) -> list[int]:
        """Replace a shared block that ends the hit by a private copy; both ends stay held until the copy has run."""
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
        """Ranks copy in the order in which rows asked; what holds both ends meanwhile is counted in `copies`."""
        self.copies.append((source, target))
        self.orders.copy_src.append(source)
        self.orders.copy_dst.append(target)
        self.orders.copy_group.append(self.group)

    def blocks_alone(self, num_tokens: int, num_encoder: int) -> int:
        """Most blocks that a request of so many tokens holds at once."""
        del num_encoder
        need = self._blocks_for(num_tokens)
        return min(need, self.spec.admission_cap_blocks) if self.spec.admission_cap_blocks else need

    # -- image -------------------------------------------------------------------------------------------------------

    def settle(self, table: list[int], at: Standing) -> list[int] | None:
        """A table with nulls for what is needed no more; None when it lacks what is needed."""
        first = max(self.skipped_tokens(at.computed), 0) // self.block_size
        if len(table) < self._blocks_for(at.computed) or NULL_BLOCK in table[first:]:
            return None
        return [NULL_BLOCK] * first + table[first:]

    def sealed_prefix(self, slot: int, index: int, at: Standing) -> bytes:
        """Digest of the prefix whose end the block at this index holds for ever; b"" while it may be written."""
        end = (index + 1) * self.block_size
        if not self.cacheable or end > at.computed:
            return b""
        digests = self.requests.content[slot].digests
        return self._digest(digests, index) if end <= len(digests) * self.hash_size else b""

    def resume(self, slot: int, table: list[int], at: Standing, num_cached_blocks: int) -> None:
        """Go on with a settled table, whose references the slot has; keys that name something else are dropped.

        `num_cached_blocks`: leading blocks whose caching is settled, as far as that is known.
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
            if is_named or pool.references[block] > 1:  # the first of those that share it will name it
                self.num_cached[slot] = max(self.num_cached[slot], index + 1)

    def _key_fits(self, slot: int, index: int, at: Standing) -> bool:
        """Whether the block at this index holds what its first key names, by what is known of the request."""
        del at
        block = self.table[slot][index]
        key, num_tokens = self.pool.key[block], self.pool.key_tokens[block]
        count, rest = divmod(num_tokens, self.hash_size)
        in_block = index * self.block_size < num_tokens <= (index + 1) * self.block_size
        known = not rest and 0 < count <= len(self.requests.content[slot].digests)
        return self.cacheable and in_block and known and key == self.key(slot, count)

    # -- window ------------------------------------------------------------------------------------------------------

    def skipped_tokens(self, num_computed: int) -> int:
        """Leading tokens that the next token does not attend to."""
        del num_computed
        return 0

    def release_skipped(self, slot: int, num_processed: int) -> None:
        """Give back blocks that lie wholly in skipped tokens; `num_processed` tokens are computed and not in flight."""
        skipped = self.skipped_tokens(num_processed)
        if skipped > 0:
            last = min(skipped // self.block_size, len(self.table[slot]))
            self._release_range(slot, 0, last)

    def _release_range(self, slot: int, first: int, last: int) -> None:
        table = self.table[slot]
        freed = []
        for index in range(min(last, len(table)) - 1, first - 1, -1):
            if table[index] == NULL_BLOCK:
                break  # an earlier call gave back all that lies before it
            freed.append(table[index])
            table[index] = NULL_BLOCK
        self._give_up(slot, freed)

    def _give_up(self, slot: int, blocks: list[int]) -> None:
        """Release blocks that a running request needs no more; its launches in flight may still read them."""
        self.pool.note_use(blocks, self.requests.granted_step[slot])
        self.pool.release(blocks)

    # -- prefix cache ------------------------------------------------------------------------------------------------

    def register_blocks(self, slot: int, num_tokens: int, boundaries: Sequence[int]) -> None:
        """Register full blocks up to `num_tokens` (of this group's share) that can serve a hit.

        `boundaries` are the positions at which a later request that replays this prompt can resume.
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
            if self.drops:
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
                continue  # it kept its key when one before it was evicted
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

    def unsettle(self, blocks: Collection[int]) -> None:
        """Let requests that have these blocks register them again."""
        for slot, table in enumerate(self.table):
            first = next((index for index, block in enumerate(table) if block in blocks), FOREVER)
            self.num_cached[slot] = min(self.num_cached[slot], first)

    def key(self, slot: int, num_hashes: int) -> Key:
        """The name of the request's prefix of so many hash blocks in this group."""
        return Key(self.requests.domain[slot], self.group, self.requests.content[slot].digests[num_hashes - 1])

    def promote(self, block: int, num_tokens: int) -> None:
        """A block that already has a key can only be growing: its shorter key goes."""
        if self.pool.key[block] is not None:
            assert self.pool.key_tokens[block] < num_tokens, f"block {block} is registered twice"
            self.pool.drop_keys(block, RemoveReason.PROMOTED)

    def reachable_blocks(self, start: int, end: int, boundaries: Sequence[int]) -> list[bool] | None:
        """Which of the blocks [start, end) can ever serve a hit; None = all."""
        del start, end, boundaries
        return None

    @abstractmethod
    def find(self, query: Query) -> tuple[list[list[int]], int]:
        """Longest cached prefix within query.max_tokens: blocks per group, nulls in front, and its length."""

    def hit_is_ready(self, hit: Sequence[int], num_tokens: int) -> bool:
        """Whether a hit of so many tokens can be adopted in this step.

        A hit that ends inside a block is copied before the launch, so it must not be on a page that this very launch
        writes. The reference does not ask.
        """
        if not self._safe or not self._ends_inside_block(hit, num_tokens):
            return True
        return hit[-1] == NULL_BLOCK or self.pool.key_step[hit[-1]] < self.pool.step

    def can_rewind(self, slot: int, num_computed: int) -> bool:
        """Whether the blocks are still there that tokens from `num_computed` on attend to and are written into."""
        first = max(self.skipped_tokens(num_computed), 0) // self.block_size
        return NULL_BLOCK not in self.table[slot][first:]

    def rewind(self, slot: int, num_computed: int) -> None:
        """Prepare for tokens from `num_computed` on to be computed again; an attention page gets the same content."""
        del slot, num_computed

    def note_written(self, slot: int) -> None:
        """What the request has registered was written before this step."""
        return

    def _digest(self, digests: Sequence[bytes], index: int) -> bytes:
        return digests[(index + 1) * (self.block_size // self.hash_size) - 1]

    # -- the quiet zone ----------------------------------------------------------------------------------------------

    def quiet_slots(self, slot: int) -> int:
        """Slots up to which the table needs no block."""
        if slot in self.partial_hit:
            return 0
        return len(self.table[slot]) * self.block_size

    def quiet_window(self, slot: int, num_processed: int) -> int:
        """Processed tokens below which nothing more leaves the window, after `release_skipped(slot, num_processed)`."""
        del slot, num_processed
        return FOREVER

    def quiet_cache(self, slot: int) -> int:
        """Tokens below which nothing becomes registrable; the replica caches. New hashes wake the request."""
        end = (max(self.num_cached[slot], 0) + 1) * self.block_size
        hashed = len(self.requests.content[slot].digests) * self.hash_size
        return end if end <= hashed else FOREVER

    def is_sound(self, slot: int) -> bool:
        """Whether what is noted of the request beside its table fits that."""
        del slot
        return True

    # -- digest ------------------------------------------------------------------------------------------------------

    def slot_state(self, slot: int) -> tuple[object, ...]:
        """All that decisions on this request depend on."""
        return self.table[slot], self.num_cached[slot], self.partial_hit.get(slot)

    def step_state(self) -> tuple[object, ...]:
        """What decisions of the step under way depend on besides."""
        return ()

    # -- small words -------------------------------------------------------------------------------------------------

    @property
    def _dense(self) -> bool:
        return self.replica.retention_interval == DENSE_RETENTION

    @property
    def _safe(self) -> bool:
        return self.replica.commit is CommitRule.SAFE
