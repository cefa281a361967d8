"""Records how vLLM 0.33 plans the cache of models: builds each on torch's meta device, and writes formats and plan.

    .tools/vllm/bin/python tests/vllm/reference_plans.py           every case of configs.json
    .tools/vllm/bin/python tests/vllm/reference_plans.py NAME...   some, kept with the others
    .tools/vllm/bin/python tests/vllm/reference_plans.py --changes every field of each config changed, one at a time

configs.json names a class of transformers for each case, with `changes` of its arguments; `added` are fields that the
class does not write and that vLLM's model reads (vllm/model_executor/models); `removed` are fields that it writes.

Runs in the environment of vLLM (`environment`), which has neither a GPU nor some packages that only kernels need: those
are stand-ins, and the block sizes are those of a Hopper GPU (FlashAttention 16, FlashMLA 64). What decides the plan is
vLLM's own: reading of the config, model classes, formats of layers, alignment of blocks, groups.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import MagicMock

HERE = Path(__file__).parents[1] / "plan" / "reference_plans"
CASES = HERE / "configs.json"
PLANS = HERE / "plans.json"
CHANGES = HERE / "changes.json"
MEMORY_BYTES = 80 << 30
SETTINGS = {"max_model_len": 32768, "max_num_batched_tokens": 8192}

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "VLLM_TARGET_DEVICE": "cpu",
}


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages whose names only have to be importable."""

    names: ClassVar = {"torchvision", "cutlass", "quack"}

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """A stand-in for each module of these packages."""
        known = name.split(".")[0] in self.names
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """An object that has every attribute."""
        facts = {"__path__": [], "__spec__": spec, "__name__": spec.name, "__file__": "", "__version__": "0"}
        return MagicMock(name=spec.name, **facts)  # type: ignore[return-value]

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to execute."""


import torch  # noqa: E402
from transformers import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

sys.meta_path.append(StandIns())

import vllm.platforms  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402
from vllm.platforms.interface import DeviceCapability, Platform  # noqa: E402


class PlanningPlatform(CpuPlatform):  # type: ignore[misc]
    """Builds models on a CPU, with the attention backends and block sizes of a Hopper GPU."""

    update_block_size_for_backend = Platform.__dict__["update_block_size_for_backend"]

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: object, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """The backend by the kind of attention."""
        if not attn_selector_config.use_mla:
            return "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
        if attn_selector_config.use_sparse:
            return "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"
        return "vllm.v1.attention.backends.mla.flashmla.FlashMLABackend"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Keep what the configuration says."""

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        """That of a Hopper GPU."""
        return DeviceCapability(9, 0)


vllm.platforms._current_platform = PlanningPlatform()

import vllm.model_executor.models.registry as registry  # noqa: E402
import vllm.triton_utils  # noqa: E402
import vllm.v1.attention.backends.flash_attn as flash_attn  # noqa: E402
import vllm.v1.attention.backends.mla.flashmla as flashmla  # noqa: E402
import vllm.v1.attention.ops.flashmla as flashmla_ops  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.config.vllm import get_layers_from_vllm_config  # noqa: E402
from vllm.distributed import (  # noqa: E402
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
    parallel_state,
)
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.layers.attention import Attention  # noqa: E402
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model  # noqa: E402
from vllm.v1.attention.backends.utils import (  # noqa: E402
    get_supported_kv_cache_layouts,
    resolve_kv_cache_layout,
)
from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config  # noqa: E402
from vllm.v1.kv_cache_interface import AttentionSpec  # noqa: E402
from vllm.v1.worker.utils import customize_attention_spec  # noqa: E402
from vllm.v1.worker.workspace import init_workspace_manager  # noqa: E402

