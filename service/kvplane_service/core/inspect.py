"""Checks the invariants of a replica's whole state, and returns its digest and its snapshot. Changes nothing.

No single operation of the interpreter visits a whole column, so that other threads can run in between.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvplane_service.core.columns import pieces
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
    """The allocator's state. The iterables read it when they are iterated: the replica must not change before.

    Attributes:
        digest: result of `digest`.
        num_free_blocks: number of free blocks.
        free_blocks: ids of the free blocks, in eviction order.
        distinct_keys: number of different (domain, group, digest) keys.
        keys: all keys, ascending by block, its primary key first.
        requests: all requests, ascending by slot.
        usage: share of the blocks that are not free, 0 to 1.
    """

    digest: str
    num_free_blocks: int
    free_blocks: Iterable[int]
    distinct_keys: int
    keys: Iterable[CachedKey]
    requests: Iterable[RequestState]
    usage: float


def take_snapshot(replica: Replica) -> Snapshot:
    """Check the invariants, and return the whole state. Raises BrokenInvariant."""
    check(replica)
    pool = replica.coordinator.pool
    usable = pool.num_blocks - 1
    return Snapshot(
        digest=digest(replica),
        num_free_blocks=pool.num_free,
        free_blocks=pool.free,
        distinct_keys=pool.count_keys(),
        keys=_keys(replica),
        requests=_requests(replica),
        usage=1.0 - pool.num_free / usable,
    )


def digest(replica: Replica) -> str:
    """Return the SHA-256 (hex) of all state of the replica that later decisions can depend on.

    Equal operations on equal replicas give equal digests.
    """
    pool, tracker, managers = replica.coordinator.pool, replica.tracker, replica.coordinator.managers
    shared = (entry for entry in _index(pool) if len(entry[1]) > 1)
    columns: tuple[Iterable[object], ...] = (
        (replica.seq, pool.executed_through, pool.epoch, pool.generation, pool.last_counter),
        pool.free,
        pool.references,
        ((one.block, one.key, one.num_tokens) for one in _keys(replica)),
        (sum(_number_of(entry) for entry in shared),),  # the index has no order
        pool.key_step,
        pool.stamp,
        (_request_columns(replica, slot) for slot in replica.requests.slots()),
        ((manager.copies, manager.step_state()) for manager in managers),
        sorted(tracker.held.items()),
        sorted(pool.busy),
        tracker.waiting,
        *(sorted(book.items()) for book in (tracker.grants, tracker.filling)),
        *_entries(tracker.tentative),
        *_entries(tracker.adoptions),
    )
    hashed = hashlib.sha256()
    for column in columns:
        for piece in pieces(column):
            hashed.update(repr(piece).encode())
        hashed.update(b"end of a column")
    return hashed.hexdigest()


def _number_of(entry: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(entry).encode()).digest())


def _entries(book: Mapping[int, Mapping[Any, list[Any]]]) -> Iterator[Iterable[object]]:
    """Yield the entries of each step of a record of the tracker, in order of steps."""
    for step, entries in sorted(book.items()):
        yield (step,)
        yield entries.items()


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


def _keys(replica: Replica) -> Iterator[CachedKey]:
    pool = replica.coordinator.pool
    for block in range(pool.num_blocks):
        key = pool.key_of(block)
        if key is None:
            continue
        tentative = pool.key_step[block] > pool.executed_through
        yield CachedKey(block, *key, pool.key_tokens[block], tentative)
        for further, count in pool.more_keys.get(block, {}).items():
            yield CachedKey(block, *further, count, tentative)


def _requests(replica: Replica) -> Iterator[RequestState]:
    requests = replica.requests
    for slot in requests.slots():
        yield RequestState(
            slot,
            requests.request_id[slot],
            requests.num_tokens[slot],
            requests.computed[slot],
            tuple(tuple(table) for table in replica.coordinator.tables(slot)),
            requests.running[slot],
        )


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
        b"".join(content.digests),
        content.hasher.tail if content.hasher else None,
        [manager.slot_state(slot) for manager in replica.coordinator.managers],
    )
