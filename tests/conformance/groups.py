"""Compare the planner with the golden grouping tables, value by value.

    python -m tests.conformance.groups tests/conformance/golden_groups.json

A line per row; of a row that differs the first divergence with its context. Exit status 1 when a row differs,
2 when the file is not what FORMAT.md (part 2) describes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import GroupKind
from kvplane.base.layers import Layer
from kvplane_plan.planner import (
    CacheGroup,
    CachePlan,
    Layout,
    PlanOptions,
    PlanWarning,
    WarningCode,
    Worker,
    plan_cache,
)
from tests.conformance.reference_specs import BadGoldenFile, read_spec, write_spec

REFERENCE_VERSION = "0.33.0"
TOP_FIELDS = {"vllm_version", "source", "defaults", "cases"}
CASE_FIELDS = {"name", "layout", "note", "config", "memory_bytes", "input", "expected"}
INPUT_FIELDS = {"specs", "layers", "workers"}
# Setting of the reference -> our option. The rest of a case's settings are read one by one below.
OPTIONS = {
    "max_model_len": "max_model_len",
    "max_num_batched_tokens": "max_batched_tokens",
    "max_concurrent_batches": "max_concurrent_batches",
    "retention_interval": "retention_interval",
    "enable_prefix_caching": "prefix_caching",
    "eagle_drop": "drops_last_block",
}
# The layers already contain these: their block size, and how states are cached.
IMPLIED = {"block_size", "mamba_cache_mode", "memory_bytes"}
# The format has no field for the length of an encoder input; the one model with an encoder is Whisper.
WHISPER_ENCODER_TOKENS = 1500
# Log lines of the reference without figures, by CRC-32: their wording is compared, but not repeated here.
LOG_LINES = {0x18462CB6: WarningCode.HYBRID_OFF, 0x518AF9CA: WarningCode.FULL_ALLOCATION}
ABSENT = "(absent)"
PADDING_LINE = re.compile(r"Add (\d+) padding layers, may waste at most (\d+\.\d\d)% KV cache memory")


@dataclass(frozen=True, slots=True)
class Difference:
    """The first value of a row that differs."""

    path: str
    expected: object
    actual: object

    def __str__(self) -> str:
        return f"{self.path}: expected {_short(self.expected)}, planned {_short(self.actual)}"


def read_cases(path: Path) -> list[dict[str, Any]]:
    """The rows of a golden file, each with the file's defaults under its settings.

    Raises:
        BadGoldenFile: not JSON (truncated, say), another version, an unknown field.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise BadGoldenFile(f"{path.name}: truncated or no JSON, at {error.pos}: {error.msg}") from error
    _expect_fields(data, TOP_FIELDS, "file")
    if data["vllm_version"] != REFERENCE_VERSION:
        raise BadGoldenFile(f"vllm_version: {data['vllm_version']!r}, this reads {REFERENCE_VERSION}")
    for index, case in enumerate(data["cases"]):
        _expect_fields(case, CASE_FIELDS, f"cases[{index}]")
        _expect_fields(case["input"], INPUT_FIELDS, f"cases[{index}].input")
        case["config"] = {**data["defaults"], **case["config"]}
    cases: list[dict[str, Any]] = data["cases"]
    return cases


def plan_case(case: Mapping[str, Any]) -> CachePlan:
    """Our plan for a row."""
    layers = _layers(case["input"])
    stages = case["input"]["workers"] or [list(layers)]
    for i, stage in enumerate(stages):
        for name in (name for name in stage if name not in layers):
            raise BadGoldenFile(f"workers[{i}]: no layer {name!r}")
    workers = [Worker(tuple(layers[name] for name in stage), case["memory_bytes"]) for stage in stages]
    return plan_cache(workers, _options(case))


def planned_row(plan: CachePlan) -> dict[str, Any]:
    """A plan in the form of a row's `expected`."""
    row = {
        "groups": [_group_row(plan, group) for group in plan.groups],
        "bytes_per_block": plan.bytes_per_block,
        "padding_bytes_per_block_by_group": list(plan.padding_bytes),
        "num_blocks": [plan.num_blocks] * len(plan.workers),
        "tensors": [_tensor_rows(plan, index) for index in range(len(plan.workers))],
        "scheduler_block_size": plan.scheduler_block_size,
        "hash_block_size": plan.hash_block_size,
        "max_concurrency": round(plan.max_concurrency, 6),
        "capacity_tokens": plan.capacity_tokens,
        "needs_kv_cache_zeroing": plan.needs_zeroing,
        "warnings": [_warning_row(one) for one in plan.warnings if one.code is not WarningCode.COARSE_HITS],
    }
    if plan.options.prefix_caching:
        row["cache_hit_alignment_tokens"] = plan.hit_alignment
    return row


def compare(case: Mapping[str, Any]) -> Difference | None:
    """The first difference between a row and our plan for it."""
    try:
        actual = planned_row(plan_case(case))
    except InvalidArgument as error:
        return Difference("plan", "a plan", f"refused: {error}")
    return first_difference(case["expected"], actual)


