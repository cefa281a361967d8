from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GroupKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GROUP_KIND_UNSPECIFIED: _ClassVar[GroupKind]
    GROUP_KIND_FULL_ATTENTION: _ClassVar[GroupKind]
    GROUP_KIND_MLA_ATTENTION: _ClassVar[GroupKind]
    GROUP_KIND_SLIDING_WINDOW: _ClassVar[GroupKind]
    GROUP_KIND_SLIDING_WINDOW_MLA: _ClassVar[GroupKind]
    GROUP_KIND_CHUNKED_LOCAL_ATTENTION: _ClassVar[GroupKind]
    GROUP_KIND_MAMBA: _ClassVar[GroupKind]
    GROUP_KIND_CROSS_ATTENTION: _ClassVar[GroupKind]
    GROUP_KIND_SINK_FULL_ATTENTION: _ClassVar[GroupKind]
    GROUP_KIND_R_SWA: _ClassVar[GroupKind]
    GROUP_KIND_RING: _ClassVar[GroupKind]

class MambaMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MAMBA_MODE_UNSPECIFIED: _ClassVar[MambaMode]
    MAMBA_MODE_NONE: _ClassVar[MambaMode]
    MAMBA_MODE_ALIGN: _ClassVar[MambaMode]

class CommitRule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMMIT_RULE_UNSPECIFIED: _ClassVar[CommitRule]
    COMMIT_RULE_SAFE: _ClassVar[CommitRule]
    COMMIT_RULE_REFERENCE: _ClassVar[CommitRule]

class EvictionPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVICTION_POLICY_UNSPECIFIED: _ClassVar[EvictionPolicy]
    EVICTION_POLICY_LRU: _ClassVar[EvictionPolicy]
    EVICTION_POLICY_WINDOW_TAIL: _ClassVar[EvictionPolicy]
    EVICTION_POLICY_TURN_TAIL: _ClassVar[EvictionPolicy]
    EVICTION_POLICY_HAZARD: _ClassVar[EvictionPolicy]

