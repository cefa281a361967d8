"""Read a model from its Hugging Face config.json: the pattern of attention layers and states that determines its cache.

Only sizes and patterns are read. Nothing is guessed: an error names the missing field and where it usually appears.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from kvplane.base.errors import InvalidArgument, NotFound
from kvplane_service.models.catalogue import Chunked, Full, Latent, Model, Sliding, State

MAX_CONFIG_BYTES = 4 << 20
MAX_LAYERS = 4096
MAX_SIZE = 1 << 30
_NESTED = ("text_config", "language_config", "llm_config")
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
    "linear_value_head_dim": "next to linear_num_value_heads",
    "linear_conv_kernel_dim": "next to linear_num_key_heads",
}


# Implicit patterns of these models: one in this number of layers has full attention.
_FULL_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
_ALL_SLIDE = ("mistral", "mixtral", "phi3", "starcoder2")
# Decide what is cached, and are not understood here: a plan without them would be wrong.
_NOT_READ = (
    "hybrid_override_pattern", "layers_block_type", "attn_layer_indices", "hybrid_layer_ids", "attn_type_list",
    "block_types", "block_configs", "linear_attn_config", "mamba_d_ssm", "cross_attention_layers", "is_encoder_decoder",
    "num_kv_shared_layers", "global_head_dim", "num_global_key_value_heads", "index_topk",
)  # fmt: skip


class _Fields:
    """The fields of a config; errors name the field."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self._values.get(name) is not None

    def names(self, name: str) -> bool:
        """Whether the field is present, even if null: heads of 0 or null are refused, not ignored."""
        return name in self._values

    def get(self, name: str, default: object = None) -> Any:  # noqa: ANN401
        """The field, or the default."""
        return self._values[name] if self.has(name) else default

    def size(self, name: str, least: int = 1, most: int = MAX_SIZE) -> int:
        """An integer within these bounds."""
        if not self.has(name):
            where = _USUALLY.get(name, "at the top level")
            raise InvalidArgument("config.json lacks it", field=name, remedy=f"it usually appears {where}")
        value = self._values[name]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            remedy = f"give a whole number of {least} to {most}"
            raise InvalidArgument(f"{repr(value)[:40]} is not a valid size", field=name, remedy=remedy)
        return value

    def refuse(self, name: str) -> NoReturn:
        """Refuse a field whose value is not supported."""
        raise InvalidArgument(
            "the cache depends on it, and kvplane does not support it",
            field=name,
            remedy="plan a model of the catalogue, or register the replica by its layers",
        )


