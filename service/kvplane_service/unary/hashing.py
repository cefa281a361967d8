"""Hashes the tokens of unary calls: short contents on the event loop, long ones on a thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvplane.base.errors import InvalidArgument
from kvplane.base.hashing import HashScheme, HashTail, RequestHasher, pack_tokens
from kvplane.base.step import NO_EXTRA_KEYS, ExtraKeys
from kvplane_service.config import Config
from kvplane_service.runtime.executors import Executor

_MAX_TOKEN_ID = 2**32 - 1
_PIECE = 1 << 16  # tokens that one call of a C function reads; it holds the interpreter for about 2 ms


@dataclass(frozen=True, slots=True)
class Hashed:
    """Hashes of the blocks that became full, and the state of the hash chain after them."""

    hashes: bytes
    tail: HashTail


class ContentHasher:
    """Hashes token ids; checks them, and decides where to hash, by the limits of the configuration."""

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
        hash_all = partial(_checked_hash, scheme, tokens, keys, tail, _Limit(self._config.max_token_id, field))
        return hash_all() if len(tokens) <= self._config.hash_inline_tokens else await self._offload(hash_all)


@dataclass(frozen=True, slots=True)
class _Limit:
    """The highest token id that is accepted, and the field of the call that has the ids."""

    highest: int
    field: str

    def check(self, tokens: Sequence[int]) -> None:
        """Raise InvalidArgument for the first id above the limit."""
        if self.highest == _MAX_TOKEN_ID:
            return
        for start in range(0, len(tokens), _PIECE):
            piece = tokens[start : start + _PIECE]
            if max(piece) > self.highest:
                at, token = next((at, token) for at, token in enumerate(piece, start) if token > self.highest)
                raise InvalidArgument(
                    f"token id {token} is over the limit of {self.highest}",
                    field=f"{self.field}[{at}]",
                    remedy="raise max_token_id of the service",
                )


def _checked_hash(
    scheme: HashScheme, tokens: Sequence[int], keys: ExtraKeys, tail: HashTail | None, limit: _Limit
) -> Hashed:
    limit.check(tokens)
    return hash_tokens(scheme, tokens, keys, tail)


def hash_tokens(scheme: HashScheme, tokens: Sequence[int], keys: ExtraKeys, tail: HashTail | None) -> Hashed:
    """Hash tokens that follow `tail`, the state of the hash chain. The ids must be unsigned 32-bit integers."""
    hasher = RequestHasher(scheme, keys, tail) if tail else RequestHasher.of_prompt(scheme, keys, len(tokens))
    pieces = [tokens[start : start + _PIECE] for start in range(0, len(tokens), _PIECE)]
    hashes = b"".join([hasher.append(pack_tokens(piece)) for piece in pieces])
    return Hashed(hashes, hasher.tail)