class Planner(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLANNER_UNSPECIFIED: _ClassVar[Planner]
    PLANNER_REFERENCE: _ClassVar[Planner]
    PLANNER_BEST: _ClassVar[Planner]
    PLANNER_SPLIT: _ClassVar[Planner]

class HashAlgorithm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HASH_ALGORITHM_UNSPECIFIED: _ClassVar[HashAlgorithm]
    HASH_ALGORITHM_KVPLANE: _ClassVar[HashAlgorithm]
    HASH_ALGORITHM_SHA256: _ClassVar[HashAlgorithm]
    HASH_ALGORITHM_SHA256_CBOR: _ClassVar[HashAlgorithm]
    HASH_ALGORITHM_XXHASH: _ClassVar[HashAlgorithm]
    HASH_ALGORITHM_XXHASH_CBOR: _ClassVar[HashAlgorithm]

class TierKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_KIND_UNSPECIFIED: _ClassVar[TierKind]
    TIER_KIND_HOST: _ClassVar[TierKind]
    TIER_KIND_DISK: _ClassVar[TierKind]
    TIER_KIND_PEERS: _ClassVar[TierKind]

class SavePolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SAVE_POLICY_UNSPECIFIED: _ClassVar[SavePolicy]
    SAVE_POLICY_BEHIND: _ClassVar[SavePolicy]
    SAVE_POLICY_THROUGH: _ClassVar[SavePolicy]
    SAVE_POLICY_REUSE: _ClassVar[SavePolicy]

class Drafter(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFTER_UNSPECIFIED: _ClassVar[Drafter]
    DRAFTER_EAGLE: _ClassVar[Drafter]
    DRAFTER_MTP: _ClassVar[Drafter]
GROUP_KIND_UNSPECIFIED: GroupKind
GROUP_KIND_FULL_ATTENTION: GroupKind
GROUP_KIND_MLA_ATTENTION: GroupKind
GROUP_KIND_SLIDING_WINDOW: GroupKind
GROUP_KIND_SLIDING_WINDOW_MLA: GroupKind
GROUP_KIND_CHUNKED_LOCAL_ATTENTION: GroupKind
GROUP_KIND_MAMBA: GroupKind
GROUP_KIND_CROSS_ATTENTION: GroupKind
GROUP_KIND_SINK_FULL_ATTENTION: GroupKind
GROUP_KIND_R_SWA: GroupKind
GROUP_KIND_RING: GroupKind
MAMBA_MODE_UNSPECIFIED: MambaMode
MAMBA_MODE_NONE: MambaMode
MAMBA_MODE_ALIGN: MambaMode
COMMIT_RULE_UNSPECIFIED: CommitRule
COMMIT_RULE_SAFE: CommitRule
COMMIT_RULE_REFERENCE: CommitRule
EVICTION_POLICY_UNSPECIFIED: EvictionPolicy
EVICTION_POLICY_LRU: EvictionPolicy
EVICTION_POLICY_WINDOW_TAIL: EvictionPolicy
EVICTION_POLICY_TURN_TAIL: EvictionPolicy
EVICTION_POLICY_HAZARD: EvictionPolicy
PLANNER_UNSPECIFIED: Planner
PLANNER_REFERENCE: Planner
PLANNER_BEST: Planner
PLANNER_SPLIT: Planner
HASH_ALGORITHM_UNSPECIFIED: HashAlgorithm
HASH_ALGORITHM_KVPLANE: HashAlgorithm
HASH_ALGORITHM_SHA256: HashAlgorithm
HASH_ALGORITHM_SHA256_CBOR: HashAlgorithm
HASH_ALGORITHM_XXHASH: HashAlgorithm
HASH_ALGORITHM_XXHASH_CBOR: HashAlgorithm
TIER_KIND_UNSPECIFIED: TierKind
TIER_KIND_HOST: TierKind
TIER_KIND_DISK: TierKind
TIER_KIND_PEERS: TierKind
SAVE_POLICY_UNSPECIFIED: SavePolicy
SAVE_POLICY_BEHIND: SavePolicy
SAVE_POLICY_THROUGH: SavePolicy
SAVE_POLICY_REUSE: SavePolicy
DRAFTER_UNSPECIFIED: Drafter
DRAFTER_EAGLE: Drafter
DRAFTER_MTP: Drafter

class GroupSpec(_message.Message):
    __slots__ = ("kind", "block_size", "window", "chunk", "mamba_mode", "speculative_blocks", "sink_tokens", "is_draft", "drops_last_block", "admission_cap_blocks", "zero_new_blocks", "lookup_class", "layer_names", "page_bytes", "extra_retained_tokens", "checkpoint_alignment", "checkpoints_single_group_hits")
    KIND_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    MAMBA_MODE_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SINK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_DRAFT_FIELD_NUMBER: _ClassVar[int]
    DROPS_LAST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_CAP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ZERO_NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_CLASS_FIELD_NUMBER: _ClassVar[int]
    LAYER_NAMES_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXTRA_RETAINED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_ALIGNMENT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_SINGLE_GROUP_HITS_FIELD_NUMBER: _ClassVar[int]
    kind: GroupKind
    block_size: int
    window: int
    chunk: int
    mamba_mode: MambaMode
    speculative_blocks: int
    sink_tokens: int
    is_draft: bool
    drops_last_block: bool
    admission_cap_blocks: int
    zero_new_blocks: bool
    lookup_class: int
    layer_names: _containers.RepeatedScalarFieldContainer[str]
    page_bytes: int
    extra_retained_tokens: int
    checkpoint_alignment: int
    checkpoints_single_group_hits: bool
    def __init__(self, kind: _Optional[_Union[GroupKind, str]] = ..., block_size: _Optional[int] = ..., window: _Optional[int] = ..., chunk: _Optional[int] = ..., mamba_mode: _Optional[_Union[MambaMode, str]] = ..., speculative_blocks: _Optional[int] = ..., sink_tokens: _Optional[int] = ..., is_draft: bool = ..., drops_last_block: bool = ..., admission_cap_blocks: _Optional[int] = ..., zero_new_blocks: bool = ..., lookup_class: _Optional[int] = ..., layer_names: _Optional[_Iterable[str]] = ..., page_bytes: _Optional[int] = ..., extra_retained_tokens: _Optional[int] = ..., checkpoint_alignment: _Optional[int] = ..., checkpoints_single_group_hits: bool = ...) -> None: ...

class AlignSpec(_message.Message):
    __slots__ = ("block_size", "chunk_limit", "stop_at_tail")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_LIMIT_FIELD_NUMBER: _ClassVar[int]
    STOP_AT_TAIL_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    chunk_limit: int
    stop_at_tail: bool
    def __init__(self, block_size: _Optional[int] = ..., chunk_limit: _Optional[int] = ..., stop_at_tail: bool = ...) -> None: ...

class TierSpec(_message.Message):
    __slots__ = ("kind", "num_blocks", "save", "checkpoint_percent", "retained_percent")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_PERCENT_FIELD_NUMBER: _ClassVar[int]
    RETAINED_PERCENT_FIELD_NUMBER: _ClassVar[int]
    kind: TierKind
    num_blocks: int
    save: SavePolicy
    checkpoint_percent: int
    retained_percent: int
    def __init__(self, kind: _Optional[_Union[TierKind, str]] = ..., num_blocks: _Optional[int] = ..., save: _Optional[_Union[SavePolicy, str]] = ..., checkpoint_percent: _Optional[int] = ..., retained_percent: _Optional[int] = ...) -> None: ...

class ReplicaSpec(_message.Message):
    __slots__ = ("groups", "num_blocks", "max_model_len", "hash_block_size", "scheduler_block_size", "max_in_flight_tokens", "hash_algorithm", "hash_seed", "disable_caching", "retention_interval", "partial_hits", "watermark_blocks", "commit", "hash_lookahead_tokens", "prefill_lookahead", "keep_divergence_boundary", "align", "disable_events", "eviction", "tiers", "hint_values", "blocks_per_state", "pool")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    HASH_BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_IN_FLIGHT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    DISABLE_CACHING_FIELD_NUMBER: _ClassVar[int]
    RETENTION_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_HITS_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    HASH_LOOKAHEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_LOOKAHEAD_FIELD_NUMBER: _ClassVar[int]
    KEEP_DIVERGENCE_BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    ALIGN_FIELD_NUMBER: _ClassVar[int]
    DISABLE_EVENTS_FIELD_NUMBER: _ClassVar[int]
    EVICTION_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    HINT_VALUES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PER_STATE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[GroupSpec]
    num_blocks: int
    max_model_len: int
    hash_block_size: int
    scheduler_block_size: int
    max_in_flight_tokens: int
    hash_algorithm: HashAlgorithm
    hash_seed: str
    disable_caching: bool
    retention_interval: int
    partial_hits: bool
    watermark_blocks: int
    commit: CommitRule
    hash_lookahead_tokens: int
    prefill_lookahead: int
    keep_divergence_boundary: bool
    align: AlignSpec
    disable_events: bool
    eviction: EvictionPolicy
    tiers: _containers.RepeatedCompositeFieldContainer[TierSpec]
    hint_values: int
    blocks_per_state: int
    pool: TierKind
    def __init__(self, groups: _Optional[_Iterable[_Union[GroupSpec, _Mapping]]] = ..., num_blocks: _Optional[int] = ..., max_model_len: _Optional[int] = ..., hash_block_size: _Optional[int] = ..., scheduler_block_size: _Optional[int] = ..., max_in_flight_tokens: _Optional[int] = ..., hash_algorithm: _Optional[_Union[HashAlgorithm, str]] = ..., hash_seed: _Optional[str] = ..., disable_caching: bool = ..., retention_interval: _Optional[int] = ..., partial_hits: bool = ..., watermark_blocks: _Optional[int] = ..., commit: _Optional[_Union[CommitRule, str]] = ..., hash_lookahead_tokens: _Optional[int] = ..., prefill_lookahead: _Optional[int] = ..., keep_divergence_boundary: bool = ..., align: _Optional[_Union[AlignSpec, _Mapping]] = ..., disable_events: bool = ..., eviction: _Optional[_Union[EvictionPolicy, str]] = ..., tiers: _Optional[_Iterable[_Union[TierSpec, _Mapping]]] = ..., hint_values: _Optional[int] = ..., blocks_per_state: _Optional[int] = ..., pool: _Optional[_Union[TierKind, str]] = ...) -> None: ...

class ModelSource(_message.Message):
    __slots__ = ("model", "tensor_parallel", "cache_dtype", "block_size", "max_model_len", "memory_bytes", "num_blocks", "max_batched_tokens", "max_concurrent_batches", "disable_caching", "retention_interval", "watermark", "commit", "hash_algorithm", "hash_seed", "speculative_tokens", "drafter", "prefix_match_unit", "eviction", "planner", "config", "tiers", "hint_values")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONCURRENT_BATCHES_FIELD_NUMBER: _ClassVar[int]
    DISABLE_CACHING_FIELD_NUMBER: _ClassVar[int]
    RETENTION_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    PREFIX_MATCH_UNIT_FIELD_NUMBER: _ClassVar[int]
    EVICTION_FIELD_NUMBER: _ClassVar[int]
    PLANNER_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    HINT_VALUES_FIELD_NUMBER: _ClassVar[int]
    model: str
    tensor_parallel: int
    cache_dtype: str
    block_size: int
    max_model_len: int
    memory_bytes: int
    num_blocks: int
    max_batched_tokens: int
    max_concurrent_batches: int
    disable_caching: bool
    retention_interval: int
    watermark: float
    commit: CommitRule
    hash_algorithm: HashAlgorithm
    hash_seed: str
    speculative_tokens: int
    drafter: Drafter
    prefix_match_unit: int
    eviction: EvictionPolicy
    planner: Planner
    config: str
    tiers: _containers.RepeatedCompositeFieldContainer[TierSpec]
    hint_values: int
    def __init__(self, model: _Optional[str] = ..., tensor_parallel: _Optional[int] = ..., cache_dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_batched_tokens: _Optional[int] = ..., max_concurrent_batches: _Optional[int] = ..., disable_caching: bool = ..., retention_interval: _Optional[int] = ..., watermark: _Optional[float] = ..., commit: _Optional[_Union[CommitRule, str]] = ..., hash_algorithm: _Optional[_Union[HashAlgorithm, str]] = ..., hash_seed: _Optional[str] = ..., speculative_tokens: _Optional[int] = ..., drafter: _Optional[_Union[Drafter, str]] = ..., prefix_match_unit: _Optional[int] = ..., eviction: _Optional[_Union[EvictionPolicy, str]] = ..., planner: _Optional[_Union[Planner, str]] = ..., config: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[TierSpec, _Mapping]]] = ..., hint_values: _Optional[int] = ...) -> None: ...

