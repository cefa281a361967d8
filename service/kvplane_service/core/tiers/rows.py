"""The blocks of a prefix that a hit needs, and a load reads."""

from __future__ import annotations

from kvplane.base.groups import ReplicaSpec
from kvplane_service.core.coordinator import Coordinator
from kvplane_service.core.requests import Requests
from kvplane_service.core.setup import is_cached


def blocks_of_hit(spec: ReplicaSpec, num_tokens: int) -> list[int]:
    """Return the number of blocks of each group that the hit of a prefix needs; 0 for groups that are not looked up.

    `num_tokens`: length of the prefix, a multiple of the block size of every group that is looked up.
    """
    return [
        num_tokens // manager.block_size - max(manager.skipped_tokens(num_tokens), 0) // manager.block_size
        if is_cached(manager.spec)
        else 0
        for manager in Coordinator(spec, Requests()).managers
    ]
