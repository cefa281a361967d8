"""Reads the header of a recording (`kvtrace/1`, `kvstep/1`) into a ReplicaSpec; refuses what it does not know."""

from __future__ import annotations

import gzip
import json
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

Record = dict[str, Any]


class BadRecording(Exception):
    """The file is not a recording that this program can replay; the text says where and why."""


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
_GROUP_FIELDS = {
    "manager", "block_size", "spec_block_size", "num_layers", "is_eagle_group", "use_eagle", "sliding_window",
    "attention_chunk_size", "mamba_cache_mode", "num_speculative_blocks", "max_admission_blocks_per_request",
    "records_new_block_ids", "spec",
}  # fmt: skip
_COMMON_FIELDS = {
    "format", "vllm", "name", "kind", "seed", "hash_algo", "none_hash_seed", "none_hash", "num_blocks",
    "retention_interval", "cache_hit_alignment_tokens", "coordinator", "partial_hash_hits", "needs_kv_cache_zeroing",
    "attention_groups", "groups",
}  # fmt: skip
_TRACE_FIELDS = _COMMON_FIELDS | {"manager_args", "eagle_group_ids", "drop_eagle_group_ids"}
_STEP_FIELDS = _COMMON_FIELDS | {
    "pressure", "scheduler_block_size", "hash_block_size", "cache_block_size", "enable_caching", "mamba_cache_mode",
    "max_in_flight_tokens", "events", "stop_token", "snapshot_every", "scheduler", "spec_decode", "needs_mamba_split",
    "mamba_partial_cache_hit",
}  # fmt: skip
_MANAGER_ARGS = {
    "max_model_len", "scheduler_block_size", "hash_block_size", "max_in_flight_tokens", "enable_caching", "use_eagle",
    "dcp_world_size", "watermark", "num_prefill_lookahead", "log_stats", "enable_kv_cache_events",
    "num_hash_lookahead_tokens",
}  # fmt: skip


def read_records(path: Path) -> Iterator[Record]:
    """The lines of a recording; a truncated or broken file raises BadRecording naming the line."""
    read = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)
                read += 1
    except (EOFError, OSError, ValueError) as error:
        raise BadRecording(f"{path.name}: line {read + 1}: {error}") from error


def trace_spec(header: Record) -> ReplicaSpec:
    """The replica of an operation trace."""
    _expect(header, "kvtrace/1", _TRACE_FIELDS)
    args = header["manager_args"]
    _known(args, _MANAGER_ARGS, "manager_args")
    if args["dcp_world_size"] < 1 or not args["log_stats"]:
        raise BadRecording(f"manager_args: {args} is not a combination that this program knows")
    return ReplicaSpec(
        groups=_groups(header),
        num_blocks=header["num_blocks"],
        max_model_len=args["max_model_len"],
        hash_block_size=args["hash_block_size"],
        scheduler_block_size=args["scheduler_block_size"],
        max_in_flight_tokens=args["max_in_flight_tokens"],
        hash_algorithm=_algorithm(header),
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


def step_spec(header: Record) -> ReplicaSpec:
    """The replica of a step trace."""
    _expect(header, "kvstep/1", _STEP_FIELDS)
    scheduler = header["scheduler"]
    threshold = scheduler["long_prefill_token_threshold"]
    limits = [scheduler["max_num_scheduled_tokens"]] + ([threshold] if threshold else [])
    align = AlignSpec(header["cache_block_size"], min(limits), header["mamba_partial_cache_hit"])
    return ReplicaSpec(
        groups=_groups(header),
        num_blocks=header["num_blocks"],
        max_model_len=scheduler["max_model_len"],
        hash_block_size=header["hash_block_size"],
        scheduler_block_size=header["scheduler_block_size"],
        max_in_flight_tokens=header["max_in_flight_tokens"],
        hash_algorithm=_algorithm(header),
        hash_seed=header["none_hash_seed"],
        enable_caching=header["enable_caching"],
        retention_interval=_retention(header),
        partial_hits=header["partial_hash_hits"],
        watermark_blocks=scheduler["watermark_blocks"],
        commit=CommitRule.REFERENCE,
        align=align if header["needs_mamba_split"] else AlignSpec(),
        events=header["events"],
    )


def _groups(header: Record) -> tuple[GroupSpec, ...]:
    classes = {gid: n for n, one in enumerate(header["attention_groups"]) for gid in one["group_ids"]}
    return tuple(_group(group, classes.get(number, 0)) for number, group in enumerate(header["groups"]))


def _group(group: Record, lookup_class: int) -> GroupSpec:
    _known(group, _GROUP_FIELDS, "groups")
    if group["manager"] not in _MANAGERS:
        raise BadRecording(f"groups: manager {group['manager']!r} is unknown")
    kind = _MLA.get(group["spec"]["type"], _MANAGERS[group["manager"]])
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
    )


def _window(kind: GroupKind, group: Record) -> int:
    """Full attention may name a window too (hybrid allocation off): a property of its kernel, not of its blocks."""
    if kind is GroupKind.R_SWA:
        return int(group["spec"]["rswa_window"])
    windowed = kind in (GroupKind.SLIDING_WINDOW, GroupKind.SLIDING_WINDOW_MLA)
    return int(group["sliding_window"]) if windowed else 0


def _algorithm(header: Record) -> HashAlgorithm:
    try:
        return HashAlgorithm(header["hash_algo"])
    except ValueError:
        raise BadRecording(f"hash_algo {header['hash_algo']!r} is unknown") from None


def _retention(header: Record) -> int:
    interval = header["retention_interval"]
    return DENSE_RETENTION if interval is None else int(interval)


def _expect(header: Record, form: str, fields: set[str]) -> None:
    if header.get("format") != form:
        raise BadRecording(f"format {header.get('format')!r}: this program replays {form}")
    if header.get("vllm") != "0.33.0":
        raise BadRecording(f"recorded from vLLM {header.get('vllm')!r}: this program replays 0.33.0")
    _known(header, fields, "header")


def _known(record: Record, fields: set[str], where: str) -> None:
    unknown = sorted(set(record) - fields)
    if unknown:
        raise BadRecording(f"{where}: unknown field {unknown[0]!r}")