class LayerFormat(_message.Message):
    __slots__ = ("kind", "block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "window", "chunk", "states", "mamba_mode", "speculative_blocks", "sink_tokens", "is_draft", "page_size_padded", "block_stride_alignment", "dcp_sharded", "state_bytes", "tokens_per_state", "page_alignment", "state_format", "max_tp_shards", "computes_window", "computes_chunk", "extra_retained_tokens", "hidden_state", "checkpoint_alignment")
    KIND_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_V_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    MAMBA_MODE_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SINK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_DRAFT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_PADDED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STRIDE_ALIGNMENT_FIELD_NUMBER: _ClassVar[int]
    DCP_SHARDED_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_STATE_FIELD_NUMBER: _ClassVar[int]
    PAGE_ALIGNMENT_FIELD_NUMBER: _ClassVar[int]
    STATE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    MAX_TP_SHARDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTES_WINDOW_FIELD_NUMBER: _ClassVar[int]
    COMPUTES_CHUNK_FIELD_NUMBER: _ClassVar[int]
    EXTRA_RETAINED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_ALIGNMENT_FIELD_NUMBER: _ClassVar[int]
    kind: GroupKind
    block_size: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    dtype: str
    window: int
    chunk: int
    states: _containers.RepeatedCompositeFieldContainer[StateTensor]
    mamba_mode: MambaMode
    speculative_blocks: int
    sink_tokens: int
    is_draft: bool
    page_size_padded: int
    block_stride_alignment: int
    dcp_sharded: bool
    state_bytes: int
    tokens_per_state: int
    page_alignment: int
    state_format: str
    max_tp_shards: int
    computes_window: int
    computes_chunk: int
    extra_retained_tokens: int
    hidden_state: bool
    checkpoint_alignment: int
    def __init__(self, kind: _Optional[_Union[GroupKind, str]] = ..., block_size: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_size: _Optional[int] = ..., head_size_v: _Optional[int] = ..., dtype: _Optional[str] = ..., window: _Optional[int] = ..., chunk: _Optional[int] = ..., states: _Optional[_Iterable[_Union[StateTensor, _Mapping]]] = ..., mamba_mode: _Optional[_Union[MambaMode, str]] = ..., speculative_blocks: _Optional[int] = ..., sink_tokens: _Optional[int] = ..., is_draft: bool = ..., page_size_padded: _Optional[int] = ..., block_stride_alignment: _Optional[int] = ..., dcp_sharded: bool = ..., state_bytes: _Optional[int] = ..., tokens_per_state: _Optional[int] = ..., page_alignment: _Optional[int] = ..., state_format: _Optional[str] = ..., max_tp_shards: _Optional[int] = ..., computes_window: _Optional[int] = ..., computes_chunk: _Optional[int] = ..., extra_retained_tokens: _Optional[int] = ..., hidden_state: bool = ..., checkpoint_alignment: _Optional[int] = ...) -> None: ...

class StateTensor(_message.Message):
    __slots__ = ("shape", "dtype")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ...) -> None: ...

