"""The invariants of a replica's state. The check changes nothing.

The invariants hold after every step, and between the parts of the work that begins an engine life. Steps may be in
flight at these times: what they granted, registered and adopted is part of the checked state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from itertools import chain

from kvplane.base.groups import CommitRule
from kvplane_core.face.interface import BrokenInvariant
from kvplane_core.face.keys import NULL_BLOCK
from kvplane_core.spec.freelist import FreeList
from kvplane_core.spec.in_flight import Stay
from kvplane_core.spec.pool import BlockPool
from kvplane_core.spec.split import SplitPool
from kvplane_core.spec.state_entries import Core
from kvplane_core.spec.tiers.tier import Tier
from kvplane_core.spec.tiers.tiers import MAX_VERSION, Tiers

_NO_SLOT = -1


def check_in_slices(replica: Core) -> Generator[None]:
    """Check all invariants, and yield after each. The caller must close the generator if the replica changes meanwhile.

    Raises:
        BrokenInvariant: an invariant is violated.
        Exception: of any other type, when the state is so broken that it cannot be read.
    """
    pool = replica.coordinator.pool
    is_free = bytearray(pool.num_blocks)
    if isinstance(pool, SplitPool):
        check_split(pool, is_free)
    else:
        check_free_list(pool.free, is_free)
    for fault in pool.retained.faults(is_free):
        raise BrokenInvariant("retained", fault)
    yield
    _check_references(pool, is_free, _count_holders(replica))
    yield
    _check_index(pool)
    _check_further_keys(replica)
    yield
    _check_key_columns(replica)
    _check_stamps(pool)
    yield
    for check in (_check_requests, _check_grants, _check_records):
        check(replica)
        yield
    tiers, key = replica.coordinator.tiers, pool.key
    filled = [row.block for load in tiers.jobs.loads.values() for row in load.rows]
    for fault in faults(tiers, {block for block in filled if key[block] is not None}):
        raise BrokenInvariant("tiers", fault)


# -- blocks ------------------------------------------------------------------------------------------------------------


def check_free_list(free: FreeList, is_free: bytearray) -> None:
    """Check that a list has each block once; sets `is_free[block]` for each free block."""
    for block in free:
        if not 0 <= block < len(is_free) or is_free[block]:
            raise BrokenInvariant("free_list", f"free list: block {block} twice, or none of the pool")
        is_free[block] = True


def check_split(pool: SplitPool, is_free: bytearray) -> None:
    """Check both lists of a split pool, and which superblocks have states; sets `is_free[block]` for each free block,
    and for the blocks under a held state, which nothing holds and which have no key.
    """
    free, groups = pool.free, pool.state_groups
    is_whole = bytearray(len(free.held))
    for blocks_of, found in ((free.whole, is_whole), (free.bare, is_free), (free.cached, is_free)):
        check_free_list(blocks_of, found)
    for number in range(len(free.held)):
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


def _count_holders(replica: Core) -> list[int]:
    """Return, by block, how many tables and records have it."""
    holders = [0] * replica.coordinator.pool.num_blocks
    for slot, block in _held_blocks(replica):
        if not 0 <= block < len(holders):
            name = "a record" if slot == _NO_SLOT else f"slot {slot}"
            raise BrokenInvariant("tables", f"{name}: a block outside the pool, {block}")
        holders[block] += 1
    holders[NULL_BLOCK] = 0
    return holders


def _held_blocks(replica: Core) -> Iterator[tuple[int, int]]:
    """Yield (slot, block) for each reference to a block."""
    pool, tracker = replica.coordinator.pool, replica.tracker
    for manager in replica.coordinator.managers:
        for slot, table in enumerate(manager.table):
            yield from ((slot, block) for block in table)
        for pair in manager.copies:
            for block in pair:
                yield _NO_SLOT, block
    for load in replica.coordinator.tiers.jobs.loads.values():
        yield from ((_NO_SLOT, row.block) for row in load.rows)
    for blocks in ([*pool.reserved, *pool.busy], *tracker.held.values(), *(blocks for _, blocks in tracker.waiting)):
        for block in blocks:
            yield _NO_SLOT, block


def _check_references(pool: BlockPool, is_free: bytearray, holders: Sequence[int]) -> None:
    """Check that reference counts equal the number of holders, and that exactly blocks without a holder are free."""
    if is_free[NULL_BLOCK]:
        raise BrokenInvariant("references", "the null block is free")
    references = pool.references
    for block in range(1, pool.num_blocks):
        count = holders[block]
        if references[block] != count:
            text = f"block {block}: {references[block]} references, {count} holders"
            raise BrokenInvariant("references", text)
        if is_free[block] == (count > 0):
            text = f"block {block}: {count} holders, free: {bool(is_free[block])}"
            raise BrokenInvariant("references", text)
    for block in pool.busy:
        text = f"block {block} is under a load of an earlier epoch and has"
        if holders[block] != 1:
            raise BrokenInvariant("busy_blocks", f"{text} {holders[block]} holders")
        if pool.key[block] is not None:
            raise BrokenInvariant("busy_blocks", f"{text} a key")


# -- keys --------------------------------------------------------------------------------------------------------------


def _check_index(pool: BlockPool) -> None:
    """Check that the index has every key with its blocks, and no other entries."""
    if pool.key[NULL_BLOCK] is not None:
        raise BrokenInvariant("keys", "the null block has a key")
    for key, blocks in pool.index.items():
        if not len(set(blocks)) == len(blocks) > 0:
            raise BrokenInvariant("key_index", f"key {key[2].hex()}: blocks {blocks[:9]}")
        for block in blocks:
            if not pool.has_key(block, key):
                raise BrokenInvariant("key_index", f"key {key[2].hex()} is not on block {block}")
    num_indexed = sum(map(len, pool.index.values()))
    on_blocks = len(pool.keyed()) + sum(map(len, pool.more_keys.values()))
    if num_indexed != on_blocks:
        raise BrokenInvariant("key_index", f"{on_blocks} keys on blocks, {num_indexed} in the index")
    if pool.index and not pool.enable_caching:
        raise BrokenInvariant("key_index", "the index has keys although prefix caching is off")


def _check_further_keys(replica: Core) -> None:
    """Check that only blocks with a primary key have further keys, and that a block of recurrent state has none."""
    pool, safe = replica.coordinator.pool, replica.spec.commit is CommitRule.SAFE
    for block, more in pool.more_keys.items():
        primary = pool.key[block]
        if primary is None or not more:
            raise BrokenInvariant("keys", f"block {block}: further keys {list(more)[:9]} without a primary one")
        _, group, _ = primary
        if safe and not replica.coordinator.managers[group].may_have_keys(1 + len(more)):
            raise BrokenInvariant("state_keys", f"block {block} holds one state and has {1 + len(more)} keys")


def _check_key_columns(replica: Core) -> None:
    """Check that a block with a key has a prefix length and a stamp.

    A key whose step is not executed must be in the record of this step.
    """
    pool = replica.coordinator.pool
    safe = replica.spec.commit is CommitRule.SAFE
    recorded = _tentative_blocks(replica)
    for block in range(1, pool.num_blocks):
        is_keyed = pool.key[block] is not None
        if (pool.key_tokens[block] > 0) != is_keyed:
            raise BrokenInvariant("keys", f"block {block}: tokens without a key, or a key without tokens")
        if not is_keyed:
            continue
        if not pool.stamp[block]:
            raise BrokenInvariant("stamps", f"block {block} has a key and no stamp")
        step = pool.key_step[block]
        if safe and step > pool.executed_through and (step, block) not in recorded:
            text = f"block {block}: its key waits for step {step}, which has no record of it"
            raise BrokenInvariant("tentative_keys", text)


def _tentative_blocks(replica: Core) -> set[tuple[int, int]]:
    """Return (step, block) of each key that a step in flight registered."""
    return {
        (step, block)
        for step, tentative in replica.tracker.tentative.items()
        for registered in tentative.values()
        for block, _ in registered
    }


def _check_stamps(pool: BlockPool) -> None:
    """Check that no two blocks have the same stamp."""
    block_of: dict[int, int] = {}
    for block, stamp in enumerate(pool.stamp):
        if stamp and block_of.setdefault(stamp, block) != block:
            raise BrokenInvariant("stamps", f"blocks {block_of[stamp]} and {block} have the same stamp")


# -- requests ----------------------------------------------------------------------------------------------------------


def _check_requests(replica: Core) -> None:
    """Check that only running requests have tables, that these have every needed block, and that loads are recorded."""
    requests = replica.requests
    running = sum(1 for slot in requests.slots() if requests.running[slot])
    if running != requests.num_running:
        raise BrokenInvariant("running_count", f"{running} run, the count says {requests.num_running}")
    for slot in range(len(requests.live)):
        _check_tables(replica, slot)
        if requests.live[slot]:
            _check_transfers(replica, slot)
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


def _check_tables(replica: Core, slot: int) -> None:
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


def _check_transfers(replica: Core, slot: int) -> None:
    requests, tracker = replica.requests, replica.tracker
    kept = requests.held[slot] or (slot in requests.loading and not requests.running[slot])
    if kept != (slot in tracker.held):
        raise BrokenInvariant("transfers", f"slot {slot}: blocks of a transfer are not held, or held too long")
    if requests.load_after[slot] > replica.seq:
        raise BrokenInvariant("transfers", f"slot {slot}: its load waits for step {requests.load_after[slot]}")


# -- steps in flight ---------------------------------------------------------------------------------------------------


def _check_grants(replica: Core) -> None:
    """Check that each request's tokens in flight and last step in flight are those of the recorded grants."""
    requests, executed = replica.requests, replica.coordinator.pool.executed_through
    granted: Counter[Stay] = Counter()
    last: dict[Stay, int] = {}
    for step, grants in sorted(replica.tracker.grants.items()):
        if not len(grants.slot) == len(grants.serial) == len(grants.num_tokens):
            raise BrokenInvariant("grants", f"grants of step {step}: columns of different lengths")
        for stay, count in zip(grants.stays(), grants.num_tokens, strict=True):
            granted[stay] += count
            last[stay] = step
    for slot in requests.slots():
        stay, step = Stay(slot, requests.serial[slot]), requests.granted_step[slot]
        expected = granted[stay] if requests.running[slot] else 0
        if requests.in_flight[slot] != expected:
            text = f"slot {slot}: {requests.in_flight[slot]} tokens in flight, grants say {expected}"
            raise BrokenInvariant("grants", text)
        if step > replica.seq:
            raise BrokenInvariant("grants", f"slot {slot}: a later grant, of step {step} after {replica.seq}")
        if requests.running[slot] and step > executed and last.get(stay) != step:
            raise BrokenInvariant("grants", f"slot {slot}: no record of its grant in step {step}")


