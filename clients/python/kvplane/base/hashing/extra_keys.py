"""What a block's content depends on besides its tokens, as tagged keys that enter the block's hash.

Two requests with equal tokens may share a page only if everything else that made its bytes is equal too: the LoRA
adapter, the images whose placeholder tokens it covers, the embeddings given in place of tokens. A salt keeps requests
apart on purpose. Each key starts with its tag, so a salt never equals an adapter of the same text.

Tags, order and values are those of vLLM 0.33 (v1/core/kv_cache_utils.py), so that its hashes can be reproduced.
"""

from __future__ import annotations

import hashlib
import sys
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from kvplane.base.errors import InvalidArgument

Key: TypeAlias = tuple[str | int | bytes, ...]
BlockKeys: TypeAlias = tuple[Key, ...] | None

_NO_EMBEDS = hashlib.sha256(b"").digest()


@dataclass(frozen=True, slots=True)
class Lora:
    """The adapter of a request. The path counts too: a name that is pointed elsewhere must not hit old pages."""

    name: str
    path: str

    def __post_init__(self) -> None:
        _check_text(self.name, "lora.name")
        _check_text(self.path, "lora.path")


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """An image, sound or video whose placeholder tokens are `[offset, offset + length)` of the prompt.

    `id` identifies the content (usually its digest).
    """

    id: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        _check_text(self.id, "multimodal.id")
        if self.offset < 0:
            raise InvalidArgument(f"{self.offset} is below 0", field="multimodal.offset")
        if self.length < 1:
            raise InvalidArgument(
                f"{self.length} is below 1", field="multimodal.length", remedy="leave empty items out"
            )

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """Digests of the embeddings that a request brings instead of tokens: one SHA-256 per hash block, from the first.

    The last digest may cover a part of a block. Blocks behind the prompt carry the digest of nothing.
    """

    block_size: int
    digests: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise InvalidArgument(f"{self.block_size} is below 1", field="prompt_embeds.block_size")
        for position, digest in enumerate(self.digests):
            if len(digest) != len(_NO_EMBEDS):
                raise InvalidArgument(
                    f"{len(digest)} bytes are no SHA-256", field=f"prompt_embeds.digests[{position}]"
                )

    @classmethod
    def of(cls, embeds: bytes, token_bytes: int, block_size: int, lookahead: int = 0) -> PromptEmbeds:
        """Digests of row-major embeddings of `token_bytes` bytes a token; `lookahead` as in `HashScheme`."""
        view = memoryview(embeds)
        starts = range(0, len(embeds), block_size * token_bytes)
        reach = (block_size + lookahead) * token_bytes
        return cls(
            block_size, tuple(hashlib.sha256(view[start : start + reach]).digest() for start in starts)
        )

    def digest(self, start: int) -> bytes:
        """Of the block that begins at token `start`."""
        block, within = divmod(start, self.block_size)
        assert within == 0, f"token {start} begins no block of {self.block_size}"
        return self.digests[block] if block < len(self.digests) else _NO_EMBEDS


@dataclass(frozen=True)
class ExtraKeys:
    """The extra keys of one request.

    Attributes:
        lora: on every block.
        multimodal: on each block that an item overlaps, with the item's place relative to the block. Items are in
            order of their offsets and do not overlap.
        cache_salt: on the first block, and through the chain in all; "" is none.
        prompt_embeds: on every block.
    """

    lora: Lora | None = None
    multimodal: tuple[MultimodalItem, ...] = ()
    cache_salt: str = ""
    prompt_embeds: PromptEmbeds | None = None

    def __post_init__(self) -> None:
        _check_text(self.cache_salt, "cache_salt")
        for position in range(1, len(self.multimodal)):
            if self.multimodal[position].offset < self.multimodal[position - 1].end:
                raise InvalidArgument(
                    "begins before the end of the item in front of it",
                    field=f"multimodal[{position}].offset",
                    remedy="list the items in order of their offsets, without overlap",
                )

    @cached_property
    def keyed_until(self) -> int:
        """No block that begins at this token or later has a key."""
        if self.lora or self.prompt_embeds:
            return sys.maxsize
        return self.multimodal[-1].end if self.multimodal else int(bool(self.cache_salt))

    def keys_for_block(self, start: int, end: int) -> BlockKeys:
        """The keys of the block that covers tokens `[start, end)`, None when it has none.

        Order: LoRA, multimodal, salt, embeddings.
        """
        keys: list[Key] = []
        if self.lora:
            keys.append(("lora", _fresh(self.lora.name), _fresh(self.lora.path)))
        keys.extend(("mm", _fresh(item.id), item.offset - start) for item in self._overlapping(start, end))
        if self.cache_salt and start == 0:
            keys.append(("cache_salt", _fresh(self.cache_salt)))
        if self.prompt_embeds:
            keys.append(("prompt_embeds", self.prompt_embeds.digest(start)))
        return tuple(keys) or None

    def _overlapping(self, start: int, end: int) -> tuple[MultimodalItem, ...]:
        first = bisect_right(self.multimodal, start, key=lambda item: item.end)
        last = bisect_right(self.multimodal, end - 1, key=lambda item: item.offset)
        return self.multimodal[first:last]


def _fresh(text: str) -> str:
    """An equal string that is an object of its own.

    Pickle writes a second occurrence of the same *object* as a reference, of an equal one in full. With fresh values
    (and tags that are constants) the bytes depend on the content only, and are those of the reference, whose values
    are fresh from its own decoder.
    """
    return text.encode().decode()


def _check_text(text: str, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(
            "has no UTF-8 form", field=field, remedy="send text without lone surrogates"
        ) from None


NO_KEYS = ExtraKeys()