# Fields of formats that do not concern memory, or that the golden form has under another name.
LEFT_OUT = {
    "block_stride_alignment",
    "cache_dtype_str",
    "cache_role",
    "is_index_group_leader",
    "topk_buffer_width",
    "dcp_sharded",
    "kv_quant_mode",
    "mamba_type",
    "num_heads",
    "num_prefill_checkpoint_blocks",
    "is_draft",
}
# Fields of text, training and experts, of which `--changes` makes no case.
NOT_CHANGED = {
    "architectures",
    "initializer_range",
    "intermediate_size",
    "is_encoder_decoder",
    "max_position_embeddings",
    "moe_intermediate_size",
    "num_hidden_layers",
    "rms_norm_eps",
    "tie_word_embeddings",
    "transformers_version",
    "use_cache",
    "vocab_size",
}
# Fields that a class writes and no published config.json has.
NO_PART_OF_A_FILE = {
    "_name_or_path",
    "chunk_size_feed_forward",
    "id2label",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "problem_type",
    "return_dict",
}


def stand_in_for_kernels() -> None:
    """Let code that only asks whether kernels exist, or makes streams, pass without a GPU."""
    StandIns.names.add("cuda")
    registry._run_in_subprocess = lambda function: function()
    flash_attn.flash_attn_supports_sinks = lambda: True
    flashmla_ops._flashmla_C_AVAILABLE = True
    flashmla.is_flashmla_dense_supported = lambda: (True, None)
    vllm.triton_utils.triton.set_allocator = lambda _: None
    torch.cuda.Stream = torch.cuda.Event = torch.Event = MagicMock  # type: ignore[misc]
    torch.accelerator.empty_cache = lambda: None
    torch.accelerator.get_memory_info = lambda *_: (10**11, 10**11)
    init_workspace_manager(torch.device("cpu"))
    item = torch.Tensor.item
    torch.Tensor.item = lambda one: 0.0 if one.is_meta else item(one)  # type: ignore[assignment, method-assign]
    operators = type(torch.ops._C)
    found = operators.__getattr__

    def get(self: Any, name: str) -> Any:
        try:
            return found(self, name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return None

    operators.__getattr__ = get  # type: ignore[method-assign]


def config_of(case: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a case: the defaults of a class of transformers with changes, as the class writes it."""
    model_type = case["model_type"]
    config = json.loads(CONFIG_MAPPING[model_type](**case.get("changes", {})).to_json_string(use_diff=False))
    for name in (NO_PART_OF_A_FILE | set(case.get("removed", ()))) & config.keys():
        del config[name]
    config["architectures"] = [case.get("architecture") or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    return config | case.get("added", {})


@contextlib.contextmanager
def built(config: dict[str, Any], ranks: int) -> Iterator[Any]:
    """The configuration of vLLM for a config.json, with every layer of the model on one rank registered in it."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        vllm_config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            enable_prefix_caching=True,
            enforce_eager=True,
            async_scheduling=False,
            tensor_parallel_size=ranks,
            **SETTINGS,
        ).create_engine_config()
    with set_current_vllm_config(vllm_config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
        destroy_model_parallel()
        initialize_model_parallel(1, 1)
        parallel_state._TP.world_size = ranks  # as if there were others; nothing is sent
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("meta"):
                initialize_model(vllm_config)
        finally:
            torch.set_default_dtype(torch.float32)
        PlanningPlatform.update_block_size_for_backend(vllm_config)
        yield vllm_config


def specs_of(vllm_config: Any) -> dict[str, Any]:
    """The format of each layer with a cache of its own, as vLLM's GPU runner collects them."""
    found = {}
    for name, layer in get_layers_from_vllm_config(vllm_config, AttentionLayerBase).items():
        if isinstance(layer, Attention) and layer.kv_sharing_target_layer_name:
            continue
        spec = layer.get_kv_cache_spec(vllm_config)
        if spec is not None:
            if isinstance(spec, AttentionSpec):
                spec = customize_attention_spec(layer.get_attn_backend(), spec)
            found[name] = replace(spec, is_draft=True) if layer.is_draft_layer else spec
    return found


def plain(spec: Any) -> dict[str, Any]:
    """A format as JSON, without fields at their default."""
    written: dict[str, Any] = {"type": type(spec).__name__, "page_size_bytes": spec.page_size_bytes}
    for field in fields(spec):
        value = getattr(spec, field.name)
        if field.name in LEFT_OUT or value == field.default:
            continue
        if field.name in ("dtype", "dtypes"):
            value = [str(one).removeprefix("torch.") for one in value] if field.name == "dtypes" else str(value)[6:]
        written[field.name] = value
    return written


def plan_of(config: dict[str, Any], ranks: int) -> dict[str, Any]:
    """What vLLM plans for a config.json."""
    with built(config, ranks) as vllm_config:
        specs = specs_of(vllm_config)
        layouts = get_supported_kv_cache_layouts(get_current_attn_backends(vllm_config))
        vllm_config.cache_config.kv_cache_layout = resolve_kv_cache_layout(
            vllm_config, [[layout.name for layout in layouts]], list(specs.values())
        ).name
        (cache,) = get_kv_cache_configs(
            vllm_config, [specs], [MEMORY_BYTES], get_global_kv_cache_groups(vllm_config, [specs])
        )
        formats: list[dict[str, Any]] = []
        layers: list[list[int]] = []
        for spec in map(plain, specs.values()):
            if spec not in formats:
                formats.append(spec)
            number = formats.index(spec)
            if layers and layers[-1][1] == number:
                layers[-1][0] += 1
            else:
                layers.append([1, number])
        return {
            "formats": formats,
            "layers": layers,
            "num_blocks": cache.num_blocks,
            "groups": sorted(len(group.layer_names) for group in cache.kv_cache_groups),
            "concurrency": get_max_concurrency_for_kv_cache_config(vllm_config, cache),
        }


def changed(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Fields of a config with another value each, without those of text and training."""
    for name, value in config.items():
        if name.endswith(("_token_id", "_token_ids")) or name in NOT_CHANGED:
            continue
        if isinstance(value, bool):
            yield name, not value
        elif isinstance(value, int):
            yield name, value * 2 if value > 1 else value + 1
        elif isinstance(value, list) and value and all(isinstance(one, str) for one in value):
            yield name, value[1:] + value[:1]
        elif value is None and ("window" in name or "head" in name or "kv" in name):
            yield name, 64


def record_changes() -> None:
    """Write the formats of the layers that vLLM plans for each changed config. Where it raises, there is nothing."""
    formats: dict[str, int] = {}
    changes: dict[str, dict[str, Any]] = {}
    for case, plan in json.loads(PLANS.read_text()).items():
        config = plan["config"]
        for name, value in changed(config):
            try:
                with built({**config, name: value}, 1) as vllm_config:
                    specs = Counter(json.dumps(plain(spec)) for spec in specs_of(vllm_config).values())
            except Exception:
                continue
            counts = [[count, formats.setdefault(one, len(formats))] for one, count in specs.items()]
            changes.setdefault(case, {})[name] = [value, counts]
    lines = [f"{json.dumps(name)}: {json.dumps(one, separators=(',', ':'))}" for name, one in changes.items()]
    table = ",\n".join(formats)
    CHANGES.write_text(f'{{"formats": [\n{table}\n],\n"changes": {{\n' + ",\n".join(lines) + "\n}}\n")


def main() -> None:
    """Record the cases that are named, or all."""
    cases = json.loads(CASES.read_text())
    wanted = sys.argv[1:]
    if wanted == ["--changes"]:
        stand_in_for_kernels()
        record_changes()
        return
    recorded = json.loads(PLANS.read_text()) if wanted and PLANS.exists() else {}
    stand_in_for_kernels()
    configs = {name: config_of(case) for name, case in cases.items()}  # before vLLM changes classes of transformers
    for name, config in configs.items():
        if wanted and name not in wanted:
            continue
        try:
            recorded[name] = {"config": config, **plan_of(config, cases[name].get("ranks", 1))}
            print(name, recorded[name]["num_blocks"], recorded[name]["groups"], flush=True)
        except Exception as error:
            print(f"{name} is not recorded: {type(error).__name__}: {str(error)[-300:]}", flush=True)
    ordered = {name: recorded[name] for name in cases if name in recorded}
    lines = [f"{json.dumps(name)}: {json.dumps(plan, separators=(',', ':'))}" for name, plan in ordered.items()]
    PLANS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