def _check_records(replica: Core) -> None:
    """Check the records of steps: that the steps are in flight, that adopted keys have a record, and that the step
    numbers for which blocks wait are in order.
    """
    tracker, executed, last = replica.tracker, replica.coordinator.pool.executed_through, replica.seq
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
    recorded = _tentative_blocks(replica)
    requests = replica.requests
    for step, adoptions in tracker.adoptions.items():
        for block, (slot, serial) in ((block, stay) for block, stays in adoptions.items() for stay in stays):
            runs = requests.running[slot] and requests.serial[slot] == serial
            last_adopted = requests.adopted_step[slot]
            if runs and last_adopted < step:
                text = f"slot {slot} adopted a key of step {step}, the last recorded is {last_adopted}"
                raise BrokenInvariant("adoptions", text)
            if runs and (step, block) not in recorded:
                text = f"slot {slot} adopted block {block} of step {step}, which has no record of its key"
                raise BrokenInvariant("adoptions", text)
    # Releases are in order: one behind a later fence waits for that, which is safe and bounded by the last step sent.
    fences = [fence for fence, _ in tracker.waiting]
    if fences and not (executed < fences[0] and max(fences) <= last):
        raise BrokenInvariant("fences", f"fences {fences[:9]}, {executed} executed")


def faults(tiers: Tiers, keyed: set[int]) -> Iterator[str]:
    """Yield what contradicts itself. `keyed`: those blocks of loads that have a key."""
    for tier in tiers.each:
        written = [write for write in tiers.jobs.writes() if write.tier == tier.number]
        yield from _faults_of_slots(tier, [write.slot for write in written])
        yield from _faults_of_keys(tier, tiers.last_job)
        yield from _faults_of_retained(tier)
        most = tiers.ids.start if not tier.number else tiers.each[tier.number - 1].num_slots
        if any(not 0 <= place < most for place in tier.wanted.version):
            yield f"tier {tier.number}: wants {len(tier.wanted)} places, below {most}"
        if not tier.wanted.is_early and (len(tier.wanted) or tier.wanted.recent):
            yield f"tier {tier.number}: wants something early with the policy {tier.wanted.policy.value}"
        if any(slot in tier.key or not 0 <= slot < tier.num_slots for slot in tier.stale):
            yield f"tier {tier.number}: a slot has a key, and holds what no key names"
        if sorted(tier.writing) != sorted({write.key for write in written}):
            yield f"tier {tier.number}: {len(tier.writing)} keys are being written, by {len(written)} jobs"
        rows = [row.source for load in tiers.jobs.loads.values() for row in load.rows]
        if tier.pins != Counter(source.slot for source in rows if source.tier == tier.number):
            yield f"tier {tier.number}: the pins are not those of the loads in flight"
    if tiers.depth != len(tiers.each):
        yield f"look-ups search {tiers.depth} of {len(tiers.each)} tiers"
    for slot, job in tiers.loading.items():
        load = tiers.jobs.loads.get(job)
        if load is None or load.request != slot:
            yield f"slot {slot} waits for load {job}, which is not in flight"
    if keyed:
        yield f"loads in flight fill blocks {sorted(keyed)[:9]}, which have keys"
    jobs = [*tiers.jobs.loads, *tiers.jobs.saves, *tiers.jobs.moves]
    if len(set(jobs)) != len(jobs) or any(job > tiers.last_job for job in jobs):
        yield f"two jobs have one number, or one above the last, {tiers.last_job}"


