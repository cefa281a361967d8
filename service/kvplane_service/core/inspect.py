"""A replica's whole state: check of its invariants, digest, snapshot. Changes nothing."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from kvplane.base.groups import CommitRule
from kvplane_service.core.keys import LAZY_KEY, NULL_BLOCK, Key
from kvplane_service.core.pool import BlockPool
from kvplane_service.core.replica import Replica
from kvplane_service.core.requests import NO_FAST_PATH


@dataclass(frozen=True, slots=True)
class CachedKey:
    """A key of the prefix cache, with the tokens of its prefix."""

    block: int
    key: Key
    num_tokens: int
    tentative: bool


@dataclass(frozen=True, slots=True)
class RequestState:
    """One live request."""

    slot: int
    request_id: str
    num_tokens: int
    computed_tokens: int
    tables: tuple[tuple[int, ...], ...]
    running: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The allocator's state.

    Attributes:
        free_blocks: in eviction order.
        distinct_keys: (domain, group, digest) keys.
        keys: by block, ascending, primary first.
        requests: by slot.
    """

    digest: str
    free_blocks: tuple[int, ...]
    distinct_keys: int
    keys: tuple[CachedKey, ...]
    requests: tuple[RequestState, ...]
    usage: float


def take_snapshot(replica: Replica) -> Snapshot:
    """The whole state, after `check`."""
    check(replica)
    pool = replica.coordinator.pool
    usable = pool.num_blocks - 1
    return Snapshot(
        digest=digest(replica),
        free_blocks=tuple(pool.free),
        distinct_keys=pool.count_keys(),
        keys=tuple(_keys(replica)),
        requests=tuple(_requests(replica)),
        usage=1.0 - pool.num_free / usable,
    )


def digest(replica: Replica) -> str:
    """SHA-256 (hex) of all state that later decisions can depend on. Equal operations give equal digests."""
    pool, tracker, managers = replica.coordinator.pool, replica.tracker, replica.coordinator.managers
    hashed = hashlib.sha256()
    state = (
        (replica.seq, pool.executed_through, pool.epoch, pool.generation, pool.last_counter),
        list(pool.free),
        pool.references,
        [(one.block, one.key, one.num_tokens) for one in _keys(replica)],
        sorted((key, blocks) for key, blocks in _index(pool) if len(blocks) > 1),
        list(pool.key_step),
        pool.stamp,
        [_request_columns(replica, slot) for slot in replica.requests.slots()],
        [(manager.copies, manager.step_state()) for manager in managers],
        sorted(tracker.held.items()),
        sorted(pool.busy),
        list(tracker.waiting),
        [sorted(book.items()) for book in (tracker.grants, tracker.tentative, tracker.adoptions, tracker.filling)],
    )
    for part in state:
        hashed.update(repr(part).encode())
    return hashed.hexdigest()


def check(replica: Replica) -> None:
    """Check the invariants; the AssertionError names the one that is violated."""
    free = replica.coordinator.pool.free.check()
    _check_references(replica, free)
    _check_keys(replica)
    _check_stamps(replica)
    _check_requests(replica)
    _check_books(replica)
    for slot in replica.requests.slots():
        if replica.requests.running[slot]:
            _check_fast_path(replica, slot)


def _check_references(replica: Replica, free: set[int]) -> None:
    """Every reference has a holder, and a block is free exactly when it has no holder."""
    pool = replica.coordinator.pool
    held: Counter[int] = Counter([*pool.reserved, *pool.busy])
    for manager in replica.coordinator.managers:
        for table in manager.table:
            held.update(block for block in table if block != NULL_BLOCK)
        held.update(block for pair in manager.copies for block in pair)
    for blocks in replica.tracker.held.values():
        held.update(blocks)
    for _, blocks in replica.tracker.waiting:
        held.update(blocks)
    del held[NULL_BLOCK]
    for block in range(1, pool.num_blocks):
        assert pool.references[block] == held[block], (
            f"block {block}: {pool.references[block]} references, {held[block]} holders"
        )
        assert (block in free) == (held[block] == 0), f"block {block}: {held[block]} holders, free: {block in free}"
    assert NULL_BLOCK not in free, "the null block is free"
    for block in pool.busy:
        assert held[block] == 1, (
            f"block {block} is under a load of an earlier engine life and has {held[block]} holders"
        )
        assert pool.key[block] is None, f"block {block} is under a load of an earlier engine life and has a key"


