"""Block hashes: the rules that decide whether two requests may share a page."""

from __future__ import annotations

import hashlib
import pickle
import sys
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.base.errors import FailedPrecondition, InvalidArgument
from kvplane.base.hashing import (
    NO_KEYS,
    ExtraKeys,
    HashScheme,
    HashTail,
    Lora,
    MultimodalItem,
    PromptEmbeds,
    RequestHasher,
    algorithm_names,
    find_algorithm,
    pack_tokens,
    split_hashes,
    unpack_tokens,
)

ALL_ALGORITHMS = list(algorithm_names())
PROMPT = [(i * 37 + 11) % 997 for i in range(40)]

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=80)


def hashes_of(
    tokens: list[int], keys: ExtraKeys = NO_KEYS, block_size: int = 8, algorithm: str = "kvplane"
) -> list[bytes]:
    scheme = HashScheme.named(block_size, algorithm, seed="test")
    return split_hashes(RequestHasher(scheme, keys).append(pack_tokens(tokens)), scheme.algorithm.digest_size)


def first_difference(left: list[bytes], right: list[bytes]) -> int:
    assert len(left) == len(right)
    return next((i for i, pair in enumerate(zip(left, right, strict=True)) if pair[0] != pair[1]), len(left))


def image(offset: int, length: int = 5, digest: str = "cat") -> ExtraKeys:
    return ExtraKeys(multimodal=(MultimodalItem(digest, offset, length),))


# -- The chain -----------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALL_ALGORITHMS)
def test_a_changed_token_changes_its_block_and_all_behind_it(algorithm: str) -> None:
    changed = PROMPT.copy()
    changed[17] += 1
    assert len(hashes_of(PROMPT, algorithm=algorithm)) == 5
    assert (
        first_difference(hashes_of(PROMPT, algorithm=algorithm), hashes_of(changed, algorithm=algorithm)) == 2
    )


@pytest.mark.parametrize("algorithm", ALL_ALGORITHMS)
def test_equal_blocks_at_different_places_have_different_hashes(algorithm: str) -> None:
    assert len(set(hashes_of([7] * 40, algorithm=algorithm))) == 5


@pytest.mark.parametrize("algorithm", ALL_ALGORITHMS)
def test_only_full_blocks_have_a_hash(algorithm: str) -> None:
    assert [len(hashes_of(PROMPT[:n], algorithm=algorithm)) for n in (0, 7, 8, 15, 16)] == [0, 0, 1, 1, 2]


def test_the_first_block_hangs_on_the_none_hash() -> None:
    scheme = HashScheme.named(8, "sha256_cbor")
    expected = hashlib.sha256(cbor2.dumps([scheme.none_hash, PROMPT[:8], None], canonical=True)).digest()
    assert RequestHasher(scheme).append(pack_tokens(PROMPT[:8])) == expected


# -- Extra keys ----------------------------------------------------------------

KEYED = {
    "salt": (ExtraKeys(cache_salt="team-a"), ExtraKeys(cache_salt="team-b")),
    "salt or none": (ExtraKeys(cache_salt="team-a"), NO_KEYS),
    "lora name": (ExtraKeys(lora=Lora("sql", "/l/1")), ExtraKeys(lora=Lora("law", "/l/1"))),
    "lora path": (ExtraKeys(lora=Lora("sql", "/l/1")), ExtraKeys(lora=Lora("sql", "/l/2"))),
    "salt and lora of one text": (ExtraKeys(cache_salt="sql"), ExtraKeys(lora=Lora("sql", "sql"))),
    "image": (image(2), image(2, digest="dog")),
    "place of the image": (image(2), image(3)),
    "embeddings": (
        ExtraKeys(prompt_embeds=PromptEmbeds.of(bytes(80), 2, 8)),
        ExtraKeys(prompt_embeds=PromptEmbeds.of(bytes([1]) + bytes(79), 2, 8)),
    ),
}


@pytest.mark.parametrize("algorithm", ALL_ALGORITHMS)
@pytest.mark.parametrize("pair", KEYED.values(), ids=KEYED.keys())
def test_what_else_makes_the_bytes_of_a_page_changes_the_hash(
    pair: tuple[ExtraKeys, ExtraKeys], algorithm: str
) -> None:
    left, right = (hashes_of(PROMPT, keys, algorithm=algorithm) for keys in pair)
    assert first_difference(left, right) == 0


