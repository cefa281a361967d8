"""Where a launch writes a recurrent state inside its chunk: an internal checkpoint.

A launch always writes the state after the chunk's last token. If `GroupSpec.checkpoint_alignment` is set, it also
writes the state at the position from which a request with the same tokens can continue:

    tokens    ...  |<------------- chunk ------------->|
                 start                    position     end
    table     [ s | null | null | checkpoint | running | drafts ]
                                  index

The block table states no position. Allocator and engine both compute it by `CheckpointRule`, from the chunk alone: the
launch writes the checkpoint if the table has a block at `index`, and the allocator gives this block a key only for
`position` tokens. A block that one side expected and the other did not write would be a wrong hit.

The chunk is that of the answer: the computed tokens before and after the grant. A launch planned behind drafts that are
rejected meanwhile starts earlier. It uses the planned chunk too; otherwise it could write into a block that has become
another state. What it leaves in the checkpoint's block is never read, because the rejection removes the checkpoint: its
position is above every token that was known.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvplane.base.groups import GroupSpec, ReplicaSpec


@dataclass(frozen=True, slots=True)
class CheckpointRule:
    """Computes the positions of states from which requests continue, in one group of recurrent states.

    Attributes:
        alignment: the distance from the chunk's start to the checkpoint is a multiple of this number of tokens;
            0 = no checkpoints inside chunks.
        block_size: tokens per block of the group.
        hash_block_size: tokens per block hash.
        hit_alignment: number of tokens of which the length of every hit is a multiple.
        drops_last_block: look-ups leave out the last matched block, so that a repeat continues one `unit` lower.
        tokens_after: number of tokens that must follow the state: one for the logits, or those that its hash covers.
    """

    alignment: int
    block_size: int
    hash_block_size: int
    hit_alignment: int
    drops_last_block: bool
    tokens_after: int

    @classmethod
    def of(cls, spec: ReplicaSpec, group: GroupSpec) -> CheckpointRule:
        """Return the rule for a group of this replica."""
        return cls(
            group.checkpoint_alignment,
            group.block_size,
            spec.hash_block_size,
            spec.hit_alignment,
            any(one.drops_last_block for one in spec.groups),
            max(1, spec.hash_lookahead_tokens),
        )

    def last_boundary(self, num_tokens: int, unit: int) -> int:
        """Return the last multiple of `unit` at which a request that repeats these tokens can continue."""
        if self.drops_last_block:
            return max(num_tokens // unit * unit - unit, 0)
        return max((num_tokens - self.tokens_after) // unit * unit, 0)

    def position(self, start: int, end: int) -> int:
        """Return after how many tokens the launch of the chunk [start, end) writes a checkpoint; 0: it writes none."""
        if self.alignment == 0:
            return 0
        position = self.last_boundary(end, self.hit_alignment)
        return position if self.can_write(start, end, position) else 0

    def can_write(self, start: int, end: int, position: int) -> bool:
        """Whether the launch of the chunk [start, end) can write the state at this position."""
        index = self.index(end)
        return (
            self.alignment > 0
            and start % self.hash_block_size == 0
            and index > (start - 1) // self.block_size
            and index >= 0
            and start + self.hash_block_size <= position < end
            and (position - start) % self.alignment == 0
        )

    def index(self, end: int) -> int:
        """Return the index in the block table of the checkpoint of a chunk that ends after `end` tokens."""
        return -(-end // self.block_size) - 2