def _check_keys(replica: Replica) -> None:
    """The index has every key with its blocks, and no others."""
    pool = replica.coordinator.pool
    assert pool.key[NULL_BLOCK] is None, "the null block has a key"
    safe = replica.spec.commit is CommitRule.SAFE
    _check_lazy_keys(pool)
    seen = 0
    for key, blocks in _index(pool):
        assert len(set(blocks)) == len(blocks) > 0, f"key {key.digest.hex()}: blocks {blocks}"
        for block in blocks:
            assert pool.has_key(block, key), f"key {key.digest.hex()} is not on block {block}"
            seen += 1
    on_blocks = sum(1 for key in pool.key if key is not None) + sum(len(more) for more in pool.more_keys.values())
    assert seen == on_blocks, f"{on_blocks} keys on blocks, {seen} in the map"
    for block, more in pool.more_keys.items():
        primary = pool.key[block]
        assert primary is not None and more, f"block {block}: further keys {more} without a primary one"
        allowed = not safe or replica.coordinator.managers[primary.group].may_have_keys(1 + len(more))
        assert allowed, f"block {block} holds one state and has {1 + len(more)} keys"
    assert pool.enable_caching or not pool.index, "keys without prefix caching"
    evictable = sum(1 for block in pool.free if pool.key[block] is not None)
    assert pool.num_evictable == evictable, f"{evictable} free blocks carry a key, the count says {pool.num_evictable}"


def _check_lazy_keys(pool: BlockPool) -> None:
    """Packed keys are in the key table only, and each can be found there."""
    rows = dict(pool.lazy_keys) if pool.lazy_keys is not None else {}
    unread = {block for block, key in enumerate(pool.key) if key is LAZY_KEY}
    assert unread == set(rows), f"keys of blocks {unread ^ set(rows)} are in one of table and column alone"
    assert len(rows) == pool.count_lazy_keys(), f"{len(rows)} rows, the count says {pool.count_lazy_keys()}"
    for block, key in rows.items():
        assert pool.references[block] == 0, f"block {block} is held and has a lazy key"
        assert pool.blocks_of(key) == [block], f"key {key.digest.hex()} of block {block} leads to {pool.blocks_of(key)}"
        assert block not in pool.more_keys, f"block {block} has further keys and a lazy one"


def _check_stamps(replica: Replica) -> None:
    """No two blocks have one stamp, and every tentative key is recorded by the tracker."""
    pool, tracker = replica.coordinator.pool, replica.tracker
    block_of: dict[int, int] = {}
    accounted = {(seq, one.block) for seq, keys in tracker.tentative.items() for one in keys}
    for block in range(1, pool.num_blocks):
        stamp = pool.stamp[block]
        other = block_of.setdefault(stamp, block) if stamp else block
        assert other == block, f"blocks {other} and {block} have one stamp"
        assert (pool.key_tokens[block] > 0) == (pool.key[block] is not None), f"block {block}: tokens without a key"
        if pool.key[block] is None:
            continue
        assert stamp, f"block {block} has a key and no stamp"
        step = pool.key_step[block]
        waits = step > pool.executed_through and replica.spec.commit is CommitRule.SAFE
        assert not waits or (step, block) in accounted, (
            f"block {block}: its key waits for step {step}, which has no record of it"
        )


def _check_requests(replica: Replica) -> None:
    """Only live requests hold blocks, and the counts agree."""
    requests = replica.requests
    running = sum(1 for slot in requests.slots() if requests.running[slot])
    assert running == requests.num_running, f"{running} run, the count says {requests.num_running}"
    for manager in replica.coordinator.managers:
        for slot, (index, shared) in manager.partial_hit.items():
            assert manager.table[slot][index] == shared, f"slot {slot}: shared block {shared} left its table"
        for slot, table in enumerate(manager.table):
            assert not table or requests.running[slot], (
                f"slot {slot} holds blocks of group {manager.group}, not running"
            )
            assert manager.num_cached[slot] <= len(table) or not table, f"slot {slot}: caches beyond its table"
            assert not table or manager.is_sound(slot), f"slot {slot}: notes of group {manager.group} are wrong"
            assert all(0 <= block < replica.spec.num_blocks for block in table), (
                f"slot {slot}: a block outside the pool"
            )
    for slot in requests.slots():
        assert requests.in_flight[slot] >= 0, f"slot {slot}: {requests.in_flight[slot]} tokens in flight"
        kept = requests.held[slot] or (slot in requests.loading and not requests.running[slot])
        is_kept = slot in replica.tracker.held
        assert kept == is_kept, f"slot {slot}: blocks of a transfer are not held, or held too long"
    assert requests.loading <= set(requests.slots()), f"loads into slots {requests.loading} that are not live"
    running_loads = {slot for slot in requests.loading if requests.running[slot]}
    assert running_loads <= requests.not_zeroed, f"loads into slots {running_loads}, zeroed {requests.not_zeroed}"
    assert all(requests.running[slot] for slot in requests.not_zeroed), f"{requests.not_zeroed} do not all run"