def test_keys_come_in_a_fixed_order_each_with_its_tag() -> None:
    embeds = PromptEmbeds.of(b"abcdef", 1, 4)
    keys = ExtraKeys(
        Lora("sql", "/l/sql"), (MultimodalItem("cat", 1, 1), MultimodalItem("dog", 3, 9)), "team-a", embeds
    )
    digests = [hashlib.sha256(part).digest() for part in (b"abcd", b"ef", b"")]
    assert keys.keys_for_block(0, 4) == (
        ("lora", "sql", "/l/sql"),
        ("mm", "cat", 1),
        ("mm", "dog", 3),
        ("cache_salt", "team-a"),
        ("prompt_embeds", digests[0]),
    )
    assert keys.keys_for_block(4, 8) == (
        ("lora", "sql", "/l/sql"),
        ("mm", "dog", -1),
        ("prompt_embeds", digests[1]),
    )
    assert keys.keys_for_block(12, 16) == (("lora", "sql", "/l/sql"), ("prompt_embeds", digests[2]))
    assert NO_KEYS.keys_for_block(0, 4) is None


def test_an_item_that_spans_blocks_is_in_each_of_them() -> None:
    keys = image(offset=6, length=12)
    found = [keys.keys_for_block(start, start + 8) for start in range(0, 40, 8)]
    assert found == [(("mm", "cat", 6),), (("mm", "cat", -2),), (("mm", "cat", -10),), None, None]
    plain, with_image = hashes_of(PROMPT), hashes_of(PROMPT, keys)
    assert first_difference(plain, with_image) == 0
    assert first_difference(plain, hashes_of(PROMPT, image(offset=16, length=1))) == 2


def test_a_session_name_is_no_part_of_a_hash() -> None:
    """Two turns of one chat and of two chats share pages alike: there is no key to put a session in."""
    assert set(ExtraKeys.__dataclass_fields__) == {"lora", "multimodal", "cache_salt", "prompt_embeds"}


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: MultimodalItem("cat", -1, 4), "multimodal.offset"),
        (lambda: MultimodalItem("cat", 0, 0), "multimodal.length"),
        (
            lambda: ExtraKeys(multimodal=(MultimodalItem("a", 0, 4), MultimodalItem("b", 3, 4))),
            "multimodal[1].offset",
        ),
        (lambda: ExtraKeys(cache_salt="\ud800"), "cache_salt"),
        (lambda: Lora("sql", "\udfff"), "lora.path"),
        (lambda: PromptEmbeds(8, (bytes(32), bytes(31))), "prompt_embeds.digests[1]"),
        (lambda: PromptEmbeds(0, ()), "prompt_embeds.block_size"),
        (lambda: HashScheme.named(0), "hash_block_size"),
        (lambda: HashScheme.named(16, lookahead=-1), "hash_lookahead"),
        (lambda: HashScheme.named(16, "md5"), "hash_algorithm"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(make: Any, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        make()
    assert refused.value.field == field


# -- Incremental, lookahead, coarser views -------------------------------------


@given(
    tokens=token_lists,
    cuts=st.lists(st.integers(0, 80)),
    block_size=st.integers(1, 9),
    ahead=st.integers(0, 3),
)
def test_appending_in_pieces_gives_the_hashes_of_one_append(
    tokens: list[int], cuts: list[int], block_size: int, ahead: int
) -> None:
    keys = ExtraKeys(multimodal=(MultimodalItem("cat", 3, 20), MultimodalItem("dog", 30, 1)), cache_salt="s")
    scheme = HashScheme.named(block_size, lookahead=ahead)
    at_once = RequestHasher(scheme, keys)
    expected = at_once.append(pack_tokens(tokens))
    tail, pieces = None, []
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(tokens)], strict=True):
        hasher = RequestHasher(scheme, keys, tail)
        pieces.append(hasher.append(pack_tokens(tokens[start:end])))
        tail = hasher.tail
    assert b"".join(pieces) == expected
    assert tail == at_once.tail
    assert at_once.num_tokens == len(tokens)


def test_the_tail_says_how_far_the_hashes_reach() -> None:
    hasher = RequestHasher(HashScheme.named(8))
    hashes = hasher.append(pack_tokens(PROMPT[:21]))
    assert hasher.tail == HashTail(2, hashes[32:], pack_tokens(PROMPT[16:21]))
    assert RequestHasher(HashScheme.named(8)).tail == HashTail(
        0, find_algorithm("kvplane").none_hash("kvplane-none-hash")
    )


