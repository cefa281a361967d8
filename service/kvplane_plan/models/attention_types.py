"""Readers of the layers of models with attention alone, and what readers of states use of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvplane.base.errors import InvalidArgument
from kvplane.base.layer_spec import DType
from kvplane_plan.models.config_fields import MAX_LAYERS, Fields
from kvplane_plan.models.shapes import Chunked, Compressed, Full, Indexer, Latent, LayerShapes, Sliding

Layers = tuple[LayerShapes, ...]
Reader = Callable[[Fields], Layers]
_INDEXER_SCALE_BLOCK = 128  # elements of an indexer's key that share a scale of four bytes
_COMPRESSED_ROW, _COMPRESSED_BYTES = 512, 584  # of DeepSeek V4: 448 of fp8, 64 of bfloat16, 8 of scales
_COMPRESS_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
_PACKED_ROW, _PACKED_BYTES = 576, 656  # of sparse attention in fp8 (Hopper): 512 of fp8, 4 scales, 64 of bfloat16


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
    fields.ignore("compression_ratio", "no_rope_layers")
    if fields.model_type == "llama":
        fields.ignore("attention_chunk_size")  # vLLM's Llama has no chunks, whatever the file says
    if fields.has("layer_types"):
        return by_type(fields, {"full_attention": lambda: full_of(fields)})
    return (full_of(fields),) * num_layers(fields)


def chat_glm(fields: Fields) -> Layers:
    """ChatGLM: full attention with few key-value heads; as vLLM, the size of a head is not that of `kv_channels`."""
    heads, hidden = fields.size("num_attention_heads"), fields.size("hidden_size")
    if hidden % heads:
        fields.reject("hidden_size", f"a multiple of the {heads} attention heads")
    fields.ignore("num_hidden_layers", "num_key_value_heads", "head_dim", "kv_channels", "multi_query_group_num")
    fields.ignore("apply_query_key_layer_scaling", "fp32_residual_connection", "interleaved_qkv", "padded_vocab_size")
    fields.ignore("apply_residual_connection_post_layernorm", "attention_softmax_in_fp32", "ffn_hidden_size")
    fields.ignore("post_layer_norm", "layernorm_epsilon")
    kv_heads = fields.size("multi_query_group_num") if fields.get("multi_query_attention") else heads
    return (Full(kv_heads, hidden // heads),) * fields.size("num_layers", most=MAX_LAYERS)


def renamed(reader: Reader, **names: str) -> Reader:
    """Return a reader of fields that have other names in config.json."""

    def read(fields: Fields) -> Layers:
        fields.rename(names)
        return reader(fields)

    return read


def multi_query(fields: Fields) -> Layers:
    """Falcon and GPT-BigCode: one key-value head, a number of them, or one per head."""
    fields.ignore("num_kv_heads", "multi_query", "n_head", "n_layer", "n_embed")
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
    fields.ignore("sliding_window_pattern", "sliding_window_size", "full_attn_mod")
    if fields.get("use_bidirectional_attention") not in (None, False, "vision"):
        fields.refuse("use_bidirectional_attention")  # the window is another one
    if fields.has("layer_types"):
        return by_type(fields, makers)
    pattern = fields.size("sliding_window_pattern") if fields.has("sliding_window_pattern") else full_every
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
    layers = num_layers(fields)
    interval = fields.size("no_rope_layer_interval") if fields.has("no_rope_layer_interval") else 4
    has_chunk = fields.has("attention_chunk_size")
    chunk = makers["chunked_attention"]() if has_chunk else full
    if fields.get("no_rope_layers"):
        flags = fields.sizes("no_rope_layers", MAX_LAYERS)
        if len(flags) != layers:
            fields.reject("no_rope_layers", f"one entry for each of the {layers} layers")
        read = tuple(chunk if flag else full for flag in flags)
    else:
        read = every(layers, interval, interval - 1, full, chunk)
    if fields.has("layer_types") and has_chunk and by_type(fields, makers) != read:
        fields.reject("layer_types", "chunked_attention where no_rope_layers (every fourth: 0) is not 0")
    return read


def latent(fields: Fields) -> Layers:
    """Multi-head latent attention in every layer."""
    return (latent_of(fields),) * num_layers(fields)


def latent_of(fields: Fields) -> Latent:
    """Return the shape of latent attention."""
    fields.ignore("num_key_value_heads", "num_attention_heads", "hidden_size", "head_dim", "q_lora_rank")
    fields.ignore("qk_nope_head_dim", "qk_head_dim", "v_head_dim")
    return Latent(fields.size("kv_lora_rank") + fields.size("qk_rope_head_dim"))


def indexed(fields: Fields) -> Layers:
    """Latent attention to tokens that an indexer selects, which has keys of its own; layers may share an indexer."""
    fields.ignore("index_n_heads", "index_topk", "layer_types", "indexer_rope_interleave")
    fields.ignore("indexer_types", "index_share_for_mtp_iteration")
    size, layers = fields.size("index_head_dim"), num_layers(fields)
    keys, latent = Indexer(size + size // _INDEXER_SCALE_BLOCK * 4), latent_of(fields)
    latent = replace(latent, packed_bytes=_PACKED_BYTES if latent.row_size == _PACKED_ROW else 0)
    every_one = fields.size("index_topk_freq") if fields.has("index_topk_freq") else 1
    first = fields.size("index_skip_topk_offset", least=0) if fields.has("index_skip_topk_offset") else 2
    shares = [bool(max(layer - first + 1, 0) % every_one) for layer in range(layers)]
    if fields.has("index_topk_pattern"):
        letters = fields.get("index_topk_pattern")
        if not isinstance(letters, str):
            fields.reject("index_topk_pattern", "a letter per layer")
        shares = [letters[layer : layer + 1] == "S" for layer in range(layers)]
    if fields.has("indexer_types") and [one == "shared" for one in fields.get("indexer_types")] != shares:
        fields.reject("indexer_types", "shared where index_topk_freq and index_topk_pattern state it")
    return tuple(latent if share else (keys, latent) for share in shares)


def compressed(fields: Fields) -> Layers:
    """DeepSeek V4: the last tokens as they are, and by layer all tokens compressed 4 to 1, of which an indexer selects,
    or 128 to 1. What a compressor has read is kept until it is compressed.
    """
    fields.ignore("hidden_size", "num_attention_heads", "num_key_value_heads", "q_lora_rank", "o_lora_rank")
    fields.ignore("qk_rope_head_dim", "index_n_heads", "index_topk", "compress_rope_theta", "num_hash_layers")
    fields.ignore("dspark_block_size", "dspark_target_layer_ids")
    row, keys = fields.size("head_dim"), fields.size("index_head_dim")
    if row != _COMPRESSED_ROW:
        fields.reject("head_dim", f"{_COMPRESSED_ROW}, the only size that the kernels of compressed attention have")
    last = Compressed("attn.swa_cache", 64, row, _COMPRESSED_BYTES, window=fields.size("sliding_window"))
    by_4 = Compressed("attn", 256, row, _COMPRESSED_BYTES, tokens_per_row=4)
    indexer = Compressed("attn.indexer", 256, keys + keys // _INDEXER_SCALE_BLOCK * 4, tokens_per_row=4)
    kinds: dict[int, LayerShapes] = {
        0: last,
        4: (indexer, _compressor(indexer, keys), last, by_4, _compressor(by_4, row)),
        128: (last, by_128 := replace(by_4, tokens_per_row=128), _compressor(by_128, row)),
    }
    return tuple(kinds[ratio] for ratio in _ratios(fields, tuple(kinds)))


def _compressor(cache: Compressed, size: int) -> Compressed:
    """Return the shape of what the compressor of a cache has read: a sum and its weights, twice if parts overlap."""
    parts = 2 if cache.tokens_per_row == 4 else 1
    window, name = parts * cache.tokens_per_row, f"{cache.name}.compressor.state_cache"
    return Compressed(name, 8 // parts, 2 * parts * size, dtype=DType.FLOAT32, window=window)


def _ratios(fields: Fields, known: tuple[int, ...]) -> list[int]:
    """Return how many tokens each layer compresses into one, 0 for none: by type, or as files before that state it."""
    layers = num_layers(fields)
    fields.ignore("compress_ratios", "compress_rates")
    if fields.has("layer_types"):
        rates = fields.inside("compress_rates") if fields.has("compress_rates") else Fields(_COMPRESS_RATES)
        if any(rates.get(name) != rate for name, rate in _COMPRESS_RATES.items()):
            fields.reject("compress_rates", f"{_COMPRESS_RATES}, which the kernels have")
        types = {"sliding_attention": 0, **_COMPRESS_RATES}
        found = fields.get("layer_types")
        ratios = [types.get(one, -1) for one in found] if isinstance(found, list) else []
        name, wanted = "layer_types", f"{', '.join(types)} for each of the {layers} layers"
    else:
        ratios = fields.sizes("compress_ratios", MAX_LAYERS)
        name, wanted = "compress_ratios", f"{', '.join(map(str, known))} for each of the {layers} layers"
    if len(ratios) < layers or not set(ratios) <= set(known):
        fields.reject(name, wanted)
    return ratios[:layers]  # the rest is of layers for prediction


def expanded_latent(fields: Fields) -> Layers:
    """MiniCPM 3: latent attention whose keys and values are cached expanded, with equal sizes."""
    fields.ignore("kv_lora_rank", "q_lora_rank", "v_head_dim", "qk_head_dim", "num_key_value_heads", "head_dim")
    fields.ignore("hidden_size")
    size = fields.size("qk_nope_head_dim") + fields.size("qk_rope_head_dim")
    return (Full(fields.size("num_attention_heads"), size),) * num_layers(fields)
