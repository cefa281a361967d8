"""What this adapter needs of vLLM and no import shows: each name is looked for at the start, those missing are named.

A name that another version of vLLM does not have would end the engine later, in the middle of a step.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

from kvplane.base.errors import FailedPrecondition
from kvplane_vllm.plugin import SUPPORTED, is_one_of

PACKAGE = "vllm."
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
# By class: attributes of its objects.
NEEDED: dict[str, str] = {
    SCHEDULER: (
        "_enqueue_waiting_request _preempt_request connector get_request_counts hash_block_size kv_cache_manager "
        "kv_holding_waiting num_spec_tokens requests running"
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheManager": (
        "coordinator empty_kv_cache_blocks enable_caching enable_kv_cache_events log_stats metrics_collector "
        "prefix_cache_lookup_enabled prefix_cache_stats watermark_blocks"
    ),
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": (
        "emit_cached_block_events enable_partial_hash_hits single_type_managers"
    ),
    "vllm.v1.request:Request": (
        "_block_hasher all_token_ids block_hashes is_finished lora_request max_tokens mm_features "
        "num_computed_tokens num_in_flight_tokens num_output_placeholders num_prompt_tokens num_tokens "
        "pooling_params resumable shared_prefix_boundary skip_reading_prefix_cache spec_token_ids status"
    ),
    "vllm.distributed.kv_events:BlockStored": "extra_keys group_idx session_id",
    "vllm.v1.kv_cache_interface:KVCacheConfig": "kv_cache_groups num_blocks prefix_cache_retention_interval",
}
NEEDED_REMOTE = {
    SCHEDULER: (
        "_pause_state adaptive_long_prefill_threshold lora_config "
        "max_model_len max_num_active_reqs max_num_running_reqs "
        "max_num_scheduled_tokens num_lookahead_tokens num_sampled_tokens_per_step "
        "num_waiting_for_streaming_input policy prefix_replay_tokens scheduler_config "
        "scheduler_reserve_full_isl vllm_config waiting"
    ),
}


def missing(*, is_remote: bool) -> Iterator[str]:
    """Yield the names that the installed vLLM does not have."""
    for where, names in [*NEEDED.items(), *(NEEDED_REMOTE.items() if is_remote else ())]:
        module, _, name = where.partition(":")
        found: Any = getattr(import_module(module), name, None)
        has = _names_of(found) if found is not None else set()
        yield from (f"{name}.{one}" for one in names.split() if one not in has)


def _names_of(found: Any) -> set[str]:
    """Return the members of a class and of its bases, and what its methods set."""
    names = set(dir(found))
    for base in found.__mro__[:-1]:
        names |= set(vars(base).get("__annotations__", ()))
        if base.__module__.startswith(PACKAGE):
            names |= {one for method in vars(base).values() if inspect.isfunction(method) for one in _set_by(method)}
    return names


def _set_by(method: Any) -> set[str]:
    return {one.argval for one in dis.get_instructions(method) if one.opname == "STORE_ATTR"}


def check(*, is_remote: bool) -> None:
    """Raise FailedPrecondition for a version of vLLM that is not supported, or that lacks a name which this adapter
    needs; mode remote needs more.
    """
    installed = _check_version(SUPPORTED, "scheduler_cls")
    if found := list(missing(is_remote=is_remote)):
        raise FailedPrecondition(
            f"vLLM {installed} does not have {', '.join(found)}",
            field="scheduler_cls",
            remedy=f"install vLLM {SUPPORTED[-1]}, or leave scheduler_cls out (docs/vllm.md)",
        )


def check_for_tiers() -> None:
    """Raise FailedPrecondition for a version of vLLM with which kvplane's connector was not tested."""
    _check_version(SUPPORTED[-1:], "kv_transfer_config.kv_connector")


def _check_version(supported: Sequence[str], field: str) -> str:
    installed = version("vllm")
    if not is_one_of(installed, supported):
        remedy = f"install vLLM {SUPPORTED[-1]} (docs/vllm.md)"
        raise FailedPrecondition(f"vLLM {installed} is not supported", field=field, remedy=remedy)
    return installed
