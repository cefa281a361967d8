"""Readers of the layers of models with recurrent states or convolutions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvplane.base.layer_spec import DType
from kvplane_plan.models.attention_types import Layers, by_type, every, full_of, latent_of, num_layers
from kvplane_plan.models.config_fields import MAX_LAYERS, Fields
from kvplane_plan.models.shapes import Full, LayerShapes, State

_STATE_DTYPES = {"float32": DType.FLOAT32, "float16": DType.FLOAT16, "bfloat16": DType.BFLOAT16}


def delta_net(fields: Fields) -> State:
    """Return the state of a gated delta net."""
    keys = fields.size("linear_num_key_heads") * fields.size("linear_key_head_dim")
    heads, size = fields.size("linear_num_value_heads"), fields.size("linear_value_head_dim")
    window = fields.size("linear_conv_kernel_dim") - 1
    return State(window, 2 * keys + heads * size, (heads, size, fields.size("linear_key_head_dim")))


def delta_nets(fields: Fields) -> Layers:
    """Full attention and gated delta nets."""
    if fields.has("layer_types"):
        fields.ignore("full_attention_interval")
        return by_type(
            fields, {"full_attention": lambda: full_of(fields), "linear_attention": lambda: delta_net(fields)}
        )
    interval = fields.size("full_attention_interval")
    return every(num_layers(fields), interval, interval - 1, full_of(fields), delta_net(fields))


def delta_nets_with_dtype(fields: Fields) -> Layers:
    """Qwen 3.5: as `delta_nets`, with a data type of the states."""
    dtype = state_dtype(fields, "mamba_ssm_dtype", "bfloat16")
    return tuple(_with_dtype(layer, dtype) for layer in delta_nets(fields))


def _with_dtype(layer: LayerShapes, dtype: DType) -> LayerShapes:
    if not isinstance(layer, State):
        return layer
    return replace(layer, dtype=dtype)


def state_dtype(fields: Fields, name: str, default: str) -> DType:
    """Return the data type of recurrent states that a field names."""
    value = fields.get(name, default)
    if not isinstance(value, str) or value not in _STATE_DTYPES:
        fields.reject(name, f"one of {', '.join(_STATE_DTYPES)}")
    return _STATE_DTYPES[value]


def kimi_delta(fields: Fields) -> Layers:
    """Kimi Linear: latent attention and delta nets with a state in float32; the lists of layers begin at 1."""
    fields.ignore("layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "mla_use_nope")
    inner = fields.inside("linear_attn_config")
    heads, size = inner.size("num_heads"), inner.size("head_dim")
    state = State(inner.size("short_conv_kernel_size") - 1, 3 * heads * size, (heads, size, size), DType.FLOAT32)
    layers = num_layers(fields)
    full, states = (inner.sizes(name, MAX_LAYERS, 1) for name in ("full_attn_layers", "kda_layers"))
    if sorted(full + states) != list(range(1, layers + 1)):
        inner.reject("kda_layers", f"each of the layers 1 to {layers} either here or in full_attn_layers")
    attention = latent_of(fields)
    return tuple(attention if layer in set(full) else state for layer in range(1, layers + 1))


def mamba_1(channels: int, kernel: int, size: int) -> State:
    """Return the state of a Mamba layer."""
    return State(kernel - 1, channels, (channels, size), keeps_drafts=False)


def jamba(fields: Fields) -> Layers:
    """Mamba, and one layer in `attn_layer_period` with full attention."""
    period = fields.size("attn_layer_period")
    offset = fields.size("attn_layer_offset", least=0) if fields.has("attn_layer_offset") else 0
    channels = fields.size("mamba_expand") * fields.size("hidden_size")
    state = mamba_1(channels, fields.size("mamba_d_conv"), fields.size("mamba_d_state"))
    fields.ignore("layers_block_type", "layer_types", "mamba_dt_rank")
    return every(num_layers(fields), period, offset, full_of(fields), state)


def mamba_2(channels: int, groups: int, heads: tuple[int, int, int], kernel: int, dtype: DType) -> State:
    """Return the state of a Mamba 2 layer; `heads` are number and size of heads and size of the state."""
    return State(kernel - 1, channels, heads, dtype, has_checkpoints=True, groups=groups, group_channels=2 * heads[2])


def mamba_alone(fields: Fields) -> Layers:
    """Mamba in every layer."""
    if fields.has("intermediate_size"):
        channels = fields.size("intermediate_size")
        fields.ignore("expand", "hidden_size")
    else:
        channels = fields.size("expand") * fields.size("hidden_size")
    fields.ignore("time_step_rank")
    return (mamba_1(channels, fields.size("conv_kernel"), fields.size("state_size")),) * num_layers(fields)


def mamba_2_alone(fields: Fields) -> Layers:
    """Mamba 2 in every layer."""
    heads = (fields.size("num_heads"), fields.size("head_dim"), fields.size("state_size"))
    if fields.has("intermediate_size"):
        channels = fields.size("intermediate_size")
        fields.ignore("expand", "hidden_size")
    else:
        channels = fields.size("expand") * fields.size("hidden_size")
    fields.ignore("chunk_size", "time_step_rank")
    state = mamba_2(channels, fields.size("n_groups"), heads, fields.size("conv_kernel"), DType.BFLOAT16)
    return (state,) * num_layers(fields)


def nemotron_h(fields: Fields) -> Layers:
    """Layers of Mamba 2, full attention, or neither."""
    fields.ignore("expand", "chunk_size", "mtp_layers_block_type", "mtp_hybrid_override_pattern")
    heads = (fields.size("mamba_num_heads"), fields.size("mamba_head_dim"), fields.size("ssm_state_size"))
    dtype = state_dtype(fields, "mamba_ssm_cache_dtype", "float32")
    state = mamba_2(heads[0] * heads[1], fields.size("n_groups"), heads, fields.size("conv_kernel"), dtype)
    size = "head_dim" if fields.has("head_dim") else "attention_head_dim"
    fields.ignore("hidden_size", "num_attention_heads", "attention_head_dim")
    full = Full(fields.size("num_key_value_heads"), fields.size(size))
    makers: dict[str, Callable[[], LayerShapes]] = {}
    for names, shape in (
        (("M", "mamba", "linear_attention"), state),
        (("*", "attention", "full_attention"), full),
        (("-", "E", "mlp", "moe"), ()),
    ):
        makers |= {name: lambda shape=shape: shape for name in names}  # type: ignore[misc]
    if fields.has("layers_block_type"):
        fields.ignore("hybrid_override_pattern", "layer_types")
        return by_type(fields, makers, "layers_block_type")
    if not isinstance(fields.get("hybrid_override_pattern"), str):
        fields.reject("hybrid_override_pattern", "a character per layer, or layers_block_type instead")
    fields.spell("hybrid_override_pattern")
    return by_type(fields, makers, "hybrid_override_pattern")


def granite_hybrid(fields: Fields) -> Layers:
    """Mamba 2 and full attention."""
    heads = (fields.size("mamba_n_heads"), fields.size("mamba_d_head"), fields.size("mamba_d_state"))
    channels = fields.size("mamba_expand") * fields.size("hidden_size")
    fields.ignore("mamba_chunk_size", "position_embedding_type")
    state = mamba_2(channels, fields.size("mamba_n_groups"), heads, fields.size("mamba_d_conv"), DType.BFLOAT16)
    full = full_of(fields)
    makers: dict[str, Callable[[], LayerShapes]] = {name: lambda: state for name in ("mamba", "linear_attention")}
    makers |= {name: lambda: full for name in ("attention", "full_attention")}
    if fields.has("layers_block_type"):
        fields.ignore("layer_types")
        return by_type(fields, makers, "layers_block_type")
    return by_type(fields, makers)


def falcon_h1(fields: Fields) -> Layers:
    """Full attention and Mamba 2 in every layer."""
    heads = (fields.size("mamba_n_heads"), fields.size("mamba_d_head"), fields.size("mamba_d_state"))
    channels = fields.size("mamba_expand") * fields.size("hidden_size")
    if fields.has("mamba_d_ssm"):
        channels = fields.size("mamba_d_ssm")
    fields.ignore("mamba_chunk_size", "mamba_norm_before_gate", "mamba_rms_norm", "mamba_use_mlp")
    state = mamba_2(channels, fields.size("mamba_n_groups"), heads, fields.size("mamba_d_conv"), DType.BFLOAT16)
    return ((full_of(fields), state),) * num_layers(fields)


def zamba_2(fields: Fields) -> Layers:
    """Mamba 2 in every layer, and in some of them full attention too."""
    heads = (fields.size("n_mamba_heads"), fields.size("mamba_headdim"), fields.size("mamba_d_state"))
    channels = fields.size("mamba_expand") * fields.size("hidden_size")
    if heads[0] * heads[1] != channels:
        fields.reject("mamba_headdim", "mamba_expand x hidden_size / n_mamba_heads")
    if fields.size("num_key_value_heads") != fields.size("num_attention_heads"):
        fields.reject("num_key_value_heads", "the value of num_attention_heads")
    state = mamba_2(channels, fields.size("mamba_ngroups"), heads, fields.size("mamba_d_conv"), DType.BFLOAT16)
    fields.ignore("attention_hidden_size", "kv_channels", "num_query_groups", "chunk_size")
    fields.ignore("num_mem_blocks", "adapter_rank", "layers_block_type", "layer_types", "head_dim")
    fields.ignore("use_shared_attention_adapter", "use_shared_mlp_adapter", "add_bias_linear", "use_mem_rope")
    full = Full(fields.size("num_key_value_heads"), fields.size("attention_head_dim"))
    both = set(fields.sizes("hybrid_layer_ids", MAX_LAYERS))
    layers = num_layers(fields)
    if both - set(range(layers)):
        fields.reject("hybrid_layer_ids", f"numbers of layers, 0 to {layers - 1}")
    return tuple((full, state) if layer in both else state for layer in range(layers))


def short_convolutions(fields: Fields) -> Layers:
    """LFM 2: convolutions over a few tokens, and full attention."""
    channels = fields.size("conv_dim") if fields.has("conv_dim") else fields.size("hidden_size")
    state = State(fields.size("conv_L_cache") - 1, channels)
    fields.ignore("block_dim", "block_ff_dim", "conv_dim_out", "num_heads")
    full = full_of(fields)
    if fields.has("layer_types"):
        fields.ignore("full_attn_idxs")
        return by_type(fields, {"full_attention": lambda: full, "conv": lambda: state})
    attends = set(fields.sizes("full_attn_idxs", MAX_LAYERS))
    return tuple(full if layer in attends else state for layer in range(num_layers(fields)))
