"""The catalogue: known models by name.

Attention patterns, heads and sizes are those of the published model configurations.
"""

from __future__ import annotations

import difflib

from kvplane.base.errors import NotFound
from kvplane_plan.models.shapes import Chunked, Full, Latent, Model, Sliding, State

_LLAMA = Full(kv_heads=8, head_size=128)
_GPT_OSS = (Sliding(kv_heads=8, head_size=64, window=128), Full(kv_heads=8, head_size=64))
_GEMMA_3 = (*(Sliding(kv_heads=16, head_size=128, window=1024),) * 5, Full(kv_heads=16, head_size=128))
_SCOUT = (*(Chunked(kv_heads=8, head_size=128, chunk=8192),) * 3, Full(kv_heads=8, head_size=128))
_JAMBA_STATE = State(window=3, channels=8192, heads=(8192, 16), keeps_drafts=False)
_JAMBA = (*(_JAMBA_STATE,) * 4, Full(kv_heads=8, head_size=128), *(_JAMBA_STATE,) * 3)
_QWEN3_NEXT_STATE = State(window=3, channels=8192, heads=(32, 128, 128))
_QWEN3_NEXT = (*(_QWEN3_NEXT_STATE,) * 3, Full(kv_heads=2, head_size=256))

MODELS: dict[str, Model] = {
    "llama-3.1-8b": Model(32, (_LLAMA,)),
    "llama-3.1-70b": Model(80, (_LLAMA,)),
    "gpt-oss-20b": Model(24, _GPT_OSS, attention_name="attn.attn"),
    "gpt-oss-120b": Model(36, _GPT_OSS, attention_name="attn.attn"),
    "gemma-3-27b": Model(62, _GEMMA_3),
    "llama-4-scout": Model(48, _SCOUT),
    "jamba-v0.1": Model(32, _JAMBA, state_name="mamba"),
    "qwen3-next-80b": Model(48, _QWEN3_NEXT, mtp=Full(kv_heads=2, head_size=256), mtp_layers=1),
    "deepseek-v3": Model(61, (Latent(row_size=576),), mtp=Latent(row_size=576), mtp_layers=1),
}


def model_named(name: str) -> Model:
    """Return the model of the catalogue with this name. Raises NotFound; the remedy lists all, and names a similar
    one.
    """
    model = MODELS.get(name)
    if model is None:
        similar = "".join(f"the most similar name is {one}; " for one in difflib.get_close_matches(name, MODELS, n=1))
        others = ", ".join(sorted(MODELS))
        raise NotFound(
            f"the catalogue has no model {name!r}",
            field="model",
            remedy=f"{similar}the catalogue has {others}",
        )
    return model
