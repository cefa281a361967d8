"""Capacity: known figures, golden rows, and models read from config.json."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.units import parse_bytes
from kvplane_plan.models.catalogue import MODELS
from kvplane_plan.models.hf_config import model_of
from kvplane_plan.models.shapes import ModelOptions
from kvplane_plan.models.sizing import Figures, Sizing, figures_of
from tests.plan.test_models import GOLDEN_ROWS

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
    config = {"model_type": "llama", "num_hidden_layers": 80, "num_attention_heads": 32, "hidden_size": 4096}
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


def test_sizing_gain_of_a_model_that_is_all_windows():
    """A uniform cache keeps every token, whichever windows the layers have."""
    config = {"model_type": "mistral", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    model = model_of({**config, "hidden_size": 4096, "sliding_window": 4096})
    figures = figures_of(Sizing(model, ModelOptions(), 40 * GIB))
    assert figures.uniform_concurrency == 10.0
    assert figures.concurrency == pytest.approx(20480 / 769)
    assert figures.decoding_concurrency == pytest.approx(20480 / 257)


def test_sizing_decode_and_prefill_are_both_given():
    both = figures("gemma-3-27b")
    assert both.concurrency == pytest.approx(5.95, abs=0.005)
    assert both.decoding_concurrency == pytest.approx(13.44, abs=0.005)


def test_sizing_gain_of_gpt_oss_120b_at_128k_is_the_published_one():
    """llm-d publishes 1.77 for prompts of 128K."""
    sizing = Sizing(MODELS["gpt-oss-120b"], ModelOptions(), 40 * GIB, max_concurrent_batches=2)
    lengths = range(16, (1 << 17) + 1, 16)

    def gain(length):
        return figures_of(sizing.at(length)).gain or 0

    length = lengths[bisect_left(lengths, 1.77, key=gain)]
    assert length == 127_184
    assert gain(length - 16) < 1.77 <= gain(length)
    assert round(gain(lengths[-1]), 3) == 1.776


def test_memory_sizes_are_parsed_with_units():
    assert [parse_bytes(text) for text in ("40GiB", "1.5 kb", "7", "2TiB")] == [40 * GIB, 1500, 7, 2 << 40]
    for text in ("", "GiB", "40 gallons", "-1GB"):
        with pytest.raises(InvalidArgument):
            parse_bytes(text)
