"""The contents of new requests, as block hashes: from their tokens, or as the engine gave them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvplane.base.errors import InvalidArgument
from kvplane.base.hashing import HashScheme, HashTail, PackedHashes, RequestHasher, pack_tokens
from kvplane.base.list_like import ListLike
from kvplane.base.step import NO_EXTRA_KEYS, ExtraKeys, News

UNPROVEN = HashTail(0, b"")


@dataclass(slots=True)
class Content:
    """The content of a request, as block hashes.

    Attributes:
        digests: chained hash of each full hash block.
        hasher: hashes appended tokens; None if the engine sends hashes instead of token ids.
    """

    digests: list[bytes]
    hasher: RequestHasher | None = None


class HashedNews(NamedTuple):
    """What a news row says of its request: `hashes` of the full hash blocks, and what hashes appended tokens; None if
    the engine sends hashes.
    """

    hashes: PackedHashes
    hasher: RequestHasher | None = None

    def content(self) -> Content:
        """Return it in the form in which a request is extended."""
        return Content(list(self.hashes), self.hasher)


def hash_news(scheme: HashScheme, news: News) -> list[HashedNews]:
    """Return the hashes of the new requests."""
    found, at = [], 0
    given = PackedHashes(news.hashes, len(news.hashes) // sum(news.num_hashes)) if news.hashes else PackedHashes()
    for row, num_tokens in enumerate(news.num_tokens):
        if news.tokens:
            extra = news.extra_keys[row] if news.extra_keys else NO_EXTRA_KEYS
            tokens = news.tokens[at : at + num_tokens] if len(news.num_tokens) > 1 else news.tokens
            found.append(_hash_tokens(scheme, tokens, extra))
            at += num_tokens
        else:
            count = news.num_hashes[row] if news.num_hashes else 0
            found.append(HashedNews(given.part(at, at + count)))
            at += count
    return found


def hash_alone(scheme: HashScheme, news: News) -> PackedHashes:
    """Return the hashes of a request that is in no step. Raises InvalidArgument if its extra keys prove nothing."""
    if news.tokens and news.extra_keys:
        RequestHasher.of_prompt(scheme, news.extra_keys[0], len(news.tokens))
    return hash_news(scheme, news)[0].hashes


def _hash_tokens(scheme: HashScheme, tokens: Sequence[int], extra: ExtraKeys) -> HashedNews:
    """Return the hashes of a request. One whose extra keys prove nothing has none, so that it shares no block: to
    refuse it would refuse the other requests of the step.
    """
    size = scheme.digest.size
    try:
        hasher = RequestHasher.of_prompt(scheme, extra, len(tokens))
    except InvalidArgument:
        return HashedNews(PackedHashes(size=size), RequestHasher(scheme, extra, UNPROVEN))
    return HashedNews(PackedHashes(hasher.append(pack_tokens(tokens)), size), hasher)


class HashedRows(ListLike[bytes]):
    """The hashes that were made of the tokens of each row that has tokens: its digests, concatenated.

    Attributes:
        counts: digests of each row.
        joined: all digests.
        size: bytes of one.
    """

    __slots__ = ("counts", "joined", "size")
    counts: Sequence[int]
    joined: bytes
    size: int

    def __len__(self) -> int:
        return len(self.counts)

    def __iter__(self) -> Iterator[bytes]:
        at = 0
        for count in self.counts:
            yield self.joined[at : at + count * self.size]
            at += count * self.size
