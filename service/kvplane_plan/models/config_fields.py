"""The fields of a Hugging Face config.json: reads them, notes which were read, and refuses those that matter and were
not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, NoReturn

from kvplane.base.errors import InvalidArgument

MAX_LAYERS = 1024  # the cost of a plan grows with the layers
MAX_SIZE = 1 << 30
# A text model inside a multimodal one: its place in the files of each type. vLLM gives the text models of other types
# other settings of the cache in part, so these types are refused.
_NESTED = {
    **dict.fromkeys(
        "gemma3 gemma3n gemma4 kimi_k25 llama4 llava maira2 mistral3 qwen2_5_vl qwen2_audio qwen2_vl qwen3_5 "
        "qwen3_5_moe qwen3_vl qwen3_vl_moe".split(),
        ("text_config",),
    ),
    **dict.fromkeys(("qwen2_5_omni", "qwen3_asr"), ("thinker_config", "text_config")),
}
_PLACES = ("text_config", "language_config", "llm_config", "thinker_config")
# What a class of transformers gives a field that a file leaves out; `tests/vllm/config_defaults.py` writes it.
_DEFAULTS: dict[str, dict[str, Any]] = json.loads(files(__package__).joinpath("defaults.json").read_text())
# Names of which a part may say what is cached.
_MAY_MATTER = re.compile(
    r"attention|attn|cache|chunk|compress|conv|cross|decoder|dim|encoder|head|hybrid|index|interval|kv|latent|layer"
    r"|linear|lora|mamba|memory|mla|mtp|nextn|pattern|period|predict|query|recurr|share|size|sliding|ssm|state|swa|window"
)
# Those that do not: normalization, positions, scales, initial values, experts, vocabulary, training.
_DOES_NOT_MATTER = re.compile(
    r"(vocab|intermediate|ffn|moe|expert|mlp|router|rope|initial|image|vision|audio|video|time_step|summary|linear_a"
    r"|linear_dt|linear_allow|activation|classifier|altup|laurel|layer_norm|layernorm|quantization)_.*"
    r"|.*(_bias|_dropout|_pdrop|_norm|_epsilon|_eps|_multipliers?|_scale|_layernorm|_softcapping|_intermediate_size"
    r"|_rope_theta|_token_id|_experts|_range|_affine|_layer_type|_hidden_act)"
    r"|_.*|.*_token_index|attention_projection_layout|attn_output_gate|cache_implementation|ep_size|gated_linear_unit"
    r"|attention_(value_scale|softmax_in_fp32)|attn_temperature_tuning|decoder_sparse_step|dim_model_base"
    r"|block_(auto_adjust_ff_dim|ffn_dim_multiplier|multiple_of|use_swiglu|use_xavier_init)|conv_use_xavier_init"
    r"|mamba_inner_layernorms|do_layer_norm_before|first_k_dense_replace"
    r"|hidden_(act|activation|size_per_layer_input)|interleave_moe_layer_step|is_decoder|layerdrop|no_rope_layer_interval"
    r"|max_position_embeddings|mlp_layer_types|moe_layer_freq|num_attention_heads_per_layer|num_dense_layers"
    r"|num_ln_in_parallel_attn|original_max_position_embeddings|model_max_length|max_sequence_length|seq_length|parallel_attn|query_pre_attn_scalar|rotary_dim"
    r"|reorder_and_upcast_attn|scale_attn_.*|scale_attention_.*|swiglu_limit|use_(cache|mamba_kernels|mambapy|associative_scan)"
    r"|word_embed_proj_dim"
)
_USUALLY = {
    "num_hidden_layers": "at the top level, or in text_config of a multimodal model",
    "num_attention_heads": "at the top level, or in text_config of a multimodal model",
    "num_key_value_heads": "next to num_attention_heads; equal to it when heads are not grouped",
    "hidden_size": "at the top level, or in text_config of a multimodal model",
    "head_dim": "next to num_attention_heads; else hidden_size / num_attention_heads",
    "full_attention_interval": "next to linear_num_key_heads; else layer_types",
    "sliding_window": "next to layer_types or sliding_window_pattern",
    "attention_chunk_size": "next to layer_types, in text_config",
    "qk_rope_head_dim": "next to kv_lora_rank",
    "attn_layer_offset": "next to attn_layer_period",
    "mamba_d_state": "next to mamba_d_conv and mamba_expand",
    "mamba_d_conv": "next to mamba_d_state",
    "mamba_expand": "next to mamba_d_state",
    "linear_num_value_heads": "next to linear_num_key_heads",
    "linear_num_key_heads": "next to linear_num_value_heads",
    "linear_key_head_dim": "next to linear_num_key_heads",
    "linear_value_head_dim": "next to linear_num_key_heads",
    "linear_conv_kernel_dim": "next to linear_num_key_heads",
}


class Fields:
    """The fields of a config.json or of an object inside it; errors name the field.

    Attributes:
        model_type: the text in `model_type`, "" if there is none.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        kind = values.get("model_type")
        self.model_type = kind if isinstance(kind, str) else ""
        self._stated = set(values)
        self._values = {**_DEFAULTS.get(self.model_type, {}), **values} if not path else values
        self._path = path
        self._read: set[str] = set()
        self._in_file: dict[str, str] = {}

    @classmethod
    def of_text_model(cls, config: Mapping[str, Any]) -> Fields:
        """Return the fields of the text model of a config.json, which may be an object inside it. Raises
        InvalidArgument for an object inside a type of files that is not read.
        """
        place = next((name for name in _PLACES if isinstance(config.get(name), dict)), "")
        if not place:
            return cls(config)
        outer = config.get("model_type")
        places = _NESTED.get(outer, ()) if isinstance(outer, str) else (place,)
        inner: Any = config if places else None
        for name in places:
            inner = inner.get(name) if isinstance(inner, dict) else None
        if not isinstance(inner, dict):
            what = f"it is {repr(outer)[:40]}, and kvplane does not read {place} of this type"
            raise InvalidArgument(what, field="model_type", remedy="`kvplane models` lists the types that it reads")
        text_type = f"{outer}_text" if f"{outer}_text" in _DEFAULTS else outer
        return cls({"model_type": text_type, **inner})

    def has(self, name: str) -> bool:
        """Return True if the field is present and not null."""
        self._read.add(name)
        return self._values.get(name) is not None

    def names(self, name: str) -> bool:
        """Return True if the field is present, even with the value null."""
        self._read.add(name)
        return name in self._values

    def get(self, name: str, default: object = None) -> Any:  # noqa: ANN401
        """Return the value of the field, or the default if it is absent or null."""
        return self._values[name] if self.has(name) else default

    def size(self, name: str, least: int = 1, most: int = MAX_SIZE) -> int:
        """Return the value of the field, an integer from `least` to `most`. Raises InvalidArgument if it is absent or
        another value.
        """
        if not self.has(name):
            where = _USUALLY.get(name, "at the top level")
            field = self._place(name)
            raise InvalidArgument("the field is missing in config.json", field=field, remedy=f"it usually is {where}")
        return self._integer(name, self._values[name], least, most)

    def sizes(self, name: str, most_values: int, least: int = 0) -> list[int]:
        """Return the value of the field, a list of integers from `least`. Raises InvalidArgument."""
        values = self.get(name)
        if not isinstance(values, list) or len(values) > most_values:
            self.reject(name, f"a list of at most {most_values} integers")
        return [self._integer(name, value, least, MAX_SIZE) for value in values]

    def inside(self, name: str) -> Fields:
        """Return the fields of an object in this one. Raises InvalidArgument if there is none."""
        value = self.get(name)
        if not isinstance(value, dict):
            self.reject(name, "an object")
        return Fields(value, f"{self._path}{name}.")

    def all(self) -> list[str]:
        """Return the names of the fields."""
        return list(self._values)

    def rename(self, names: Mapping[str, str]) -> None:
        """Read fields under other names from now on: those that are given, each with the name in the file."""
        ours = {theirs: name for name, theirs in names.items()}
        self._values = {ours.get(name, name): value for name, value in self._values.items()}
        self._stated = {ours.get(name, name) for name in self._stated}
        self._in_file = dict(names)

    def spell(self, name: str) -> None:
        """Replace a text by the list of its characters."""
        self._values = {**self._values, name: list(self._values[name])}

    def _place(self, name: str) -> str:
        return self._path + self._in_file.get(name, name)

    def _integer(self, name: str, value: object, least: int, most: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            self.reject(name, f"an integer from {least} to {most}")
        return value

    def ignore(self, *names: str) -> None:
        """Count fields as read that matter to other models and not to this one."""
        self._read.update(names)

    def reject(self, name: str, wanted: str) -> NoReturn:
        """Raise InvalidArgument for a value that is not what it should be."""
        what = f"its value in config.json is {repr(self._values.get(name))[:40]}"
        raise InvalidArgument(what, field=self._place(name), remedy=f"give {wanted}")

    def refuse(self, name: str) -> NoReturn:
        """Raise InvalidArgument for a field that may change the cache in a way that is not supported."""
        raise InvalidArgument(
            f"the cache of a model of the type {self.model_type[:40]!r} may depend on it, and kvplane does not read it",
            field=self._place(name),
            remedy="name a model of the catalogue, or register the replica with a list of its layers",
        )

    def refuse_unread(self) -> None:
        """Raise InvalidArgument for the first field that may matter, has a value other than null, false, 0 or nothing,
        and was not read.
        """
        for name, value in self._values.items():
            if (
                value
                and name in self._stated
                and name not in self._read
                and _MAY_MATTER.search(name)
                and not _DOES_NOT_MATTER.fullmatch(name)
            ):
                self.refuse(name)
