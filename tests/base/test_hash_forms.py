"""The bytes behind each named block hash, and equality with independent encoders."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

import cbor2
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvplane.base.groups import HashAlgorithm
from kvplane.base.hashing import HashScheme, RequestHasher, RequestKeys, block_digest, pack_tokens
from kvplane.base.hashing.cbor import encode
from kvplane.base.step import ExtraKeys

PROMPT = [(i * 37 + 11) % 997 for i in range(40)]

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=80)
texts = st.text(max_size=30).filter(lambda text: text.isprintable())

plain_values = st.none() | st.integers(-(2**64), 2**64 - 1) | st.text(max_size=300) | st.binary(max_size=300)
cbor_values = st.recursive(plain_values, lambda inner: st.lists(inner, max_size=30).map(tuple), max_leaves=60)


@given(cbor_values)
def test_cbor_equals_the_canonical_encoding_of_cbor2(value: Any) -> None:
    assert encode(value) == cbor2.dumps(value, canonical=True)


@pytest.mark.parametrize("count", [23, 24, 255, 256, 65_535, 65_536])
def test_cbor_lengths_take_the_fewest_bytes(count: int) -> None:
    for value in (count, -count - 1, "x" * count, bytes(count), (0,) * count):
        assert encode(value) == cbor2.dumps(value, canonical=True)


FORMS = {
    HashAlgorithm.SHA256: lambda triple: hashlib.sha256(pickle.dumps(triple, protocol=5)).digest(),
    HashAlgorithm.SHA256_CBOR: lambda triple: hashlib.sha256(cbor2.dumps(triple, canonical=True)).digest(),
    HashAlgorithm.XXHASH: lambda triple: xxhash.xxh3_128_digest(pickle.dumps(triple, protocol=5)),
    HashAlgorithm.XXHASH_CBOR: lambda triple: xxhash.xxh3_128_digest(cbor2.dumps(triple, canonical=True)),
}


@pytest.mark.parametrize("algorithm", FORMS)
@given(tokens=token_lists)
def test_a_reference_hash_is_the_digest_of_parent_tokens_and_keys(algorithm: HashAlgorithm, tokens: list[int]) -> None:
    scheme = HashScheme.named(4, algorithm, seed="s")
    hashes = RequestHasher(scheme, ExtraKeys(salt="s1")).append(pack_tokens(tokens))
    parent, expected = scheme.none_hash, b""
    for start in range(0, len(tokens) - 3, 4):
        extra = (("cache_salt", "s1"),) if start == 0 else None
        parent = FORMS[algorithm]((parent, tuple(tokens[start : start + 4]), extra))
        expected += parent
    assert hashes == expected


def test_pickled_hashes_depend_on_values_and_not_on_shared_objects() -> None:
    name = "adapter-1"
    scheme = HashScheme.named(8, HashAlgorithm.SHA256)
    shared = RequestHasher(scheme, ExtraKeys((name, name)))
    copies = RequestHasher(scheme, ExtraKeys(("".join(name), "-".join(["adapter", "1"]))))
    assert shared.append(pack_tokens(PROMPT)) == copies.append(pack_tokens(PROMPT))


def test_kvplane_hash_has_the_form_of_its_docstring() -> None:
    scheme = HashScheme.named(4)
    keys = cbor2.dumps([["cache_salt", "s1"]], canonical=True)
    sizes = (4).to_bytes(4, "little") + len(keys).to_bytes(4, "little")
    first = hashlib.sha256(b"kvb1" + sizes + scheme.none_hash + pack_tokens([1, 2, 3, 4]) + keys).digest()
    second = hashlib.sha256(b"kvb1" + (4).to_bytes(8, "little") + first + pack_tokens([5, 6, 7, 8])).digest()
    hashes = RequestHasher(scheme, ExtraKeys(salt="s1")).append(pack_tokens(range(1, 9)))
    assert hashes == first + second


def test_kvplane_hashes_are_stable() -> None:
    """Caches outlive releases: a changed form needs a new name, not another digest under the old one."""
    hashes = RequestHasher(HashScheme.named(8, seed="test"), ExtraKeys(salt="team-a")).append(pack_tokens(PROMPT))
    assert hashes[-32:].hex() == "24fcc1b8b1df841173e65d969de96cbd09013122a51f5c4b03448de3beeff91e"


@given(token_lists, token_lists, texts, texts)
def test_kvplane_hash_distinguishes_all_inputs(left: list[int], right: list[int], salt: str, other: str) -> None:
    algorithm = block_digest(HashAlgorithm.KVPLANE)

    def digest(tokens: list[int], salt: str) -> bytes:
        keys = RequestKeys(ExtraKeys(salt=salt), 1).of_block(0, 1)
        return algorithm.hash_block(bytes(32), pack_tokens(tokens), keys)

    assert (digest(left, salt) == digest(right, other)) == ((left, salt) == (right, other))


def test_kvplane_hash_does_not_confuse_key_bytes_and_tokens() -> None:
    algorithm = block_digest(HashAlgorithm.KVPLANE)
    keys = ((b"four", b"more"),)
    as_tokens = pack_tokens([1, 2]) + encode(keys)
    padded = as_tokens + bytes(-len(as_tokens) % 4)
    assert algorithm.hash_block(bytes(32), pack_tokens([1, 2]), keys) != algorithm.hash_block(bytes(32), padded, None)
