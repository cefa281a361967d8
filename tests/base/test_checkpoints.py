"""The rule by which allocator and engine compute where a launch writes a state inside its chunk."""

from __future__ import annotations

import pytest

from kvplane.base.checkpoints import CheckpointRule

RULE = CheckpointRule(
    alignment=2, block_size=8, hash_block_size=2, hit_alignment=2, drops_last_block=False, tokens_after=1
)
DRAFTS = CheckpointRule(
    alignment=2, block_size=8, hash_block_size=2, hit_alignment=2, drops_last_block=True, tokens_after=1
)


@pytest.mark.parametrize(
    ("rule", "num_tokens", "boundary"),
    [(RULE, 21, 20), (RULE, 20, 18), (RULE, 1, 0), (DRAFTS, 21, 18), (DRAFTS, 20, 18), (DRAFTS, 2, 0)],
)
def test_a_repeat_continues_at_the_last_boundary_with_tokens_after_it(rule, num_tokens, boundary):
    assert rule.last_boundary(num_tokens, 2) == boundary


@pytest.mark.parametrize(
    ("start", "end", "position"),
    [
        (0, 21, 20),
        (0, 17, 16),
        (0, 8, 0),  # the chunk has one block, that of the running state
        (8, 21, 20),
        (8, 16, 0),  # the block before that of the running state has the state from which the chunk starts
        (9, 21, 0),  # the start is inside a hash block
        (10, 21, 0),  # the block before has the first state too
        (0, 9, 8),
    ],
)
def test_a_launch_writes_a_state_inside_its_chunk(start, end, position):
    assert RULE.position(start, end) == position


def test_the_checkpoint_is_in_the_block_before_that_of_the_running_state():
    assert [RULE.index(end) for end in (9, 16, 17, 24, 25)] == [0, 0, 1, 1, 2]


def test_a_position_that_the_kernel_cannot_write_has_no_checkpoint():
    rule = CheckpointRule(
        alignment=8, block_size=8, hash_block_size=2, hit_alignment=2, drops_last_block=False, tokens_after=1
    )
    assert (rule.position(0, 21), rule.position(0, 25)) == (0, 24)


def test_without_an_alignment_there_are_no_checkpoints():
    rule = CheckpointRule(
        alignment=0, block_size=8, hash_block_size=2, hit_alignment=2, drops_last_block=False, tokens_after=1
    )
    assert rule.position(0, 25) == 0
