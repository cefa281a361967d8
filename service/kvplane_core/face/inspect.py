"""Checks the invariants of a replica, and returns a snapshot of its state, which it reads from the image."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from typing import Any

from kvplane_core.face.interface import ReplicaCore
from kvplane_core.face.keys import Key
from kvplane_core.face.state import read_entries


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
    """The allocator's state. The iterables read its image when they are iterated.

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
    image, entries = b"".join(core.image(with_statistics=False)), dict[str, list[Any]]()
    for name, value in read_entries(image):
        entries.setdefault(name, []).append(value)
    num_free = core.free_blocks
    retained = (block for _, lists in entries.get("retained", ()) for _, blocks in lists for block in blocks)
    return Snapshot(
        digest=sha256(image).hexdigest(),
        num_free_blocks=num_free,
        free_blocks=chain(entries["free"][0], retained),
        distinct_keys=core.count_keys(),
        keys=_keys(entries),
        requests=_requests(entries),
        usage=1.0 - num_free / (core.spec.num_blocks - 1),
    )


def check(replica: ReplicaCore) -> None:
    """Check all invariants. Raises BrokenInvariant, which names the violated one."""
    for _ in replica.check_in_slices():
        pass


def _keys(entries: dict[str, list[Any]]) -> Iterator[CachedKey]:
    (tokens,), (steps,), (more,) = entries["pool.key_tokens"], entries["pool.key_step"], entries["more_keys"]
    executed = entries["pool"][0]["executed_through"]
    for first, pairs, numbers, digests in entries["keys"]:
        of_block = iter(digests)
        for block, number in enumerate(numbers, first):
            if number:
                tentative = steps[block] > executed
                domain, group = pairs[number - 1]
                yield CachedKey(block, domain, group, next(of_block), tokens[block], tentative)
                for (domain, group, further), count in more.get(block, ()):
                    yield CachedKey(block, domain, group, further, count, tentative)


def _requests(entries: dict[str, list[Any]]) -> Iterator[RequestState]:
    (columns,), tables = entries["requests"], [state["table"] for state in entries["manager"]]
    for slot, is_live in enumerate(columns["live"]):
        if is_live:
            yield RequestState(
                slot,
                columns["request_id"][slot],
                columns["num_tokens"][slot],
                columns["computed"][slot],
                tuple(tuple(table[slot]) for table in tables),
                columns["running"][slot],
            )
