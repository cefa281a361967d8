"""Hashes of block contents, by which the service finds the cached prefix of a prompt."""

from kvplane.base.hashing.algorithms import BlockDigest as BlockDigest
from kvplane.base.hashing.algorithms import block_digest as block_digest
from kvplane.base.hashing.algorithms import chain_run as chain_run
from kvplane.base.hashing.extra_keys import RequestKeys as RequestKeys
from kvplane.base.hashing.extra_keys import continued as continued
from kvplane.base.hashing.extra_keys import digest_embeds as digest_embeds
from kvplane.base.hashing.extra_keys import revived as revived
from kvplane.base.hashing.hasher import HashScheme as HashScheme
from kvplane.base.hashing.hasher import HashTail as HashTail
from kvplane.base.hashing.hasher import PackedHashes as PackedHashes
from kvplane.base.hashing.hasher import RequestHasher as RequestHasher
from kvplane.base.hashing.hasher import split_hashes as split_hashes
from kvplane.base.hashing.memo import HashMemo as HashMemo
from kvplane.base.hashing.tokens import MAX_TOKEN_ID as MAX_TOKEN_ID
from kvplane.base.hashing.tokens import TOKEN_BYTES as TOKEN_BYTES
from kvplane.base.hashing.tokens import check_packed as check_packed
from kvplane.base.hashing.tokens import pack_tokens as pack_tokens
from kvplane.base.hashing.tokens import unpack_tokens as unpack_tokens
