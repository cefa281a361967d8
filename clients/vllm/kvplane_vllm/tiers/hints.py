"""vLLM's KvHints, which an orchestrator gives with a request: those of kvplane become what callers of a service ask.

    {"action_type": "kvplane.retain", "action_version": "1", "payload": {"ttl_s": 3600, "priority": 10}}
        the prompt of this request is evicted after all others for that time, from the request's end on
    {"action_type": "kvplane.prefetch", "action_version": "1", "payload": {"token_ids": [...], "cache_salt": ""}}
        another prompt will come: what only the disk has of it is read into host memory

Actions of other types are for others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvplane.base.errors import InvalidArgument
from kvplane.base.hashing import HashScheme, RequestHasher, pack_tokens
from kvplane.base.sections import Prefetch, Retain
from kvplane.base.session import CacheRequest
from kvplane.base.step import ExtraKeys, Part
from kvplane.base.values import MAX_PRIORITY, MAX_RETAINED_NS, NO_REQUEST
from kvplane_vllm.tiers.settings import RETAINED_PERCENT

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvplane.base.groups import ReplicaSpec

RETAIN, PREFETCH = "kvplane.retain", "kvplane.prefetch"
VERSION = "1"
OWNER = "kv_hints"  # of what is retained
MOST_ACTIONS = 16  # of one request
NS = 1_000_000_000


def _payloads(request: Request, action_type: str) -> Iterator[dict[str, Any]]:
    envelope = getattr(request, "kv_hints", None)  # not in vLLM 0.32
    for action in envelope.actions[:MOST_ACTIONS] if envelope is not None else ():
        if action.action_type != action_type:
            continue
        if action.action_version != VERSION:
            raise _wrong("action_version", f"{action_type} has version {VERSION} here")
        if not isinstance(action.payload, dict):
            raise _wrong("payload", "give an object")
        yield action.payload


def prefetches(request: Request, spec: ReplicaSpec) -> list[CacheRequest]:
    """Return the prompts that a new request says will come. Raises InvalidArgument for an action that is wrong, and
    FailedPrecondition if this process cannot compute block hashes.
    """
    found = []
    for payload in _payloads(request, PREFETCH):
        scheme, max_tokens = HashScheme.of(spec), spec.max_model_len
        tokens, salt = payload.get("token_ids"), payload.get("cache_salt", "")
        if not isinstance(tokens, list) or not scheme.block_size <= len(tokens) <= max_tokens:
            raise _wrong("payload.token_ids", f"give a list of {scheme.block_size} to {max_tokens} token ids")
        if not isinstance(salt, str):
            raise _wrong("payload.cache_salt", "give a text")
        packed = pack_tokens(tokens, "payload.token_ids")
        hashes = RequestHasher.of_prompt(scheme, ExtraKeys(salt=salt), len(tokens)).append(packed)
        rows = Prefetch([NO_REQUEST], [len(hashes) // scheme.digest.size], hashes)
        found.append(CacheRequest(0, rows=Part(prefetch=rows)))
    return found


def retained(request: Request, hash_block_size: int) -> list[CacheRequest]:
    """Return what is to be retained of a request that ends: the full blocks of its prompt. Raises InvalidArgument for
    an action that is wrong.
    """
    hashes, found = request.block_hashes[: request.num_prompt_tokens // hash_block_size], []
    for payload in _payloads(request, RETAIN):
        ttl_s, priority = payload.get("ttl_s"), payload.get("priority", 0)
        if not _is_number(ttl_s) or not 0 < ttl_s <= MAX_RETAINED_NS // NS:  # type: ignore[operator]
            raise _wrong("payload.ttl_s", f"give more than 0 and at most {MAX_RETAINED_NS // NS} seconds")
        if not _is_number(priority) or not 0 <= priority <= MAX_PRIORITY or int(priority) != priority:
            raise _wrong("payload.priority", f"give an integer from 0 to {MAX_PRIORITY}")
        if hashes:
            rows = Retain([len(hashes)], b"".join(hashes), owner=[OWNER], percent=[RETAINED_PERCENT])
            rows.priority, rows.until_ns, rows.now_ns = [int(priority)], [max(1, int(ttl_s * NS))], [0]  # type: ignore[operator]
            found.append(CacheRequest(0, rows=Part(retain=rows)))
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wrong(field: str, remedy: str) -> InvalidArgument:
    return InvalidArgument("a KvHint is not carried out", field=f"kv_hints.actions.{field}", remedy=remedy)
