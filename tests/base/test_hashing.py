"""Block hashes: when two requests may share a page."""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
import sys
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.base.errors import FailedPrecondition, InvalidArgument
from kvplane.base.groups import GroupKind, GroupSpec, HashAlgorithm, ReplicaSpec
from kvplane.base.hashing import (
    HashScheme,
    HashTail,
    PackedHashes,
    RequestHasher,
    RequestKeys,
    block_digest,
    digest_embeds,
    pack_tokens,
    split_hashes,
    unpack_tokens,
)
from kvplane.base.step import NO_EXTRA_KEYS, ExtraKeys, Multimodal

ALL_ALGORITHMS = list(HashAlgorithm)
PROMPT = [(i * 37 + 11) % 997 for i in range(40)]

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=80)


def hashes_of(
    tokens: list[int],
    keys: ExtraKeys = NO_EXTRA_KEYS,
    block_size: int = 8,
    algorithm: HashAlgorithm = HashAlgorithm.KVPLANE,
) -> list[bytes]:
    scheme = HashScheme.named(block_size, algorithm, seed="test")
    return split_hashes(RequestHasher(scheme, keys).append(pack_tokens(tokens)), scheme.digest.size)


def first_difference(left: list[bytes], right: list[bytes]) -> int:
    assert len(left) == len(right)
    return next((i for i, pair in enumerate(zip(left, right, strict=True)) if pair[0] != pair[1]), len(left))


def image(offset: int, length: int = 5, digest: str = "cat") -> ExtraKeys:
    return ExtraKeys(multimodal=(Multimodal(digest, offset, length),))


# -- The chain -----------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALL_ALGORITHMS)
def test_a_changed_token_changes_its_block_and_all_later_blocks(algorithm: HashAlgorithm) -> None:
    changed = PROMPT.copy()
    changed[17] += 1
    assert len(hashes_of(PROMPT, algorithm=algorithm)) == 5
    assert first_difference(hashes_of(PROMPT, algorithm=algorithm), hashes_of(changed, algorithm=algorithm)) == 2


@pytest.mark.parametrize("algorithm", ALL_ALGORITHMS)
def test_equal_blocks_at_different_places_have_different_hashes(algorithm: HashAlgorithm) -> None:
    assert len(set(hashes_of([7] * 40, algorithm=algorithm))) == 5


@pytest.mark.parametrize("algorithm", ALL_ALGORITHMS)
def test_hashes_exist_only_for_full_blocks(algorithm: HashAlgorithm) -> None:
    assert [len(hashes_of(PROMPT[:n], algorithm=algorithm)) for n in (0, 7, 8, 15, 16)] == [0, 0, 1, 1, 2]


def test_the_parent_of_the_first_block_is_the_none_hash() -> None:
    scheme = HashScheme.named(8, HashAlgorithm.SHA256_CBOR)
    expected = hashlib.sha256(cbor2.dumps([scheme.none_hash, PROMPT[:8], None], canonical=True)).digest()
    assert RequestHasher(scheme).append(pack_tokens(PROMPT[:8])) == expected


# -- Extra keys ----------------------------------------------------------------

KEYED = {
    "salt": (ExtraKeys(salt="team-a"), ExtraKeys(salt="team-b")),
    "salt or none": (ExtraKeys(salt="team-a"), NO_EXTRA_KEYS),
    "lora name": (ExtraKeys(lora=("sql", "/l/1")), ExtraKeys(lora=("law", "/l/1"))),
    "lora path": (ExtraKeys(lora=("sql", "/l/1")), ExtraKeys(lora=("sql", "/l/2"))),
    "salt and lora of one text": (ExtraKeys(salt="sql"), ExtraKeys(lora=("sql", "sql"))),
    "image": (image(2), image(2, digest="dog")),
    "place of the image": (image(2), image(3)),
    "embeddings": (
        ExtraKeys(prompt_embeds=digest_embeds(bytes(80), 2, 8)),
        ExtraKeys(prompt_embeds=digest_embeds(bytes([1]) + bytes(79), 2, 8)),
    ),
}


@pytest.mark.parametrize("algorithm", ALL_ALGORITHMS)
@pytest.mark.parametrize("pair", KEYED.values(), ids=KEYED.keys())
def test_extra_keys_change_the_hash(pair: tuple[ExtraKeys, ExtraKeys], algorithm: HashAlgorithm) -> None:
    left, right = (hashes_of(PROMPT, keys, algorithm=algorithm) for keys in pair)
    assert first_difference(left, right) == 0


