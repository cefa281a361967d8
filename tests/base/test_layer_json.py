"""Layers as JSON: they round-trip, and unknown fields are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import MambaMode
from kvplane.base.layer_json import LAYER_TYPES, layer_from_dict, layer_to_dict, spec_from_dict, spec_to_dict
from kvplane.base.layer_spec import DType
from kvplane.base.layers import FullAttentionSpec, KVSharingLayer, Layer

HEADS = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16"}
# The least that each type needs to be said.
LEAST: dict[str, dict[str, Any]] = {
    "full_attention": HEADS,
    "mla_attention": HEADS,
    "hidden_state": HEADS,
    "sink_full_attention": {**HEADS, "sink_tokens": 32},
    "r_swa": {**HEADS, "window": 64},
    "sliding_window": {**HEADS, "window": 64},
    "sliding_window_mla": {**HEADS, "window": 64},
    "chunked_local_attention": {**HEADS, "chunk": 64},
    "cross_attention": HEADS,
    "ring": HEADS,
    "mamba": {"block_size": 16, "shapes": [[3, 4], [5]], "dtypes": ["bfloat16", "float32"]},
}


def test_every_layer_type_is_covered():
    assert LEAST.keys() == LAYER_TYPES.keys()


@pytest.mark.parametrize("type_name", LEAST)
def test_formats_round_trip(type_name):
    spec = spec_from_dict({"type": type_name, **LEAST[type_name]})
    assert spec.type_name == type_name
    assert spec_from_dict(json.loads(json.dumps(spec_to_dict(spec)))) == spec


def test_fields_with_other_values_than_the_default_round_trip():
    changed = {"mode": "align", "speculative_blocks": 2, "padded_page_bytes": 512}
    text = {"type": "mamba", **LEAST["mamba"], **changed}
    spec = spec_from_dict(text)
    assert spec.mamba_mode is MambaMode.ALIGN
    assert spec_to_dict(spec) == text


def test_owning_sharing_and_draft_layers_round_trip():
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=DType.UINT8)
    for layer in (Layer("a", spec), Layer("d", spec, is_draft=True), KVSharingLayer("b", "a")):
        assert layer_from_dict(json.loads(json.dumps(layer_to_dict(layer)))) == layer


FULL = {"type": "full_attention", **HEADS}


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({**FULL, "type": "fulll"}, "spec.type"),
        ({**FULL, "type": 7}, "spec.type"),
        (HEADS, "spec.type"),
        ({**FULL, "window": 64}, "spec.window"),
        ({k: v for k, v in FULL.items() if k != "head_size"}, "spec.head_size"),
        ({**FULL, "head_size": "64"}, "spec.head_size"),
        ({**FULL, "head_size": True}, "spec.head_size"),
        ({**FULL, "head_size": 0}, "spec.head_size"),
        ({**FULL, "dtype": "bf16"}, "spec.dtype"),
        ({**FULL, "dcp_sharded": 1}, "spec.dcp_sharded"),
        ({**FULL, "state_format": None}, "spec.state_format"),
        ({"type": "mamba", **LEAST["mamba"], "shapes": [[3, 4], 5]}, "spec.shapes[1]"),
        ({"type": "mamba", **LEAST["mamba"], "shapes": [[3, 4.5], [5]]}, "spec.shapes[0][1]"),
        ({"type": "mamba", **LEAST["mamba"], "dtypes": ["bfloat16", "f4"]}, "spec.dtypes[1]"),
        ({"type": "mamba", **LEAST["mamba"], "mode": "all"}, "spec.mode"),
    ],
)
def test_an_invalid_format_is_refused_by_its_path(data, field):
    with pytest.raises(InvalidArgument) as refused:
        spec_from_dict(data)
    assert refused.value.field == field
    assert refused.value.remedy


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"name": "a"}, "layers[3]"),
        ({"name": "a", "spec": FULL, "shares_with": "b"}, "layers[3]"),
        ({"name": "a", "spec": FULL, "draft": True}, "layers[3]"),
        ({"spec": FULL}, "layers[3].name"),
        ({"name": "a", "shares_with": 4}, "layers[3].shares_with"),
        ({"name": "a", "spec": [FULL]}, "layers[3].spec"),
        ({"name": "a", "spec": FULL, "is_draft": "no"}, "layers[3].is_draft"),
        ({"name": "a", "spec": {**FULL, "num_kv_heads": -1}}, "layers[3].spec.num_kv_heads"),
    ],
)
def test_an_invalid_layer_is_refused_by_its_path(data, field):
    with pytest.raises(InvalidArgument) as refused:
        layer_from_dict(data, "layers[3]")
    assert refused.value.field == field
