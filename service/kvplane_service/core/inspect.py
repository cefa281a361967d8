"""Checks the invariants of a replica's whole state, and returns its snapshot. Changes nothing.

No single operation of the interpreter visits a whole column, so that other threads can run in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from kvplane_service.core.interface import ReplicaCore
from kvplane_service.core.keys import Key
from kvplane_service.core.replica import Replica
from kvplane_service.core.state import digest


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
        digest: SHA-256 of the state, see `state.digest`.
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


def take_snapshot(core: ReplicaCore) -> Snapshot:
    """Check the invariants of the core itself, and return its whole state. Raises BrokenInvariant."""
    check(core)
    replica = core.reference()
    pool = replica.coordinator.pool
    usable = pool.num_blocks - 1
    return Snapshot(
        digest=digest(replica),
        num_free_blocks=pool.num_free,
        free_blocks=chain(pool.free, pool.retained),
        distinct_keys=pool.count_keys(),
        keys=_keys(replica),
        requests=_requests(replica),
        usage=1.0 - pool.num_free / usable,
    )


def check(replica: ReplicaCore) -> None:
    """Check all invariants. Raises BrokenInvariant, which names the violated one."""
    for _ in replica.check_in_slices():
        pass


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