def test_extra_keys_have_a_fixed_order_and_tags() -> None:
    items = (Multimodal("cat", 1, 1), Multimodal("dog", 3, 9))
    embeds = digest_embeds(b"abcdef", token_bytes=1, block_size=4)
    keys = RequestKeys(ExtraKeys(("sql", "/l/sql"), "team-a", items, embeds), block_size=4)
    lora = ("lora", "sql", "/l/sql")
    digests = [hashlib.sha256(part).digest() for part in (b"abcd", b"ef", b"")]
    assert keys.of_block(0, 4) == (
        lora,
        ("mm", "cat", 1),
        ("mm", "dog", 3),
        ("cache_salt", "team-a"),
        ("prompt_embeds", digests[0]),
    )
    assert keys.of_block(4, 8) == (lora, ("mm", "dog", -1), ("prompt_embeds", digests[1]))
    assert keys.of_block(12, 16) == (lora, ("prompt_embeds", digests[2]))
    assert RequestKeys(NO_EXTRA_KEYS, block_size=4).of_block(0, 4) is None


def test_an_item_is_an_extra_key_of_each_block_that_it_spans() -> None:
    keys = RequestKeys(image(offset=6, length=12), block_size=8)
    found = [keys.of_block(start, start + 8) for start in range(0, 40, 8)]
    assert found == [(("mm", "cat", 6),), (("mm", "cat", -2),), (("mm", "cat", -10),), None, None]
    assert first_difference(hashes_of(PROMPT), hashes_of(PROMPT, image(offset=6, length=12))) == 0
    assert first_difference(hashes_of(PROMPT), hashes_of(PROMPT, image(offset=16, length=1))) == 2


def test_a_session_name_is_not_part_of_a_hash() -> None:
    """Two turns of one chat and of two chats share pages alike: there is no key to put a session in."""
    names = {field.name for field in dataclasses.fields(ExtraKeys)}
    assert names == {"lora", "multimodal", "salt", "prompt_embeds"}


BAD_KEYS = {
    "multimodal[0].offset": ExtraKeys(multimodal=(Multimodal("cat", -1, 4),)),
    "multimodal[0].length": ExtraKeys(multimodal=(Multimodal("cat", 0, 0),)),
    "multimodal[1].offset": ExtraKeys(multimodal=(Multimodal("cat", 0, 4), Multimodal("dog", 3, 4))),
    "multimodal[0].identifier": ExtraKeys(multimodal=(Multimodal("\ud800", 0, 4),)),
    "salt": ExtraKeys(salt="\ud800"),
    "lora_name": ExtraKeys(lora=("\udfff", "/l/sql")),
    "lora_path": ExtraKeys(lora=("sql", "\udfff")),
    "prompt_embeds[1]": ExtraKeys(prompt_embeds=(bytes(32), bytes(31))),
}


