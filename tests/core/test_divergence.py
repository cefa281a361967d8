"""A prompt that differs from a cached one in its last block (vLLM #57610), and the policy that keeps its hit.

Retention 0 keeps the window before the replay boundary and nothing else, so a prompt that differs just below it finds
no window at all. `keep_divergence_boundary` keeps the window one block lower as well.
"""

from __future__ import annotations

import pytest

from kvplane.base.groups import DENSE_RETENTION
from tests.core.builders import Engine, full, window


def letters(count):
    """Distinct blocks of 16."""
    return "".join(chr(0x4E00 + index // 16) for index in range(count))


@pytest.mark.parametrize(("full_block", "hit"), [(16, 976), (32, 960)])
@pytest.mark.parametrize(
    ("changes", "is_kept"),
    [
        ({"retention_interval": 0}, False),
        ({"retention_interval": 0, "keep_divergence_boundary": True}, True),
        ({"retention_interval": DENSE_RETENTION}, True),
    ],
)
def test_keep_divergence_boundary_keeps_the_hit_below_a_divergence(full_block, hit, changes, is_kept):
    """A window of 256 in blocks of 16, full attention in blocks of 16 or, as reported, of 32.

    The replay boundary is 992 both ways, and 991 is in the block before it, so 976 or 960 tokens are shared in whole
    blocks. That is where the second window ends, if it is kept.
    """
    engine = Engine(full(full_block), window(256, 16), num_blocks=400, **changes)
    prompt = letters(1000)
    engine.serve(0, prompt)
    parted = prompt[:991] + "z" * 9
    assert engine.would_hit(parted).num_tokens == (hit if is_kept else 0)


def test_keep_divergence_boundary_does_not_change_the_hit_of_a_repeat():
    for keep in (False, True):
        engine = Engine(full(16), window(256, 16), num_blocks=400, retention_interval=0, keep_divergence_boundary=keep)
        engine.serve(0, letters(1000))
        assert engine.would_hit(letters(1000)).num_tokens == 992


def test_keep_divergence_boundary_keeps_one_more_block():
    kept = {}
    for keep in (False, True):
        engine = Engine(window(8), full(), retention_interval=0, keep_divergence_boundary=keep)
        engine.admit(0, "a" * 20)
        table = engine.table(0)
        kept[keep] = [index for index, block in enumerate(table) if engine.pool.key[block] is not None]
    assert kept == {False: [2, 3], True: [1, 2, 3]}


def test_requests_after_the_first_divergence_hit_the_single_group_hit():
    """The first request that diverges gets the single-group hit 976 and keeps the window there."""
    engine = Engine(full(16), window(256, 16), num_blocks=400, retention_interval=0)
    prompt = letters(1000)
    engine.serve(0, prompt)
    assert engine.serve(1, prompt[:991] + "y" * 9).single_group_hit == 976
    assert engine.would_hit(prompt[:991] + "z" * 9).num_tokens == 976
