"""The model types whose config.json is read: which layers have which cache.

A reader takes the fields of a config.json and returns the layers. What vLLM 0.33 plans for a config of each type is in
`tests/plan/reference_plans`, and the readers return the same. A type that is not here is refused.
"""

from __future__ import annotations

from kvplane_plan.models.attention_types import (
    Reader,
    chat_glm,
    chunked,
    compressed,
    dense,
    expanded_latent,
    flagged,
    indexed,
    latent,
    multi_query,
    renamed,
    shared,
    two_head_sizes,
    two_kinds_of_heads,
    typed_windows,
    windows,
    windows_one_in,
)
from kvplane_plan.models.state_types import (
    delta_nets,
    delta_nets_with_dtype,
    falcon_h1,
    granite_hybrid,
    jamba,
    kimi_delta,
    mamba_2_alone,
    mamba_alone,
    nemotron_h,
    short_convolutions,
    zamba_2,
)

# Types whose layer for multi-token prediction has the cache of the last layer.
PREDICTS_LIKE_LAST = ("deepseek_v3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_GPT = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embd"}
READERS: dict[str, Reader] = {
    **dict.fromkeys(
        "arcee cohere ernie4_5 ernie4_5_moe flex_olmo gemma glm glm4 glm4_moe gpt_neox granite granitemoe "
        "granitemoeshared jais2 llama ministral3 mixtral olmo olmo2 olmoe opt persimmon phi qwen2 qwen2_5_omni_text "
        "qwen2_5_vl qwen2_5_vl_text qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_asr_text qwen3_moe qwen3_vl_moe_text "
        "qwen3_vl_text seed_oss smollm3 solar_open stablelm".split(),
        dense,
    ),
    **dict.fromkeys(("gpt2", "gptj"), renamed(dense, **_GPT)),
    "chatglm": chat_glm,
    "falcon": multi_query,
    "minimax_m2": flagged,
    "gpt_bigcode": renamed(multi_query, **_GPT),
    **dict.fromkeys(("mistral", "phi3", "phimoe", "starcoder2"), windows),
    **dict.fromkeys("exaone4 exaone_moe gpt_oss laguna olmo3".split(), typed_windows),
    "gemma2": windows_one_in(2),
    **dict.fromkeys(("gemma3", "gemma3_text"), windows_one_in(6)),
    "cohere2": windows_one_in(4, more=1),
    "gemma3n_text": shared(typed_windows),
    "gemma4_text": shared(two_head_sizes),
    "mimo_v2_flash": two_kinds_of_heads,
    **dict.fromkeys(("llama4", "llama4_text"), chunked),
    **dict.fromkeys("axk1 deepseek_v2 deepseek_v3 kimi_k2 mistral4 youtu".split(), latent),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), indexed),
    "deepseek_v4": compressed,
    "minicpm3": expanded_latent,
    **dict.fromkeys(("olmo_hybrid", "qwen3_next"), delta_nets),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), delta_nets_with_dtype),
    "kimi_linear": kimi_delta,
    "jamba": jamba,
    **dict.fromkeys(("falcon_mamba", "mamba"), mamba_alone),
    "mamba2": mamba_2_alone,
    "nemotron_h": nemotron_h,
    "granitemoehybrid": granite_hybrid,
    "falcon_h1": falcon_h1,
    "zamba2": zamba_2,
    **dict.fromkeys(("lfm2", "lfm2_moe"), short_convolutions),
}