def _check_books(replica: Replica) -> None:
    """Tokens in flight equal the grants, and there is no record of an executed step."""
    requests, tracker, executed = replica.requests, replica.tracker, replica.executed_through
    granted: Counter[tuple[int, int]] = Counter()
    for grants in tracker.grants.values():
        for slot, serial, count in zip(grants.slot, grants.serial, grants.num_tokens, strict=True):
            granted[slot, serial] += count
    for slot in requests.slots():
        expected = granted[slot, requests.serial[slot]] if requests.running[slot] else 0
        assert requests.in_flight[slot] == expected, (
            f"slot {slot}: {requests.in_flight[slot]} tokens in flight, grants say {expected}"
        )
        assert not requests.running[slot] or requests.granted_step[slot] <= replica.seq, f"slot {slot}: a later grant"
    for name, book in (("grants", tracker.grants), ("tentative", tracker.tentative), ("adoptions", tracker.adoptions)):
        assert min(book, default=executed + 1) > executed, f"{name} of step {min(book)}, {executed} is executed"
    # Releases are in order: one behind a later fence waits for that, which is safe and bounded by the last step sent.
    fences = [fence for fence, _ in tracker.waiting]
    assert not fences or (executed < fences[0] and max(fences) <= replica.seq), f"fences {fences}, {executed} executed"


def _check_fast_path(replica: Replica, slot: int) -> None:
    """Below the bound of its fast path a request needs no block and can register no key."""
    requests, managers = replica.requests, replica.coordinator.managers
    slots = requests.fast_path_until[slot]
    if slots == NO_FAST_PATH:
        return
    assert slots <= requests.alloc_bound[slot] and slots < requests.register_bound[slot], f"slot {slot}: wrong bounds"
    for manager in managers:
        assert slots <= manager.alloc_bound(slot), f"slot {slot}: group {manager.group} needs a block before {slots}"
        if replica.spec.enable_caching:
            first = manager.register_bound(slot)
            assert first >= slots or first % replica.spec.scheduler_block_size, (
                f"slot {slot}: group {manager.group} can register {first} tokens, fast path until {slots}"
            )


def _index(pool: BlockPool) -> Iterator[tuple[Key, list[int]]]:
    """Every key with its blocks, first registered first."""
    for domain, maps in pool.index.items():
        for group, by_digest in enumerate(maps):
            for value, entry in by_digest.items():
                yield Key(domain, group, value), [entry] if isinstance(entry, int) else entry
    if pool.lazy_keys is not None:
        for block, key in pool.lazy_keys:
            yield key, [block]


def _keys(replica: Replica) -> list[CachedKey]:
    pool = replica.coordinator.pool
    found = []
    for block in range(pool.num_blocks):
        key = pool.key_of(block)
        if key is None:
            continue
        tentative = pool.key_step[block] > pool.executed_through
        found.append(CachedKey(block, key, pool.key_tokens[block], tentative))
        more = pool.more_keys.get(block, {})
        found.extend(CachedKey(block, further, count, tentative) for further, count in more.items())
    return found


def _requests(replica: Replica) -> list[RequestState]:
    requests = replica.requests
    return [
        RequestState(
            slot,
            requests.request_id[slot],
            requests.num_tokens[slot],
            requests.computed[slot],
            tuple(tuple(table) for table in replica.coordinator.tables(slot)),
            requests.running[slot],
        )
        for slot in requests.slots()
    ]


def _request_columns(replica: Replica, slot: int) -> tuple[object, ...]:
    requests = replica.requests
    content = requests.content[slot]
    return (
        slot,
        requests.serial[slot],
        requests.request_id[slot],
        requests.domain[slot],
        requests.running[slot],
        requests.held[slot],
        slot in requests.loading,
        slot in requests.not_zeroed,
        requests.load_after[slot],
        requests.skip_reading[slot],
        requests.limit[slot],
        requests.num_prompt[slot],
        requests.num_tokens[slot],
        requests.computed[slot],
        requests.in_flight[slot],
        requests.granted_step[slot],
        requests.single_group_hit[slot],
        requests.running[slot] and requests.launch_end(slot),
        content.digests,
        content.hasher.tail if content.hasher else None,
        [manager.slot_state(slot) for manager in replica.coordinator.managers],
    )
