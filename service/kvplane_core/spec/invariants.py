"""The invariants of a replica's state, checked in slices of bounded work. The check changes nothing.

The invariants hold after every step, and between the slices of the work that begins an engine life (the time of one
epoch). Steps may be in flight at these times: what they granted, registered and adopted is part of the checked state.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Generator, Iterator
from itertools import chain
from typing import TYPE_CHECKING

from kvplane.base.groups import CommitRule
from kvplane_core.face.columns import SLICE_BLOCKS, U32, find_equal, pieces, zeros
from kvplane_core.face.interface import BrokenInvariant
from kvplane_core.face.keys import NULL_BLOCK, Key
from kvplane_core.spec.freelist import FreeList
from kvplane_core.spec.in_flight import Stay
from kvplane_core.spec.key_maps import LAZY_KEY
from kvplane_core.spec.pool import BlockPool
from kvplane_core.spec.split import SplitPool
from kvplane_core.spec.tiers.invariants import faults

if TYPE_CHECKING:
    from kvplane_core.spec.replica import Replica

_REQUESTS = 16  # requests checked in one slice; each has one table per group
_ZEROS = 1 << 16  # entries of the column of counts that are created in one slice
_NO_SLOT = -1

Slices = Generator[None]


def check_in_slices(replica: Replica) -> Slices:
    """Check all invariants; yields after about a millisecond of work. The caller must close the generator if the
    replica changes between two slices.

    Raises:
        BrokenInvariant: an invariant is violated.
        Exception: of any other type, when the state is so broken that it cannot be read.
    """
    pool = replica.coordinator.pool
    is_free = bytearray(pool.num_blocks)
    yield from check_split(pool, is_free) if isinstance(pool, SplitPool) else check_free_list(pool.free, is_free)
    for fault in pool.retained.faults(is_free):
        if fault:
            raise BrokenInvariant("retained", fault)
        yield
    holders = array(U32)
    for start in range(0, pool.num_blocks, _ZEROS):
        holders.extend(zeros(U32, min(_ZEROS, pool.num_blocks - start)))
        yield
    yield from _count_holders(replica, holders)
    yield from _check_references(pool, is_free, holders)
    yield from _check_lazy_keys(pool)
    yield from _check_index(pool)
    yield from _check_further_keys(replica)
    yield from _check_key_columns(replica, is_free)
    yield from _check_stamps(pool)
    yield from _check_requests(replica)
    yield from _check_grants(replica)
    yield from _check_records(replica)
    yield from _check_tiers(replica)


def indexed_keys(pool: BlockPool) -> Iterator[tuple[Key, list[int]]]:
    """Yield every key of the index with the blocks that have it; the block that was registered first comes first.

    Recovered keys that are still in the packed table (`KeyTable`) are not in the index.
    """
    for domain, maps in pool.index.items():
        for group, by_digest in enumerate(maps):
            for value, entry in by_digest.items():
                yield (domain, group, value), [entry] if isinstance(entry, int) else entry


# -- blocks ------------------------------------------------------------------------------------------------------------


def check_free_list(free: FreeList, is_free: bytearray) -> Slices:
    """Check that the links agree in both directions and with the count; sets `is_free[block]` for each free block."""
    count, before = 0, free.sentinel
    for piece in pieces(free.links()):
        for block, previous in piece:
            if block != free.sentinel and is_free[block]:
                raise BrokenInvariant("free_list", f"free list: block {block} twice")
            if previous != before:
                name = "the sentinel" if block == free.sentinel else f"block {block}"
                raise BrokenInvariant("free_list", f"free list: {name} does not point back to {before}")
            if block != free.sentinel:
                is_free[block] = True
                count += 1
            before = block
        yield
    if count != free.count:
        raise BrokenInvariant("free_list", f"free list: {count} blocks, count says {free.count}")


def check_split(pool: SplitPool, is_free: bytearray) -> Slices:
    """Check both lists of a split pool, and which superblocks have states; sets `is_free[block]` for each free block,
    and for the blocks under a held state, which nothing holds and which have no key.
    """
    free, groups = pool.free, pool.state_groups
    is_whole = bytearray(len(free.held))
    yield from check_free_list(free.whole, is_whole)
    yield from check_free_list(free.bare, is_free)
    yield from check_free_list(free.cached, is_free)
    for numbers in pieces(range(len(free.held)), max(1, SLICE_BLOCKS // pool.size)):
        for number in numbers:
            blocks = free.blocks(number)
            others = blocks[1:]
            held = sum(1 for block in blocks if pool.references[block])
            if free.held[number] != held or bool(is_whole[number]) == (held > 0):
                text = f"{held} blocks held, the count says {free.held[number]}, whole: {bool(is_whole[number])}"
                raise BrokenInvariant("superblocks", f"superblock {number}: {text}")
            for block in blocks:
                key = pool.key_of(block)
                expected = (free.bare if key is None else free.cached) if is_free[block] else None
                if free.list_of(block) is not expected or (is_free[block] and not held):
                    raise BrokenInvariant("superblocks", f"block {block} is wrongly among those of cut superblocks")
                if key is not None and (key[1] in groups) != bool(free.has_state[number]):
                    raise BrokenInvariant("superblocks", f"block {block} has a key of another kind than its superblock")
            if free.has_state[number]:
                held_others = (block for block in others if block not in pool.busy and pool.references[block])
                wrong = [*held_others, *(block for block in others if pool.key[block] is not None)]
                if wrong:
                    raise BrokenInvariant("superblocks", f"blocks {wrong[:9]} are under a state and in use")
            for block in others if held and free.has_state[number] else blocks if not held else ():
                is_free[block] = not pool.references[block]
        yield
    if free.count != free.bare.count + free.cached.count + free.whole.count * pool.size:
        raise BrokenInvariant("superblocks", f"{free.count} is not the number of free blocks")


def _count_holders(replica: Replica, holders: array[int]) -> Slices:
    for piece in pieces(_held_blocks(replica)):
        for slot, block in piece:
            if not 0 <= block < len(holders):
                name = "a record" if slot == _NO_SLOT else f"slot {slot}"
                raise BrokenInvariant("tables", f"{name}: a block outside the pool, {block}")
            holders[block] += 1
        yield
    holders[NULL_BLOCK] = 0


def _held_blocks(replica: Replica) -> Iterator[tuple[int, int]]:
    """Yield (slot, block) for each reference to a block; one null block in addition per table, so that empty tables
    count as work of a slice.
    """
    pool, tracker = replica.coordinator.pool, replica.tracker
    for manager in replica.coordinator.managers:
        for slot, table in enumerate(manager.table):
            yield slot, NULL_BLOCK  # bounds the number of empty tables in a slice
            for block in table:
                yield slot, block
        for pair in manager.copies:
            for block in pair:
                yield _NO_SLOT, block
    for load in replica.coordinator.tiers.jobs.loads.values():
        yield from ((_NO_SLOT, row.block) for row in load.rows)
    for blocks in ([*pool.reserved, *pool.busy], *tracker.held.values(), *(blocks for _, blocks in tracker.waiting)):
        for block in blocks:
            yield _NO_SLOT, block


def _check_references(pool: BlockPool, is_free: bytearray, holders: array[int]) -> Slices:
    """Check that reference counts equal the number of holders, and that exactly blocks without a holder are free."""
    if is_free[NULL_BLOCK]:
        raise BrokenInvariant("references", "the null block is free")
    references = pool.references
    for piece in pieces(range(1, pool.num_blocks)):
        for block in piece:
            count = holders[block]
            if references[block] != count:
                text = f"block {block}: {references[block]} references, {count} holders"
                raise BrokenInvariant("references", text)
            if is_free[block] == (count > 0):
                text = f"block {block}: {count} holders, free: {bool(is_free[block])}"
                raise BrokenInvariant("references", text)
        yield
    for piece in pieces(pool.busy):
        for block in piece:
            text = f"block {block} is under a load of an earlier engine life and has"
            if holders[block] != 1:
                raise BrokenInvariant("busy_blocks", f"{text} {holders[block]} holders")
            if pool.key[block] is not None:
                raise BrokenInvariant("busy_blocks", f"{text} a key")
        yield


# -- keys --------------------------------------------------------------------------------------------------------------


def _check_lazy_keys(pool: BlockPool) -> Slices:
    """Check that exactly the blocks with LAZY_KEY have a row in the table of recovered keys, and that look-ups find
    this row.
    """
    if pool.key[NULL_BLOCK] is not None:
        raise BrokenInvariant("keys", "the null block has a key")
    table, num_blocks = pool.lazy_keys, 0
    for piece in pieces(range(pool.num_blocks)):
        for block in piece:
            if pool.key[block] is not LAZY_KEY:
                continue
            num_blocks += 1
            if table is None or not table.has_row(block):
                raise BrokenInvariant("packed_keys", f"block {block} has LAZY_KEY and no row in the key table")
            if pool.references[block]:
                raise BrokenInvariant("packed_keys", f"block {block} is held and has LAZY_KEY")
            key = table.key_of(block)
            if pool.blocks_of(key) != [block]:
                text = f"key {key[2].hex()} of block {block} leads to {pool.blocks_of(key)}"
                raise BrokenInvariant("packed_keys", text)
            if block in pool.more_keys:
                raise BrokenInvariant("packed_keys", f"block {block} has LAZY_KEY and further keys")
        yield
    num_rows = table.count_rows() if table is not None else 0
    if num_rows != num_blocks:
        text = f"the key table has {num_rows} rows, and {num_blocks} blocks have LAZY_KEY"
        raise BrokenInvariant("packed_keys", text)
    if num_rows != pool.count_lazy_keys():
        raise BrokenInvariant("packed_keys", f"{num_rows} rows, the count says {pool.count_lazy_keys()}")


def _check_index(pool: BlockPool) -> Slices:
    """Check that the index has every key with its blocks, and no other entries."""
    num_indexed = pool.count_lazy_keys()
    for piece in pieces(indexed_keys(pool)):
        for key, blocks in piece:
            if not len(set(blocks)) == len(blocks) > 0:
                raise BrokenInvariant("key_index", f"key {key[2].hex()}: blocks {blocks[:9]}")
            for block in blocks:
                if not pool.has_key(block, key):
                    raise BrokenInvariant("key_index", f"key {key[2].hex()} is not on block {block}")
            num_indexed += len(blocks)
        yield
    on_blocks = 0
    for keys in pieces(pool.key, SLICE_BLOCKS):
        on_blocks += len(keys) - keys.count(None)
        yield
    for piece_of_further in pieces(pool.more_keys.values()):
        on_blocks += sum(map(len, piece_of_further))
        yield
    if num_indexed != on_blocks:
        raise BrokenInvariant("key_index", f"{on_blocks} keys on blocks, {num_indexed} in the index")
    if pool.index and not pool.enable_caching:
        raise BrokenInvariant("key_index", "the index has keys although prefix caching is off")


def _check_further_keys(replica: Replica) -> Slices:
    """Check that only blocks with a primary key have further keys, and that a block of recurrent state has none."""
    pool, safe = replica.coordinator.pool, replica.spec.commit is CommitRule.SAFE
    for piece in pieces(pool.more_keys.items()):
        for block, more in piece:
            primary = pool.key[block]
            if primary is None or not more:
                raise BrokenInvariant("keys", f"block {block}: further keys {list(more)[:9]} without a primary one")
            _, group, _ = primary
            if safe and not replica.coordinator.managers[group].may_have_keys(1 + len(more)):
                raise BrokenInvariant("state_keys", f"block {block} holds one state and has {1 + len(more)} keys")
        yield


def _check_key_columns(replica: Replica, is_free: bytearray) -> Slices:
    """Check that a block with a key has a prefix length and a stamp (version number of its content).

    A key whose step is not executed must be in the record of this step.
    """
    pool, num_evictable = replica.coordinator.pool, 0
    safe = replica.spec.commit is CommitRule.SAFE
    recorded = yield from _tentative_blocks(replica)
    for piece in pieces(range(1, pool.num_blocks)):
        for block in piece:
            is_keyed = pool.key[block] is not None
            if (pool.key_tokens[block] > 0) != is_keyed:
                raise BrokenInvariant("keys", f"block {block}: tokens without a key, or a key without tokens")
            if not is_keyed:
                continue
            num_evictable += is_free[block]
            if not pool.stamp[block]:
                raise BrokenInvariant("stamps", f"block {block} has a key and no stamp")
            step = pool.key_step[block]
            if safe and step > pool.executed_through and (step, block) not in recorded:
                text = f"block {block}: its key waits for step {step}, which has no record of it"
                raise BrokenInvariant("tentative_keys", text)
        yield
    if pool.num_evictable != num_evictable:
        text = f"{num_evictable} free blocks carry a key, the count says {pool.num_evictable}"
        raise BrokenInvariant("evictable_count", text)


def _tentative_blocks(replica: Replica) -> Generator[None, None, set[tuple[int, int]]]:
    """Return (step, block) of each key that a step in flight registered."""
    recorded: set[tuple[int, int]] = set()
    for step, tentative in replica.tracker.tentative.items():
        for piece in pieces(chain.from_iterable(tentative.values())):
            recorded.update((step, block) for block, _ in piece)
            yield
    return recorded


def _check_stamps(pool: BlockPool) -> Slices:
    """Check that no two blocks have the same stamp (version number of a content)."""
    equal = yield from find_equal(pool.stamp)
    if equal:
        raise BrokenInvariant("stamps", f"blocks {equal[0]} and {equal[1]} have the same stamp")


# -- requests ----------------------------------------------------------------------------------------------------------


def _check_requests(replica: Replica) -> Slices:
    """Check that only running requests have tables, that these have every needed block, and that loads are recorded."""
    requests = replica.requests
    running = sum(1 for slot in requests.slots() if requests.running[slot])
    if running != requests.num_running:
        raise BrokenInvariant("running_count", f"{running} run, the count says {requests.num_running}")
    for piece in pieces(range(len(requests.live)), _REQUESTS):
        for slot in piece:
            _check_tables(replica, slot)
            if requests.live[slot]:
                _check_transfers(replica, slot)
        yield
    live, loading, not_zeroed = set(requests.slots()), requests.loading, requests.not_zeroed
    if not loading <= live:
        raise BrokenInvariant("transfers", f"loads into slots {sorted(loading - live)[:9]} that are not live")
    wrong = {slot for slot in loading if requests.running[slot]} - not_zeroed
    if wrong:
        raise BrokenInvariant(
            "transfers", f"slots {sorted(wrong)[:9]} load, and their new blocks are not exempt from zeroing"
        )
    wrong = {slot for slot in not_zeroed if not requests.running[slot]}
    if wrong:
        raise BrokenInvariant("transfers", f"slots {sorted(wrong)[:9]} wait for a load and do not run")


def _check_tables(replica: Replica, slot: int) -> None:
    runs, computed = replica.requests.running[slot], replica.requests.computed[slot]
    safe = replica.spec.commit is CommitRule.SAFE  # with commit=reference a rewind may need released blocks
    for manager in replica.coordinator.managers:
        table, group = manager.table[slot], manager.group
        if slot in manager.partial_hit:
            index, shared = manager.partial_hit[slot]
            if index >= len(table) or table[index] != shared:
                raise BrokenInvariant(
                    "partial_hits", f"slot {slot}: shared block {shared} is not at index {index} of its table"
                )
        if not table:
            continue
        if not runs:
            raise BrokenInvariant("tables", f"slot {slot} holds blocks of group {group}, not running")
        if manager.num_cached[slot] > len(table):
            raise BrokenInvariant(
                "tables", f"slot {slot}: {manager.num_cached[slot]} cached blocks in a table of {len(table)}"
            )
        if not manager.is_sound(slot):
            raise BrokenInvariant(
                "state_positions", f"slot {slot}: what the manager of group {group} recorded contradicts its table"
            )
        if safe and not manager.can_rewind(slot, computed):
            text = f"slot {slot}: group {group} lacks a block that the token after {computed} needs"
            raise BrokenInvariant("tables", text)


def _check_transfers(replica: Replica, slot: int) -> None:
    requests, tracker = replica.requests, replica.tracker
    kept = requests.held[slot] or (slot in requests.loading and not requests.running[slot])
    if kept != (slot in tracker.held):
        raise BrokenInvariant("transfers", f"slot {slot}: blocks of a transfer are not held, or held too long")
    if requests.load_after[slot] > replica.seq:
        raise BrokenInvariant("transfers", f"slot {slot}: its load waits for step {requests.load_after[slot]}")


# -- steps in flight ---------------------------------------------------------------------------------------------------


def _check_grants(replica: Replica) -> Slices:
    """Check that each request's tokens in flight and last step in flight are those of the recorded grants."""
    requests, executed = replica.requests, replica.executed_through
    granted: Counter[Stay] = Counter()
    last: dict[Stay, int] = {}
    for step, grants in sorted(replica.tracker.grants.items()):
        if not len(grants.slot) == len(grants.serial) == len(grants.num_tokens):
            raise BrokenInvariant("grants", f"grants of step {step}: columns of different lengths")
        for piece in pieces(zip(grants.stays(), grants.num_tokens, strict=True)):
            for stay, count in piece:
                granted[stay] += count
                last[stay] = step
            yield
    for slots in pieces(requests.slots()):
        for slot in slots:
            stay, step = Stay(slot, requests.serial[slot]), requests.granted_step[slot]
            expected = granted[stay] if requests.running[slot] else 0
            if requests.in_flight[slot] != expected:
                text = f"slot {slot}: {requests.in_flight[slot]} tokens in flight, grants say {expected}"
                raise BrokenInvariant("grants", text)
            if step > replica.seq:
                raise BrokenInvariant("grants", f"slot {slot}: a later grant, of step {step} after {replica.seq}")
            if requests.running[slot] and step > executed and last.get(stay) != step:
                raise BrokenInvariant("grants", f"slot {slot}: no record of its grant in step {step}")
        yield


