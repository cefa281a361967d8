"""What a recovery gives back to an unused pool."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from kvplane_service.core.freelist import Links
from kvplane_service.core.keys import Key
from kvplane_service.core.keytable import KeyTable


@dataclass(frozen=True, slots=True)
class Recovered:
    """What became of the rows.

    Attributes:
        kept: are keys of the cache again.
        unproven: the memory shows other stamps.
        repeated: the block had the key already.
        impossible: name a block, group or digest that the pool cannot have.
    """

    kept: int
    unproven: int
    repeated: int
    impossible: int


@dataclass(frozen=True, slots=True)
class Regained:
    """Columns of a pool by block, whole: the pool takes the columns themselves.

    Attributes:
        outcome: for those who watch.
        epoch: the highest that memory or entries show; stamps were given in it.
        stamp, key_tokens: of blocks with a key, 0 for the others.
        key: UNTOUCHED or None.
        links: free blocks in eviction order.
        table: the primary keys; some may be those of several blocks.
        shared: blocks of the table that have one key, by key.
        further: keys beside the primary one.
    """

    outcome: Recovered
    epoch: int
    stamp: array[int]
    key_tokens: array[int]
    key: list[Key | None]
    links: Links
    table: KeyTable
    shared: list[list[int]]
    further: list[tuple[int, Key]]