def _faults_of_slots(tier: Tier, written: list[int]) -> Iterator[str]:
    only_pinned = [slot for slot in tier.pins if slot not in tier.key]
    seen, count = bytearray(tier.num_used), 0
    for slot in chain(tier.free, tier.key, written, only_pinned):
        if not 0 <= slot < tier.num_used or seen[slot]:
            yield f"tier {tier.number}: slot {slot} has two states, or was never used"
            return
        seen[slot] = True
        count += 1
    if count != tier.num_used and not tier.is_of_peers:
        yield f"tier {tier.number}: {tier.num_used} slots were used, {count} have a state"


def _faults_of_keys(tier: Tier, last_job: int) -> Iterator[str]:
    last = MAX_VERSION if tier.is_of_peers else last_job
    count, held = 0, [0] * len(tier.uses)
    for key, slot in tier.in_order():
        held[key[1]] += 1
        if tier.key.get(slot) != key or not 0 < tier.version.get(slot, 0) <= last:
            yield f"tier {tier.number}: slot {slot} has another key than the one that leads to it, or no version"
        count += 1
    if count != len(tier.key) or count != len(tier.version):
        yield f"tier {tier.number}: {count} keys lead to {len(tier.key)} slots"
    if held != [use.held for use in tier.uses]:
        yield f"tier {tier.number}: the groups have {held} blocks, counted {[use.held for use in tier.uses]}"


def _faults_of_retained(tier: Tier) -> Iterator[str]:
    """Exactly the keys that are retained here, and are no shadows, are in the lists of their priorities."""
    slots = list(tier.retained)
    if sorted(slots) != sorted(tier.kept.values()) or len(slots) != tier.num_retained:
        yield f"tier {tier.number}: {len(tier.kept)} keys are retained, in {len(slots)} slots of {tier.num_retained}"
    expected = {slot: tier.priority_of(key) for key, slot in chain(tier.recent.items(), tier.kept.items())}
    if {slot: priority for slot, priority in expected.items() if priority is not None} != tier.retained.priority:
        yield f"tier {tier.number}: slots {slots[:9]} are retained, expected {list(expected.items())[:9]}"
    used = tier.used_by_owners()
    if any(count > tier.most_retained for count in used):
        yield f"tier {tier.number}: owners retain {used} keys, each at most {tier.most_retained}"
