"""Capacity: known figures, golden rows, and models read from config.json."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvplane.base.errors import InvalidArgument, NotFound
from kvplane_service.models.catalogue import MODELS, ModelOptions, Sliding
from kvplane_service.models.hf_config import model_of
from kvplane_service.models.sizing import Figures, Sizing, figures_of, find_model, parse_bytes, shortest_with_gain
from tests.service.test_models import GOLDEN_ROWS

GIB = 1 << 30


def figures(model: str, memory: int = 40 * GIB, context: int = 32768, **options: Any) -> Figures:
    return figures_of(Sizing(MODELS[model], ModelOptions(max_model_len=context, **options), memory))


def test_sizing_llama_70b_bytes_per_token():
    assert figures("llama-3.1-70b").bytes_per_token == 327_680
    assert figures("llama-3.1-70b", cache_dtype="fp8").bytes_per_token == 163_840


def test_sizing_number_of_8k_requests_in_40_gib():
    at_8k = figures("llama-3.1-70b", context=8192, cache_dtype="fp8")
    assert int(at_8k.concurrency) == 32
    assert int(figures("llama-3.1-70b", context=8193, cache_dtype="fp8").concurrency) == 31


def test_sizing_bytes_of_80_layers_with_all_heads():
    config = {"num_hidden_layers": 80, "num_attention_heads": 32, "hidden_size": 4096}
    figures = figures_of(Sizing(model_of(config), ModelOptions(max_model_len=250_000), 400 * GIB))
    assert figures.bytes_per_token == 1_310_720
    assert 250_000 * figures.bytes_per_token == pytest.approx(328e9, rel=0.002)


ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.1-70b tp4": ("llama-3.1-70b", {"tensor_parallel": 4}),
    "gemma-3-27b": ("gemma-3-27b", {}),
    "gemma-3-27b tp2": ("gemma-3-27b", {"tensor_parallel": 2}),
    "gpt-oss-20b": ("gpt-oss-20b", {}),
    "gpt-oss-120b": ("gpt-oss-120b", {}),
    "gpt-oss-120b tp8": ("gpt-oss-120b", {"tensor_parallel": 8}),
    "llama-4-scout tp8 (HMA forced on)": ("llama-4-scout", {"tensor_parallel": 8}),
    "jamba-v0.1 mamba=align": ("jamba-v0.1", {}),
    "jamba-v0.1 mamba=none": ("jamba-v0.1", {}),
    "qwen3-next-80b-a3b mamba=align": ("qwen3-next-80b", {}),
    "qwen3-next-80b-a3b mamba=none": ("qwen3-next-80b", {}),
    "deepseek-v3": ("deepseek-v3", {}),
}
UNIFORM = {
    "gemma-3-27b": "gemma-3-27b hma-off",
    "gpt-oss-20b": "gpt-oss-20b hma-off",
    "llama-4-scout tp8 (HMA forced on)": "llama-4-scout tp8 (default: HMA off)",
}


@pytest.mark.parametrize("row", ROWS)
def test_sizing_blocks_and_concurrency_equal_the_golden_row(row):
    model, options = ROWS[row]
    expected = GOLDEN_ROWS[row]["expected"]
    caching = "mamba=none" not in row
    sizing = Sizing(MODELS[model], ModelOptions(**options), 40 * GIB, max_concurrent_batches=2, prefix_caching=caching)
    figures = figures_of(sizing)
    assert [figures.num_blocks] == expected["num_blocks"]
    assert figures.concurrency == pytest.approx(expected["max_concurrency"], abs=1e-6)
    if row in UNIFORM:
        uniform = GOLDEN_ROWS[UNIFORM[row]]["expected"]["max_concurrency"]
        assert figures.uniform_concurrency == pytest.approx(uniform, abs=1e-6)


def test_sizing_gain_of_gpt_oss_120b_at_128k_is_the_published_one():
    """llm-d publishes 1.77 for prompts of 128K."""
    sizing = Sizing(MODELS["gpt-oss-120b"], ModelOptions(), 40 * GIB, max_concurrent_batches=2)
    length = shortest_with_gain(sizing, 1.77, 1 << 17)
    assert length == 127_184
    before, there, at_128k = (figures_of(sizing.at(each)).gain or 0 for each in (length - 16, length, 1 << 17))
    assert before < 1.77 <= there
    assert round(at_128k, 3) == 1.776
    assert shortest_with_gain(sizing, 2.0, 1 << 17) is None


# Published config.json files, as far as the cache depends on them.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-70b": {
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "hidden_size": 8192,
    },
    "gpt-oss-120b": {
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "hidden_size": 2880,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
    "gemma-3-27b": {
        "text_config": {
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "hidden_size": 5376,
            "head_dim": 128,
            "sliding_window": 1024,
            "sliding_window_pattern": 6,
        },
        "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
    },
    "llama-4-scout": {
        "text_config": {
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "hidden_size": 5120,
            "head_dim": 128,
            "attention_chunk_size": 8192,
        },
    },
    "jamba-v0.1": {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    "qwen3-next-80b": {
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "hidden_size": 2048,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    "deepseek-v3": {
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "hidden_size": 7168,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config_json_has_the_layers_of_the_catalogue(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    read = find_model(str(tmp_path))
    assert find_model(str(tmp_path / "config.json")) == read
    options = ModelOptions()
    assert [layer.spec for layer in read.layers(options)] == [layer.spec for layer in MODELS[name].layers(options)]


NEEDED = [
    ("llama-3.1-70b", "num_hidden_layers"),
    ("llama-3.1-70b", "hidden_size"),
    ("gpt-oss-120b", "sliding_window"),
    ("jamba-v0.1", "mamba_d_state"),
    ("qwen3-next-80b", "linear_key_head_dim"),
    ("deepseek-v3", "qk_rope_head_dim"),
]


@pytest.mark.parametrize(("name", "field"), NEEDED)
def test_config_json_without_a_field_is_refused_with_its_usual_place(name, field):
    config = {key: value for key, value in CONFIGS[name].items() if key != field}
    with pytest.raises(InvalidArgument, match="the field is missing") as caught:
        model_of(config)
    assert caught.value.field == field
    assert caught.value.remedy.startswith("it usually is ")


@pytest.mark.parametrize("value", [0, -8, "8", 1.5, None, True])
def test_config_json_with_invalid_heads_is_refused(value):
    with pytest.raises(InvalidArgument) as caught:
        model_of({**CONFIGS["llama-3.1-70b"], "num_key_value_heads": value})
    assert caught.value.field == "num_key_value_heads"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["tree_attention"] * 80}, "layer_types"),
        ({"num_attention_heads": 7}, "head_dim"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"head_dim": 1 << 40}, "head_dim"),
        ({"layer_types": [["full_attention"]] * 80}, "layer_types"),
        ({"attention_chunk_size": 128, "no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        ({"attn_layer_period": 8, "attn_layer_offset": "x", "mamba_d_state": 16}, "attn_layer_offset"),
        ({"sliding_window": 4096}, "layer_types"),  # which layers have it?
        ({"sliding_window": 4096, "model_type": ["gemma2"]}, "layer_types"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"linear_num_key_heads": 16}, "full_attention_interval"),
        ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern"),
        ({"num_kv_shared_layers": 10}, "num_kv_shared_layers"),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 2048}, "index_topk"),
    ],
)
def test_contradictory_config_json_is_refused_by_field(changes, field):
    with pytest.raises(InvalidArgument) as caught:
        model_of({**CONFIGS["llama-3.1-70b"], **changes})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral"}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"model_type": "gemma2"}, [0, 2, 4, 6]),
        ({"model_type": "gemma3_text"}, [0, 1, 2, 3, 4, 6, 7]),
        ({"sliding_window_pattern": 4}, [0, 1, 2, 4, 5, 6]),
        ({"model_type": "qwen2", "use_sliding_window": False, "max_window_layers": 3}, []),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3}, [3, 4, 5, 6, 7]),
        ({"model_type": "mistral", "sliding_window": None}, []),
    ],
)
def test_config_json_decides_which_layers_have_a_window(changes, windows):
    """As the model types of transformers define it when the file does not."""
    config = {"num_hidden_layers": 8, "num_attention_heads": 8, "hidden_size": 512, "sliding_window": 128, **changes}
    shapes = model_of(config).pattern
    assert [layer for layer, shape in enumerate(shapes) if isinstance(shape, Sliding)] == windows


def test_missing_or_malformed_config_json_is_refused(tmp_path):
    with pytest.raises(NotFound, match="No such file"):
        find_model(str(tmp_path / "config.json"))
    for text, match in (("[]", "not a JSON object"), ("{", "not JSON")):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(InvalidArgument, match=match):
            find_model(str(tmp_path / "bad.json"))
    with pytest.raises(NotFound, match=r"the most similar name is llama-3\.1-70b"):
        find_model("llama-3.1-71b")


def test_memory_sizes_are_parsed_with_units():
    assert [parse_bytes(text) for text in ("40GiB", "1.5 kb", "7", "2TiB")] == [40 * GIB, 1500, 7, 2 << 40]
    for text in ("", "GiB", "40 gallons", "-1GB"):
        with pytest.raises(InvalidArgument):
            parse_bytes(text)
