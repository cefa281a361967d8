"""A memo of prompts that were hashed, so that the next turn of a conversation hashes only what is new."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple, TypeAlias

from kvplane.base.hashing.extra_keys import RequestKeys
from kvplane.base.hashing.hasher import HashScheme, HashTail, RequestHasher
from kvplane.base.hashing.tokens import TOKEN_BYTES, check_packed
from kvplane.base.step import NO_EXTRA_KEYS, ExtraKeys


class _Known(NamedTuple):
    """A beginning of a prompt: the packed tokens that its hashes depend on, and the hashes of its blocks."""

    packed: bytes
    hashes: bytes


_Beginning: TypeAlias = tuple[ExtraKeys, bytes]  # extra keys and the first block


class HashMemo:
    """Hashes prompts, and continues where the longest known prompt ends that the new one begins with.

    It is for one engine, and one thread at a time: how long a call takes shows which prompts are known.
    """

    def __init__(self, scheme: HashScheme, *, max_tokens: int = 1 << 20) -> None:
        """Start with no prompts. The memo keeps about six bytes for each of `max_tokens` tokens, those used last."""
        self._scheme, self._max_bytes = scheme, max_tokens * TOKEN_BYTES
        self._known: OrderedDict[_Beginning, list[_Known]] = OrderedDict()
        self._num_bytes = 0

    def hash_prompt(self, packed: bytes, extra_keys: ExtraKeys = NO_EXTRA_KEYS) -> tuple[RequestHasher, bytes]:
        """Return a hasher to which a prompt was appended, and the hashes of the prompt's full blocks, concatenated.

        Args:
            packed: the prompt, four bytes per token, as `RequestHasher.append` takes it.
            extra_keys: as of `RequestHasher`; only prompts with equal ones are continued.

        Raises:
            InvalidArgument: as `RequestHasher.of_prompt` and `append`.
        """
        check_packed(packed)
        scheme = self._scheme
        stride, ahead = scheme.block_size * TOKEN_BYTES, scheme.lookahead * TOKEN_BYTES
        beginning = (extra_keys, packed[:stride])
        known = self._find(beginning, packed)
        num_blocks = len(known.hashes) // scheme.digest.size
        tail = HashTail(num_blocks, known.hashes[-scheme.digest.size :]) if num_blocks else None
        RequestKeys(extra_keys, scheme.block_size).check_prompt(len(packed) // TOKEN_BYTES)
        hasher = RequestHasher(scheme, extra_keys, tail)
        hashes = known.hashes + hasher.append(packed[num_blocks * stride :])
        if hashes:
            end = len(hashes) // scheme.digest.size * stride + ahead
            self._remember(beginning, known, _Known(packed[:end], hashes))
        return hasher, hashes

    def _find(self, beginning: _Beginning, packed: bytes) -> _Known:
        found = [one for one in self._known.get(beginning, ()) if packed.startswith(one.packed)]
        return max(found, key=lambda one: len(one.packed), default=_Known(b"", b""))

    def _remember(self, beginning: _Beginning, before: _Known, known: _Known) -> None:
        """Keep a prompt instead of the one that it continues."""
        prompts = self._known.setdefault(beginning, [])
        if before in prompts:
            prompts.remove(before)
            self._num_bytes -= len(before.packed)
        prompts.append(known)
        self._num_bytes += len(known.packed)
        self._known.move_to_end(beginning)
        while self._num_bytes > self._max_bytes:
            oldest = next(iter(self._known))
            self._num_bytes -= len(self._known[oldest].pop(0).packed)
            if not self._known[oldest]:
                del self._known[oldest]
