"""Layer formats as JSON: they round-trip, and unknown fields are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import MambaMode
from kvplane.base.layer_json import LAYER_TYPES, spec_from_dict, spec_to_dict

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