@pytest.mark.parametrize("field", BAD_KEYS)
def test_an_invalid_extra_key_is_refused_by_field(field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        RequestHasher(HashScheme.named(8), BAD_KEYS[field])
    assert refused.value.field == f"extra_keys.{field}"


# -- Incremental, lookahead, coarser views -------------------------------------


@given(
    tokens=token_lists,
    cuts=st.lists(st.integers(0, 80)),
    block_size=st.integers(1, 9),
    ahead=st.integers(0, 3),
)
def test_tokens_appended_in_pieces_have_the_hashes_of_one_append(
    tokens: list[int], cuts: list[int], block_size: int, ahead: int
) -> None:
    keys = ExtraKeys(multimodal=(Multimodal("cat", 3, 20), Multimodal("dog", 30, 1)), salt="s")
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


def test_tail_of_hashes_has_their_position() -> None:
    hasher = RequestHasher(HashScheme.named(8))
    hashes = hasher.append(pack_tokens(PROMPT[:21]))
    assert hasher.tail == HashTail(2, hashes[32:], pack_tokens(PROMPT[16:21]))
    assert RequestHasher(HashScheme.named(8)).tail == HashTail(
        0, block_digest(HashAlgorithm.KVPLANE).none_hash("kvplane-none-hash")
    )


def test_hash_scheme_follows_the_replica_spec() -> None:
    groups = (GroupSpec(GroupKind.FULL_ATTENTION, 16),)
    spec = ReplicaSpec(
        groups=groups,
        num_blocks=8,
        max_model_len=64,
        hash_block_size=4,
        scheduler_block_size=16,
        max_in_flight_tokens=64,
        hash_algorithm=HashAlgorithm.SHA256,
        hash_seed="42",
        hash_lookahead_tokens=2,
    )
    assert HashScheme.of(spec) == HashScheme.named(4, HashAlgorithm.SHA256, "42", 2)


def test_a_lookahead_hash_requires_the_tokens_after_its_block() -> None:
    hasher = RequestHasher(HashScheme.named(8, lookahead=3))
    counts = [len(hasher.append(pack_tokens([token]))) // 32 for token in PROMPT[:20]]
    assert [at for at, count in enumerate(counts) if count] == [10, 18]


def test_a_lookahead_hash_depends_only_on_its_lookahead_tokens() -> None:
    def first_hash(changed_at: int) -> bytes:
        tokens = PROMPT.copy()
        tokens[changed_at] += 1
        return RequestHasher(HashScheme.named(8, lookahead=2)).append(pack_tokens(tokens))[:32]

    assert first_hash(9) != first_hash(10) == first_hash(11)


def test_a_lookahead_hash_has_the_form_of_the_reference() -> None:
    scheme = HashScheme.named(4, HashAlgorithm.SHA256_CBOR, lookahead=2)
    keys = image(offset=5, length=1)
    behind = [[["mm", "cat", 5]], *PROMPT[4:6]]
    expected = hashlib.sha256(cbor2.dumps([scheme.none_hash, PROMPT[:4], behind], canonical=True)).digest()
    assert RequestHasher(scheme, keys).append(pack_tokens(PROMPT[:6])) == expected


def test_hash_view_has_the_last_hash_of_each_larger_block() -> None:
    scheme = HashScheme.named(8)
    a, b, c, d, e = hashes_of(PROMPT)
    fine = b"".join([a, b, c, d, e])
    assert scheme.coarser(fine, 16) == b + d
    assert scheme.coarser(fine, 24) == c
    assert scheme.coarser(fine, 8) == fine
    assert scheme.coarser(fine, 48) == b""


@pytest.mark.parametrize("block_size", [0, 4, 12, -8])
def test_hash_view_of_a_non_multiple_block_size_is_refused(block_size: int) -> None:
    with pytest.raises(InvalidArgument) as refused:
        HashScheme.named(8).coarser(bytes(64), block_size)
    assert refused.value.field == "block_size"


# -- Seeds ---------------------------------------------------------------------


def test_strong_hashes_have_a_default_seed_that_can_be_overridden() -> None:
    assert (
        HashScheme.named(8, HashAlgorithm.SHA256).none_hash
        == hashlib.sha256(pickle.dumps("vllm-none-hash", protocol=5)).digest()
    )
    assert (
        HashScheme.named(8, HashAlgorithm.SHA256_CBOR).none_hash
        == hashlib.sha256(cbor2.dumps("vllm-none-hash")).digest()
    )
    assert HashScheme.named(8).none_hash == hashlib.sha256(b"kvn1kvplane-none-hash").digest()
    for algorithm in (HashAlgorithm.KVPLANE, HashAlgorithm.SHA256, HashAlgorithm.SHA256_CBOR):
        assert HashScheme.named(8, algorithm, seed="42").none_hash != HashScheme.named(8, algorithm).none_hash


@pytest.mark.parametrize("algorithm", [HashAlgorithm.XXHASH, HashAlgorithm.XXHASH_CBOR])
def test_weak_hashes_require_a_secret_seed(algorithm: HashAlgorithm) -> None:
    with pytest.raises(InvalidArgument) as refused:
        HashScheme.named(8, algorithm)
    assert refused.value.field == "hash_seed"
    assert HashScheme.named(8, algorithm, seed="a").none_hash != HashScheme.named(8, algorithm, seed="b").none_hash


def test_a_hash_algorithm_without_its_package_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(FailedPrecondition, match="pip install xxhash"):
        block_digest(HashAlgorithm.XXHASH_CBOR)


# -- Token columns -------------------------------------------------------------


@given(token_lists)
def test_token_column_has_four_little_endian_bytes_per_token(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)
    assert packed == b"".join(token.to_bytes(4, "little") for token in tokens)
    assert unpack_tokens(packed) == tokens


@pytest.mark.parametrize("token", [-1, 2**32, 2**70, 1.0, "7", None])
def test_a_token_id_beyond_32_bits_is_refused(token: Any) -> None:
    with pytest.raises(InvalidArgument) as refused:
        pack_tokens([5, token], "prompt_tokens")
    assert refused.value.field == "prompt_tokens[1]"


def test_a_truncated_token_column_is_refused_and_changes_nothing() -> None:
    hasher = RequestHasher(HashScheme.named(8))
    hasher.append(pack_tokens(PROMPT[:3]))
    before = hasher.tail
    with pytest.raises(InvalidArgument, match="7 bytes"):
        hasher.append(bytes(7))
    assert hasher.tail == before
    with pytest.raises(InvalidArgument, match="5 bytes"):
        unpack_tokens(bytes(5))


@given(st.integers(1, 5), st.lists(st.integers(0, 255), max_size=9), st.slices(9), st.integers(-10, 10))
def test_packed_hashes_read_like_a_list(size: int, values: list[int], part: slice, at: int) -> None:
    listed = [bytes([value] * size) for value in values]
    packed = PackedHashes(b"".join(listed), size)
    assert (len(packed), list(packed), packed == listed, listed == packed) == (len(listed), listed, True, True)
    assert (packed[part], repr(packed), packed == [*listed, b"x"]) == (listed[part], repr(listed), False)
    first, end, _ = part.indices(len(listed))
    assert packed.part(first, max(first, end)) == listed[first : max(first, end)]
    if -len(listed) <= at < len(listed):
        assert packed[at] == listed[at]
    else:
        with pytest.raises(IndexError):
            packed[at]
