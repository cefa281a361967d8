"""Hashes of block contents, by which the service finds the cached prefix of a prompt."""

from kvplane.base.hashing.algorithms import BlockDigest, block_digest, chain_run
from kvplane.base.hashing.extra_keys import RequestKeys, continued, digest_embeds, revived
from kvplane.base.hashing.hasher import HashScheme, HashTail, PackedHashes, RequestHasher, split_hashes
from kvplane.base.hashing.memo import HashMemo
from kvplane.base.hashing.tokens import MAX_TOKEN_ID, TOKEN_BYTES, check_packed, pack_tokens, unpack_tokens

__all__ = [
    "MAX_TOKEN_ID",
    "TOKEN_BYTES",
    "BlockDigest",
    "HashMemo",
    "HashScheme",
    "HashTail",
    "PackedHashes",
    "RequestHasher",
    "RequestKeys",
    "block_digest",
    "chain_run",
    "check_packed",
    "continued",
    "digest_embeds",
    "pack_tokens",
    "revived",
    "split_hashes",
    "unpack_tokens",
]
