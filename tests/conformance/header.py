"""Reads the header of a recording (`kvtrace/1`, `kvstep/1`) into a ReplicaSpec; refuses unknown fields."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvplane.base.groups import (
    DENSE_RETENTION,
    AlignSpec,
    CommitRule,
    GroupKind,
    GroupSpec,
    HashAlgorithm,
    MambaMode,
    ReplicaSpec,
)
from kvplane.base.hashing import HashScheme
from tests.conformance.forms import (
    ANYTHING,
    COUNT,
    FLAG,
    NUMBER,
    POSITIVE,
    TEXT,
    BadRecording,
    Form,
    Record,
    list_of,
    maybe,
    one_of,
)

_MANAGERS = {
    "SlidingWindowManager": GroupKind.SLIDING_WINDOW,
    "ChunkedLocalAttentionManager": GroupKind.CHUNKED_LOCAL,
    "MambaManager": GroupKind.MAMBA,
    "FullAttentionManager": GroupKind.FULL_ATTENTION,
    "RSWAManager": GroupKind.R_SWA,
    "CircularBufferManager": GroupKind.RING,
    "CrossAttentionManager": GroupKind.CROSS,
}
_MLA = {"MLAAttentionSpec": GroupKind.MLA, "SlidingWindowMLASpec": GroupKind.SLIDING_WINDOW_MLA}
_DTYPE = one_of("bfloat16", "float16", "float32", "uint8")
_SPEC = Form(
    {"type": one_of(
        "FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "SlidingWindowMLASpec", "MambaSpec",
        "ChunkedLocalAttentionSpec", "RSWASpec", "CircularBufferSpec", "CrossAttentionSpec",
    ), "block_size": POSITIVE},
    {
        "num_kv_heads": POSITIVE, "head_size": POSITIVE, "head_size_v": POSITIVE, "dtype": _DTYPE,
        "page_size_bytes": POSITIVE, "page_size_padded": POSITIVE, "sliding_window": POSITIVE,
        "attention_chunk_size": POSITIVE, "rswa_window": POSITIVE, "shapes": list_of(list_of(POSITIVE)),
        "dtypes": list_of(_DTYPE), "mamba_cache_mode": one_of("align", "none"), "num_speculative_blocks": COUNT,
        "num_prefill_checkpoint_blocks": COUNT, "prefill_checkpoint_alignment": POSITIVE,
        "tokens_per_state": POSITIVE, "state_content_bytes": POSITIVE, "cache_dtype_str": TEXT, "alignment": POSITIVE,
        "model_version": TEXT, "max_tp_shards": POSITIVE, "extra_retained_tokens": COUNT, "dcp_sharded": FLAG,
    },
)  # fmt: skip
_GROUP = Form(
    {
        "manager": one_of(*_MANAGERS), "block_size": POSITIVE, "spec_block_size": POSITIVE, "num_layers": POSITIVE,
        "is_eagle_group": FLAG, "sliding_window": maybe(POSITIVE), "mamba_cache_mode": one_of(None, "align", "none"),
        "num_speculative_blocks": maybe(COUNT), "max_admission_blocks_per_request": maybe(POSITIVE),
        "records_new_block_ids": FLAG, "spec": ANYTHING,
    },
    {"use_eagle": FLAG, "attention_chunk_size": maybe(POSITIVE)},
)  # fmt: skip
_LOOKUP_CLASS = Form({"group_ids": list_of(COUNT), "manager": one_of(*_MANAGERS), "use_eagle": FLAG})
_COMMON = {
    "vllm": one_of("0.33.0"), "name": TEXT, "kind": TEXT, "seed": COUNT,
    "hash_algo": one_of("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"), "none_hash_seed": TEXT, "none_hash": TEXT,
    "num_blocks": POSITIVE, "retention_interval": maybe(COUNT), "cache_hit_alignment_tokens": POSITIVE,
    "coordinator": one_of(
        "KVCacheCoordinatorNoPrefixCache", "UnitaryKVCacheCoordinator", "HybridKVCacheCoordinator"
    ),
    "partial_hash_hits": FLAG, "needs_kv_cache_zeroing": FLAG, "attention_groups": list_of(ANYTHING),
    "groups": list_of(ANYTHING),
}  # fmt: skip
_TRACE = Form(
    _COMMON
    | {"format": one_of("kvtrace/1"), "manager_args": ANYTHING}
    | {"eagle_group_ids": list_of(COUNT), "drop_eagle_group_ids": list_of(COUNT)}
)
_MANAGER_ARGS = Form(
    {
        "max_model_len": POSITIVE, "scheduler_block_size": POSITIVE, "hash_block_size": POSITIVE,
        "max_in_flight_tokens": POSITIVE, "enable_caching": FLAG, "use_eagle": FLAG, "dcp_world_size": POSITIVE,
        "watermark": NUMBER, "num_prefill_lookahead": COUNT, "log_stats": one_of(True), "enable_kv_cache_events": FLAG,
    },
    {"num_hash_lookahead_tokens": COUNT, "enable_mamba_shared_prefix_checkpoint": FLAG},
)  # fmt: skip
_STEP = Form(
    _COMMON
    | {
        "format": one_of("kvstep/1"), "pressure": TEXT, "scheduler_block_size": POSITIVE, "hash_block_size": POSITIVE,
        "cache_block_size": POSITIVE, "enable_caching": FLAG, "mamba_cache_mode": one_of("align", "none"),
        "max_in_flight_tokens": POSITIVE, "events": FLAG, "stop_token": COUNT, "snapshot_every": POSITIVE,
        "scheduler": ANYTHING, "spec_decode": ANYTHING, "needs_mamba_split": FLAG, "mamba_partial_cache_hit": FLAG,
    }
)  # fmt: skip
_SCHEDULER = Form(
    {
        "policy": one_of("fcfs", "priority"), "max_num_running_reqs": POSITIVE, "max_num_scheduled_tokens": POSITIVE,
        "max_num_batched_tokens": POSITIVE, "long_prefill_token_threshold": COUNT,
        "long_prefill_token_threshold_adaptive": FLAG, "max_model_len": POSITIVE, "enable_chunked_prefill": FLAG,
        "async_scheduling": FLAG, "watermark": NUMBER, "watermark_blocks": COUNT, "reserve_full_isl": FLAG,
        "v2_model_runner": FLAG,
    }
)  # fmt: skip
_SPEC_DECODE = Form({"k": POSITIVE, "lookahead": COUNT, "draft_slots": COUNT})


def read_records(path: Path) -> Iterator[Record]:
    """The lines of a recording; a truncated or broken file raises BadRecording naming the line."""
    read = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise BadRecording(f"line {read + 1}: no record")
                yield record
                read += 1
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise BadRecording(f"line {read + 1}: {error}") from error


def trace_spec(header: Record) -> ReplicaSpec:
    """The replica of an operation trace."""
    _expect(header, "kvtrace/1", _TRACE)
    args = header["manager_args"]
    _MANAGER_ARGS.check(args, "manager_args")
    spec = ReplicaSpec(
        groups=_groups(header),
        num_blocks=header["num_blocks"],
        max_model_len=args["max_model_len"],
        hash_block_size=args["hash_block_size"],
        scheduler_block_size=args["scheduler_block_size"],
        max_in_flight_tokens=args["max_in_flight_tokens"],
        hash_algorithm=HashAlgorithm(header["hash_algo"]),
        hash_seed=header["none_hash_seed"],
        enable_caching=args["enable_caching"],
        retention_interval=_retention(header),
        partial_hits=header["partial_hash_hits"],
        watermark_blocks=int(args["watermark"] * header["num_blocks"]),
        commit=CommitRule.REFERENCE,
        hash_lookahead_tokens=args.get("num_hash_lookahead_tokens", 0),
        prefill_lookahead=args["num_prefill_lookahead"],
        events=args["enable_kv_cache_events"],
    )
    return _checked(header, spec)


def step_spec(header: Record) -> ReplicaSpec:
    """The replica of a step trace."""
    _expect(header, "kvstep/1", _STEP)
    scheduler = header["scheduler"]
    _SCHEDULER.check(scheduler, "scheduler")
    if header["spec_decode"] is not None:
        _SPEC_DECODE.check(header["spec_decode"], "spec_decode")
    threshold = scheduler["long_prefill_token_threshold"]
    limits = [scheduler["max_num_scheduled_tokens"]] + ([threshold] if threshold else [])
    align = AlignSpec(header["cache_block_size"], min(limits), header["mamba_partial_cache_hit"])
    spec = ReplicaSpec(
        groups=_groups(header),
        num_blocks=header["num_blocks"],
        max_model_len=scheduler["max_model_len"],
        hash_block_size=header["hash_block_size"],
        scheduler_block_size=header["scheduler_block_size"],
        max_in_flight_tokens=header["max_in_flight_tokens"],
        hash_algorithm=HashAlgorithm(header["hash_algo"]),
        hash_seed=header["none_hash_seed"],
        enable_caching=header["enable_caching"],
        retention_interval=_retention(header),
        partial_hits=header["partial_hash_hits"],
        watermark_blocks=scheduler["watermark_blocks"],
        commit=CommitRule.REFERENCE,
        align=align if header["needs_mamba_split"] else AlignSpec(),
        events=header["events"],
    )
    return _checked(header, spec)


def _groups(header: Record) -> tuple[GroupSpec, ...]:
    for number, one in enumerate(header["attention_groups"]):
        _LOOKUP_CLASS.check(one, f"attention_groups[{number}]")
    for number, group in enumerate(header["groups"]):
        _GROUP.check(group, f"groups[{number}]")
        _SPEC.check(group["spec"], f"groups[{number}].spec")
    classes = {gid: n for n, one in enumerate(header["attention_groups"]) for gid in one["group_ids"]}
    return tuple(_group(header, group, classes.get(number, 0)) for number, group in enumerate(header["groups"]))


def _group(header: Record, group: Record, lookup_class: int) -> GroupSpec:
    kind = _MLA.get(group["spec"]["type"], _MANAGERS[group["manager"]])
    has_checkpoints = group["mamba_cache_mode"] == "align" and group["spec"].get("num_prefill_checkpoint_blocks", 0) > 0
    return GroupSpec(
        kind=kind,
        block_size=group["block_size"],
        window=_window(kind, group),
        chunk=group.get("attention_chunk_size") or 0,
        mamba_mode=MambaMode(group["mamba_cache_mode"] or "none"),
        speculative_blocks=group["num_speculative_blocks"] or 0,
        is_draft=group["is_eagle_group"],
        drops_last_block=group.get("use_eagle", False),
        admission_cap_blocks=group["max_admission_blocks_per_request"] or 0,
        zero_new_blocks=group["records_new_block_ids"],
        lookup_class=lookup_class,
        extra_retained_tokens=group["spec"].get("extra_retained_tokens", 0),
        checkpoint_alignment=group["spec"].get("prefill_checkpoint_alignment", 0) if has_checkpoints else 0,
        checkpoints_single_group_hits=group["mamba_cache_mode"] == "align" and _checkpoints_single_group_hits(header),
    )


def _checkpoints_single_group_hits(header: Record) -> bool:
    """As KVCacheManager decides."""
    args = header.get("manager_args", {})
    asked = args.get("enable_mamba_shared_prefix_checkpoint", False) and args["num_prefill_lookahead"] <= 1
    return asked and bool(header["eagle_group_ids"]) and bool(header["partial_hash_hits"])


def _window(kind: GroupKind, group: Record) -> int:
    """Full attention may name a window too (hybrid allocation off): a property of its kernel, not of its blocks."""
    if kind is GroupKind.R_SWA:
        return int(group["spec"]["rswa_window"])
    windowed = kind in (GroupKind.SLIDING_WINDOW, GroupKind.SLIDING_WINDOW_MLA)
    return int(group["sliding_window"]) if windowed else 0


def _retention(header: Record) -> int:
    interval = header["retention_interval"]
    return DENSE_RETENTION if interval is None else int(interval)


def _expect(header: Record, form: str, fields: Form) -> None:
    """Check the version first: a file of another version may have other fields."""
    if header.get("format") != form:
        raise BadRecording(f"format {header.get('format')!r}: this program replays {form}")
    if header.get("vllm") != "0.33.0":
        raise BadRecording(f"recorded from vLLM {header.get('vllm')!r}: this program replays 0.33.0")
    fields.check(header, "header")


# -- what follows from the rest --------------------------------------------------------------------------------------


def _checked(header: Record, spec: ReplicaSpec) -> ReplicaSpec:
    """Return the spec if the redundant fields of the header agree."""
    spec.validate()
    _follows("none_hash", header["none_hash"], HashScheme.of(spec).none_hash.hex())
    if any(group["records_new_block_ids"] for group in header["groups"]):
        _follows("needs_kv_cache_zeroing", header["needs_kv_cache_zeroing"], True)
    if spec.enable_caching:
        alignment = spec.hash_block_size if spec.partial_hits else spec.scheduler_block_size
        _follows("cache_hit_alignment_tokens", header["cache_hit_alignment_tokens"], alignment)
    return spec


def _follows(name: str, given: Any, follows: Any) -> None:
    if given != follows:
        raise BadRecording(f"header: {name} is {given!r}, the rest of the header says {follows!r}")
