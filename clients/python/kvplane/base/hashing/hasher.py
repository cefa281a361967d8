"""From a growing sequence of tokens to the chained hashes of its full blocks.

    tokens   |  0..15  |  16..31  |  32..47  |  48..  |        block size 16
    hashes        h0         h1         h2                     h1 = H(h0, tokens 16..31, keys of 16..31)

Each hash stands for the whole prefix that ends there. A group with blocks of 32 tokens uses h1, h3, ...
"""

from __future__ import annotations

from dataclasses import dataclass

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import HashAlgorithm, ReplicaSpec
from kvplane.base.hashing.algorithms import BlockDigest, block_digest
from kvplane.base.hashing.cbor import CborValue
from kvplane.base.hashing.extra_keys import RequestKeys
from kvplane.base.hashing.tokens import TOKEN_BYTES, check_packed, unpack_tokens
from kvplane.base.step import NO_EXTRA_KEYS, ExtraKeys


@dataclass(frozen=True, slots=True)
class HashScheme:
    """How the blocks of one replica are hashed. Two parties with equal schemes get equal hashes.

    Attributes:
        digest: of one block.
        none_hash: the parent of every first block.
        block_size: tokens of a hash block.
        lookahead: tokens behind a block that its hash covers as well, because the drafter's state at the
            block's last position depends on them. A hash waits until they are known. 0 without such a
            drafter.
    """

    digest: BlockDigest
    none_hash: bytes
    block_size: int
    lookahead: int = 0

    @classmethod
    def of(cls, spec: ReplicaSpec) -> HashScheme:
        """The scheme of a replica. Raises as `named`."""
        return cls.named(spec.hash_block_size, spec.hash_algorithm, spec.hash_seed, spec.hash_lookahead_tokens)

    @classmethod
    def named(
        cls,
        block_size: int,
        algorithm: HashAlgorithm = HashAlgorithm.KVPLANE,
        seed: str = "",
        lookahead: int = 0,
    ) -> HashScheme:
        """A scheme by the name of its algorithm; the seed "" is the algorithm's own.

        Raises:
            InvalidArgument: no seed where the algorithm needs a secret one.
            FailedPrecondition: the algorithm needs a package that is not installed.
        """
        assert block_size > 0 <= lookahead, "sizes are checked by ReplicaSpec"
        digest = block_digest(algorithm)
        chosen = seed or digest.default_seed
        if not chosen:
            raise InvalidArgument(
                f"{algorithm.value} does not resist a search for collisions, so its seed must be a secret",
                field="hash_seed",
                remedy="give a random text, the same to all who share the cache",
            )
        return cls(digest, digest.none_hash(chosen), block_size, lookahead)

    def coarser(self, hashes: bytes, block_size: int) -> bytes:
        """The hashes of blocks of `block_size` tokens: every k-th of `hashes`, the last of each coarse block.

        Raises:
            InvalidArgument: `block_size` is no multiple of the scheme's.
        """
        k, rest = divmod(block_size, self.block_size)
        if rest or k < 1:
            raise InvalidArgument(
                f"{block_size} is no multiple of the hash block size {self.block_size}",
                field="block_size",
                remedy="choose a hash block size that divides the block size of every group",
            )
        return b"".join(split_hashes(hashes, self.digest.size)[k - 1 :: k])


def split_hashes(hashes: bytes, digest_size: int) -> list[bytes]:
    """The single digests of a column."""
    return [hashes[at : at + digest_size] for at in range(0, len(hashes), digest_size)]


@dataclass(frozen=True, slots=True)
class HashTail:
    """The state of a hasher, from which another one can continue.

    Attributes:
        num_blocks: blocks hashed so far.
        digest: hash of the last of them, the scheme's none hash when there is none.
        pending: packed tokens since.
    """

    num_blocks: int
    digest: bytes
    pending: bytes = b""


class RequestHasher:
    """Hashes the blocks of one request as its tokens become known, in pieces or at once alike."""

    def __init__(self, scheme: HashScheme, extra_keys: ExtraKeys = NO_EXTRA_KEYS, tail: HashTail | None = None) -> None:
        """`tail`: the state of another hasher of the same scheme and keys, from which this one continues.

        Raises:
            InvalidArgument: extra keys out of order or range, as `RequestKeys`.
        """
        start = tail or HashTail(0, scheme.none_hash)
        self._scheme = scheme
        self._keys = RequestKeys(extra_keys, scheme.block_size)
        self._num_blocks = start.num_blocks
        self._digest = start.digest
        self._pending = start.pending

    @property
    def tail(self) -> HashTail:
        """The current state."""
        return HashTail(self._num_blocks, self._digest, self._pending)

    @property
    def num_tokens(self) -> int:
        """Tokens appended so far."""
        return self._num_blocks * self._scheme.block_size + len(self._pending) // TOKEN_BYTES

    def append(self, packed: bytes) -> bytes:
        """Takes further tokens (packed) and returns the hashes of the blocks that became full, b"" when none
        did.

        Raises:
            InvalidArgument: the column holds no whole number of tokens; nothing is taken.
        """
        check_packed(packed)
        tokens = self._pending + packed
        full_blocks = (len(tokens) // TOKEN_BYTES - self._scheme.lookahead) // self._scheme.block_size
        if full_blocks <= 0:
            self._pending = tokens
            return b""
        hashes = self._hash_blocks(tokens, full_blocks)
        self._pending = tokens[full_blocks * self._scheme.block_size * TOKEN_BYTES :]
        self._digest = hashes[-self._scheme.digest.size :]
        self._num_blocks += full_blocks
        return hashes

    def _hash_blocks(self, tokens: bytes, full_blocks: int) -> bytes:
        """Block by block as long as blocks have keys, the rest in one run."""
        scheme, stride = self._scheme, self._scheme.block_size * TOKEN_BYTES
        keyed = full_blocks if scheme.lookahead else min(full_blocks, self._num_keyed_blocks())
        parent, hashes = self._digest, []
        for i in range(keyed):
            block = tokens[i * stride : (i + 1) * stride]
            parent = scheme.digest.hash_block(parent, block, self._extra(tokens, i))
            hashes.append(parent)
        plain = tokens[keyed * stride : full_blocks * stride]
        return b"".join(hashes) + scheme.digest.hash_run(parent, plain, scheme.block_size)

    def _num_keyed_blocks(self) -> int:
        """Blocks from here on that may have keys."""
        keyed_tokens = self._keys.keyed_until - self._num_blocks * self._scheme.block_size
        return max(0, -(-keyed_tokens // self._scheme.block_size))

    def _extra(self, tokens: bytes, i: int) -> CborValue:
        """Keys of the i-th pending block; with lookahead, the pair (keys of block and lookahead, lookahead
        tokens).
        """
        size, ahead = self._scheme.block_size, self._scheme.lookahead
        start = (self._num_blocks + i) * size
        keys = self._keys.of_block(start, start + size + ahead)
        if not ahead:
            return keys
        end = (i + 1) * size * TOKEN_BYTES
        return (keys, *unpack_tokens(tokens[end : end + ahead * TOKEN_BYTES]))
