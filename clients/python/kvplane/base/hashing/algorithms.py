"""The algorithms that hash a block: from the parent's digest, the block's tokens and its extra keys to a digest.

`kvplane`, the default, is SHA-256 over a compact binary form. Measured in ns per block of 16 / 64 / 512 tokens on one
core with SHA extensions (CPython 3.11, OpenSSL): SHA-256 407 / 515 / 1649, BLAKE2b-128 654 / 691 / 2794, BLAKE2s 444 /
808 / 4382, SHA-512 538 / 864 / 3049. (XXH3 111 / 124 / 198, but an attacker can find collisions.) A digest cut to 16
bytes would save no time, so all 32 bytes are kept: a collision costs 2^128 work.

The other algorithms are those of vLLM 0.33 (vllm/utils/hashing.py), for engines that compute the hashes themselves.
`sha256` and `xxhash` hash Python's pickle of (parent, tokens, extra keys); `sha256_cbor` and `xxhash_cbor` its
canonical CBOR.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

from kvplane.base.errors import FailedPrecondition
from kvplane.base.groups import HashAlgorithm
from kvplane.base.hashing import cbor, native
from kvplane.base.hashing.cbor import CborValue
from kvplane.base.hashing.tokens import TOKEN_BYTES, unpack_tokens


class BlockDigest(Protocol):
    """A function that hashes one block. It has no state: equal arguments give equal digests on every machine.

    In every method `parent` is the digest of the previous block, `packed` the block's token ids, four bytes each, and
    `extra` its extra keys. The caller has checked that `packed` is whole tokens and that `parent` has `size` bytes.
    """

    @property
    def size(self) -> int:
        """The length of a digest in bytes."""

    @property
    def default_seed(self) -> str:
        """The seed that is used if the caller gives none; "" if the caller must give a secret seed.

        An algorithm for which an attacker can find collisions has no default seed.
        """

    def none_hash(self, seed: str) -> bytes:
        """Return the digest that stands for the missing parent of every request's first block, computed from a seed."""

    def hash_block(self, parent: bytes, packed: bytes, extra: CborValue) -> bytes:
        """Return the digest of one block."""

    def hash_run(self, parent: bytes, packed: bytes, block_size: int) -> bytes:
        """Return the concatenated digests of consecutive whole blocks of `block_size` tokens without extra keys."""


@dataclass(frozen=True, slots=True)
class PackedSha256:
    """kvplane's own algorithm: the SHA-256 of these parts of a block, in this order.

        tag | u32 number of tokens | u32 bytes of keys | parent | u32 tokens | canonical CBOR of the keys

    Two different blocks never give the same input bytes, because each part has a fixed size or its size precedes it.
    Integers are little-endian. The tag differs from the tag of a hashed seed and from the tags of later versions of
    this form.
    """

    size: int = 32
    default_seed: str = "kvplane-none-hash"

    def none_hash(self, seed: str) -> bytes:
        """Return the digest that stands for the missing parent of every request's first block; see BlockDigest."""
        return sha256(b"kvn1" + seed.encode()).digest()

    def hash_block(self, parent: bytes, packed: bytes, extra: CborValue) -> bytes:
        """Return the digest of one block; see BlockDigest."""
        keys = b"" if extra is None else cbor.encode(extra)
        return sha256(_packed_head(len(packed), len(keys)) + parent + packed + keys).digest()

    def hash_run(self, parent: bytes, packed: bytes, block_size: int) -> bytes:
        """Return the digests of consecutive blocks; see BlockDigest."""
        stride = block_size * TOKEN_BYTES
        head = _packed_head(stride, 0)
        digests = []
        for start in range(0, len(packed), stride):
            parent = sha256(head + parent + packed[start : start + stride]).digest()
            digests.append(parent)
        return b"".join(digests)


