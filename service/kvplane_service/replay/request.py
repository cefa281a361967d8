"""One request of the engine, from its trace entry to its last generated token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kvplane.base.hashing import HashScheme, RequestHasher, pack_tokens

NO_SLOT = -1

# Odd, so that the first generated tokens of 2^32 requests all differ.
_SPREAD = 0x9E3779B1
_MASK = 0xFFFFFFFF


class Content(Protocol):
    """What the engine needs to know of a trace entry."""

    @property
    def request_id(self) -> str:
        """Name of the request."""
        ...

    @property
    def session(self) -> str:
        """What the requests of one conversation share; "" when the trace does not say."""
        ...

    @property
    def arrival_ns(self) -> int:
        """When it arrives, from the start of the trace."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """1 or more."""
        ...

    @property
    def num_output_tokens(self) -> int:
        """Tokens that it generates, 1 or more."""
        ...

    def prompt(self) -> Iterable[bytes]:
        """The prompt as packed tokens, in pieces."""
        ...


class LiveRequest:
    """A request inside the engine.

    The prompt is hashed when its turn comes near and never kept as tokens; generated tokens are made and hashed a block
    at a time, and never repeat: they start at a number of the request's own, and a block hash covers all before it.

    Attributes:
        content: its trace entry.
        slot: the number that the service knows it by, NO_SLOT before it is announced.
        num_tokens: prompt and generated tokens at its end.
        admitted: it has run before, so its next admission is a resumption.
    """

    __slots__ = ("_hasher", "_prompt_hashes", "_serial", "admitted", "content", "num_tokens", "slot")

    def __init__(self, content: Content, serial: int, max_output: int) -> None:
        self.content = content
        self.slot = NO_SLOT
        self.num_tokens = content.num_prompt_tokens + min(content.num_output_tokens, max_output)
        self.admitted = False
        self._serial = serial
        self._hasher: RequestHasher | None = None
        self._prompt_hashes = b""

    def hash_prompt(self, scheme: HashScheme) -> None:
        """Hash the prompt's full blocks, unless that is done."""
        if self._hasher is not None:
            return
        hasher = RequestHasher(scheme)
        self._prompt_hashes = b"".join(map(hasher.append, self.content.prompt()))
        assert hasher.num_tokens == self.content.num_prompt_tokens, "a trace entry holds as many tokens as it says"
        self._hasher = hasher

    def take_prompt_hashes(self) -> bytes:
        """The hashes of the prompt, given away once: the service keeps them from here on."""
        assert self._hasher is not None, "hash_prompt comes first"
        hashes, self._prompt_hashes = self._prompt_hashes, b""
        return hashes

    def hash_generated(self, known_tokens: int) -> bytes:
        """The hashes that became complete when the request grew to `known_tokens`."""
        assert self._hasher is not None, "hash_prompt comes first"
        first = self._hasher.num_tokens - self.content.num_prompt_tokens
        end = known_tokens - self.content.num_prompt_tokens
        start = self._serial * _SPREAD
        return self._hasher.append(pack_tokens([(start + i) & _MASK for i in range(first, end)]))