def first_difference(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> Difference | None:
    """The first difference between a row's `expected` and a `planned_row`."""
    warnings = [_read_warning(line) for line in expected["warnings"]]
    return next(_differences({**expected, "warnings": warnings}, actual, ""), None)


def main(arguments: list[str] | None = None) -> int:
    """Compare every row of a file; see the module's text for the exit status."""
    parser = argparse.ArgumentParser(prog="tests.conformance.groups", description=main.__doc__)
    parser.add_argument("file", type=Path)
    path = parser.parse_args(arguments).file
    try:
        cases = read_cases(path)
        differing = [case["name"] for case in cases if not _report(case)]
    except (BadGoldenFile, OSError) as error:
        print(f"cannot compare: {error}", file=sys.stderr)
        return 2
    print(f"{len(cases) - len(differing)} of {len(cases)} rows identical")
    return 1 if differing else 0


def _report(case: Mapping[str, Any]) -> bool:
    difference = compare(case)
    title = f"{case['name']} [{case['layout']}]"
    if difference is None:
        print(f"same     {title}: {_count(case['expected'])} values")
        return True
    print(f"DIFFERS  {title}: {difference}\n         note: {case['note'] or '-'}; settings: {case['config']}")
    return False


def _layers(given: Mapping[str, Any]) -> dict[str, Layer]:
    specs = [read_spec(spec, f"specs[{i}]") for i, spec in enumerate(given["specs"])]
    drafts = [spec.get("is_draft", False) for spec in given["specs"]]
    for name in (name for name, i in given["layers"].items() if i not in range(len(specs))):
        raise BadGoldenFile(f"layers.{name}: no spec {given['layers'][name]}")
    return {name: Layer(name, specs[i], drafts[i]) for name, i in given["layers"].items()}


def _options(case: Mapping[str, Any]) -> PlanOptions:
    if case["layout"] not in [layout.value for layout in Layout]:
        raise BadGoldenFile(f"layout: {case['layout']!r} is unknown")
    config = dict(case["config"])
    for name in config.keys() - OPTIONS.keys() - IMPLIED - {"disable_hma"}:
        raise BadGoldenFile(f"config.{name}: unknown setting")
    values: dict[str, Any] = {OPTIONS[name]: value for name, value in config.items() if name in OPTIONS}
    return PlanOptions(
        **values,
        layout=Layout(case["layout"]),
        hybrid=not config.get("disable_hma", False),
        max_encoder_tokens=WHISPER_ENCODER_TOKENS,
    )


def _group_row(plan: CachePlan, group: CacheGroup) -> dict[str, Any]:
    return {
        "layers": list(group.layer_names),
        "num_layers": len(group.layer_names),
        "is_eagle_group": group.is_draft,
        "kind": group.kind.value,
        "block_size": group.block_size,
        "page_size_bytes": group.spec.page_bytes if group.one_format else group.bytes_per_block,
        "bytes_per_block": group.bytes_per_block,
        "spec": _merged_spec_row(group) if group.one_format else _uniform_spec_row(group),
    }


def _merged_spec_row(group: CacheGroup) -> dict[str, Any]:
    # The reference keeps its first layer's draft mark, except where it builds a new full-attention format.
    keeps_mark = group.kind not in (GroupKind.FULL_ATTENTION, GroupKind.MLA)
    draft = {"is_draft": True} if keeps_mark and group.is_draft else {}
    return {**write_spec(group.spec), **draft}


def _uniform_spec_row(group: CacheGroup) -> dict[str, Any]:
    return {
        "type": "UniformTypeKVCacheSpecs",
        "block_size": group.block_size,
        "page_size_bytes": group.bytes_per_block,
        "layer_block_sizes": sorted({spec.block_size for spec in group.specs}),
        "layer_page_sizes": sorted({spec.page_bytes for spec in group.specs}),
    }


def _tensor_rows(plan: CachePlan, worker: int) -> list[dict[str, Any]]:
    return [
        {
            "size": plan.workers[worker].size_bytes,
            "offset": tensor.offset_bytes,
            "layer_stride": tensor.layer_stride_bytes,
            "block_stride": tensor.block_stride_bytes,
            "num_layers": len(tensor.layer_names),
            "first_layer": tensor.layer_names[0],
        }
        for tensor in plan.workers[worker].tensors
    ]


def _warning_row(warning: PlanWarning) -> list[object]:
    if warning.code is not WarningCode.PADDING_LAYERS:
        return [warning.code.value]
    unused, layers = warning.figures
    return [warning.code.value, unused, f"{100 * unused / layers:.2f}"]


def _read_warning(line: str) -> list[object]:
    if match := PADDING_LINE.fullmatch(line):
        return [WarningCode.PADDING_LAYERS.value, int(match[1]), match[2]]
    code = LOG_LINES.get(zlib.crc32(line.encode()))
    return [code.value if code else line]


def _differences(expected: object, actual: object, path: str) -> Iterator[Difference]:
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key in sorted(expected.keys() | actual.keys()):
            theirs, ours = expected.get(key, ABSENT), actual.get(key, ABSENT)
            yield from _differences(theirs, ours, f"{path}.{key}" if path else key)
    elif isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        for index, (theirs, ours) in enumerate(zip(expected, actual, strict=True)):
            yield from _differences(theirs, ours, f"{path}[{index}]")
    elif type(expected) is not type(actual) or expected != actual:
        yield Difference(path, expected, actual)


def _expect_fields(data: Any, fields: set[str], path: str) -> None:
    if not isinstance(data, dict) or data.keys() != fields:
        found = sorted(data) if isinstance(data, dict) else type(data).__name__
        raise BadGoldenFile(f"{path}: has {found}, expected {sorted(fields)}")


def _count(value: object) -> int:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 1 if items is None else sum(_count(item) for item in items)


def _short(value: object, most: int = 160) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


if __name__ == "__main__":
    sys.exit(main())
