"""The blocks of a prefix that a hit needs, and a load reads; and those that are kept of it."""

from __future__ import annotations

from kvplane.base.groups import GroupKind, ReplicaSpec
from kvplane_service.core.coordinator import Coordinator
from kvplane_service.core.requests import Requests


def blocks_of_hit(spec: ReplicaSpec, num_tokens: int) -> list[int]:
    """Return the number of blocks of each group that the hit of a prefix needs; 0 for groups that are not looked up.

    `num_tokens`: length of the prefix, a multiple of the block size of every group that is looked up.
    """
    return [
        num_tokens // manager.block_size - max(manager.skipped_tokens(num_tokens), 0) // manager.block_size
        if manager.spec.is_cached
        else 0
        for manager in Coordinator(spec, Requests()).managers
    ]


def blocks_kept(spec: ReplicaSpec, num_tokens: int, chunk_tokens: int) -> list[int]:
    """Return the number of blocks of each group that have keys when a prompt is computed and its end can be hit.

    `num_tokens` as for `blocks_of_hit`; `chunk_tokens`: of a step, a multiple of the same. A state exists only where a
    chunk ends.
    """
    kept = []
    for manager in Coordinator(spec, Requests()).managers:
        count, size = 0, manager.block_size
        for start in range(0, num_tokens if manager.spec.is_cached else 0, chunk_tokens):
            first, last = start // size, min(start + chunk_tokens, num_tokens) // size
            mask = manager.reachable_blocks(first, last, [num_tokens])
            mask = [True] * (last - first) if mask is None else mask
            count += sum(mask[-1:] if manager.spec.kind is GroupKind.MAMBA else mask)
        kept.append(count)
    return kept
