"""Hashes of the tokens that the compiled core does not hash: those of requests with extra keys, or all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvplane.base.hashing import HashScheme, RequestHasher, pack_tokens
from kvplane.base.step import NO_EXTRA_KEYS, News, Step
from kvplane_core.cpp import _native
from kvplane_core.face.contents import HashedNews, hash_news

HERE = -1  # digests of a row whose tokens are hashed by the core


class Hashers:
    """Hash the tokens of the requests that the core marks as hashed outside of it."""

    def __init__(self, core: object, scheme: HashScheme, hashes_here: bool) -> None:
        """`hashes_here`: the core hashes the tokens of requests without extra keys."""
        self._core, self._scheme, self._hashes_here = core, scheme, hashes_here
        self._each: dict[int, RequestHasher] = {}  # by slot; also of some requests that have ended
        self._outside: Sequence[bool] = _native.read(core, "column", "hashed_outside")

    def clear(self) -> None:
        """Forget all requests."""
        self._each.clear()

    def outside(self) -> list[tuple[int, RequestHasher]]:
        """Return the hashers of the requests whose tokens the core does not hash, by slot."""
        return [(slot, one) for slot, one in sorted(self._each.items()) if self._outside[slot]]

    def continue_from(self, slot: int, hasher: RequestHasher) -> None:
        """Let the core hash further tokens of a request, or keep the hasher of a request with extra keys."""
        is_here = self._hashes_here and hasher.extra_keys == NO_EXTRA_KEYS
        _native.change(self._core, "set_hash_tail", slot, hasher.tail.pending if is_here else None)
        if not is_here:
            self._each[slot] = hasher

    def hash(self, step: Step) -> tuple[tuple[Any, Any], ...]:
        """Hash the tokens of a step that the core does not hash: of new requests, and then
        of running ones. Returns them per part, of facts and news, as the core reads them: counts, HERE for the
        other rows with tokens, and the hashes.
        """
        contents = [self._hash_news(part.news) for part in step.parts]
        outside, fresh, made = self._outside, set[int](), []
        for part, of_news in zip(step.parts, contents, strict=True):
            facts, at, of_facts = part.facts, 0, list[bytes | None]()
            for row, slot in enumerate(facts.slot if facts.tokens else ()):
                count = facts.appended[row]
                tokens = facts.tokens[at : at + count]
                at += count
                hasher = self._each.get(slot) if outside[slot] or slot in fresh else None
                of_facts.append(hasher.append(pack_tokens(tokens)) if tokens and hasher is not None else None)
            for slot, one in zip(part.news.slot, of_news, strict=False):
                self._each.pop(slot, None)
                if one is not None and one.hasher is not None:
                    self._each[slot] = one.hasher
                    fresh.add(slot)
            of_requests = [one.hashes.joined if one is not None else None for one in of_news]
            made.append((self._joined(of_facts), self._joined(of_requests)))
        return tuple(made)

    def _hash_news(self, news: News) -> list[HashedNews | None]:
        """Return the hashes of new requests, None for one that the core hashes; [] if no tokens are given."""
        if not news.tokens:
            return []
        if not self._hashes_here:
            return list(hash_news(self._scheme, news))
        return [
            one if one is not None and one.hasher is not None and one.hasher.extra_keys != NO_EXTRA_KEYS else None
            for one in hash_news(self._scheme, news)
        ]

    def _joined(self, hashed: list[bytes | None]) -> tuple[list[int], bytes] | None:
        if not hashed:
            return None
        size = self._scheme.digest.size
        counts = [HERE if one is None else len(one) // size for one in hashed]
        return counts, b"".join([one for one in hashed if one is not None])
