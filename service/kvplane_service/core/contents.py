"""The contents of new requests, as block hashes: from their tokens, or as the engine gave them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

from kvplane.base.errors import InvalidArgument
from kvplane.base.hashing import HashScheme, PackedHashes, RequestHasher, pack_tokens
from kvplane.base.step import NO_EXTRA_KEYS, ExtraKeys, News
from kvplane_service.core.requests import Content


class HashedNews(NamedTuple):
    """What a news row says of its request: `hashes` of the full hash blocks, and what hashes appended tokens; None if
    the engine sends hashes.
    """

    hashes: PackedHashes
    hasher: RequestHasher | None = None

    def content(self) -> Content:
        """Return it in the form in which a request is extended."""
        return Content(list(self.hashes), self.hasher)


def hash_news(scheme: HashScheme, news: News, field: str) -> list[HashedNews]:
    """Return the hashes of the new requests. Raises InvalidArgument for invalid extra keys."""
    found, at = [], 0
    given = PackedHashes(news.hashes, len(news.hashes) // sum(news.num_hashes)) if news.hashes else PackedHashes()
    for row, num_tokens in enumerate(news.num_tokens):
        if news.tokens:
            extra = news.extra_keys[row] if news.extra_keys else NO_EXTRA_KEYS
            tokens = news.tokens[at : at + num_tokens] if len(news.num_tokens) > 1 else news.tokens
            found.append(_hash_tokens(scheme, tokens, extra, f"{field}.extra_keys[{row}]"))
            at += num_tokens
        else:
            count = news.num_hashes[row] if news.num_hashes else 0
            found.append(HashedNews(given.part(at, at + count)))
            at += count
    return found


def _hash_tokens(scheme: HashScheme, tokens: Sequence[int], extra: ExtraKeys, field: str) -> HashedNews:
    try:
        hasher = RequestHasher(scheme, extra)
    except InvalidArgument as error:
        inner = error.field.removeprefix("extra_keys")
        raise InvalidArgument(error.message, field=field + inner, remedy=error.remedy) from None
    return HashedNews(PackedHashes(hasher.append(pack_tokens(tokens)), scheme.digest.size), hasher)


class HashedRows(Sequence[bytes]):
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

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> list[bytes]: ...
    def __getitem__(self, at: int | slice) -> bytes | list[bytes]:
        return list(self)[at]

    def __iter__(self) -> Iterator[bytes]:
        at = 0
        for count in self.counts:
            yield self.joined[at : at + count * self.size]
            at += count * self.size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))
