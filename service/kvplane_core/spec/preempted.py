"""What a preempted request leaves behind, so that it continues from where it was when it comes back.

A group keeps the keys of windows and states only where another prompt probably continues (see `reachable_blocks`). A
preempted request comes back and computes all that is behind the last such place again. But what it holds when it is
preempted has the window, or the state, of its last whole blocks: these get keys too, and a tier can save them.
"""

from __future__ import annotations

from kvplane_core.face.keys import NULL_BLOCK
from kvplane_core.spec.coordinator import Coordinator


def leave_hit(blocks: Coordinator, slot: int) -> None:
    """Register what the longest hit needs that the blocks of a running request can give, in all groups or in none.

    Safe: only blocks whose tokens a step before this one registered, or left out because no hit was likely.
    """
    requests, spec = blocks.requests, blocks.spec
    caching = blocks.caching
    ends = [manager.num_cached[slot] - int(manager.drops_last_block) for manager in caching]
    end = min([requests.computed[slot], *(end * one.block_size for end, one in zip(ends, caching, strict=True))])
    end -= end % spec.scheduler_block_size
    if end <= 0 or (blocks.has_states and requests.ends_at[slot] != end):
        return  # a running state is that of its last token only
    left = []
    for manager in caching:
        first, stop = max(manager.skipped_tokens(end), 0) // manager.block_size, manager.num_cached[slot]
        keep = manager.reachable_blocks(first, stop, (end,))
        if keep is None:
            continue  # each of its blocks has got its key
        if NULL_BLOCK in [block for block, kept in zip(manager.table[slot][first:stop], keep, strict=True) if kept]:
            return  # has left the window
        left.append((manager, first, stop, keep))
    for manager, first, stop, keep in left:
        manager.register_range(slot, first, stop, keep)
