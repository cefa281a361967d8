"""Read a model from its Hugging Face config.json: the pattern of attention layers and states that determines its cache.

Only sizes and patterns are read, and none is guessed: an error names the missing field and where it usually is.
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
# Fields that change what is cached and that this module does not support: a plan that ignored them would be wrong.
_NOT_READ = (
    "hybrid_override_pattern", "layers_block_type", "attn_layer_indices", "hybrid_layer_ids", "attn_type_list",
    "block_types", "block_configs", "linear_attn_config", "mamba_d_ssm", "cross_attention_layers", "is_encoder_decoder",
    "num_kv_shared_layers", "global_head_dim", "num_global_key_value_heads", "index_topk",
)  # fmt: skip


class _Fields:
    """The fields of a config.json; errors name the field."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def has(self, name: str) -> bool:
        """Return True if the field is present and not null."""
        return self._values.get(name) is not None

    def names(self, name: str) -> bool:
        """Return True if the field is present, even with the value null."""
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
            raise InvalidArgument("the field is missing in config.json", field=name, remedy=f"it usually is {where}")
        value = self._values[name]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            remedy = f"give an integer from {least} to {most}"
            raise InvalidArgument(f"its value in config.json is {repr(value)[:40]}", field=name, remedy=remedy)
        return value

    def refuse(self, name: str) -> NoReturn:
        """Raise InvalidArgument for a field that changes the cache in a way that is not supported."""
        raise InvalidArgument(
            "the cache depends on this field of config.json, and kvplane does not support it",
            field=name,
            remedy="name a model of the catalogue, or register the replica with a list of its layers",
        )


def read_model(path: Path) -> Model:
    """Read the model that the config.json at `path` describes.

    Raises:
        NotFound: the file cannot be read.
        InvalidArgument: the file is not a JSON object, or a field is missing, invalid or unsupported.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        what, remedy = f"{path} cannot be read: {error.strerror}", "name a model of the catalogue or a config.json"
        raise NotFound(what, field="model", remedy=remedy) from None
    if len(text) > MAX_CONFIG_BYTES:
        what = f"{path} has {len(text)} bytes, at most {MAX_CONFIG_BYTES} are read"
        raise InvalidArgument(what, field="model", remedy="name the model's config.json")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        remedy = "name the model's config.json"
        raise InvalidArgument(f"{path} is not JSON: {error}", field="model", remedy=remedy) from None
    if not isinstance(config, dict):
        raise InvalidArgument(f"{path} is not a JSON object", field="model", remedy="name the model's config.json")
    return model_of(config)


def model_of(config: Mapping[str, Any]) -> Model:
    """Return the model that the fields of a config.json describe. Raises InvalidArgument that names a field."""
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
    """Return a function that returns, for the number of a layer, its shape: kind of attention or state, with
    its sizes.
    """
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
        fields.refuse("mamba_d_state")  # the config does not state which layers have a state
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
    """Return a function that returns, for the number of a layer, its shape, in a model in which some layers have a
    sliding window.
    """
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
        f"it is missing, and the model type {kind!r} does not determine which layers have the sliding window",
        field="layer_types",
        remedy="add layer_types with one entry per layer, or sliding_window_pattern, to config.json",
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
        found = f"{len(types)} entries" if isinstance(types, list) else "no list"
        what = f"it has {found} for {_num_layers(fields)} layers"
        raise InvalidArgument(what, field="layer_types", remedy="give one entry per layer (num_hidden_layers)")
    for name in types:
        if not isinstance(name, str) or name not in makers:
            known = ", ".join(makers)
            what = f"it contains the unknown type {repr(name)[:40]}"
            raise InvalidArgument(what, field="layer_types", remedy=f"kvplane supports {known}")
    shapes = {name: makers[name]() for name in dict.fromkeys(types)}
    return lambda layer: shapes[types[layer]]


def _kv_heads(fields: _Fields) -> int:
    return fields.size("num_key_value_heads" if fields.names("num_key_value_heads") else "num_attention_heads")


def _head_size(fields: _Fields) -> int:
    if fields.has("head_dim"):
        return fields.size("head_dim")
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if hidden % heads:
        what = f"it is missing, and hidden_size {hidden} is not a multiple of the {heads} attention heads"
        raise InvalidArgument(what, field="head_dim", remedy="add head_dim to config.json")
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