def _check_records(replica: Replica) -> Slices:
    """Check the records of steps: that the steps are in flight, that adopted keys have a record, and that the step
    numbers for which blocks wait are in order.
    """
    tracker, executed, last = replica.tracker, replica.executed_through, replica.seq
    steps_of = {
        "grants": list(tracker.grants),
        "tentative": list(tracker.tentative),
        "adoptions": list(tracker.adoptions),
        "filling": list(tracker.filling),
    }
    for name, steps in steps_of.items():
        for step in steps:
            if step <= executed:
                raise BrokenInvariant("records", f"{name} of step {step}, {executed} is executed")
            if step > last:
                raise BrokenInvariant("records", f"{name} of step {step}, the last is {last}")
    recorded = yield from _tentative_blocks(replica)
    requests = replica.requests
    for step, adoptions in tracker.adoptions.items():
        for piece in pieces((block, stay) for block, stays in adoptions.items() for stay in stays):
            for block, (slot, serial) in piece:
                runs = requests.running[slot] and requests.serial[slot] == serial
                last_adopted = requests.adopted_step[slot]
                if runs and last_adopted < step:
                    text = f"slot {slot} adopted a key of step {step}, the last recorded is {last_adopted}"
                    raise BrokenInvariant("adoptions", text)
                if runs and (step, block) not in recorded:
                    text = f"slot {slot} adopted block {block} of step {step}, which has no record of its key"
                    raise BrokenInvariant("adoptions", text)
            yield
    # Releases are in order: one behind a later fence waits for that, which is safe and bounded by the last step sent.
    fences = [fence for fence, _ in tracker.waiting]
    if fences and not (executed < fences[0] and max(fences) <= last):
        raise BrokenInvariant("fences", f"fences {fences[:9]}, {executed} executed")


def _check_tiers(replica: Replica) -> Slices:
    """Check that each slot of a tier has one state, and that loads, pins and keys agree."""
    tiers, key = replica.coordinator.tiers, replica.coordinator.pool.key
    filled = [row.block for load in tiers.jobs.loads.values() for row in load.rows]
    for fault in faults(tiers, {block for block in filled if key[block] is not None}):
        if fault:
            raise BrokenInvariant("tiers", fault)
        yield
