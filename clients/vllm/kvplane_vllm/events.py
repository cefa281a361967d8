"""Conversion of the allocator's cache events to vLLM's KV events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from vllm.distributed.kv_events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.request import Request

from kvplane.base.step import CacheEvent, EventKind
from kvplane_vllm.known import Known


def of_hit(real: Any, request: Request, blocks: Sequence[Sequence[int]]) -> list[KVCacheEvent]:
    """Return what vLLM announces of a hit to a client that asks for it (`kv_cache_report_mode`: "full"). `real` is the
    coordinator that vLLM built; it reads only how many blocks there are in each group.
    """
    real.emit_cached_block_events(request, blocks)
    return list(real.block_pool.take_events())


def convert_all(found: Iterable[CacheEvent], by_slot: Mapping[int, Known], lookahead: int) -> Iterator[KVCacheEvent]:
    """Convert events whose requests are in these slots, see `convert`."""
    for event in found:
        known = by_slot.get(event.slot)
        converted = convert(event, known.request if known else None, lookahead)
        if converted is not None:
            yield converted


def convert(event: CacheEvent, request: Request | None, lookahead: int) -> KVCacheEvent | None:
    """Return the event in the form that vLLM's own KV cache manager emits; None for keys of an unknown request.

    `request` is the request in the event's slot; a BlockStored event contains its tokens and adapter. `lookahead` is
    the number of tokens after a block that the block's hash also covers.
    """
    if event.kind is EventKind.CLEARED:
        return AllBlocksCleared()
    hashes: list[Any] = [maybe_convert_block_hash(digest) for digest in event.hashes]  # type: ignore[arg-type]
    if event.kind is EventKind.REMOVED:
        return BlockRemoved(block_hashes=hashes, medium=MEDIUM_GPU, group_idx=event.group)
    if request is None:
        return None
    size, tokens = event.block_size, request.all_token_ids
    extra = [generate_block_hash_extra_keys(request, start, start + size, 0)[0] for start in event.block_starts]
    lora = request.lora_request
    more: dict[str, Any] = {}  # not in vLLM 0.32
    if lookahead:
        ends = [start + size for start in event.block_starts]
        more["lookahead_token_ids"] = [list(tokens[end : end + lookahead]) for end in ends]
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=maybe_convert_block_hash(event.parent) if event.parent else None,  # type: ignore[arg-type]
        token_ids=tokens[event.start : event.end],
        block_size=size,
        lora_id=lora.adapter_id if lora else None,
        medium=MEDIUM_GPU,
        lora_name=lora.name if lora else None,
        extra_keys=to_event_extra_keys(extra),
        group_idx=event.group,
        session_id=request.session_id,
        **more,
    )
