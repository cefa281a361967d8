"""Compute the chained hashes of a request's full blocks, while its tokens arrive.

    tokens   |  0..15  |  16..31  |  32..47  |  48..  |        block size 16
    hashes        h0         h1         h2                     h1 = H(h0, tokens 16..31, keys of 16..31)

Each hash identifies the whole prefix that ends with its block. A group with blocks of 32 tokens uses h1, h3, ...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import overload

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import HashAlgorithm, ReplicaSpec
from kvplane.base.hashing.algorithms import BlockDigest, block_digest, hasher_of
from kvplane.base.hashing.cbor import CborValue
from kvplane.base.hashing.extra_keys import RequestKeys, untagged
from kvplane.base.hashing.tokens import TOKEN_BYTES, check_packed, unpack_tokens
from kvplane.base.list_like import ListLike
from kvplane.base.step import NO_EXTRA_KEYS, ExtraKeys


@dataclass(frozen=True, slots=True)
class HashScheme:
    """How the blocks of one replica are hashed. Processes with equal schemes compute equal hashes.

    Attributes:
        digest: the algorithm that hashes one block.
        none_hash: the digest that stands for the missing parent of a request's first block.
        block_size: tokens of a hash block.
        lookahead: tokens after a block that its hash covers too, because a drafter's state at the block's last token
            depends on these later tokens. The hash is computed once these later tokens are known. 0 without such a
            drafter.
        tagged: whether each extra key begins with the name of its source. vLLM before 0.33 hashes the values alone, and
            of an adapter its name without the path.
    """

    digest: BlockDigest
    none_hash: bytes
    block_size: int
    lookahead: int = 0
    tagged: bool = True

    @classmethod
    def of(cls, spec: ReplicaSpec) -> HashScheme:
        """Return the scheme of a replica. Raises the errors of `named`."""
        return cls.named(spec.hash_block_size, spec.hash_algorithm, spec.hash_seed, spec.hash_lookahead_tokens)

    @classmethod
    def named(
        cls,
        block_size: int,
        algorithm: HashAlgorithm = HashAlgorithm.KVPLANE,
        seed: str = "",
        lookahead: int = 0,
    ) -> HashScheme:
        """Return a scheme by the name of its algorithm. The seed "" stands for the algorithm's default.

        Raises:
            InvalidArgument: the algorithm needs a secret seed, and `seed` is "".
            FailedPrecondition: the algorithm needs a package that is not installed.
        """
        assert block_size > 0 <= lookahead, "sizes are checked by ReplicaSpec"
        digest = block_digest(algorithm)
        chosen = seed or digest.default_seed
        if not chosen:
            raise InvalidArgument(
                f"the seed is empty, but {algorithm.value} needs a secret one: an attacker can find collisions",
                field="hash_seed",
                remedy="give a random text, the same for all processes that share the cache",
            )
        return cls(digest, digest.none_hash(chosen), block_size, lookahead)

    def compiled(self) -> tuple[object, int] | None:
        """Return the compiled function that hashes blocks without extra keys, see `hasher_of`; None without it."""
        return None if self.lookahead else hasher_of(self.digest, self.block_size)

    def coarser(self, hashes: bytes, block_size: int) -> bytes:
        """Return the hashes of larger blocks, of `block_size` tokens: the hash of a larger block is the last of the
        given hashes within it.

        Raises:
            InvalidArgument: `block_size` is not a multiple of the scheme's block size.
        """
        k, rest = divmod(block_size, self.block_size)
        if rest or k < 1:
            raise InvalidArgument(
                f"{block_size} is not a multiple of the hash block size {self.block_size}",
                field="block_size",
                remedy="choose a hash block size that divides the block size of every group",
            )
        return b"".join(split_hashes(hashes, self.digest.size)[k - 1 :: k])


def split_hashes(hashes: bytes, digest_size: int) -> list[bytes]:
    """Split concatenated digests into a list, one entry per digest of `digest_size` bytes."""
    return [hashes[at : at + digest_size] for at in range(0, len(hashes), digest_size)]


class PackedHashes(ListLike[bytes]):
    """Digests of one size that stay concatenated; each becomes an object only when it is read.

    To split those of a prompt of a million tokens takes 10 ms, and other threads wait for the interpreter's lock.

    Attributes:
        joined: the digests, one after the other.
        size: bytes of one.
    """

    __slots__ = ("joined", "size")

    def __init__(self, joined: bytes = b"", size: int = 1) -> None:
        self.joined, self.size = joined, size

    def __len__(self) -> int:
        return len(self.joined) // self.size

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> list[bytes]: ...
    def __getitem__(self, at: int | slice) -> bytes | list[bytes]:
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(len(self)))]
        number = at + len(self) if at < 0 else at
        if not 0 <= number < len(self):
            raise IndexError(at)
        return self.joined[number * self.size : (number + 1) * self.size]

    def part(self, first: int, end: int) -> PackedHashes:
        """Return the digests from number `first` to the one before `end`."""
        return PackedHashes(self.joined[first * self.size : end * self.size], self.size)

    def __iter__(self) -> Iterator[bytes]:
        return iter(split_hashes(self.joined, self.size))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedHashes):
            return self.joined == other.joined and (self.size == other.size or not self.joined)
        return isinstance(other, (list, tuple)) and list(self) == list(other)


@dataclass(frozen=True, slots=True)
class HashTail:
    """The state of a request's hasher, from which a new hasher can continue.

    Attributes:
        num_blocks: number of blocks hashed so far.
        digest: hash of the last of these blocks; the scheme's `none_hash` if there is none; b"" if no block of the
            request gets a hash, because its extra keys prove nothing.
        pending: the tokens after these blocks, four bytes each.
    """

    num_blocks: int
    digest: bytes
    pending: bytes = b""


class RequestHasher:
    """Hash the blocks of one request as its tokens arrive. The hashes do not depend on how the tokens are split over
    calls.
    """

    def __init__(self, scheme: HashScheme, extra_keys: ExtraKeys = NO_EXTRA_KEYS, tail: HashTail | None = None) -> None:
        """Start at the first token, or, with `tail`, continue from the state of another hasher of the same scheme and
        keys.

        Raises:
            InvalidArgument: the extra keys are invalid; see `RequestKeys`.
        """
        start = tail or HashTail(0, scheme.none_hash)
        self._scheme = scheme
        self._extra_keys = extra_keys
        self._keys = RequestKeys(extra_keys if start.digest else NO_EXTRA_KEYS, scheme.block_size)
        self._num_blocks = start.num_blocks
        self._digest = start.digest
        self._pending = start.pending

    @classmethod
    def of_prompt(cls, scheme: HashScheme, extra_keys: ExtraKeys, num_tokens: int) -> RequestHasher:
        """Return the hasher of a new request of this many tokens.

        Raises:
            InvalidArgument: the extra keys are invalid, or do not prove what these tokens are; see
                `RequestKeys.check_prompt`.
        """
        hasher = cls(scheme, extra_keys)
        hasher._keys.check_prompt(num_tokens)
        return hasher

    @property
    def tail(self) -> HashTail:
        """The current state, from which a new hasher can continue."""
        return HashTail(self._num_blocks, self._digest, self._pending)

    @property
    def extra_keys(self) -> ExtraKeys:
        """The extra keys of the request."""
        return self._extra_keys

    @property
    def num_tokens(self) -> int:
        """The number of tokens appended so far."""
        return self._num_blocks * self._scheme.block_size + len(self._pending) // TOKEN_BYTES

    def append(self, packed: bytes) -> bytes:
        """Append tokens, four bytes each, and return the concatenated hashes of the blocks that became full; b"" if no
        block became full.

        Raises:
            InvalidArgument: the length of `packed` is not a multiple of four bytes; nothing is appended.
        """
        check_packed(packed)
        if not self._digest:
            return b""
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
        """Hash the first blocks one by one while they may have extra keys, and the rest in one call."""
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
        """Return how many of the next blocks may have extra keys."""
        keyed_tokens = self._keys.keyed_until - self._num_blocks * self._scheme.block_size
        return max(0, -(-keyed_tokens // self._scheme.block_size))

    def _extra(self, tokens: bytes, i: int) -> CborValue:
        """Return the extra keys of the i-th pending block. With a lookahead, the keys also cover the lookahead's tokens
        after the block.
        """
        size, ahead = self._scheme.block_size, self._scheme.lookahead
        start = (self._num_blocks + i) * size
        named = self._keys.of_block(start, start + size + ahead)
        keys: CborValue = named if self._scheme.tagged else untagged(named)
        if not ahead:
            return keys
        end = (i + 1) * size * TOKEN_BYTES
        return (keys, *unpack_tokens(tokens[end : end + ahead * TOKEN_BYTES]))
