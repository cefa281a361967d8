"""Writes tiny models with random weights, of which every token depends on the whole context: a wrong page shows.

python tests/vllm/tiny_models.py FOLDER [NAME ...]

Without names, those of CONFIGS; MORE are for `python -m tests.vllm.shapes`.

Runs in the environment of vLLM (`environment`).
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    MixtralConfig,
    Olmo3Config,
    Qwen3Config,
    Qwen3NextConfig,
    Starcoder2Config,
)

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
    "long": LlamaConfig(**COMMON | {"num_hidden_layers": 2, "max_position_embeddings": 1 << 18}),
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
MORE = {
    "cohere2": Cohere2Config(**COMMON, sliding_window=64, layer_types=[SLIDING] * 3 + [FULL], pad_token_id=0),
    "deepseek": DeepseekV3Config(
        **COMMON | {"num_key_value_heads": 4},
        **EXPERTS,
        first_k_dense_replace=2,
        moe_intermediate_size=32,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        q_lora_rank=32,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
    ),
    "gemma2": Gemma2Config(**COMMON, sliding_window=64, query_pre_attn_scalar=32, pad_token_id=0),
    "llama4": Llama4TextConfig(
        **COMMON | {"num_hidden_layers": 8},
        **EXPERTS | {"num_experts_per_tok": 1},
        num_local_experts=2,
        intermediate_size_mlp=128,
        attention_chunk_size=64,
        pad_token_id=0,
    ),
    "mamba2": Mamba2Config(
        hidden_size=64,
        num_hidden_layers=4,
        expand=2,
        head_dim=32,
        num_heads=4,
        state_size=16,
        n_groups=1,
        conv_kernel=4,
        chunk_size=32,
        vocab_size=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    ),
    "gdn": Qwen3NextConfig(
        **COMMON | {"num_key_value_heads": 4, "head_dim": 64},
        **EXPERTS,
        num_experts=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    ),
    "mha": LlamaConfig(**COMMON | {"num_key_value_heads": 4}),
    "mistral": MistralConfig(**COMMON, sliding_window=64),
    "mixtral": MixtralConfig(**COMMON, **EXPERTS, num_local_experts=4),
    "olmo3": Olmo3Config(**COMMON, sliding_window=64, layer_types=[SLIDING] * 3 + [FULL], pad_token_id=0),
    "qwen3": Qwen3Config(**COMMON),
    "starcoder2": Starcoder2Config(**COMMON, sliding_window=64),
}


def write(name: str, folder: Path) -> None:
    """Write one model."""
    config = (CONFIGS | MORE)[name]
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
    for one in sys.argv[2:] or CONFIGS:
        write(one, Path(sys.argv[1]))
