"""The memo of hashed prompts: the hashes are those of a hasher without it, and only new blocks are hashed."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import HashAlgorithm
from kvplane.base.hashing import HashMemo, HashScheme, RequestHasher, pack_tokens
from kvplane.base.step import NO_EXTRA_KEYS, ExtraKeys

SCHEME = HashScheme.named(4)
KEYS = [NO_EXTRA_KEYS, ExtraKeys(salt="a"), ExtraKeys(lora=("name", "path"))]
tokens = st.lists(st.integers(0, 1), max_size=30)  # few ids, so that prompts often begin alike


class Counting:
    """A digest that counts the blocks that it hashes."""

    def __init__(self, digest: Any) -> None:
        self.digest, self.blocks = digest, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.digest, name)

    def hash_run(self, parent: bytes, packed: bytes, block_size: int) -> bytes:
        self.blocks += len(packed) // (4 * block_size)
        return self.digest.hash_run(parent, packed, block_size)


@given(
    st.lists(st.tuples(tokens, st.sampled_from(KEYS)), max_size=8),
    st.sampled_from([0, 1, 5]),
    st.sampled_from([1 << 20, 12, 0]),
    tokens,
)
def test_hash_memo_gives_the_hashes_of_a_hasher(prompts, lookahead, max_tokens, more):
    scheme = HashScheme.named(4, HashAlgorithm.KVPLANE, "", lookahead)
    memo = HashMemo(scheme, max_tokens=max_tokens)
    for prompt, keys in prompts:
        hasher, hashes = memo.hash_prompt(pack_tokens(prompt), keys)
        plain = RequestHasher(scheme, keys)
        assert hashes == plain.append(pack_tokens(prompt))
        assert hasher.tail == plain.tail
        assert hasher.append(pack_tokens(more)) == plain.append(pack_tokens(more))


def test_hash_memo_hashes_only_what_is_new_of_a_next_turn():
    counting: Any = Counting(SCHEME.digest)
    memo = HashMemo(replace(SCHEME, digest=counting))
    conversations = [[100 + number] * 8 + list(range(number, number + 40)) for number in range(3)]
    for turn in range(1, 5):
        for prompt in conversations:
            before = counting.blocks
            memo.hash_prompt(pack_tokens(prompt))
            assert counting.blocks - before == (12 if turn == 1 else 5)
            prompt += list(range(20))


def test_hash_memo_keeps_the_prompts_that_were_used_last():
    counting: Any = Counting(SCHEME.digest)
    memo = HashMemo(replace(SCHEME, digest=counting), max_tokens=3 * 16)
    prompts = [pack_tokens([number] * 16) for number in range(4)]
    for number, hashed in ((0, 4), (1, 4), (2, 4), (0, 0), (3, 4), (0, 0), (2, 0), (1, 4)):
        before = counting.blocks
        memo.hash_prompt(prompts[number])
        assert counting.blocks - before == hashed, number


def test_hash_memo_refuses_half_tokens_and_remembers_nothing_of_them():
    memo = HashMemo(SCHEME)
    with pytest.raises(InvalidArgument):
        memo.hash_prompt(bytes(18))
    assert memo.hash_prompt(bytes(16))[1] == RequestHasher(SCHEME).append(bytes(16))
