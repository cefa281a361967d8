"""Checks the invariants of a replica's whole state, and returns its digest and its snapshot. Changes nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from kvplane_service.core.invariants import check_in_slices, indexed_keys
from kvplane_service.core.keys import Key
from kvplane_service.core.pool import BlockPool
from kvplane_service.core.replica import Replica


@dataclass(frozen=True, slots=True)
class CachedKey:
    """A key of the prefix cache: its block, name, length of the prefix in tokens, and whether its step is not executed
    yet.
    """

    block: int
    domain: str
    group: int
    digest: bytes
    num_tokens: int
    tentative: bool

    @property
    def key(self) -> Key:
        """Return (domain, group, digest), as the pool stores it."""
        return self.domain, self.group, self.digest


@dataclass(frozen=True, slots=True)
class RequestState:
    """One request that has a slot; `tables` are its block tables, one per group."""

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
        digest: result of `digest`.
        free_blocks: ids of the free blocks, in eviction order.
        distinct_keys: number of different (domain, group, digest) keys.
        keys: all keys, ascending by block, its primary key first.
        requests: all requests, ascending by slot.
        usage: share of the blocks that are not free, 0 to 1.
    """

    digest: str
    free_blocks: tuple[int, ...]
    distinct_keys: int
    keys: tuple[CachedKey, ...]
    requests: tuple[RequestState, ...]
    usage: float


def take_snapshot(replica: Replica) -> Snapshot:
    """Check the invariants, and return the whole state. Raises BrokenInvariant."""
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
    """Return the SHA-256 (hex) of all state of the replica that later decisions can depend on.

    Equal operations on equal replicas give equal digests.
    """
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
    """Check all invariants. Raises BrokenInvariant, which names the violated one."""
    for _ in check_in_slices(replica):
        pass


def _index(pool: BlockPool) -> Iterator[tuple[Key, list[int]]]:
    """Yield every key of the pool with the blocks that have it; the block that was registered first comes first."""
    yield from indexed_keys(pool)
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
        found.append(CachedKey(block, *key, pool.key_tokens[block], tentative))
        more = pool.more_keys.get(block, {})
        found.extend(CachedKey(block, *further, count, tentative) for further, count in more.items())
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