class Layer(_message.Message):
    __slots__ = ("name", "format", "shares_with")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    SHARES_WITH_FIELD_NUMBER: _ClassVar[int]
    name: str
    format: LayerFormat
    shares_with: str
    def __init__(self, name: _Optional[str] = ..., format: _Optional[_Union[LayerFormat, _Mapping]] = ..., shares_with: _Optional[str] = ...) -> None: ...

class LayerSource(_message.Message):
    __slots__ = ("layers", "memory_bytes", "num_blocks", "max_model_len", "max_batched_tokens", "max_concurrent_batches", "block_outermost", "disable_caching", "retention_interval", "watermark", "commit", "hash_algorithm", "hash_seed", "decode_context_parallel", "stages", "speculative_tokens", "drafter", "prefix_match_unit", "eviction", "planner", "tiers", "hint_values")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONCURRENT_BATCHES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_OUTERMOST_FIELD_NUMBER: _ClassVar[int]
    DISABLE_CACHING_FIELD_NUMBER: _ClassVar[int]
    RETENTION_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    DECODE_CONTEXT_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    PREFIX_MATCH_UNIT_FIELD_NUMBER: _ClassVar[int]
    EVICTION_FIELD_NUMBER: _ClassVar[int]
    PLANNER_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    HINT_VALUES_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedCompositeFieldContainer[Layer]
    memory_bytes: int
    num_blocks: int
    max_model_len: int
    max_batched_tokens: int
    max_concurrent_batches: int
    block_outermost: bool
    disable_caching: bool
    retention_interval: int
    watermark: float
    commit: CommitRule
    hash_algorithm: HashAlgorithm
    hash_seed: str
    decode_context_parallel: int
    stages: _containers.RepeatedCompositeFieldContainer[PipelineStage]
    speculative_tokens: int
    drafter: Drafter
    prefix_match_unit: int
    eviction: EvictionPolicy
    planner: Planner
    tiers: _containers.RepeatedCompositeFieldContainer[TierSpec]
    hint_values: int
    def __init__(self, layers: _Optional[_Iterable[_Union[Layer, _Mapping]]] = ..., memory_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_batched_tokens: _Optional[int] = ..., max_concurrent_batches: _Optional[int] = ..., block_outermost: bool = ..., disable_caching: bool = ..., retention_interval: _Optional[int] = ..., watermark: _Optional[float] = ..., commit: _Optional[_Union[CommitRule, str]] = ..., hash_algorithm: _Optional[_Union[HashAlgorithm, str]] = ..., hash_seed: _Optional[str] = ..., decode_context_parallel: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[PipelineStage, _Mapping]]] = ..., speculative_tokens: _Optional[int] = ..., drafter: _Optional[_Union[Drafter, str]] = ..., prefix_match_unit: _Optional[int] = ..., eviction: _Optional[_Union[EvictionPolicy, str]] = ..., planner: _Optional[_Union[Planner, str]] = ..., tiers: _Optional[_Iterable[_Union[TierSpec, _Mapping]]] = ..., hint_values: _Optional[int] = ...) -> None: ...

class PipelineStage(_message.Message):
    __slots__ = ("layer_names",)
    LAYER_NAMES_FIELD_NUMBER: _ClassVar[int]
    layer_names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, layer_names: _Optional[_Iterable[str]] = ...) -> None: ...
