"""Hash the tokens of unary calls: inline when short, on a thread when long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvplane.base.errors import InvalidArgument
from kvplane.base.hashing import HashScheme, HashTail, RequestHasher, pack_tokens
from kvplane.base.step import NO_EXTRA_KEYS, ExtraKeys
from kvplane_service.config import Config
from kvplane_service.runtime.executors import Executor


@dataclass(frozen=True, slots=True)
class Hashed:
    """Hashes of the blocks that became full, and the state of the hash chain after them."""

    hashes: bytes
    tail: HashTail


class ContentHasher:
    """Hashes token ids within the limits of the configuration."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._offload = Executor("hashing of long contents", threads=2, max_waiting=64)  # each holds a message

    async def hash(
        self,
        scheme: HashScheme,
        tokens: Sequence[int],
        keys: ExtraKeys = NO_EXTRA_KEYS,
        tail: HashTail | None = None,
        field: str = "token_ids",
    ) -> Hashed:
        """Hash tokens that follow `tail`, the state of the hash chain.

        Raises:
            InvalidArgument: names the token or extra key at fault.
            Busy: too many long contents wait to be hashed.
        """
        self._check_ids(tokens, field)
        if len(tokens) <= self._config.hash_inline_tokens:
            return hash_tokens(scheme, tokens, keys, tail)
        return await self._offload(partial(hash_tokens, scheme, tokens, keys, tail))

    def _check_ids(self, tokens: Sequence[int], field: str) -> None:
        limit = self._config.max_token_id
        if limit == 2**32 - 1 or not tokens or max(tokens) <= limit:
            return
        at = next(at for at, token in enumerate(tokens) if token > limit)
        raise InvalidArgument(
            f"{tokens[at]} is over the limit of {limit}",
            field=f"{field}[{at}]",
            remedy="raise max_token_id of the service",
        )


def hash_tokens(scheme: HashScheme, tokens: Sequence[int], keys: ExtraKeys, tail: HashTail | None) -> Hashed:
    """Hash tokens that follow `tail`; pure."""
    hasher = RequestHasher(scheme, keys, tail)
    hashes = hasher.append(pack_tokens(tokens))
    return Hashed(hashes, hasher.tail)
