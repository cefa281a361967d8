"""What a pool takes over of a recovery, with its own structures."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from kvplane_core.face.columns import SLICE_BLOCKS, Ints
from kvplane_core.face.keys import Key
from kvplane_core.face.recovery import RecoveredState
from kvplane_core.spec.freelist import Links
from kvplane_core.spec.key_maps import LAZY_KEY, new_map
from kvplane_core.spec.keytable import KeyTable
from kvplane_core.spec.pool import BlockPool
from kvplane_core.spec.split import SplitPool


@dataclass(frozen=True, slots=True)
class LazyState(RecoveredState):
    """Such a state with what a `BlockPool` takes over, so that installing it takes no time.

    Attributes:
        key: by block, LAZY_KEY if it has a key, else None.
        links: the free list.
        table: the primary keys.
        shared: for each key that several blocks have, these blocks.
    """

    key: list[Key | None]
    links: Links
    table: KeyTable
    shared: list[list[int]]

    @classmethod
    def of(cls, state: RecoveredState) -> LazyState:
        """Return it with the structures of a pool of its size."""
        columns = {one.name: getattr(state, one.name) for one in fields(RecoveredState)}
        num_blocks, num_tokens = len(state.stamp), np.frombuffer(state.key_tokens, np.uint32)
        table = KeyTable(num_blocks, state.names, state.pair, state.block, state.digest)
        links = Links.of(num_blocks, state.free, state.num_bare)
        return cls(**columns, key=_presence(num_tokens), links=links, table=table, shared=table.shared_keys())


def install(pool: BlockPool, state: LazyState) -> None:
    """Install recovered keys in an unused pool, which takes ownership of the columns."""
    assert not pool.index, "a pool with keys needs no recovery"
    stamps_of_reserved = [(block, pool.stamp[block]) for block in pool.reserved]
    pool.key, pool.key_tokens, pool.stamp = state.key, state.key_tokens, state.stamp
    for block, stamp in stamps_of_reserved:
        pool.stamp[block] = stamp
    table = state.table
    if isinstance(pool, SplitPool):
        pool.name_states(state.names, state.pair, state.block)
    pool.free.replace(state.links)
    if not table.num_keys:
        return
    pool.lazy_keys, pool.num_evictable = table, table.num_keys
    pool.index = {domain: [new_map(pool.num_blocks) for _ in range(pool.num_groups)] for domain in table.domains()}
    for blocks in state.shared:
        for block in blocks:
            pool.move_to_index(block)
    for block, key in state.further:
        pool.register(block, key, 0)
    pool.registered.clear()


def _presence(num_tokens: Ints) -> list[Key | None]:
    """Return, by block, LAZY_KEY if it has a recovered key, else None; built in pieces, so that other threads can run
    in between.
    """
    present: list[Key | None] = []
    for start in range(0, len(num_tokens), SLICE_BLOCKS):
        present += [LAZY_KEY if count else None for count in num_tokens[start : start + SLICE_BLOCKS].tolist()]
    return present
