"""Models read from a config.json: equal to what vLLM 0.33 plans, and refused where a field could matter."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvplane.base.errors import InvalidArgument, NotFound
from kvplane.v1.allocation_pb2 import RegisterReplicaRequest
from kvplane.v1.replica_pb2 import ModelSource
from kvplane_plan.models.catalogue import MODELS
from kvplane_plan.models.hf_config import model_of
from kvplane_plan.models.model_types import READERS
from kvplane_plan.models.shapes import ModelOptions, Sliding
from kvplane_plan.models.sizing import Sizing, figures_of, find_model
from kvplane_service.rpc.sources import plan_source
from tests.conformance.reference_specs import read_spec

FOLDER = Path(__file__).with_name("reference_plans")
CASES: dict[str, dict[str, Any]] = json.loads((FOLDER / "configs.json").read_text())
PLANS: dict[str, dict[str, Any]] = json.loads((FOLDER / "plans.json").read_text())
CHANGES: dict[str, Any] = json.loads((FOLDER / "changes.json").read_text())
MEMORY_BYTES = 80 << 30
PUBLISHED: dict[str, dict[str, Any]] = json.loads((FOLDER / "published.json").read_text())["files"]
AS_VLLM = ModelOptions(max_model_len=32768, state_checkpoints=True)


def test_every_case_is_recorded_and_names_its_origin():
    assert PLANS.keys() == CASES.keys()
    assert len(PLANS) >= 40
    assert all(case["model_type"] for case in CASES.values()), "a class of transformers"
    assert len({case["model_type"] for case in CASES.values()}) >= 40


def test_every_type_that_is_read_has_a_recorded_plan_or_is_another_name_of_one():
    recorded = {plan["config"]["model_type"] for plan in PLANS.values()}
    published = {case["text_type"] for case in PUBLISHED.values() if "num_blocks" in case}
    # Outer types of files that have a text model; Llama 4 is compared with a row of golden_groups.json.
    others = {"gemma3", "llama4", "llama4_text"}
    # Text models of multimodal files whose layers are those of Qwen 2 and Qwen 3.
    others |= {"qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3_asr_text"}
    assert set(READERS) - recorded - published <= others
    assert recorded <= set(READERS)
    operating = (Path(__file__).parents[2] / "docs" / "operating" / "capacity.md").read_text()
    assert f"For {len(PLANS)} configs of {len(recorded)} types, " in operating


@pytest.mark.parametrize("name", PLANS)
def test_plan_equals_that_of_vllm(name):
    plan = PLANS[name]
    model, options = model_of(plan["config"]), replace(AS_VLLM, tensor_parallel=CASES[name].get("ranks", 1))
    expected = [read_spec(plan["formats"][number], name) for count, number in plan["layers"] for _ in range(count)]
    # vLLM lists the layers of some models in another order.
    assert sorted(repr(layer.spec) for layer in model.layers(options)) == sorted(map(repr, expected))
    figures = figures_of(Sizing(model, options, MEMORY_BYTES))
    assert figures.num_blocks == plan["num_blocks"]
    assert sorted(group.num_layers for group in figures.groups) == plan["groups"]
    assert figures.concurrency == pytest.approx(plan["concurrency"], abs=1e-9)


@pytest.mark.parametrize("name", CHANGES["changes"])
def test_config_with_one_changed_field_gives_the_layers_of_vllm_or_is_refused(name):
    """Each field of 90 configs was changed, one at a time, for vLLM: no change that matters passes unread."""
    refused = 0
    for field, (value, counts) in CHANGES["changes"][name].items():
        expected = Counter({repr(read_spec(CHANGES["formats"][number], name)): count for count, number in counts})
        try:
            model = model_of({**PLANS[name]["config"], field: value})
        except InvalidArgument:
            refused += 1
            continue
        assert Counter(repr(layer.spec) for layer in model.layers(AS_VLLM)) == expected, f"{field} = {value}"
    assert refused <= 3


MATTERS = {
    "llama": ("num_kv_heads", "sliding_window", "kv_lora_rank", "num_kv_shared_layers", "mamba_ssm_dtype"),
    "qwen3_next": ("mamba_ssm_dtype", "sliding_window", "attention_chunk_size"),
    "falcon": ("sliding_window", "n_head_kv"),
    "deepseek_v3": ("index_topk", "index_head_dim", "compress_ratios"),
    "nemotron_h": ("sliding_window", "num_kv_shared_layers"),
    "gpt2": ("multi_query", "add_cross_attention"),
    "gemma4_text": ("kv_lora_rank", "attention_chunk_size"),
}


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, fields in MATTERS.items() for field in fields])
def test_field_that_may_matter_and_is_not_read_is_refused_by_name(name, field):
    config = PLANS[name]["config"]
    model_of(config)
    with pytest.raises(InvalidArgument, match="kvplane does not read it") as caught:
        model_of({**config, field: 2})
    assert caught.value.field == field
    model_of({**config, field: None})  # as the classes write what a model does not have


# Fields of files that transformers' classes do not write, and that are about weights, positions or experts.
DOES_NOT_MATTER: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": {"factor": 8.0}, "torch_dtype": "bfloat16", "quantization_config": {"bits": 4}},
    "cohere2": {"cache_implementation": "hybrid", "layer_switch": 4, "order_of_interleaved_layers": "local_attn_first"},
    "deepseek_v3": {"ep_size": 1, "moe_layer_freq": 1, "seq_aux": True, "scoring_func": "sigmoid"},
    "jamba": {"mamba_inner_layernorms": True, "num_logits_to_keep": 1},
    "lfm2": {"num_heads": 32, "block_use_swiglu": True, "conv_use_xavier_init": True},
    "mimo_v2_flash": {"attention_projection_layout": "split", "attention_chunk_size": 128, "hybrid_block_size": None},
    "minimax_m2": {"attn_type_list": [1] * 62, "num_mtp_modules": 3, "mtp_transformer_layers": 1},
    "qwen3_5_text": {"attn_output_gate": True, "mtp_use_dedicated_embeddings": False},
    "zamba2": {"use_shared_attention_adapter": True, "gated_linear_unit": True},
}


@pytest.mark.parametrize("name", DOES_NOT_MATTER)
def test_field_that_does_not_matter_is_accepted(name):
    config = PLANS[name]["config"]
    assert model_of({**config, **DOES_NOT_MATTER[name]}).pattern == model_of(config).pattern


# Models that vLLM 0.33 does not plan, or not from this kind of file.
@pytest.mark.parametrize(
    "model_type", ["bamba", "bert", "minimax", "minimax_text_01", "t5", "whisper", "rwkv", "minimax_m3", "", None, 7]
)
def test_model_type_that_is_not_read_is_refused(model_type):
    with pytest.raises(InvalidArgument, match="which kvplane does not read") as caught:
        model_of({**PLANS["llama"]["config"], "model_type": model_type})
    assert caught.value.field == "model_type"


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("qwen3_5_text", {"mamba_ssm_dtype": "float8"}, "mamba_ssm_dtype"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 3}, "use_sliding_window"),
        ("kimi_linear", {"num_hidden_layers": 28}, "linear_attn_config.kda_layers"),
        ("kimi_linear", {"linear_attn_config": {}}, "linear_attn_config.num_heads"),
        ("kimi_linear", {"linear_attn_config": None}, "linear_attn_config"),
        ("zamba2", {"hybrid_layer_ids": [54]}, "hybrid_layer_ids"),
        ("zamba2", {"n_mamba_heads": 16}, "mamba_headdim"),
        ("zamba2", {"num_key_value_heads": 64}, "num_key_value_heads"),
        ("mimo_v2_flash", {"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern"),
        ("mimo_v2_flash", {"sliding_window": 64}, "sliding_window"),
        ("gemma4_text", {"per_layer_config": {"5": {"num_key_value_heads": 1}}}, "per_layer_config.5"),
        ("gemma4_text", {"per_layer_config": {"99": {"head_dim": 512}}}, "per_layer_config.99"),
        ("gemma4_text", {"layer_types": ["sliding_attention"] * 30}, "layer_types"),
        ("gemma4_text, sizes of full layers", {"global_head_dim": None}, "global_head_dim"),
        ("gemma3n_text", {"num_kv_shared_layers": 35}, "num_kv_shared_layers"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list"),
        ("glm_moe_dsa", {"indexer_types": ["full", "shared"]}, "indexer_types"),
        ("deepseek_v4", {"head_dim": 256}, "head_dim"),
        ("deepseek_v4", {"layer_types": ["full_attention"] * 7}, "layer_types"),
        ("deepseek_v4", {"layer_types": ["sliding_attention"] * 6}, "layer_types"),
        ("deepseek_v4", {"compress_rates": {"compressed_sparse_attention": 8}}, "compress_rates"),
        ("deepseek_v4", {"layer_types": None}, "compress_ratios"),
        ("deepseek_v4", {"layer_types": None, "compress_ratios": [0, 4, 8, 0, 4, 128, 0]}, "compress_ratios"),
        ("nemotron_h", {"layers_block_type": None}, "hybrid_override_pattern"),
        ("nemotron_h", {"layers_block_type": ["mamba", "rwkv"]}, "layers_block_type"),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "M-M?"}, "hybrid_override_pattern"),
        ("gpt2", {"n_embd": None}, "n_embd"),
        ("gpt2", {"n_layer": -1}, "n_layer"),
        ("llama", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
    ],
)
def test_contradictory_config_of_a_type_is_refused_by_field(name, changes, field):
    with pytest.raises(InvalidArgument) as caught:
        model_of({**PLANS[name]["config"], **changes})
    assert caught.value.field == field


@pytest.mark.parametrize("name", PLANS)
def test_replica_is_registered_from_its_config(name):
    plan = PLANS[name]
    amounts = {"memory_bytes": MEMORY_BYTES, "max_model_len": 32768, "tensor_parallel": CASES[name].get("ranks", 1)}
    source = ModelSource(config=json.dumps(plan["config"]), **amounts)
    planned = plan_source(RegisterReplicaRequest(replica="r", model=source))
    assert planned.spec.num_blocks == plan["num_blocks"]
    assert sorted(len(one.layer_names) for one in planned.spec.groups) == plan["groups"]
    # A state inside a launch is written by engines on Mamba 2 kernels alone; no source says that this one does.
    assert {one.checkpoint_alignment for one in planned.spec.groups} == {0}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"config": "{"}, "model.config"),
        ({"config": "[" * 100_000}, "model.config"),
        ({"config": "[]"}, "model.config"),
        ({"config": " " * ((1 << 20) + 1)}, "model.config"),
        ({"config": "{}"}, "model.config.model_type"),
        ({"config": json.dumps({"model_type": "x" * 100_000})}, "model.config.model_type"),
        ({"config": json.dumps({**PLANS["llama"]["config"], "index_topk": 8})}, "model.config.index_topk"),
        ({"model": "llama-3.1-8b"}, "model.model"),
    ],
)
def test_registration_from_a_bad_config_is_refused_by_field(changes, field):
    fields = {"config": json.dumps(PLANS["llama"]["config"]), "num_blocks": 100, **changes}
    with pytest.raises(InvalidArgument) as caught:
        plan_source(RegisterReplicaRequest(replica="r", model=ModelSource(**fields)))
    assert caught.value.field == field


def test_pattern_of_characters_is_that_of_the_types():
    config = PLANS["nemotron_h"]["config"]
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-"}
    pattern = "".join(letters[one] for one in config["layers_block_type"])
    spelled = {**config, "layers_block_type": None, "hybrid_override_pattern": pattern}
    assert model_of(spelled) == model_of(config)


def test_ratios_of_layers_are_those_of_the_types():
    config = PLANS["deepseek_v4"]["config"]
    of_types = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    ratios = [of_types[one] for one in config["layer_types"]]
    assert model_of({**config, "layer_types": None, "compress_ratios": [*ratios, 0]}) == model_of(config)


def test_compressed_rows_of_another_type_are_refused():
    with pytest.raises(InvalidArgument, match="rows of fp8") as caught:
        model_of(PLANS["deepseek_v4"]["config"]).layers(ModelOptions(cache_dtype="bfloat16"))
    assert caught.value.field == "cache_dtype"


@pytest.mark.parametrize(("name", "ranks"), [("nemotron_h", 16), ("zamba2", 64), ("kimi_linear", 3)])
def test_ranks_that_do_not_divide_a_state_are_refused(name, ranks):
    with pytest.raises(InvalidArgument, match="cannot be divided evenly") as caught:
        model_of(PLANS[name]["config"]).layers(ModelOptions(tensor_parallel=ranks))
    assert caught.value.field == "tensor_parallel"


def test_text_model_of_a_multimodal_file_is_read():
    text = PLANS["gemma3_text"]["config"]
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"num_hidden_layers": 27}}
    assert model_of(config) == model_of(text)


# Published config.json files, as far as the cache depends on them.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-70b": {
        "model_type": "llama",
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "hidden_size": 8192,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
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
            "model_type": "gemma3_text",
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
            "model_type": "llama4_text",
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "hidden_size": 5120,
            "head_dim": 128,
            "attention_chunk_size": 8192,
        },
    },
    "jamba-v0.1": {
        "model_type": "jamba",
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
        "model_type": "qwen3_next",
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
        "model_type": "deepseek_v3",
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


@pytest.mark.parametrize("field", ["num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim"])
def test_config_json_without_a_field_that_has_no_default_is_refused_with_its_usual_place(field):
    config = {**CONFIGS["deepseek-v3"], "model_type": "kimi_k2"}
    with pytest.raises(InvalidArgument, match="the field is missing") as caught:
        model_of({key: value for key, value in config.items() if key != field})
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
        ({"model_type": "llama4", "attention_chunk_size": 128, "no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        ({"model_type": "jamba", "attn_layer_period": 8, "attn_layer_offset": "x"}, "attn_layer_offset"),
        ({"sliding_window": 4096, "model_type": "olmo3"}, "layer_types"),  # which layers have it?
        ({"sliding_window": 4096, "model_type": ["gemma2"]}, "model_type"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"model_type": "qwen3_next"}, "full_attention_interval"),
        ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern"),
        ({"num_kv_shared_layers": 10}, "num_kv_shared_layers"),
        ({"model_type": "kimi_k2", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 2}, "index_topk"),
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
        ({"model_type": "exaone4", "sliding_window_pattern": 4}, [0, 1, 2, 4, 5, 6]),
        ({"model_type": "qwen2", "use_sliding_window": False, "max_window_layers": 3}, []),
        ({"model_type": "mistral", "sliding_window": None}, []),
    ],
)
def test_config_json_decides_which_layers_have_a_window(changes, windows):
    """As the model types of transformers define it when the file does not."""
    config = {"num_hidden_layers": 8, "num_attention_heads": 8, "hidden_size": 512, "sliding_window": 128, **changes}
    shapes = model_of(config).pattern
    assert [layer for layer, shape in enumerate(shapes) if isinstance(shape, Sliding)] == windows


@pytest.mark.parametrize(
    ("name", "changes", "layers"),
    [
        ("gemma3_text", {"sliding_window": None}, "FFFFFFFF"),  # null is no default
        (
            "exaone4",
            {"sliding_window_pattern": "LLLG", "layer_types": ["sliding_attention", "full_attention"] * 4},
            "WF" * 4,
        ),
        ("phi3", {"sliding_window": 64, "full_attn_mod": 1}, "W" * 8),
        ("llama4_text", {"no_rope_layers": [1, 1, 0, 1, 1, 0, 1, 1], "attention_chunk_size": 64}, "CCFCCFCC"),
        ("llama4_text", {"no_rope_layers": [], "attention_chunk_size": 64}, "CCCFCCCF"),
        ("llama4_text", {"attention_chunk_size": None}, "F" * 8),
        ("gemma4_text", {"use_bidirectional_attention": "vision", "global_head_dim": 64}, "WWWWWFWF"),
    ],
)
def test_layers_of_fields_that_published_files_have(name, changes, layers):
    base: dict[str, Any] = {
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "hidden_size": 512,
    }
    if name == "gemma4_text":
        base["layer_types"] = [*["sliding_attention"] * 5, "full_attention", "sliding_attention", "full_attention"]
    letters = {"Full": "F", "Sliding": "W", "Chunked": "C"}
    pattern = model_of({"model_type": name, **base, **changes}).pattern
    assert "".join(letters[type(shape).__name__] for shape in pattern) == layers


def test_field_that_a_file_leaves_out_has_the_default_of_its_class():
    """Gemma 3 as published: heads, their size and their number are left out."""
    config = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    first = model_of({"model_type": "gemma3", "text_config": config}).pattern[0]
    assert first == Sliding(kv_heads=4, head_size=256, window=1024)


FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ({"quant_method": "modelopt", "kv_cache_scheme": FP8}, "fp8"),
        ({"quant_method": "modelopt_fp4", "quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8"),
        ({"quant_method": "modelopt", "kv_cache_scheme": {**FP8, "dynamic": True}}, ""),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}, "fp8"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, ""),
        ({"kv_cache_scheme": FP8}, ""),  # vLLM does not follow a file without a method
        ({"quant_method": "modelopt", "kv_cache_scheme": None}, ""),
    ],
)
def test_cache_type_that_a_checkpoint_states_is_planned(quantization, dtype):
    config = {**CONFIGS["llama-3.1-70b"], "quantization_config": quantization}
    model = model_of(config)
    assert model.cache_dtype == dtype
    spec = model.layers(ModelOptions())[0].spec
    assert spec == model.layers(ModelOptions(cache_dtype=dtype or "bfloat16"))[0].spec
    assert model.layers(ModelOptions(cache_dtype="bfloat16"))[0].spec.page_bytes == 65536


@pytest.mark.parametrize(
    ("method", "name", "scheme"),
    [
        ("modelopt", "kv_cache_quant_algo", "NVFP4"),
        ("modelopt", "kv_cache_scheme", {"num_bits": 4, "type": "float"}),
        ("quark", "kv_cache_scheme", FP8),
    ],
)
def test_cache_type_that_is_not_planned_is_refused_by_name(method, name, scheme):
    config = {**CONFIGS["llama-3.1-70b"], "quantization_config": {"quant_method": method, name: scheme}}
    with pytest.raises(InvalidArgument) as caught:
        model_of(config)
    assert caught.value.field == f"quantization_config.{name}"


def test_rows_of_sparse_latent_attention_in_fp8_have_their_scales():
    """656 bytes a row: 512 elements, four scales of float32, and 64 elements of bfloat16."""
    model = model_of(PLANS["deepseek_v32"]["config"])
    pages = {layer.spec.page_bytes // 64 for layer in model.layers(ModelOptions(cache_dtype="fp8"))}
    assert pages == {132, 656}


def test_context_above_the_models_is_a_warning():
    model = model_of({**CONFIGS["llama-3.1-70b"], "max_position_embeddings": 8192})
    warned = figures_of(Sizing(model, AS_VLLM, MEMORY_BYTES)).warnings
    assert any("32,768 tokens is above the model's 8,192" in one for one in warned)
    fits = replace(AS_VLLM, max_model_len=8192)
    assert not figures_of(Sizing(model, fits, MEMORY_BYTES)).warnings


def test_text_model_inside_a_type_of_files_that_is_not_read_is_refused():
    config = {"model_type": "minicpmv4_6", "text_config": PLANS["qwen3_5_text"]["config"]}
    with pytest.raises(InvalidArgument, match="does not read text_config of this type") as caught:
        model_of(config)
    assert caught.value.field == "model_type"


def test_missing_or_malformed_config_json_is_refused(tmp_path):
    with pytest.raises(NotFound, match="No such file"):
        find_model(str(tmp_path / "config.json"))
    for text, match in (("[]", "not a JSON object"), ("{", "not JSON")):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(InvalidArgument, match=match):
            find_model(str(tmp_path / "bad.json"))
    with pytest.raises(NotFound, match=r"the most similar name is llama-3\.1-70b"):
        find_model("llama-3.1-71b")
