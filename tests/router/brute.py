"""The longest hit by trying every length: a length counts if every group has all blocks that a hit of it needs.

Written from the definition of each kind of group, without the look-up's order of search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvplane.base.groups import GroupKind, GroupSpec, ReplicaSpec

Has = Callable[[int], bool]  # whether a group has the key of the prefix of that number of hash blocks


def longest_hit(spec: ReplicaSpec, has: Sequence[Has], num_tokens: int) -> int:
    """The hit of a prompt; `has` by group."""
    for length in range((num_tokens - 1) // spec.hit_alignment * spec.hit_alignment, 0, -spec.hit_alignment):
        if all(_accepts(spec, group, one, length, num_tokens) for group, one in zip(spec.groups, has, strict=True)):
            return length
    return 0


def _accepts(spec: ReplicaSpec, group: GroupSpec, has: Has, length: int, num_tokens: int) -> bool:
    """Whether a hit of `length` tokens finds what this group needs. The last token is read only to be dropped."""
    size, unit = group.block_size, spec.hash_block_size
    known = (num_tokens - int(not group.drops_last_block)) // unit * unit

    def blocks(first: int, end: int) -> bool:
        return all(has((index + 1) * size // unit) for index in range(first, end))

    drop = int(group.drops_last_block)
    if group.kind in (GroupKind.SLIDING_WINDOW, GroupKind.SLIDING_WINDOW_MLA):
        if length % size:
            return False
        end = length // size + drop
        first = max(0, end - max(-(-(group.window - 1) // size) + drop, 1))
        return end * size <= known and blocks(first, end)
    if group.kind is GroupKind.CHUNKED_LOCAL:
        return blocks(length // group.chunk * group.chunk // size, length // size)
    if group.kind is GroupKind.MAMBA:
        return (length % size == 0 or spec.partial_hits) and has(length // unit)
    needed = length + drop * min(spec.hit_alignment, size)
    whole = needed // size
    if not blocks(0, whole):
        return False
    if needed % size == 0:
        return True
    inside = range(needed, min((whole + 1) * size, known) + 1, unit)
    return spec.partial_hits and any(has(end // unit) for end in inside)
