"""The pages that the service plans for models with states are those that the operations on states take.

Tests of the service compare these plans with what vLLM plans for the same models.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

from kvplane_kernels.interface import DeltaInputs, ScanInputs, StatePages, StateRows
from kvplane_kernels.torch_ops import TorchOps
from kvplane_kernels.triton_ops import delta_rule, selective_scan, states
from kvplane_plan.models.catalogue import MODELS
from kvplane_plan.models.hf_config import model_of
from kvplane_plan.models.shapes import Model, ModelOptions
from kvplane_plan.planner import PlanOptions, Worker, plan_cache, to_rank_plan
from kvplane_worker.pages import PageBuffers

TOKENS, WRITTEN = 5, 3
OPS = TorchOps()


KIMI_LINEAR = {
    "model_type": "kimi_linear",
    "num_hidden_layers": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
}


def planned(model: Model) -> StatePages:
    """The states of a model's first layer on one of 8 ranks."""
    layers = model.layers(ModelOptions(tensor_parallel=8))
    plan = to_rank_plan(plan_cache([Worker(layers)], PlanOptions(num_blocks=24, max_model_len=512)))
    return PageBuffers.allocate(plan).state(layers[0].name)


def convolved(pages: StatePages) -> tuple[StateRows, torch.Tensor]:
    """One row of random tokens, whose last state is stored, and the result of its convolution."""
    write = torch.zeros(TOKENS, dtype=torch.int32)
    write[-1] = WRITTEN
    rows = StateRows(torch.tensor([0, TOKENS], dtype=torch.int32), torch.zeros(1, dtype=torch.int32), write)
    channels, width = pages.conv.shape[1], pages.conv.shape[2] + 1
    x = torch.randn(TOKENS, channels).to(pages.conv.dtype)
    assert states.refused_convolution(pages.conv, x) == ""
    u = OPS.convolve(pages.conv, rows, x, torch.randn(channels, width), torch.zeros(channels))
    assert torch.equal(pages.conv[WRITTEN], x[1 - width :].T), "the last tokens, oldest first"
    return rows, u


def assert_stored(pages: StatePages) -> None:
    written = pages.ssm.flatten(1).count_nonzero(1)
    assert written[WRITTEN] == pages.ssm[0].numel()
    assert written.count_nonzero() == 1


def test_jamba_runs_on_its_plan():
    pages = planned(MODELS["jamba-v0.1"])
    rows, u = convolved(pages)
    _, channels, size = pages.ssm.shape
    assert (channels, size) == (8192 // 8, 16)
    b = torch.randn(TOKENS, size).to(u)
    inputs = ScanInputs(rows.query_start, rows.read_block, rows.write_block, u, torch.rand_like(u), b, b)
    assert selective_scan.refusal(pages.ssm, inputs) == ""
    y = OPS.selective_scan(pages.ssm, inputs, -torch.rand(channels, size), torch.ones(channels))
    assert y.isfinite().all()
    assert_stored(pages)


@pytest.mark.parametrize(
    ("model", "key_heads", "gates"),
    [(MODELS["qwen3-next-80b"], 2, ()), (model_of(KIMI_LINEAR), 4, (128,))],
    ids=["Qwen3-Next", "Kimi Linear"],
)
def test_gated_delta_rules_run_on_their_plans(model, key_heads, gates):
    """Kimi Linear has a gate per element of a key."""
    pages = planned(model)
    rows, u = convolved(pages)
    _, heads, value_size, key_size = pages.ssm.shape
    assert (heads, value_size, key_size) == (32 // 8, 128, 128)
    q, k, v = torch.split(u, [key_heads * key_size, key_heads * key_size, heads * value_size], dim=1)
    q, k = (normalize(part.view(TOKENS, key_heads, key_size), dim=2) for part in (q, k))
    tokens = q, k, v.view(TOKENS, heads, value_size), -torch.rand(TOKENS, heads, *gates), torch.rand(TOKENS, heads)
    inputs = DeltaInputs(rows.query_start, rows.read_block, rows.write_block, *tokens)
    assert delta_rule.refusal(pages.ssm, inputs) == ""
    assert OPS.gated_delta_rule(pages.ssm, inputs).isfinite().all()
    assert_stored(pages)
