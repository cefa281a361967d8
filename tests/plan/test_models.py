"""The catalogue: each model's layers on one rank, compared with those of the golden tables."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from kvplane.base.errors import InvalidArgument, NotFound
from kvplane.base.groups import GroupKind, MambaMode
from kvplane.base.layer_spec import AttentionSpec, DType
from kvplane.base.layers import Layer, MambaSpec
from kvplane_plan.models.catalogue import MODELS, model_named
from kvplane_plan.models.shapes import ModelOptions
from kvplane_plan.planner import PlanOptions, Worker, plan_cache, to_groups
from tests.conformance.groups import read_cases
from tests.conformance.reference_specs import read_spec

CASES = read_cases(Path(__file__).parents[1] / "conformance" / "golden_groups.json")
GOLDEN_ROWS = {case["name"]: case for case in CASES}
GOLDEN = {name: case["input"] for name, case in GOLDEN_ROWS.items()}
NOT_CACHED = ModelOptions(mamba_mode=MambaMode.NONE)


@pytest.mark.parametrize(
    ("model", "options", "golden"),
    [
        ("llama-3.1-70b", ModelOptions(tensor_parallel=4), "llama-3.1-70b tp4"),
        ("gpt-oss-20b", ModelOptions(), "gpt-oss-20b"),
        ("gpt-oss-120b", ModelOptions(), "gpt-oss-120b"),
        ("gpt-oss-120b", ModelOptions(tensor_parallel=8), "gpt-oss-120b tp8"),
        ("gemma-3-27b", ModelOptions(), "gemma-3-27b"),
        ("gemma-3-27b", ModelOptions(tensor_parallel=2), "gemma-3-27b tp2"),
        ("llama-4-scout", ModelOptions(tensor_parallel=8), "llama-4-scout tp8 (HMA forced on)"),
        ("jamba-v0.1", ModelOptions(), "jamba-v0.1 mamba=align"),
        ("jamba-v0.1", NOT_CACHED, "jamba-v0.1 mamba=none"),
        ("qwen3-next-80b", ModelOptions(), "qwen3-next-80b-a3b mamba=align"),
        ("qwen3-next-80b", NOT_CACHED, "qwen3-next-80b-a3b mamba=none"),
        ("deepseek-v3", ModelOptions(), "deepseek-v3"),
    ],
)
def test_catalogue_layers_equal_the_golden_tables(model, options, golden):
    given = GOLDEN[golden]
    specs = [read_spec(spec, f"specs[{i}]") for i, spec in enumerate(given["specs"])]
    expected = tuple(Layer(name, specs[index]) for name, index in given["layers"].items())
    assert model_named(model).layers(options) == expected


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("options", [ModelOptions(), ModelOptions(cache_dtype="fp8"), NOT_CACHED])
def test_every_catalogue_model_can_be_planned_and_allocated(model, options):
    caching = options.mamba_mode is MambaMode.ALIGN
    plan = plan_cache([Worker(model_named(model).layers(options), 80 << 30)], PlanOptions(prefix_caching=caching))
    for group in to_groups(plan):
        group.validate(model)


def kinds(model, options=ModelOptions()):  # noqa: B008  frozen
    return Counter(layer.spec.kind for layer in model_named(model).layers(options))


def test_layer_patterns_end_at_the_last_layer():
    assert kinds("gemma-3-27b") == {GroupKind.SLIDING_WINDOW: 52, GroupKind.FULL_ATTENTION: 10}
    assert kinds("llama-3.1-8b") == {GroupKind.FULL_ATTENTION: 32}


# Ranks


def heads(model, ranks):
    spec = model_named(model).layers(ModelOptions(tensor_parallel=ranks))[-1].spec
    assert isinstance(spec, AttentionSpec)
    return spec.num_kv_heads


def test_heads_are_divided_over_ranks_and_replicated_when_there_are_fewer():
    assert [heads("llama-3.1-70b", ranks) for ranks in (1, 2, 4, 8, 16)] == [8, 4, 2, 1, 1]


@pytest.mark.parametrize(("model", "ranks"), [("llama-3.1-70b", 3), ("llama-3.1-70b", 12), ("jamba-v0.1", 5)])
def test_ranks_that_do_not_divide_the_heads_are_refused(model, ranks):
    with pytest.raises(InvalidArgument, match=f"tensor_parallel: .* cannot be divided evenly by {ranks} ranks"):
        model_named(model).layers(ModelOptions(tensor_parallel=ranks))


def test_latent_rows_are_equal_on_every_rank():
    layers = model_named("deepseek-v3").layers(ModelOptions(tensor_parallel=8))
    plan = plan_cache([Worker(layers)], PlanOptions(num_blocks=1000, tp_size=8))
    assert plan.tp_replicas == 8
    assert layers[0].spec.page_bytes == model_named("deepseek-v3").layers(ModelOptions())[0].spec.page_bytes


# Data types and block sizes


def test_cache_dtype_applies_to_attention_and_not_to_states():
    state, *_, attention = model_named("jamba-v0.1").layers(ModelOptions(cache_dtype="fp8"))[:5]
    assert attention.spec.precision is DType.FLOAT8_E4M3FN
    assert isinstance(state.spec, MambaSpec)
    assert state.spec.dtypes == (DType.BFLOAT16, DType.BFLOAT16)


@pytest.mark.parametrize(
    ("model", "options", "block_size"),
    [
        ("jamba-v0.1", ModelOptions(), 80),
        ("qwen3-next-80b", ModelOptions(), 544),
        ("jamba-v0.1", ModelOptions(cache_dtype="fp8"), 160),  # half the bytes a token: twice the tokens
        ("jamba-v0.1", ModelOptions(tensor_parallel=8), 80),  # state and heads shrink alike
        ("qwen3-next-80b", ModelOptions(tensor_parallel=4), 272),  # two heads do not shrink below one
        ("jamba-v0.1", ModelOptions(block_size=64), 128),  # in whole blocks as asked for
        ("jamba-v0.1", ModelOptions(block_size=8), 80),  # and of the kernel
    ],
)
def test_attention_blocks_are_raised_until_a_page_holds_a_state(model, options, block_size):
    plan = plan_cache([Worker(model_named(model).layers(options))], PlanOptions(num_blocks=3000))
    assert {group.block_size for group in plan.groups} == {block_size}
    assert len({group.spec.page_bytes for group in plan.groups}) == 1
    state, attention = plan.groups[0].spec, plan.groups[-1].spec
    assert state.content_bytes <= attention.page_bytes


def test_an_uncached_state_has_one_block_of_max_model_len():
    layers = model_named("jamba-v0.1").layers(ModelOptions(mamba_mode=MambaMode.NONE, max_model_len=4096))
    assert {layer.spec.block_size for layer in layers} == {4096, 80}


def test_latent_attention_requires_whole_kernel_blocks():
    assert model_named("llama-3.1-8b").layers(ModelOptions(block_size=512))[0].spec.block_size == 512
    sizes = [model_named("deepseek-v3").layers(ModelOptions(block_size=n))[0].spec.block_size for n in (16, 64, 96)]
    assert sizes == [64, 64, 128]


# Bad input


def test_an_unknown_model_is_not_found_and_the_nearest_is_named():
    with pytest.raises(NotFound) as refused:
        model_named("lama-3.1-70b").layers(ModelOptions())
    assert refused.value.field == "model"
    assert refused.value.remedy.startswith("the most similar name is llama-3.1-70b;")
    with pytest.raises(NotFound, match=r"has no model .. \(the catalogue has deepseek-v3, "):
        model_named("").layers(ModelOptions())


@pytest.mark.parametrize(
    ("field", "value"),
    [("tensor_parallel", 0), ("block_size", -16), ("max_model_len", 0), ("cache_dtype", "int4")],
)
def test_an_invalid_model_option_is_refused_by_field(field, value):
    with pytest.raises(InvalidArgument) as refused:
        ModelOptions(**{field: value})
    assert refused.value.field == field
