"""Writes tiny models with random weights, of which every token depends on the whole context: a wrong page shows.

python tests/vllm/tiny_models.py FOLDER

Runs in the environment of vLLM (`environment`).
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GptOssConfig, LlamaConfig, Qwen3NextConfig

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
COMMON = {
    **SIZES,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING, FULL = "sliding_attention", "full_attention"
EXPERTS = {"num_experts_per_tok": 2}
CONFIGS = {
    "llama": LlamaConfig(**COMMON),
    "gemma3": Gemma3TextConfig(
        **COMMON | {"num_hidden_layers": 7},
        sliding_window=64,
        layer_types=[SLIDING] * 5 + [FULL, SLIDING],
        query_pre_attn_scalar=32,
        pad_token_id=0,
    ),
    "gptoss": GptOssConfig(
        **COMMON | {"intermediate_size": 64},
        **EXPERTS,
        num_local_experts=4,
        sliding_window=64,
        layer_types=[SLIDING, FULL] * 2,
        pad_token_id=0,
    ),
    "qwen3next": Qwen3NextConfig(
        **COMMON,
        **EXPERTS,
        num_experts=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    ),
}


def write(name: str, folder: Path) -> None:
    """Write one model."""
    config = CONFIGS[name]
    config.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, values in model.named_parameters():
            if values.dim() >= 2 and "conv" not in parameter_name:
                scale = 1.0 if "embed" in parameter_name else 1.5 / math.sqrt(values.shape[-1])
                values.copy_(torch.randn(values.shape, generator=generator) * scale)
    model.save_pretrained(folder / name)


if __name__ == "__main__":
    torch.manual_seed(0)
    for one in CONFIGS:
        write(one, Path(sys.argv[1]))