def read_model(path: Path) -> Model:
    """The model that a config.json describes.

    Raises:
        NotFound: no such file.
        InvalidArgument: it is no JSON object, or a field lacks or cannot be.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}", field="model", remedy="name a model or a config.json") from None
    if len(text) > MAX_CONFIG_BYTES:
        raise InvalidArgument(f"{path} has {len(text)} bytes", field="model", remedy="give the model's config.json")
    try:
        config = json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"{path} is not JSON: {error}", field="model") from None
    if not isinstance(config, dict):
        raise InvalidArgument(f"{path} is not a JSON object", field="model", remedy="give the model's config.json")
    return model_of(config)


def model_of(config: Mapping[str, Any]) -> Model:
    """The model that the fields of a config.json describe. Raises InvalidArgument naming a field."""
    inner: Mapping[str, Any] = next((config[name] for name in _NESTED if isinstance(config.get(name), dict)), {})
    fields = _Fields({**config, **inner})
    shape_of = _shapes(fields)
    num_layers = _num_layers(fields)
    pattern = tuple(map(shape_of, range(num_layers)))
    attention = [shape for shape in pattern if not isinstance(shape, State)]
    has_mtp = bool(fields.get("num_nextn_predict_layers")) and bool(attention)
    return Model(num_layers, pattern, mtp=attention[-1] if has_mtp else None)


_Shape = Full | Latent | State


def _shapes(fields: _Fields) -> Callable[[int], _Shape]:
    """The shape of each layer by its number."""
    for name in _NOT_READ:
        if fields.get(name) and not (name == "layers_block_type" and fields.has("attn_layer_period")):
            fields.refuse(name)
    if fields.has("kv_lora_rank"):
        latent = Latent(fields.size("kv_lora_rank") + fields.size("qk_rope_head_dim"))
        return lambda _: latent
    full = Full(_kv_heads(fields), _head_size(fields))
    if fields.has("attn_layer_period"):
        return _every(fields.size("attn_layer_period"), _offset(fields), full, _mamba(fields))
    if fields.has("layer_types"):
        return _by_type(fields, full)
    if fields.has("mamba_d_state"):
        fields.refuse("mamba_d_state")  # in which layers?
    if fields.has("full_attention_interval") or fields.has("linear_num_key_heads"):
        interval = fields.size("full_attention_interval")
        return _every(interval, interval - 1, full, _delta_net(fields))
    if fields.has("attention_chunk_size"):
        interval = fields.size("no_rope_layer_interval") if fields.has("no_rope_layer_interval") else 4
        local = Chunked(full.kv_heads, full.head_size, fields.size("attention_chunk_size"))
        return _every(interval, interval - 1, full, local)
    has_window = fields.has("sliding_window") and fields.get("use_sliding_window", True)
    if has_window or fields.has("sliding_window_pattern"):
        return _windows(fields, full)
    return lambda _: full


def _windows(fields: _Fields, full: Full) -> Callable[[int], _Shape]:
    """Which layers have the window."""
    window, kind = _sliding(fields, full), str(fields.get("model_type"))[:40]
    if fields.has("sliding_window_pattern") or kind in _FULL_EVERY:
        named = fields.has("sliding_window_pattern")
        interval = fields.size("sliding_window_pattern") if named else _FULL_EVERY[kind]
        return _every(interval, interval - 1, full, window)
    if fields.has("max_window_layers"):
        first = fields.size("max_window_layers", least=0)
        return lambda layer: window if layer >= first else full
    if kind in _ALL_SLIDE:
        return lambda _: window
    raise InvalidArgument(
        f"a model of type {kind!r} does not say which layers have the window",
        field="layer_types",
        remedy="give one entry per layer, or sliding_window_pattern",
    )


def _num_layers(fields: _Fields) -> int:
    return fields.size("num_hidden_layers", most=MAX_LAYERS)


def _offset(fields: _Fields) -> int:
    return fields.size("attn_layer_offset", least=0) if fields.has("attn_layer_offset") else 0


def _every(period: int, offset: int, one: _Shape, others: _Shape) -> Callable[[int], _Shape]:
    return lambda layer: one if layer % period == offset else others


def _by_type(fields: _Fields, full: Full) -> Callable[[int], _Shape]:
    makers: dict[str, Callable[[], _Shape]] = {
        "full_attention": lambda: full,
        "attention": lambda: full,
        "sliding_attention": lambda: _sliding(fields, full),
        "chunked_attention": lambda: Chunked(full.kv_heads, full.head_size, fields.size("attention_chunk_size")),
        "linear_attention": lambda: _delta_net(fields),
    }
    types = fields.get("layer_types")
    if not isinstance(types, list) or len(types) != _num_layers(fields):
        raise InvalidArgument("not one entry per layer", field="layer_types", remedy="give num_hidden_layers of them")
    for name in types:
        if not isinstance(name, str) or name not in makers:
            known = ", ".join(makers)
            raise InvalidArgument(f"{repr(name)[:40]} is unknown", field="layer_types", remedy=f"kvplane knows {known}")
    shapes = {name: makers[name]() for name in dict.fromkeys(types)}
    return lambda layer: shapes[types[layer]]


def _kv_heads(fields: _Fields) -> int:
    return fields.size("num_key_value_heads" if fields.names("num_key_value_heads") else "num_attention_heads")


def _head_size(fields: _Fields) -> int:
    if fields.has("head_dim"):
        return fields.size("head_dim")
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if hidden % heads:
        raise InvalidArgument(f"{heads} heads do not divide hidden_size {hidden}", field="head_dim", remedy="give it")
    return hidden // heads


def _sliding(fields: _Fields, full: Full) -> Sliding:
    return Sliding(full.kv_heads, full.head_size, fields.size("sliding_window"))


def _mamba(fields: _Fields) -> State:
    channels = fields.size("mamba_expand") * fields.size("hidden_size")
    return State(fields.size("mamba_d_conv") - 1, channels, (channels, fields.size("mamba_d_state")))


def _delta_net(fields: _Fields) -> State:
    keys = fields.size("linear_num_key_heads") * fields.size("linear_key_head_dim")
    heads, size = fields.size("linear_num_value_heads"), fields.size("linear_value_head_dim")
    channels = 2 * keys + heads * size
    return State(fields.size("linear_conv_kernel_dim") - 1, channels, (heads, size, fields.size("linear_key_head_dim")))
