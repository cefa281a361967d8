"""How an engine hashes blocks, proven from what it publishes: the keys of a prompt's first blocks follow from their
tokens.

A prompt's keys are then computed by `kvplane.base.hashing`, and are the engine's own. A scheme is adopted after two
keys, the second of which was computed from the first, or of another prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvplane.base.errors import KvplaneError
from kvplane.base.groups import HashAlgorithm
from kvplane.base.hashing import HashScheme, RequestHasher, pack_tokens
from kvplane.base.step import NO_EXTRA_KEYS, ExtraKeys
from kvplane_fleet.wire.events import KEY_BYTES, Evidence

PROOFS_NEEDED = 2
MOST_TRIES = 256  # store events that fit no scheme, until none is looked for any more
MOST_BLOCKS = 4  # of a prompt that are hashed for a proof
MOST_BLOCK_SIZE = 1 << 16  # of blocks of which a proof is made
MOST_EFFORT = 1 << 14  # of one store event: hash blocks, and 64 tokens count as one; some 30 ms


@dataclass(frozen=True, slots=True)
class Domain:
    """A way to hash blocks; engines with equal domains have equal keys for equal prompts.

    Attributes:
        algorithm: the algorithm of the hashes.
        seed: its seed; "" = the algorithm's default.
        block_size: tokens of a hash block.
        lookahead: tokens after a block that its hash covers.
        key_bytes: bytes of a hash that are the key; of keys with 8 an attacker can find two prompts that share one.
    """

    algorithm: HashAlgorithm
    seed: str
    block_size: int
    lookahead: int = 0
    key_bytes: int = KEY_BYTES

    @property
    def scheme(self) -> HashScheme:
        """The scheme by which `kvplane.base.hashing` computes the hashes."""
        return HashScheme.named(self.block_size, self.algorithm, self.seed, self.lookahead)

    def keys(self, tokens: Sequence[int], extra: ExtraKeys = NO_EXTRA_KEYS) -> list[int]:
        """Return the keys of the whole hash blocks of a prompt. Raises InvalidArgument for tokens out of range,
        or extra keys that prove nothing.
        """
        scheme = self.scheme
        hasher = RequestHasher.of_prompt(scheme, extra, len(tokens))
        return keys_of(hasher.append(pack_tokens(tokens)), scheme.digest.size, self.key_bytes)

    @property
    def mask(self) -> int:
        """The bits of a key."""
        return (1 << 8 * self.key_bytes) - 1

    def __str__(self) -> str:
        ahead = f", {self.lookahead} tokens ahead" if self.lookahead else ""
        seed = "a given" if self.seed else "default"
        width = "" if self.key_bytes == KEY_BYTES else f", keys of {self.key_bytes} bytes"
        return f"{self.algorithm.value}, {seed} seed, blocks of {self.block_size}{ahead}{width}"


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
    """

    def __init__(self, algorithms: Sequence[HashAlgorithm], seed: str) -> None:
        """`algorithms`: those to try, with `seed` ("" = their default; those without one are left out then)."""
        self._algorithms, self._seed = algorithms, seed
        self.domain: Domain | None = None
        self.proofs = self.tries = 0
        self._candidate: Domain | None = None
        self._left: Iterator[Domain] = iter(())  # domains that are not compared yet
        self._form = (0, 0, 0)  # of the blocks that they are for

    @property
    def wants_tokens(self) -> bool:
        """Whether further store events can help."""
        return self.domain is None and self.tries < MOST_TRIES

    def observe(self, keys: Sequence[int], block_size: int, evidence: Evidence) -> None:
        """Compare the keys of stored blocks with their tokens. Blocks that do not begin a prompt, or have other content
        than tokens, prove nothing.
        """
        whole = 0 < block_size <= MOST_BLOCK_SIZE and len(evidence.tokens) == len(keys) * block_size
        if not self.wants_tokens or not keys or not whole or evidence.parent is not None or not evidence.plain:
            return
        ahead = evidence.lookahead
        if ahead and len(ahead) < len(keys):
            return
        count = min(len(keys), MOST_BLOCKS)
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
        for size in [size for size in range(block_size, 0, -1) if block_size % size == 0]:
            for algorithm in self._algorithms:
                domain = Domain(algorithm, self._seed, size, lookahead, key_bytes)
                try:
                    domain.scheme  # noqa: B018 - raises where the algorithm needs a seed or a package
                except KvplaneError:
                    continue
                yield domain
