"""Content hashes of blocks: what a prefix hit is decided by."""

from kvplane.base.hashing.algorithms import DEFAULT_ALGORITHM, HashAlgorithm, algorithm_names, find_algorithm
from kvplane.base.hashing.extra_keys import NO_KEYS, ExtraKeys, Lora, MultimodalItem, PromptEmbeds
from kvplane.base.hashing.hasher import HashScheme, HashTail, RequestHasher, split_hashes
from kvplane.base.hashing.tokens import MAX_TOKEN_ID, TOKEN_BYTES, check_packed, pack_tokens, unpack_tokens

__all__ = [
    "DEFAULT_ALGORITHM",
    "MAX_TOKEN_ID",
    "NO_KEYS",
    "TOKEN_BYTES",
    "ExtraKeys",
    "HashAlgorithm",
    "HashScheme",
    "HashTail",
    "Lora",
    "MultimodalItem",
    "PromptEmbeds",
    "RequestHasher",
    "algorithm_names",
    "check_packed",
    "find_algorithm",
    "pack_tokens",
    "split_hashes",
    "unpack_tokens",
]
