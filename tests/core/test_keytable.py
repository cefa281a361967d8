"""The table of recovered keys returns the same as a dict of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane_core.face.keys import NULL_BLOCK, Key
from kvplane_core.spec.keytable import KeyTable

pytestmark = pytest.mark.specification  # its key table

PAIRS = [("", 0), ("tenant", 0), ("", 3)]
NUM_BLOCKS = 1000


def table_of(keys: list[Key]) -> tuple[KeyTable, dict[int, Key]]:
    """Each key on a block of its own, from block 7 on."""
    blocks = np.arange(7, 7 + len(keys))
    pair = np.array([PAIRS.index((domain, group)) for domain, group, _ in keys], np.uint32)
    digest = np.frombuffer(b"".join(digest for _, _, digest in keys), np.uint8).reshape(-1, 16)
    return KeyTable(NUM_BLOCKS, PAIRS, pair, blocks, digest), dict(zip(blocks.tolist(), keys, strict=True))


# Few bytes differ, so that beginnings, hashes and whole digests are often equal.
digests = st.tuples(st.integers(0, 3), st.sampled_from([0, 5, 7, 8, 15])).map(
    lambda drawn: bytes(drawn[0] if at == drawn[1] else 0 for at in range(16))
)
keys = st.builds(lambda pair, digest: (*pair, digest), st.sampled_from(PAIRS), digests)


@given(st.lists(keys, unique=True, max_size=40), st.lists(keys, max_size=20), st.randoms(use_true_random=False))
def test_key_table_finds_exactly_its_keys(inside, asked, chance):
    table, key_of = table_of(inside)
    for block in chance.sample(sorted(key_of), len(key_of) // 3):
        assert table.take(block) == key_of.pop(block)
    block_of = {key: block for block, key in key_of.items()}
    assert dict(table) == key_of
    assert table.num_keys == len(key_of)
    for group in (0, 1, 3):
        assert table.count_keys(group) == sum(of_key == group for _, of_key, _ in block_of)
    for key in (*asked, *inside):
        assert table.find(*key) == block_of.get(key, NULL_BLOCK)
        domain, group, digest = key
        assert table.find("other", group, digest) == NULL_BLOCK
        assert table.find(domain, group, digest + b"x") == NULL_BLOCK


@given(st.lists(keys, max_size=30))
def test_key_table_returns_keys_of_several_blocks(inside):
    table, key_of = table_of(inside)
    several = {
        key: [block for block, other in key_of.items() if other == key] for key in inside if inside.count(key) > 1
    }
    assert sorted(table.shared_keys()) == sorted(several.values())
    assert table.shared_keys() == [sorted(blocks) for blocks in table.shared_keys()]


def test_take_of_a_taken_block_is_an_assertion():
    table, _ = table_of([("", 0, bytes(16))])
    table.take(7)
    with pytest.raises(AssertionError, match="block 7 has no row"):
        table.take(7)
    with pytest.raises(AssertionError, match="block 8 has no row"):
        table.key_of(8)
