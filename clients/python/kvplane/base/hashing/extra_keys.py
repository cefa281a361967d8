"""Inputs of a block's hash other than its tokens, as tagged keys.

Two requests with equal tokens may share a page only if all other inputs of its content are equal: the LoRA adapter, the
images whose placeholder tokens it covers, the embeddings given instead of tokens. A salt separates requests on purpose.
Each key starts with its tag, so that a salt never equals an adapter of the same text.

Tags, order and values are those of vLLM 0.33 (v1/core/kv_cache_utils.py), so that its hashes can be
reproduced.
"""

from __future__ import annotations

import hashlib
import sys
from bisect import bisect_right
from dataclasses import dataclass
from typing import TypeAlias

from kvplane.base.errors import InvalidArgument
from kvplane.base.step import NO_EXTRA_KEYS, ExtraKeys, Multimodal

Key: TypeAlias = tuple[str | int | bytes, ...]
BlockKeys: TypeAlias = tuple[Key, ...] | None

_NO_EMBEDS = hashlib.sha256(b"").digest()


@dataclass(frozen=True, slots=True)
class RequestKeys:
    """The extra keys of one request, block by block.

    Attributes:
        extra: the extra keys of the request.
        block_size: tokens per hash block; `extra.prompt_embeds` has one digest per hash block.

    Raises:
        InvalidArgument: text that cannot be encoded as UTF-8, items that are empty, overlap or are out of order, or a
            digest of embeddings that is not SHA-256; `field` names it.
    """

    extra: ExtraKeys
    block_size: int

    def __post_init__(self) -> None:
        if self.extra == NO_EXTRA_KEYS:
            return
        for field, text in zip(("lora_name", "lora_path"), self.extra.lora or (), strict=False):
            _check_text(text, field)
        _check_text(self.extra.salt, "salt")
        _check_items(self.extra.multimodal)
        for position, digest in enumerate(self.extra.prompt_embeds):
            if len(digest) != len(_NO_EMBEDS):
                raise _bad(f"prompt_embeds[{position}]", f"{len(digest)} bytes are no SHA-256")

    @property
    def keyed_until(self) -> int:
        """The first token from which on no block has a key."""
        if self.extra.lora or self.extra.prompt_embeds:
            return sys.maxsize
        return _end(self.extra.multimodal[-1]) if self.extra.multimodal else int(bool(self.extra.salt))

    def of_block(self, start: int, end: int) -> BlockKeys:
        """The keys of the block that covers tokens `[start, end)`, None when it has none.

        LoRA on every block; each item on the blocks that it overlaps, with its place relative to the block;
        the salt on the first block, and through the chain in all; embeddings on every block.
        """
        keys: list[Key] = []
        if self.extra.lora:
            keys.append(("lora", *map(_fresh, self.extra.lora)))
        items = self._items_between(start, end)
        keys.extend(("mm", _fresh(item.identifier), item.offset - start) for item in items)
        if self.extra.salt and start == 0:
            keys.append(("cache_salt", _fresh(self.extra.salt)))
        if self.extra.prompt_embeds:
            keys.append(("prompt_embeds", self._embeds_digest(start // self.block_size)))
        return tuple(keys) or None

    def _items_between(self, start: int, end: int) -> tuple[Multimodal, ...]:
        first = bisect_right(self.extra.multimodal, start, key=_end)
        last = bisect_right(self.extra.multimodal, end - 1, key=lambda item: item.offset)
        return self.extra.multimodal[first:last]

    def _embeds_digest(self, block: int) -> bytes:
        """The digest of a block's embeddings; blocks after the prompt have the digest of no bytes, as in vLLM."""
        digests = self.extra.prompt_embeds
        return digests[block] if block < len(digests) else _NO_EMBEDS


def digest_embeds(embeds: bytes, token_bytes: int, block_size: int, lookahead: int = 0) -> tuple[bytes, ...]:
    """`ExtraKeys.prompt_embeds` of row-major embeddings: one SHA-256 per hash block, the last one maybe of a
    part.

    Args:
        embeds: the rows of all prompt tokens.
        token_bytes: bytes of one token's row.
        block_size: tokens of a hash block.
        lookahead: as in `HashScheme`.
    """
    view = memoryview(embeds)
    reach = (block_size + lookahead) * token_bytes
    starts = range(0, len(embeds), block_size * token_bytes)
    return tuple(hashlib.sha256(view[start : start + reach]).digest() for start in starts)


def _end(item: Multimodal) -> int:
    return item.offset + item.length


def _fresh(text: str) -> str:
    """An equal string that is a separate object.

    Pickle writes a second occurrence of the same *object* as a reference, of an equal one in full. With fresh
    values (and tags that are constants) the bytes depend on the content only, and are those of the reference,
    whose values are fresh from its own decoder.
    """
    return text.encode().decode()


def _check_text(text: str, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _bad(field, "has no UTF-8 form", "send text without lone surrogates") from None


def _check_items(items: tuple[Multimodal, ...]) -> None:
    end = 0
    for position, item in enumerate(items):
        field = f"multimodal[{position}]"
        _check_text(item.identifier, f"{field}.identifier")
        if item.length < 1:
            raise _bad(f"{field}.length", f"{item.length} is below 1", "leave empty items out")
        if item.offset < end:
            problem = f"{item.offset} is before the end of the previous item, {end}"
            raise _bad(f"{field}.offset", problem, "list items by offset, without overlap")
        end = _end(item)


def _bad(field: str, problem: str, remedy: str = "") -> InvalidArgument:
    return InvalidArgument(problem, field=f"extra_keys.{field}", remedy=remedy)
