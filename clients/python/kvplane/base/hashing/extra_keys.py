"""The extra keys of a block: the inputs of its hash other than its tokens.

Two requests with equal tokens may share a page only if everything else that the page depends on is equal too: the LoRA
adapter, the images whose placeholder tokens the block contains, and embeddings that replace tokens. A salt keeps the
blocks of requests apart on purpose. Every key starts with its tag, so that a salt never equals the name of an adapter.

Tags, order and values are those of vLLM 0.33 (v1/core/kv_cache_utils.py), so that vLLM's hashes can be reproduced.
"""

from __future__ import annotations

import hashlib
import sys
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import TypeAlias

from kvplane.base.errors import InvalidArgument
from kvplane.base.step import NO_EXTRA_KEYS, ExtraKeys, Multimodal

Key: TypeAlias = tuple[str | int | bytes, ...]
BlockKeys: TypeAlias = tuple[Key, ...] | None

_NO_EMBEDS = hashlib.sha256(b"").digest()


@dataclass(frozen=True, slots=True)
class RequestKeys:
    """The extra keys of one request, from which `of_block` computes the extra keys of each block.

    Attributes:
        extra: the extra keys of the request.
        block_size: tokens per hash block; `extra.prompt_embeds` has one digest per hash block.

    Raises:
        InvalidArgument: a text cannot be encoded as UTF-8; an adapter or a multimodal item has no name; a multimodal
            item is empty, overlaps another multimodal item or is out of order; or a digest of embeddings does not have
            the 32 bytes of a SHA-256. The error's field names it.
    """

    extra: ExtraKeys
    block_size: int

    def __post_init__(self) -> None:
        if self.extra == NO_EXTRA_KEYS:
            return
        for field, text in zip(("lora_name", "lora_path"), self.extra.lora or (), strict=False):
            _check_text(text, field)
        if self.extra.lora and not self.extra.lora[0]:
            raise _bad("lora_name", "the adapter has no name, so that any other one is equal to it", "name the adapter")
        _check_text(self.extra.salt, "salt")
        _check_items(self.extra.multimodal)
        for position, digest in enumerate(self.extra.prompt_embeds):
            if len(digest) != len(_NO_EMBEDS):
                raise _bad(
                    f"prompt_embeds[{position}]",
                    f"the digest has {len(digest)} bytes, a SHA-256 has {len(_NO_EMBEDS)}",
                    "compute the digests with kvplane.base.hashing.digest_embeds",
                )

    def check_prompt(self, num_tokens: int) -> None:
        """Check that the keys prove what a new request of this many tokens consists of.

        Raises:
            InvalidArgument: a multimodal item is not within these tokens; or there is not one digest of embeddings for
                each block with a token of the prompt. The digest of no bytes stands for no embeddings: it is right for
                blocks behind the prompt alone, of a request that continues.
        """
        for position, item in enumerate(self.extra.multimodal):
            if _end(item) > num_tokens:
                raise _bad(
                    f"multimodal[{position}].offset",
                    f"the item ends at token {_end(item)}, the request has {num_tokens}",
                    "give the position of the item's placeholder tokens",
                )
        digests, num_blocks = self.extra.prompt_embeds, -(-num_tokens // self.block_size)
        if not digests:
            return
        known = len(digests)
        while known and digests[known - 1] == _NO_EMBEDS:
            known -= 1
        if len(digests) != num_blocks or not known or _NO_EMBEDS in digests[:known]:
            raise _bad(
                "prompt_embeds",
                f"there are {known} digests of embeddings, {len(digests) - known} of no bytes, and {num_blocks} blocks",
                f"give one per {self.block_size} tokens, by digest_embeds; `continued` adds those behind the prompt",
            )

    @property
    def keyed_until(self) -> int:
        """The index of the first token such that this and all later tokens have no extra keys."""
        if self.extra.lora or self.extra.prompt_embeds:
            return sys.maxsize
        return _end(self.extra.multimodal[-1]) if self.extra.multimodal else int(bool(self.extra.salt))

    def of_block(self, start: int, end: int) -> BlockKeys:
        """Return the extra keys of the block that covers tokens `[start, end)`; None if the block has no extra keys.

        The LoRA adapter and the embeddings are keys of every block. A multimodal item is a key of each block that it
        overlaps, with its offset relative to the block. The salt is a key of the first block; it changes all later
        hashes too, since each hash depends on the previous block's hash.
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
        """Return the digest of a block's embeddings; for a block after the prompt the digest of no bytes, as
        in vLLM.
        """
        digests = self.extra.prompt_embeds
        return digests[block] if block < len(digests) else _NO_EMBEDS


def untagged(keys: BlockKeys) -> tuple[str | int | bytes | Key, ...] | None:
    """Return the extra keys of a block as vLLM before 0.33 hashed them: the values alone, of an adapter its name."""
    return keys and tuple(key[1:] if key[0] == "mm" else key[1] for key in keys)


def digest_embeds(embeds: bytes, token_bytes: int, block_size: int, lookahead: int = 0) -> tuple[bytes, ...]:
    """Compute `ExtraKeys.prompt_embeds`: one SHA-256 per hash block; the last block may be incomplete.

    Args:
        embeds: the embeddings of all prompt tokens, one row per token, row-major.
        token_bytes: bytes of one token's row.
        block_size: tokens of a hash block.
        lookahead: number of tokens after a block that the block's digest covers too, as in `HashScheme`.
    """
    view = memoryview(embeds)
    reach = (block_size + lookahead) * token_bytes
    starts = range(0, len(embeds), block_size * token_bytes)
    return tuple(hashlib.sha256(view[start : start + reach]).digest() for start in starts)


def continued(keys: ExtraKeys, num_tokens: int, block_size: int) -> ExtraKeys:
    """Return the extra keys of a request that has grown to this many tokens, with which it can be sent again as a new
    one: the digest of no bytes for each hash block behind its prompt.
    """
    digests = keys.prompt_embeds
    if not digests:
        return keys
    return replace(keys, prompt_embeds=(*digests, *[_NO_EMBEDS] * (-(-num_tokens // block_size) - len(digests))))


def revived(keys: ExtraKeys, num_began: int, num_tokens: int, block_size: int) -> ExtraKeys:
    """Return the extra keys of a request that was sent with `num_began` tokens and has `num_tokens` now.

    Keys that proved nothing then prove nothing now, though they may fit the tokens that came since.
    """
    try:
        RequestKeys(keys, block_size).check_prompt(num_began)
    except InvalidArgument:
        return replace(keys, prompt_embeds=(_NO_EMBEDS,))  # safe: the digest of no bytes alone is never accepted
    return continued(keys, num_tokens, block_size)


def _end(item: Multimodal) -> int:
    return item.offset + item.length


def _fresh(text: str) -> str:
    """Return an equal string that is a new object.

    Pickle writes a second occurrence of the same *object* as a reference, but a second equal object in full. With a new
    object for each value (the tags are constants) the bytes depend on the content only. These bytes then equal the
    bytes in vLLM, whose decoder also creates a new object for each value.
    """
    return text.encode().decode()


def _check_text(text: str, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _bad(field, f"{text!r} cannot be encoded as UTF-8", "send text without lone surrogates") from None


def _check_items(items: tuple[Multimodal, ...]) -> None:
    end = 0
    for position, item in enumerate(items):
        field = f"multimodal[{position}]"
        _check_text(item.identifier, f"{field}.identifier")
        if not item.identifier:
            raise _bad(f"{field}.identifier", "it is empty, so that any other item is equal to it", "name the content")
        if item.length < 1:
            raise _bad(f"{field}.length", f"a length of {item.length} tokens is below 1", "leave empty items out")
        if item.offset < end:
            problem = f"the item starts at token {item.offset}, before the end of the previous item at token {end}"
            raise _bad(f"{field}.offset", problem, "list items by offset, without overlap")
        end = _end(item)


def _bad(field: str, problem: str, remedy: str = "") -> InvalidArgument:
    return InvalidArgument(problem, field=f"extra_keys.{field}", remedy=remedy)
