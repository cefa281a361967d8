"""What vLLM 0.33 plans for the published config.json files of `tests/plan/reference_plans/published.json`.

    .tools/vllm/bin/python tests/vllm/published_plans.py FOLDER            compare with the table; exit 1 if one differs
    .tools/vllm/bin/python tests/vllm/published_plans.py FOLDER --changes  one file a type, with each field changed

FOLDER has the files (`tests/plan/published.py`). A multimodal file is built whole, without its encoders; where that
needs a processor that is not there, its text model is, under the architecture that the whole model gives it. Weights
are not quantized here. The type of the cache that a checkpoint states is resolved by vLLM's own function, and for
llm-compressor by the scheme of its config.

With --changes, each file is cut to eight layers, and the file changes.json of FOLDER gets the plan of every change:
`python -m tests.plan.published FOLDER --changes` compares.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reference_plans as reference
import vllm.model_executor.layers.fused_moe.config as moe_config
import vllm.v1.attention.backends.flash_attn as flash_attn
from vllm.config import ModelConfig, VllmConfig

TABLE = reference.HERE / "published.json"
_PLACES = ("text_config", "language_config", "llm_config", "thinker_config")
# Architectures of text models that vLLM builds inside a multimodal model, and the types of files that they alone have.
_ARCHITECTURES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_PLAIN = {
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
}
_CHANGED = re.compile(
    r"attention|attn|cache|channels|chunk|conv|dim|expand|group|head|hybrid|index|interval|kv|latent|layer|linear|mamba"
    r"|mla|pattern|period|query|quant|share|size|sliding|ssm|state|swa|window"
)
_NOT_CHANGED = re.compile(
    r"activation|architectures|bias|dropout|eps|expert|initializer|intermediate|mlp|model_type|moe|norm"
    r"|num_hidden_layers|rope_(param|scal|theta)|token|vision|vocab"
)
_CUT = 8
_FIGURES = ("num_blocks", "groups", "concurrency")


class _Accelerated:
    """The platform, which answers code that only asks for an accelerator that there is one."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def is_cuda_alike(self) -> bool:
        """There is one."""
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)


def prepare() -> None:
    """Let vLLM build models without a GPU, and without the kernels of quantized weights."""
    reference.stand_in_for_kernels()
    flash_attn.flash_attn_supports_kv_cache_dtype = lambda *_, **__: True
    moe_config.current_platform = _Accelerated(moe_config.current_platform)
    ModelConfig._verify_quantization = lambda self: setattr(self, "quantization", None)
    VllmConfig._get_quantization_config = staticmethod(lambda *_: None)


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    """The text model of a multimodal file, as one of its own; the file itself if it has none."""
    place = next((name for name in _PLACES if isinstance(config.get(name), dict)), "")
    inner = config[place] if place else config
    inner = inner["text_config"] if isinstance(inner.get("text_config"), dict) else inner
    kind = inner.get("model_type") or config["model_type"]
    plain = _PLAIN.get(kind, kind)
    if not place and plain == kind:
        return config
    kept = {name: value for name, value in inner.items() if place or not isinstance(value, dict)}
    if "quantization_config" in config:
        kept["quantization_config"] = config["quantization_config"]
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(kept.get(name), dict) and "mrope_section" in kept[name]:
            del kept[name]
    architecture = _ARCHITECTURES.get(plain) or inner["architectures"][0]
    return kept | {"model_type": plain, "architectures": [architecture]}


def plan_of(config: dict[str, Any]) -> dict[str, Any]:
    """What vLLM plans for a file, or the error for its text model."""
    config = {name: value for name, value in config.items() if name != "auto_map"}
    given = config.get("quantization_config") or {}
    from_scheme = given.get("quant_method") == "compressed-tensors" and given.get("kv_cache_scheme")
    options = {"kv_cache_dtype": "fp8" if from_scheme else "auto"}
    is_multimodal = any(isinstance(config.get(name), dict) for name in _PLACES)
    original = reference.SETTINGS.copy()
    try:
        reference.SETTINGS.update(options, **({"language_model_only": True} if is_multimodal else {}))
        try:
            return reference.plan_of(config, 1)
        except Exception:
            reference.SETTINGS.pop("language_model_only", None)
            return reference.plan_of(text_of(config), 1)
    finally:
        reference.SETTINGS.clear()
        reference.SETTINGS.update(original)


def files_of(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each file of the table that the folder has, with its digest."""
    table = json.loads(TABLE.read_text())["files"]
    for path in sorted(folder.glob("*.json")):
        config = json.loads(path.read_text())
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]
        if digest in table:
            yield digest, config


def compare(folder: Path) -> int:
    """Compare the table with what vLLM plans now."""
    table, different = json.loads(TABLE.read_text())["files"], 0
    for digest, config in files_of(folder):
        plan = plan_of(config)
        figures = (plan["num_blocks"], plan["groups"], round(plan["concurrency"], 6))
        found = dict(zip(_FIGURES, figures, strict=True))
        wanted = {name: table[digest][name] for name in found}
        different += found != wanted
        print(table[digest]["origin"], "equal" if found == wanted else f"{found} instead of {wanted}", flush=True)
    return int(different > 0)


def changes_of(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A file cut to a few layers, then with each field dropped, and changed."""
    layers = config.get("num_hidden_layers", 0)
    if layers > _CUT:
        cut = {name: value[:_CUT] for name, value in config.items() if isinstance(value, list) and len(value) == layers}
        config = config | cut | {"num_hidden_layers": _CUT}
    yield "", config
    for name, value in config.items():
        if not _CHANGED.search(name) or _NOT_CHANGED.search(name):
            continue
        yield f"{name} dropped", {other: one for other, one in config.items() if other != name}
        if isinstance(value, bool):
            yield f"{name} changed", {**config, name: not value}
        elif isinstance(value, int):
            yield f"{name} changed", {**config, name: value * 2 if value > 1 else value + 1}
        elif isinstance(value, list) and value:
            yield f"{name} changed", {**config, name: value[1:] + value[:1]}
        elif value is None or isinstance(value, str):
            yield f"{name} changed", {**config, name: 64 if value is None else None}


def record_changes(folder: Path) -> int:
    """Write what vLLM plans for one file of each type with each field changed; what it refuses is left out."""
    seen, made = set(), []
    for _, config in files_of(folder):
        text = text_of(config)
        if text["model_type"] in seen:
            continue
        seen.add(text["model_type"])
        for what, one in changes_of(text):
            try:
                plan = plan_of(one)
            except Exception:
                continue
            made.append({"what": what, "config": one, **{name: plan[name] for name in _FIGURES}})
        print(text["model_type"], len(made), flush=True)
    (folder / "changes.json").write_text(json.dumps(made))
    return 0


if __name__ == "__main__":
    prepare()
    where = Path(sys.argv[1])
    sys.exit(record_changes(where) if "--changes" in sys.argv else compare(where))
