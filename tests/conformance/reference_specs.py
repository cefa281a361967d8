"""The reference's layer formats, as golden_groups.json writes them, to ours and back.

The golden file leaves out fields at their default. Three of its fields say no more to a planner than "these
bytes are packed otherwise": they become one name, `state_format`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvplane.base.groups import MambaMode
from kvplane.base.layer_spec import AttentionSpec, DType, LayerSpec
from kvplane.base.layers import (
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

FORMAT_FIELDS = ("cache_dtype_str", "model_version", "is_index_group_leader")
# Fields of a golden spec that are no part of the format: compared or used elsewhere.
APART = ("type", "page_size_bytes", "is_draft", *FORMAT_FIELDS)

_ATTENTION = {
    "block_size": "block_size",
    "num_kv_heads": "num_kv_heads",
    "head_size": "head_size",
    "head_size_v": "head_size_v",
    "dtype": "dtype",
    "page_size_padded": "padded_page_bytes",
    "state_content_bytes": "state_bytes",
    "tokens_per_state": "tokens_per_state",
    "alignment": "page_alignment",
    "max_tp_shards": "max_tp_shards",
}
_COMPUTES = {"sliding_window": "computes_window", "attention_chunk_size": "computes_chunk"}
_MAMBA = {
    "block_size": "block_size",
    "shapes": "shapes",
    "dtypes": "dtypes",
    "page_size_padded": "padded_page_bytes",
    "mamba_cache_mode": "mode",
    "num_speculative_blocks": "speculative_blocks",
    "prefill_checkpoint_alignment": "checkpoint_alignment",
}
# Type of the reference -> our type, and its fields -> ours.
TYPES: dict[str, tuple[type[LayerSpec], dict[str, str]]] = {
    "FullAttentionSpec": (FullAttentionSpec, _ATTENTION | _COMPUTES),
    "MLAAttentionSpec": (MLASpec, _ATTENTION | _COMPUTES),
    "SlidingWindowSpec": (SlidingWindowSpec, _ATTENTION | {"sliding_window": "window"}),
    "SlidingWindowMLASpec": (SlidingWindowMLASpec, _ATTENTION | {"sliding_window": "window"}),
    "ChunkedLocalAttentionSpec": (ChunkedLocalSpec, _ATTENTION | {"attention_chunk_size": "chunk"}),
    "CrossAttentionSpec": (CrossAttentionSpec, _ATTENTION),
    "MambaSpec": (MambaSpec, _MAMBA),
}
_TYPE_NAMES = {ours: name for name, (ours, _) in TYPES.items()}

_PARSE: dict[str, Callable[[Any], Any]] = {
    "dtype": DType,
    "dtypes": lambda names: tuple(DType(name) for name in names),
    "shapes": lambda shapes: tuple(tuple(shape) for shape in shapes),
    "mamba_cache_mode": MambaMode,
}
_WRITE: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda dtype: dtype.value,
    "dtypes": lambda dtypes: [dtype.value for dtype in dtypes],
    "shapes": lambda shapes: [list(shape) for shape in shapes],
    "mamba_cache_mode": lambda mode: mode.value,
}
# What each of our fields holds when the golden file leaves it out.
_DEFAULTS = {
    "padded_page_bytes": 0,
    "state_bytes": 0,
    "tokens_per_state": 1,
    "page_alignment": 1,
    "max_tp_shards": 0,
    "computes_window": 0,
    "computes_chunk": 0,
    "mode": MambaMode.NONE,
    "speculative_blocks": 0,
    "checkpoint_alignment": 0,
}


class BadGoldenFile(Exception):
    """The file is not what FORMAT.md describes; the message names the place."""


def read_spec(golden: Mapping[str, Any], path: str) -> LayerSpec:
    """Our format of a golden spec. Its page size is checked on the way."""
    name = golden.get("type")
    if name not in TYPES:
        raise BadGoldenFile(f"{path}.type: {name!r} is unknown")
    ours, fields = TYPES[name]
    for field in golden.keys() - fields.keys() - set(APART):
        raise BadGoldenFile(f"{path}.{field}: {name} has no such field")
    packed = " ".join(f"{f}={golden[f]}" for f in FORMAT_FIELDS if f in golden)
    other: dict[str, Any] = {"state_format": packed} if packed else {}
    try:
        values = {fields[f]: _PARSE.get(f, _same)(value) for f, value in golden.items() if f in fields}
        spec = ours(**values, **other)
    except (TypeError, ValueError) as error:
        raise BadGoldenFile(f"{path}: {error}") from error
    if spec.page_bytes != golden.get("page_size_bytes"):
        raise BadGoldenFile(
            f"{path}.page_size_bytes: {golden.get('page_size_bytes')}, its fields make {spec.page_bytes}"
        )
    return spec


def write_spec(spec: LayerSpec) -> dict[str, Any]:
    """A format in the words of the golden file."""
    name = _TYPE_NAMES[type(spec)]
    values = {theirs: (ours, getattr(spec, ours)) for theirs, ours in TYPES[name][1].items()}
    if isinstance(spec, MLASpec | SlidingWindowMLASpec):
        values.pop("head_size_v")  # a latent row has no value part; 0 is the default there
    kept = {f: _WRITE.get(f, _same)(v) for f, (ours, v) in values.items() if v != _DEFAULTS.get(ours)}
    if isinstance(spec, AttentionSpec) and spec.state_format:
        packed = dict(item.split("=", 1) for item in spec.state_format.split(" "))
        kept |= {f: value == "True" if value in ("True", "False") else value for f, value in packed.items()}
    return {"type": name, "page_size_bytes": spec.page_bytes, **kept}


def _same(value: Any) -> Any:
    return value
