"""The named block hashes: a digest of (parent digest, tokens of the block, extra keys).

`kvplane`, the default, is SHA-256 over a packed form. Measured per block on one core with SHA extensions (CPython 3.11,
OpenSSL; ns for 16 / 64 / 512 tokens): SHA-256 407 / 515 / 1649, BLAKE2b-128 654 / 691 / 2794, BLAKE2s 444 / 808 / 4382,
SHA-512 538 / 864 / 3049; XXH3 111 / 124 / 198, but it resists no one who looks for collisions. A digest cut to 16
bytes saves nothing at 16 tokens, so all 32 are kept: a collision costs 2^128 work and not 2^64.

The others are those of vLLM 0.33 (vllm/utils/hashing.py), for hashes that have to equal an engine's own: `sha256` and
`xxhash` digest Python's pickle of the triple, `sha256_cbor` and `xxhash_cbor` its canonical CBOR.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

from kvplane.base.errors import FailedPrecondition, InvalidArgument
from kvplane.base.hashing import cbor
from kvplane.base.hashing.cbor import CborValue
from kvplane.base.hashing.tokens import TOKEN_BYTES, unpack_tokens

DEFAULT_ALGORITHM = "kvplane"


class HashAlgorithm(Protocol):
    """How one block is hashed. Stateless: the same arguments give the same digest on every machine.

    Attributes:
        name: as in configuration and on the wire.
        digest_size: bytes of a digest.
        default_seed: of the digest before the first block; None when the seed must be a secret of the caller, because
            the algorithm does not resist a search for collisions.
    """

    @property
    def name(self) -> str: ...
    @property
    def digest_size(self) -> int: ...
    @property
    def default_seed(self) -> str | None: ...

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
    """kvplane's own: SHA-256 of `tag | u32 tokens | u32 bytes of keys | parent | tokens | canonical CBOR of the keys`.

    Unambiguous because every part has a fixed size or its size in front; integers are little-endian. The tag keeps
    blocks apart from seeds and from later versions of this form.
    """

    name: str = DEFAULT_ALGORITHM
    digest_size: int = 32
    default_seed: str | None = "kvplane-none-hash"

    def none_hash(self, seed: str) -> bytes:
        return sha256(b"kvn1" + seed.encode()).digest()

    def hash_block(self, parent: bytes, packed: bytes, extra: CborValue) -> bytes:
        keys = b"" if extra is None else cbor.encode(extra)
        return sha256(_packed_head(len(packed), len(keys)) + parent + packed + keys).digest()

    def hash_run(self, parent: bytes, packed: bytes, block_size: int) -> bytes:
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

    name: str
    digest_size: int
    default_seed: str | None
    digest: Callable[[bytes], bytes]
    serialize: Callable[[bytes, Sequence[int], CborValue], bytes]
    serialize_seed: Callable[[str], bytes]

    def none_hash(self, seed: str) -> bytes:
        return self.digest(self.serialize_seed(seed))

    def hash_block(self, parent: bytes, packed: bytes, extra: CborValue) -> bytes:
        return self.digest(self.serialize(parent, unpack_tokens(packed), extra))

    def hash_run(self, parent: bytes, packed: bytes, block_size: int) -> bytes:
        tokens = unpack_tokens(packed)
        digests = []
        for start in range(0, len(tokens), block_size):
            parent = self.digest(self.serialize(parent, tokens[start : start + block_size], None))
            digests.append(parent)
        return b"".join(digests)


def find_algorithm(name: str) -> HashAlgorithm:
    """The algorithm of that name.

    Raises:
        InvalidArgument: there is none.
        FailedPrecondition: it needs a package that is not installed.
    """
    if name not in _MAKERS:
        raise InvalidArgument(
            f"there is no block hash {name!r}",
            field="hash_algorithm",
            remedy=f"choose one of {', '.join(_MAKERS)}",
        )
    return _MAKERS[name]()


def algorithm_names() -> Iterable[str]:
    """All names, the default first."""
    return tuple(_MAKERS)


def _sha256_digest(data: bytes) -> bytes:
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


def _over_pickle(name: str, size: int, seed: str | None, digest: Callable[[bytes], bytes]) -> HashAlgorithm:
    return ReferenceHash(name, size, seed, digest, _pickle, _pickle_seed)


def _over_cbor(name: str, size: int, seed: str | None, digest: Callable[[bytes], bytes]) -> HashAlgorithm:
    return ReferenceHash(name, size, seed, digest, _cbor, cbor.encode)


_REFERENCE_SEED = "vllm-none-hash"

_MAKERS: dict[str, Callable[[], HashAlgorithm]] = {
    DEFAULT_ALGORITHM: PackedSha256,
    "sha256": lambda: _over_pickle("sha256", 32, _REFERENCE_SEED, _sha256_digest),
    "sha256_cbor": lambda: _over_cbor("sha256_cbor", 32, _REFERENCE_SEED, _sha256_digest),
    "xxhash": lambda: _over_pickle("xxhash", 16, None, _xxh3_128()),
    "xxhash_cbor": lambda: _over_cbor("xxhash_cbor", 16, None, _xxh3_128()),
}
