"""The model types whose config.json is read: which layers have which cache.

A reader takes the fields of a config.json and returns the layers. What vLLM 0.33 plans for a config of each type is in
`tests/plan/reference_plans`, and the readers return the same. A type that is not here is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvplane.base.errors import InvalidArgument
from kvplane.base.layer_spec import DType
from kvplane_plan.models.config_fields import MAX_LAYERS, Fields
from kvplane_plan.models.shapes import Chunked, Full, Indexer, Latent, LayerShapes, Sliding, State

Layers = tuple[LayerShapes, ...]
Reader = Callable[[Fields], Layers]
_STATE_DTYPES = {"float32": DType.FLOAT32, "float16": DType.FLOAT16, "bfloat16": DType.BFLOAT16}
_INDEXER_SCALE_BLOCK = 128  # elements of an indexer's key that share a scale of four bytes


def num_layers(fields: Fields) -> int:
    """Return the number of layers."""
    return fields.size("num_hidden_layers", most=MAX_LAYERS)


def kv_heads(fields: Fields) -> int:
    """Return the number of key-value heads."""
    heads = fields.size("num_attention_heads")
    return fields.size("num_key_value_heads") if fields.names("num_key_value_heads") else heads


def head_size(fields: Fields) -> int:
    """Return the elements of a head."""
    if fields.has("head_dim"):
        fields.ignore("hidden_size")
        return fields.size("head_dim")
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if hidden % heads:
        what = f"it is missing, and hidden_size {hidden} is not a multiple of the {heads} attention heads"
        raise InvalidArgument(what, field="head_dim", remedy="add head_dim to config.json")
    return hidden // heads


def full_of(fields: Fields) -> Full:
    """Return the shape of full attention."""
    return Full(kv_heads(fields), head_size(fields))


def sliding_of(fields: Fields, more: int = 0) -> Sliding:
    """Return the shape of sliding-window attention, with a window that is `more` tokens longer than the field says."""
    full = full_of(fields)
    return Sliding(full.kv_heads, full.head_size, fields.size("sliding_window") + more)


def every(layers: int, period: int, offset: int, one: LayerShapes, others: LayerShapes) -> Layers:
    """Return layers of which one in `period` has another shape than the others."""
    return tuple(one if layer % period == offset else others for layer in range(layers))


def by_type(fields: Fields, makers: dict[str, Callable[[], LayerShapes]], name: str = "layer_types") -> Layers:
    """Return the layers that a list of types names; `makers` makes the shape of each type. Raises InvalidArgument."""
    types = fields.get(name)
    layers = num_layers(fields) if fields.has("num_hidden_layers") else None
    if not isinstance(types, list) or len(types) not in ({layers} if layers else range(1, MAX_LAYERS + 1)):
        found = f"{len(types)} entries" if isinstance(types, list) else "no list"
        what = f"it has {found} for {layers} layers"
        raise InvalidArgument(what, field=name, remedy="give one entry per layer (num_hidden_layers)")
    for one in types:
        if not isinstance(one, str) or one not in makers:
            what = f"it contains the unknown type {repr(one)[:40]}"
            raise InvalidArgument(what, field=name, remedy=f"kvplane supports {', '.join(makers)}")
    shapes = {one: makers[one]() for one in dict.fromkeys(types)}
    return tuple(shapes[one] for one in types)


# Attention


def dense(fields: Fields) -> Layers:
    """Full attention in every layer."""
    if fields.names("use_sliding_window"):
        fields.ignore("sliding_window", "max_window_layers")
        if fields.get("use_sliding_window"):
            fields.refuse("use_sliding_window")
    if fields.has("layer_types"):
        return by_type(fields, {"full_attention": lambda: full_of(fields)})
    return (full_of(fields),) * num_layers(fields)


def renamed(reader: Reader, **names: str) -> Reader:
    """Return a reader of fields that have other names in config.json."""

    def read(fields: Fields) -> Layers:
        fields.rename(names)
        return reader(fields)

    return read


def multi_query(fields: Fields) -> Layers:
    """Falcon and GPT-BigCode: one key-value head, a number of them, or one per head."""
    fields.ignore("num_kv_heads", "multi_query")
    heads = fields.size("num_attention_heads")
    if fields.has("num_key_value_heads"):
        heads = fields.size("num_key_value_heads")
    elif fields.get("new_decoder_architecture"):
        heads = fields.size("num_kv_heads")
    elif fields.get("multi_query", True):
        heads = 1
    return (Full(heads, head_size(fields)),) * num_layers(fields)


def windows(fields: Fields, full_every: int = 0, more: int = 0) -> Layers:
    """Full and sliding-window attention. Without a list of types, one layer in `sliding_window_pattern` or `full_every`
    is full; 0 = none.
    """
    makers: dict[str, Callable[[], LayerShapes]] = {
        "full_attention": lambda: full_of(fields),
        "sliding_attention": lambda: sliding_of(fields, more),
    }
    fields.ignore("sliding_window")
    pattern = fields.size("sliding_window_pattern") if fields.has("sliding_window_pattern") else full_every
    if fields.has("layer_types"):
        return by_type(fields, makers)
    layers = num_layers(fields)
    if not fields.has("sliding_window"):
        return (full_of(fields),) * layers
    if not pattern:
        return (sliding_of(fields, more),) * layers
    return every(layers, pattern, pattern - 1, full_of(fields), sliding_of(fields, more))


def flagged(fields: Fields) -> Layers:
    """MiniMax M2: full attention in every layer, which a list of flags may say."""
    if set(fields.sizes("attn_type_list", MAX_LAYERS) if fields.has("attn_type_list") else ()) - {1}:
        fields.refuse("attn_type_list")
    fields.ignore("mtp_transformer_layers", "num_mtp_modules", "use_mtp")
    return dense(fields)


def windows_one_in(full_every: int, more: int = 0) -> Reader:
    """Return a reader of models of which one layer in `full_every` is full if the file does not say which."""

    def read(fields: Fields) -> Layers:
        fields.ignore("layer_switch", "order_of_interleaved_layers")
        return windows(fields, full_every, more)

    return read


def typed_windows(fields: Fields) -> Layers:
    """Full and sliding-window attention, as a list of types says; all full without windows."""
    if fields.has("sliding_window") and not fields.has("layer_types") and not fields.has("sliding_window_pattern"):
        raise InvalidArgument(
            f"it is missing, and the model type {fields.model_type[:40]!r} does not determine which layers have the "
            "sliding window",
            field="layer_types",
            remedy="add layer_types with one entry per layer, or sliding_window_pattern, to config.json",
        )
    return windows(fields)


def shared(reader: Reader) -> Reader:
    """Return a reader of models whose last layers read the cache of earlier ones and have none."""

    def read(fields: Fields) -> Layers:
        layers = reader(fields)
        count = fields.size("num_kv_shared_layers", 0, len(layers) - 1) if fields.has("num_kv_shared_layers") else 0
        return layers[: len(layers) - count] + ((),) * count

    return read


def two_head_sizes(fields: Fields) -> Layers:
    """Gemma 4: layers with full attention have heads of another size, and may have fewer."""
    layers = windows(fields, 6)
    if isinstance(layers[-1], Sliding):
        fields.reject("layer_types", "full_attention as the type of the last layer")
    fields.ignore("num_global_key_value_heads", "global_head_dim", "attention_k_eq_v")
    if fields.names("per_layer_config"):  # as transformers 5 writes it; null: all layers are equal
        sizes = _sizes_of_layers(fields, len(layers)) if fields.has("per_layer_config") else {}
        return tuple(
            replace(layer, head_size=sizes.get(number, layer.head_size)) if isinstance(layer, Full) else layer
            for number, layer in enumerate(layers)
        )
    heads = kv_heads(fields)
    if fields.get("attention_k_eq_v") and fields.has("num_global_key_value_heads"):
        heads = fields.size("num_global_key_value_heads")
    full = Full(heads, fields.size("global_head_dim"))
    return tuple(layer if isinstance(layer, Sliding) else full for layer in layers)


def _sizes_of_layers(fields: Fields, layers: int) -> dict[int, int]:
    """Return the head sizes of the layers that state their own."""
    found = {}
    listed = fields.inside("per_layer_config")
    for name in listed.all():
        one = listed.inside(name)
        if not name.isdecimal() or int(name) >= layers or set(one.all()) != {"head_dim"}:
            listed.refuse(name)
        found[int(name)] = one.size("head_dim")
    return found


def two_kinds_of_heads(fields: Fields) -> Layers:
    """MiMo V2: layers with windows have key-value heads of their own; values are smaller than keys."""
    flags = fields.sizes("hybrid_layer_pattern", MAX_LAYERS)
    fields.ignore("layer_types", "attention_chunk_size", "hybrid_block_size", "hidden_size", "num_attention_heads")
    fields.ignore("swa_num_attention_heads")
    window = fields.size("sliding_window_size" if fields.has("sliding_window_size") else "sliding_window")
    if fields.get("sliding_window", window) != window:
        fields.reject("sliding_window", f"{window}, as sliding_window_size is")
    full = Full(fields.size("num_key_value_heads"), fields.size("head_dim"), value_size=fields.size("v_head_dim"))
    heads, size = fields.size("swa_num_key_value_heads"), fields.size("swa_head_dim")
    sliding = Sliding(heads, size, window, value_size=fields.size("swa_v_head_dim"))
    if len(flags) != num_layers(fields):
        fields.reject("hybrid_layer_pattern", f"one entry for each of the {num_layers(fields)} layers")
    return tuple(sliding if flag else full for flag in flags)


def chunked(fields: Fields) -> Layers:
    """Llama 4: attention within chunks, and every fourth layer full."""
    full = full_of(fields)
    makers: dict[str, Callable[[], LayerShapes]] = {
        "full_attention": lambda: full,
        "chunked_attention": lambda: Chunked(full.kv_heads, full.head_size, fields.size("attention_chunk_size")),
    }
    interval = fields.size("no_rope_layer_interval") if fields.has("no_rope_layer_interval") else 4
    if fields.has("layer_types"):
        fields.ignore("attention_chunk_size")
        return by_type(fields, makers)
    return every(num_layers(fields), interval, interval - 1, full, makers["chunked_attention"]())


def latent(fields: Fields) -> Layers:
    """Multi-head latent attention in every layer."""
    return (_latent(fields),) * num_layers(fields)


def _latent(fields: Fields) -> Latent:
    fields.ignore("num_key_value_heads", "num_attention_heads", "hidden_size", "head_dim", "q_lora_rank")
    fields.ignore("qk_nope_head_dim", "qk_head_dim", "v_head_dim")
    return Latent(fields.size("kv_lora_rank") + fields.size("qk_rope_head_dim"))


def indexed(fields: Fields) -> Layers:
    """Latent attention to tokens that an indexer with keys of its own selects."""
    fields.ignore("index_n_heads", "index_topk", "layer_types", "indexer_rope_interleave")
    if set(fields.get("indexer_types", ())) - {"full"}:
        fields.refuse("indexer_types")
    size = fields.size("index_head_dim")
    keys = Indexer(size + size // _INDEXER_SCALE_BLOCK * 4)
    return ((keys, _latent(fields)),) * num_layers(fields)


def expanded_latent(fields: Fields) -> Layers:
    """MiniCPM 3: latent attention whose keys and values are cached expanded, with equal sizes."""
    fields.ignore("kv_lora_rank", "q_lora_rank", "v_head_dim", "qk_head_dim", "num_key_value_heads", "head_dim")
    fields.ignore("hidden_size")
    size = fields.size("qk_nope_head_dim") + fields.size("qk_rope_head_dim")
    return (Full(fields.size("num_attention_heads"), size),) * num_layers(fields)


# States


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
    attention = _latent(fields)
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


# Types whose layer for multi-token prediction has the cache of the last layer.
PREDICTS_LIKE_LAST = ("deepseek_v3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_GPT = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embd"}
READERS: dict[str, Reader] = {
    **dict.fromkeys(
        "arcee cohere ernie4_5 ernie4_5_moe flex_olmo gemma glm glm4 glm4_moe gpt_neox granite granitemoe "
        "granitemoeshared jais2 llama ministral3 mixtral olmo olmo2 olmoe opt persimmon phi phimoe qwen2 "
        "qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm".split(),
        dense,
    ),
    **dict.fromkeys(("gpt2", "gptj"), renamed(dense, **_GPT)),
    "falcon": multi_query,
    "minimax_m2": flagged,
    "gpt_bigcode": renamed(multi_query, **_GPT),
    **dict.fromkeys(("mistral", "phi3", "starcoder2"), windows),
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
