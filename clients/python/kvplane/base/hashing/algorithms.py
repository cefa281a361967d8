"""The named block hashes: a digest of (parent digest, tokens of the block, extra keys).

`kvplane`, the default, is SHA-256 over a packed form. Measured in ns per block of 16 / 64 / 512 tokens on one
core with SHA extensions (CPython 3.11, OpenSSL): SHA-256 407 / 515 / 1649, BLAKE2b-128 654 / 691 / 2794,
BLAKE2s 444 / 808 / 4382, SHA-512 538 / 864 / 3049. (XXH3 111 / 124 / 198, but it resists no one who looks for
collisions.) A digest cut to 16 bytes would save nothing, so all 32 are kept: a collision costs 2^128 work.

The others are those of vLLM 0.33 (vllm/utils/hashing.py), for hashes that have to equal an engine's own:
`sha256` and `xxhash` digest Python's pickle of the triple, `sha256_cbor` and `xxhash_cbor` canonical CBOR.
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
from kvplane.base.hashing import cbor
from kvplane.base.hashing.cbor import CborValue
from kvplane.base.hashing.tokens import TOKEN_BYTES, unpack_tokens


class BlockDigest(Protocol):
    """How one block is hashed. Stateless: the same arguments give the same digest on every machine.

    The arguments of all are checked by the caller: whole tokens, parents of `size` bytes.
    """

    @property
    def size(self) -> int:
        """Bytes of a digest."""
        ...

    @property
    def default_seed(self) -> str:
        """The seed of `none_hash`; "" when the caller has to choose a secret one.

        That is so where the algorithm does not resist a search for collisions.
        """
        ...

    def none_hash(self, seed: str) -> bytes:
        """The parent of every first block."""
        ...

    def hash_block(self, parent: bytes, packed: bytes, extra: CborValue) -> bytes:
        """The digest of one block of packed tokens."""
        ...

    def hash_run(self, parent: bytes, packed: bytes, block_size: int) -> bytes:
        """The chained digests, one after the other, of whole blocks without extra keys."""
        ...


@dataclass(frozen=True, slots=True)
class PackedSha256:
    """kvplane's own: SHA-256 of a block written in parts.

        tag | u32 number of tokens | u32 bytes of keys | parent | u32 tokens | canonical CBOR of the keys

    Unambiguous because every part has a fixed size or its size in front; integers are little-endian. The tag
    keeps blocks apart from seeds and from later versions of this form.
    """

    size: int = 32
    default_seed: str = "kvplane-none-hash"

    def none_hash(self, seed: str) -> bytes:
        """As BlockDigest."""
        return sha256(b"kvn1" + seed.encode()).digest()

    def hash_block(self, parent: bytes, packed: bytes, extra: CborValue) -> bytes:
        """As BlockDigest."""
        keys = b"" if extra is None else cbor.encode(extra)
        return sha256(_packed_head(len(packed), len(keys)) + parent + packed + keys).digest()

    def hash_run(self, parent: bytes, packed: bytes, block_size: int) -> bytes:
        """As BlockDigest."""
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
    """vLLM's form: `digest(serialize((parent, token ids, extra keys)))`.

    `serialize` gets the parent, the ids and the keys; `serialize_seed` a seed alone.
    """

    size: int
    default_seed: str
    digest: Callable[[bytes], bytes]
    serialize: Callable[[bytes, Sequence[int], CborValue], bytes]
    serialize_seed: Callable[[str], bytes]

    def none_hash(self, seed: str) -> bytes:
        """As BlockDigest."""
        return self.digest(self.serialize_seed(seed))

    def hash_block(self, parent: bytes, packed: bytes, extra: CborValue) -> bytes:
        """As BlockDigest."""
        return self.digest(self.serialize(parent, unpack_tokens(packed), extra))

    def hash_run(self, parent: bytes, packed: bytes, block_size: int) -> bytes:
        """As BlockDigest."""
        tokens = unpack_tokens(packed)
        digests = []
        for start in range(0, len(tokens), block_size):
            parent = self.digest(self.serialize(parent, tokens[start : start + block_size], None))
            digests.append(parent)
        return b"".join(digests)


def block_digest(algorithm: HashAlgorithm) -> BlockDigest:
    """How `algorithm` hashes a block.

    Raises:
        FailedPrecondition: it needs a package that is not installed.
    """
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