def _packed_head(token_bytes: int, key_bytes: int) -> bytes:
    return struct.pack("<4sII", b"kvb1", token_bytes // TOKEN_BYTES, key_bytes)


@dataclass(frozen=True, slots=True)
class ReferenceHash:
    """vLLM's algorithm: `digest(serialize(parent, token ids, extra keys))`.

    Attributes:
        size: length of a digest in bytes.
        default_seed: the seed if the caller gives none; "" = the caller must give a seed.
        digest: hashes the serialized bytes.
        serialize: turns a parent digest, token ids and extra keys into bytes.
        serialize_seed: turns a seed into bytes.
    """

    size: int
    default_seed: str
    digest: Callable[[bytes], bytes]
    serialize: Callable[[bytes, Sequence[int], CborValue], bytes]
    serialize_seed: Callable[[str], bytes]

    def none_hash(self, seed: str) -> bytes:
        """Return the digest that stands for the missing parent of every request's first block; see BlockDigest."""
        return self.digest(self.serialize_seed(seed))

    def hash_block(self, parent: bytes, packed: bytes, extra: CborValue) -> bytes:
        """Return the digest of one block; see BlockDigest."""
        return self.digest(self.serialize(parent, unpack_tokens(packed), extra))

    def hash_run(self, parent: bytes, packed: bytes, block_size: int) -> bytes:
        """Return the digests of consecutive blocks; see BlockDigest."""
        tokens = unpack_tokens(packed)
        digests = []
        for start in range(0, len(tokens), block_size):
            parent = self.digest(self.serialize(parent, tokens[start : start + block_size], None))
            digests.append(parent)
        return b"".join(digests)


def block_digest(algorithm: HashAlgorithm) -> BlockDigest:
    """Return the implementation of a hash algorithm: compiled where that is installed and the processor suits.

    Raises:
        FailedPrecondition: the algorithm needs the package xxhash, which is not installed; also the errors of
            `with_native`.
    """
    return with_native(algorithm, python_digest(algorithm))


def python_digest(algorithm: HashAlgorithm) -> BlockDigest:
    """Return the implementation of a hash algorithm in Python. Raises the errors of `block_digest` about xxhash."""
    if algorithm is HashAlgorithm.KVPLANE:
        return PackedSha256()
    over_pickle = algorithm in (HashAlgorithm.SHA256, HashAlgorithm.XXHASH)
    form, seed_form = (_pickle, _pickle_seed) if over_pickle else (_cbor, cbor.encode)
    if algorithm in (HashAlgorithm.SHA256, HashAlgorithm.SHA256_CBOR):
        return ReferenceHash(32, "vllm-none-hash", _sha256, form, seed_form)
    return ReferenceHash(16, "", _xxh3_128(), form, seed_form)


def _sha256(data: bytes) -> bytes:
    return sha256(data).digest()


def _xxh3_128() -> Callable[[bytes], bytes]:
    try:
        from xxhash import xxh3_128_digest
    except ImportError:
        raise FailedPrecondition(
            "the xxhash block hashes need the package xxhash, which is not installed",
            field="hash_algorithm",
            remedy="pip install xxhash, or choose kvplane or a sha256 hash",
        ) from None
    return xxh3_128_digest


def _pickle(parent: bytes, tokens: Sequence[int], extra: CborValue) -> bytes:
    return pickle.dumps((parent, tuple(tokens), extra), protocol=5)


def _pickle_seed(seed: str) -> bytes:
    return pickle.dumps(seed, protocol=5)


def _cbor(parent: bytes, tokens: Sequence[int], extra: CborValue) -> bytes:
    ids = cbor.encode_array(list(map(cbor.encode_int, tokens)))
    return cbor.encode_array([cbor.encode(parent), ids, cbor.encode(extra)])


FORMS = {
    HashAlgorithm.KVPLANE: 0,
    HashAlgorithm.SHA256: 1,
    HashAlgorithm.SHA256_CBOR: 2,
    HashAlgorithm.XXHASH: 3,
    HashAlgorithm.XXHASH_CBOR: 4,
}
CHAIN_FORM = 5
WITHOUT_SHA256 = (HashAlgorithm.XXHASH, HashAlgorithm.XXHASH_CBOR)


@dataclass(frozen=True, slots=True)
class NativeDigest:
    """An algorithm whose runs are hashed by the compiled module, and all else by its Python form.

    Attributes:
        python: the algorithm in Python.
        form: its number in the module.
        run: the module's `hash_run`; a function and no module, because modules can be neither copied nor pickled.
        max_block: most tokens of a block that it takes.
    """

    python: BlockDigest
    form: int
    run: Callable[[int, bytes, bytes, int], bytes]
    max_block: int

    @property
    def size(self) -> int:
        """The length of a digest in bytes."""
        return self.python.size

    @property
    def default_seed(self) -> str:
        """The seed that is used if the caller gives none; see BlockDigest."""
        return self.python.default_seed

    def none_hash(self, seed: str) -> bytes:
        """Return the digest that stands for the missing parent of every request's first block; see BlockDigest."""
        return self.python.none_hash(seed)

    def hash_block(self, parent: bytes, packed: bytes, extra: CborValue) -> bytes:
        """Return the digest of one block; see BlockDigest."""
        if extra is None and packed:
            return self.hash_run(parent, packed, len(packed) // TOKEN_BYTES)
        return self.python.hash_block(parent, packed, extra)

    def hash_run(self, parent: bytes, packed: bytes, block_size: int) -> bytes:
        """Return the digests of consecutive blocks; see BlockDigest."""
        if block_size > self.max_block:
            return self.python.hash_run(parent, packed, block_size)
        return self.run(self.form, parent, packed, block_size)


def with_native(algorithm: HashAlgorithm, python: BlockDigest) -> BlockDigest:
    """Return the compiled form of an algorithm, or `python` where it is not used. Raises as `native.selected` does."""
    compiled = native.selected(needs_sha256=algorithm not in WITHOUT_SHA256)
    if compiled is None:
        return python
    return NativeDigest(python, FORMS[algorithm], compiled.hash_run, compiled.MAX_BLOCK)


def hasher_of(digest: BlockDigest, block_size: int) -> tuple[object, int] | None:
    """Return the compiled function that hashes blocks, in a capsule for other compiled modules, and the number of the
    algorithm; None where the digest does not use it for blocks of this size.
    """
    if not isinstance(digest, NativeDigest) or block_size > digest.max_block or native.hasher() is None:
        return None
    return native.hasher(), digest.form


def chain_run(parent: bytes, packed: bytes, block_size: int) -> bytes:
    """Return the digests of consecutive whole blocks by SGLang's algorithm: SHA-256 of the parent's digest and the
    block's token ids, four bytes each. The first block of a prompt has no parent: b"".
    """
    compiled = native.selected()
    if compiled is not None and block_size <= compiled.MAX_BLOCK:
        digests: bytes = compiled.hash_run(CHAIN_FORM, parent, packed, block_size)
        return digests
    stride, found = block_size * TOKEN_BYTES, []
    for start in range(0, len(packed), stride):
        parent = sha256(parent + packed[start : start + stride]).digest()
        found.append(parent)
    return b"".join(found)