def test_a_lookahead_hash_waits_for_the_tokens_behind_its_block() -> None:
    hasher = RequestHasher(HashScheme.named(8, lookahead=3))
    counts = [len(hasher.append(pack_tokens([token]))) // 32 for token in PROMPT[:20]]
    assert [at for at, count in enumerate(counts) if count] == [10, 18]


def test_a_lookahead_hash_depends_on_the_tokens_behind_its_block_and_no_further() -> None:
    def first_hash(changed_at: int) -> bytes:
        tokens = PROMPT.copy()
        tokens[changed_at] += 1
        return RequestHasher(HashScheme.named(8, lookahead=2)).append(pack_tokens(tokens))[:32]

    assert first_hash(9) != first_hash(10) == first_hash(11)


def test_a_lookahead_hash_is_the_reference_form_of_keys_and_tokens_behind() -> None:
    scheme = HashScheme.named(4, "sha256_cbor", lookahead=2)
    keys = image(offset=5, length=1)
    behind = [[["mm", "cat", 5]], *PROMPT[4:6]]
    expected = hashlib.sha256(cbor2.dumps([scheme.none_hash, PROMPT[:4], behind], canonical=True)).digest()
    assert RequestHasher(scheme, keys).append(pack_tokens(PROMPT[:6])) == expected


def test_a_coarser_view_takes_the_last_hash_of_each_coarse_block() -> None:
    scheme = HashScheme.named(8)
    a, b, c, d, e = hashes_of(PROMPT)
    fine = b"".join([a, b, c, d, e])
    assert scheme.coarser(fine, 16) == b + d
    assert scheme.coarser(fine, 24) == c
    assert scheme.coarser(fine, 8) == fine
    assert scheme.coarser(fine, 48) == b""


@pytest.mark.parametrize("block_size", [0, 4, 12, -8])
def test_a_view_that_is_no_multiple_is_refused(block_size: int) -> None:
    with pytest.raises(InvalidArgument) as refused:
        HashScheme.named(8).coarser(bytes(64), block_size)
    assert refused.value.field == "block_size"


# -- Seeds ---------------------------------------------------------------------


def test_strong_hashes_have_a_fixed_seed_and_another_seed_wins() -> None:
    assert (
        HashScheme.named(8, "sha256").none_hash
        == hashlib.sha256(pickle.dumps("vllm-none-hash", protocol=5)).digest()
    )
    assert (
        HashScheme.named(8, "sha256_cbor").none_hash == hashlib.sha256(cbor2.dumps("vllm-none-hash")).digest()
    )
    assert HashScheme.named(8).none_hash == hashlib.sha256(b"kvn1kvplane-none-hash").digest()
    for algorithm in ("kvplane", "sha256", "sha256_cbor"):
        assert HashScheme.named(8, algorithm, seed="42").none_hash != HashScheme.named(8, algorithm).none_hash


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_weak_hashes_want_a_secret_seed(algorithm: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        HashScheme.named(8, algorithm)
    assert refused.value.field == "hash_seed"
    assert (
        HashScheme.named(8, algorithm, seed="a").none_hash
        != HashScheme.named(8, algorithm, seed="b").none_hash
    )


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(FailedPrecondition, match="pip install xxhash"):
        find_algorithm("xxhash_cbor")


# -- Token columns -------------------------------------------------------------


@given(token_lists)
def test_a_column_is_four_little_endian_bytes_a_token(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)
    assert packed == b"".join(token.to_bytes(4, "little") for token in tokens)
    assert unpack_tokens(packed) == tokens


@pytest.mark.parametrize("token", [-1, 2**32, 2**70, 1.0, "7", None])
def test_an_id_beyond_32_bits_is_refused_and_never_cut(token: Any) -> None:
    with pytest.raises(InvalidArgument) as refused:
        pack_tokens([5, token], "prompt_tokens")
    assert refused.value.field == "prompt_tokens[1]"


def test_a_cut_column_is_refused_and_changes_nothing() -> None:
    hasher = RequestHasher(HashScheme.named(8))
    hasher.append(pack_tokens(PROMPT[:3]))
    before = hasher.tail
    with pytest.raises(InvalidArgument, match="7 bytes"):
        hasher.append(bytes(7))
    assert hasher.tail == before
    with pytest.raises(InvalidArgument, match="5 bytes"):
        unpack_tokens(bytes(5))
