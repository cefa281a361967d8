"""How an engine hashes blocks, proven from what it publishes: the keys of a prompt's first blocks follow from their
tokens.

A prompt's keys are then computed by `kvplane.base.hashing`, and are the engine's own. A scheme is adopted after two
keys, the second of which was computed from the first, or of another prompt.

What else a hash has, an adapter or a salt, is proven apart: by the first block of a prompt of which an event states it.
vLLM 0.33 hashes an adapter's path, which no event states: the operator names it. A block of the adapter that does not
follow from it shows that the adapter was loaded from elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from hashlib import sha256
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from kvplane.base.errors import InvalidArgument, KvplaneError
from kvplane.base.groups import HashAlgorithm
from kvplane.base.hashing import TOKEN_BYTES, HashScheme, RequestHasher, RequestKeys, chain_run, pack_tokens
from kvplane.base.step import NO_EXTRA_KEYS, ExtraKeys
from kvplane_fleet.wire.events import KEY_BYTES, Evidence

PROOFS_NEEDED = 2
MOST_TRIES = 256  # store events that fit no scheme, until none is looked for any more
MOST_BLOCKS = 4  # of a prompt that are hashed for a proof
MOST_BLOCK_SIZE = 1 << 16  # of blocks of which a proof is made
PACKED_AT_ONCE = 1 << 16  # token ids
MOST_KEYED = 1 << 11  # hash blocks of an adapter's first block: some microseconds each
MOST_EFFORT = 1 << 14  # of one store event: hash blocks, and 64 tokens count as one; some 30 ms


class EngineHash(Enum):
    """Algorithms that engines alone use, not replicas of kvplane."""

    SGLANG = "sglang"  # SHA-256 of the parent's digest and the tokens; the first 8 bytes are the key


Algorithm: TypeAlias = HashAlgorithm | EngineHash
_SGLANG_SALT = b"sglang-cache-salt-v1\0"


@dataclass(frozen=True, slots=True)
class Domain:
    """A way to hash blocks; engines with equal domains have equal keys for equal prompts.

    Attributes:
        algorithm: the algorithm of the hashes.
        seed: its seed; "" = the algorithm's default.
        block_size: tokens of a hash block.
        lookahead: tokens after a block that its hash covers.
        key_bytes: bytes of a hash that are the key; of keys with 8 an attacker can find two prompts that share one.
        tagged: see HashScheme.
        lora: name and path of the adapter with which every prompt is computed; None = the base model.
    """

    algorithm: Algorithm
    seed: str
    block_size: int
    lookahead: int = 0
    key_bytes: int = KEY_BYTES
    tagged: bool = True
    lora: tuple[str, str] | None = None

    @property
    def scheme(self) -> HashScheme:
        """The scheme by which `kvplane.base.hashing` computes the hashes."""
        assert isinstance(self.algorithm, HashAlgorithm)
        scheme = HashScheme.named(self.block_size, self.algorithm, self.seed, self.lookahead)
        return scheme if self.tagged else replace(scheme, tagged=False)

    def keys(self, tokens: Sequence[int], extra: ExtraKeys = NO_EXTRA_KEYS) -> list[int]:
        """Return the keys of the whole hash blocks of a prompt; none if it is not known what else they have. Raises
        InvalidArgument for tokens out of range, or extra keys that prove nothing, or are of another adapter.
        """
        if self.lora is not None:
            if extra.lora is not None and extra.lora[0] != self.lora[0]:
                what, remedy = f"{extra.lora[0][:140]!r} is another adapter than the model", "name one of both"
                raise InvalidArgument(what, field="prompt.extra_keys.lora_name", remedy=remedy)
            extra = replace(extra, lora=extra.lora or self.lora)
        if self.algorithm is EngineHash.SGLANG:
            if extra.lora or extra.multimodal or extra.prompt_embeds:
                return []  # SGLang hashes numbers of an adapter and of images that no event states
            RequestKeys(extra, self.block_size)  # checks the salt
            parent = sha256(_SGLANG_SALT + extra.salt.encode()).digest() if extra.salt else b""
            whole = len(tokens) // self.block_size * self.block_size
            hashes = chain_run(parent, _packed(tokens)[: TOKEN_BYTES * whole], self.block_size)
            first: list[int] = np.frombuffer(hashes, ">u8")[::4].tolist()
            return first
        scheme = self.scheme
        hasher = RequestHasher.of_prompt(scheme, extra, len(tokens))
        return keys_of(hasher.append(_packed(tokens)), scheme.digest.size, self.key_bytes)

    @property
    def mask(self) -> int:
        """The bits of a key."""
        return (1 << 8 * self.key_bytes) - 1

    def __str__(self) -> str:
        ahead = f", {self.lookahead} tokens ahead" if self.lookahead else ""
        seed = "a given" if self.seed else "default"
        width = "" if self.key_bytes == KEY_BYTES else f", keys of {self.key_bytes} bytes"
        tags = "" if self.tagged else ", untagged"
        return f"{self.algorithm.value}, {seed} seed, blocks of {self.block_size}{ahead}{width}{tags}"


def _packed(tokens: Sequence[int]) -> bytes:
    """Return token ids as `pack_tokens`, a part at a time: as objects, all would take ten times as much memory."""
    parts = (tokens[at : at + PACKED_AT_ONCE] for at in range(0, len(tokens), PACKED_AT_ONCE))
    return b"".join(map(pack_tokens, parts))


def keys_of(hashes: bytes, digest_bytes: int, key_bytes: int = KEY_BYTES) -> list[int]:
    """Return the keys of concatenated digests: their last bytes."""
    words = np.frombuffer(hashes, np.uint8).reshape(-1, digest_bytes)[:, -key_bytes:].copy().view(">u8")
    low: list[int] = words[:, -1].tolist()
    if key_bytes == KEY_BYTES:
        return low
    return [high << 64 | each for high, each in zip(words[:, 0].tolist(), low, strict=True)]


class DomainProof:
    """Finds the domain of one engine life.

    Attributes:
        domain: the domain, once it is proven.
        proofs: keys that were reproduced.
        tries: store events that were compared with no result.
        differing: adapters whose blocks do not follow from their paths.
    """

    def __init__(
        self, algorithms: Sequence[HashAlgorithm], seed: str, adapters: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """`algorithms`: those to try, and always SGLang's, with `seed` ("" = their default; those without one are left
        out then). `adapters`: paths of adapters by name.
        """
        self._algorithms, self._seed, self._adapters = algorithms, seed, adapters
        self.domain: Domain | None = None
        self.proofs = self.tries = 0
        self.differing = set[str]()
        self._knows_tags = False
        self._candidate: Domain | None = None
        self._left: Iterator[Domain] = iter(())  # domains that are not compared yet
        self._form = (0, 0, 0)  # of the blocks that they are for

    @property
    def wants_tokens(self) -> bool:
        """Whether further store events can help."""
        return self.domain is None and self.tries < MOST_TRIES

    @property
    def wants_extra(self) -> bool:
        """Whether events of prompts with an adapter or a salt can help."""
        return self.domain is not None and bool(self._adapters or not (self._knows_tags or self.tries >= MOST_TRIES))

    def observe(self, keys: Sequence[int], block_size: int, evidence: Evidence) -> bool:
        """Compare the keys of stored blocks with their tokens. Blocks that do not begin a prompt, or have other content
        than an event states, prove nothing. Returns whether nothing contradicts the path of an adapter.
        """
        whole = 0 < block_size <= MOST_BLOCK_SIZE and len(evidence.tokens) == len(keys) * block_size
        ahead = evidence.lookahead
        if not keys or not whole or evidence.parent is not None or (ahead and len(ahead) < len(keys)):
            return True
        if evidence.plain and self.wants_tokens:
            self._prove(keys, block_size, evidence)
        elif evidence.extra is not None and self.wants_extra:
            return self._prove_extra(keys[0], block_size, evidence.extra, evidence)
        return True

    def _prove_extra(self, key: int, block_size: int, extra: ExtraKeys, evidence: Evidence) -> bool:
        """Compare the first block of a prompt with an adapter or a salt."""
        name = extra.lora[0] if extra.lora else ""
        if self.domain is None or block_size // self.domain.block_size > MOST_KEYED:
            return True
        if name and name not in self._adapters:
            return True
        lora = (name, self._adapters[name]) if name else None
        tokens = [*evidence.tokens[:block_size], *(evidence.lookahead[0] if evidence.lookahead else ())]
        for tagged in (self.domain.tagged, not self.domain.tagged):
            domain = replace(self.domain, tagged=tagged)
            if replace(domain, lora=lora).keys(tokens, replace(extra, lora=None))[-1:] == [key]:
                self.domain, self._knows_tags = domain, True
                self.differing.discard(name)
                return True
        self.tries += 1
        if name:
            self.differing.add(name)
        return not name

    def _prove(self, keys: Sequence[int], block_size: int, evidence: Evidence) -> None:
        ahead, count = evidence.lookahead, min(len(keys), MOST_BLOCKS)
        tokens = [*evidence.tokens[: count * block_size], *(ahead[count - 1] if ahead else ())]
        for domain in self._next((block_size, len(ahead[0]) if ahead else 0, evidence.key_bytes)):
            step = block_size // domain.block_size
            if domain.keys(tokens)[step - 1 :: step][:count] == list(keys[:count]):
                self._found(domain, count)
                return
        self.tries += 1

    def _next(self, form: tuple[int, int, int]) -> Iterator[Domain]:
        """Yield the candidate, then as many other domains as one event may cost; the next event continues with the
        others. `form`: block size, lookahead and bytes of a key.
        """
        if self._candidate is not None and form[0] % self._candidate.block_size == 0:
            yield self._candidate
        effort, begun = 0, False
        while effort < MOST_EFFORT:
            domain = next(self._left, None) if form == self._form else None
            if domain is None:
                if begun:
                    return
                self._left, self._form, begun = self._candidates(*form), form, True
                continue
            effort += MOST_BLOCKS * (form[0] // domain.block_size + form[0] // 64 + 1)
            yield domain

    def _found(self, domain: Domain, count: int) -> None:
        if domain != self._candidate:
            self._candidate, self.proofs = domain, 0
        self.proofs += count
        if self.proofs >= PROOFS_NEEDED:
            self.domain = domain

    def _candidates(self, block_size: int, lookahead: int, key_bytes: int) -> Iterator[Domain]:
        if not lookahead and key_bytes == KEY_BYTES:
            yield Domain(EngineHash.SGLANG, "", block_size)
        for size in [size for size in range(block_size, 0, -1) if block_size % size == 0]:
            for algorithm in self._algorithms:
                domain = Domain(algorithm, self._seed, size, lookahead, key_bytes)
                try:
                    domain.scheme  # noqa: B018 - raises where the algorithm needs a seed or a package
                except KvplaneError:
                    continue
                yield domain
