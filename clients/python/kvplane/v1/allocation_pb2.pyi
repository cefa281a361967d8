from kvplane.v1 import plan_pb2 as _plan_pb2
from kvplane.v1 import replica_pb2 as _replica_pb2
from kvplane.v1 import step_pb2 as _step_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReplicaState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLICA_STATE_UNSPECIFIED: _ClassVar[ReplicaState]
    REPLICA_STATE_IDLE: _ClassVar[ReplicaState]
    REPLICA_STATE_LIVE: _ClassVar[ReplicaState]
    REPLICA_STATE_LAPSED: _ClassVar[ReplicaState]
    REPLICA_STATE_RECOVERING: _ClassVar[ReplicaState]
    REPLICA_STATE_OPENING: _ClassVar[ReplicaState]
    REPLICA_STATE_DIVERGED: _ClassVar[ReplicaState]

class StoreState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STORE_STATE_UNSPECIFIED: _ClassVar[StoreState]
    STORE_STATE_OFF: _ClassVar[StoreState]
    STORE_STATE_OK: _ClassVar[StoreState]
    STORE_STATE_CATCHING_UP: _ClassVar[StoreState]
    STORE_STATE_DEGRADED: _ClassVar[StoreState]

class WatermarkUse(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WATERMARK_USE_UNSPECIFIED: _ClassVar[WatermarkUse]
    WATERMARK_USE_ALWAYS: _ClassVar[WatermarkUse]
    WATERMARK_USE_NEVER: _ClassVar[WatermarkUse]

class AllocationStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ALLOCATION_STATUS_UNSPECIFIED: _ClassVar[AllocationStatus]
    ALLOCATION_STATUS_GRANTED: _ClassVar[AllocationStatus]
    ALLOCATION_STATUS_REFUSED: _ClassVar[AllocationStatus]
    ALLOCATION_STATUS_DEFERRED: _ClassVar[AllocationStatus]
    ALLOCATION_STATUS_STALE_HIT: _ClassVar[AllocationStatus]
    ALLOCATION_STATUS_NOTHING_TO_DO: _ClassVar[AllocationStatus]
    ALLOCATION_STATUS_NEVER_FITS: _ClassVar[AllocationStatus]

class EndKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    END_KIND_UNSPECIFIED: _ClassVar[EndKind]
    END_KIND_FREE: _ClassVar[EndKind]
    END_KIND_HELD: _ClassVar[EndKind]
    END_KIND_PREEMPTED: _ClassVar[EndKind]
    END_KIND_RELEASED: _ClassVar[EndKind]

class PrefetchOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PREFETCH_OUTCOME_UNSPECIFIED: _ClassVar[PrefetchOutcome]
    PREFETCH_OUTCOME_ALL: _ClassVar[PrefetchOutcome]
    PREFETCH_OUTCOME_TOO_LATE: _ClassVar[PrefetchOutcome]
    PREFETCH_OUTCOME_TOO_MANY: _ClassVar[PrefetchOutcome]
REPLICA_STATE_UNSPECIFIED: ReplicaState
REPLICA_STATE_IDLE: ReplicaState
REPLICA_STATE_LIVE: ReplicaState
REPLICA_STATE_LAPSED: ReplicaState
REPLICA_STATE_RECOVERING: ReplicaState
REPLICA_STATE_OPENING: ReplicaState
REPLICA_STATE_DIVERGED: ReplicaState
STORE_STATE_UNSPECIFIED: StoreState
STORE_STATE_OFF: StoreState
STORE_STATE_OK: StoreState
STORE_STATE_CATCHING_UP: StoreState
STORE_STATE_DEGRADED: StoreState
WATERMARK_USE_UNSPECIFIED: WatermarkUse
WATERMARK_USE_ALWAYS: WatermarkUse
WATERMARK_USE_NEVER: WatermarkUse
ALLOCATION_STATUS_UNSPECIFIED: AllocationStatus
ALLOCATION_STATUS_GRANTED: AllocationStatus
ALLOCATION_STATUS_REFUSED: AllocationStatus
ALLOCATION_STATUS_DEFERRED: AllocationStatus
ALLOCATION_STATUS_STALE_HIT: AllocationStatus
ALLOCATION_STATUS_NOTHING_TO_DO: AllocationStatus
ALLOCATION_STATUS_NEVER_FITS: AllocationStatus
END_KIND_UNSPECIFIED: EndKind
END_KIND_FREE: EndKind
END_KIND_HELD: EndKind
END_KIND_PREEMPTED: EndKind
END_KIND_RELEASED: EndKind
PREFETCH_OUTCOME_UNSPECIFIED: PrefetchOutcome
PREFETCH_OUTCOME_ALL: PrefetchOutcome
PREFETCH_OUTCOME_TOO_LATE: PrefetchOutcome
PREFETCH_OUTCOME_TOO_MANY: PrefetchOutcome

class RegisterReplicaRequest(_message.Message):
    __slots__ = ("replica", "spec", "model", "layers", "num_ranks", "namespace_digest", "model_name")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    replica: str
    spec: _replica_pb2.ReplicaSpec
    model: _replica_pb2.ModelSource
    layers: _replica_pb2.LayerSource
    num_ranks: int
    namespace_digest: bytes
    model_name: str
    def __init__(self, replica: _Optional[str] = ..., spec: _Optional[_Union[_replica_pb2.ReplicaSpec, _Mapping]] = ..., model: _Optional[_Union[_replica_pb2.ModelSource, _Mapping]] = ..., layers: _Optional[_Union[_replica_pb2.LayerSource, _Mapping]] = ..., num_ranks: _Optional[int] = ..., namespace_digest: _Optional[bytes] = ..., model_name: _Optional[str] = ...) -> None: ...

class RegisterReplicaResponse(_message.Message):
    __slots__ = ("spec", "bytes_per_block", "max_concurrency", "warnings", "epoch")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    MAX_CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    spec: _replica_pb2.ReplicaSpec
    bytes_per_block: int
    max_concurrency: float
    warnings: _containers.RepeatedScalarFieldContainer[str]
    epoch: int
    def __init__(self, spec: _Optional[_Union[_replica_pb2.ReplicaSpec, _Mapping]] = ..., bytes_per_block: _Optional[int] = ..., max_concurrency: _Optional[float] = ..., warnings: _Optional[_Iterable[str]] = ..., epoch: _Optional[int] = ...) -> None: ...

class DeregisterReplicaRequest(_message.Message):
    __slots__ = ("replica", "epoch")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    replica: str
    epoch: int
    def __init__(self, replica: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class DeregisterReplicaResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GroupCounters(_message.Message):
    __slots__ = ("used_blocks", "cached_blocks", "allocated_blocks", "hit_blocks", "evicted_blocks")
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    used_blocks: int
    cached_blocks: int
    allocated_blocks: int
    hit_blocks: int
    evicted_blocks: int
    def __init__(self, used_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., allocated_blocks: _Optional[int] = ..., hit_blocks: _Optional[int] = ..., evicted_blocks: _Optional[int] = ...) -> None: ...

class ReplicaCounters(_message.Message):
    __slots__ = ("steps", "admitted", "ended", "preempted", "refused", "queried_tokens", "hit_tokens", "granted_tokens", "withdrawn_keys", "evicted_keys", "groups", "unaligned_chunks")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRANTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_KEYS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_KEYS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    UNALIGNED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    admitted: int
    ended: int
    preempted: int
    refused: int
    queried_tokens: int
    hit_tokens: int
    granted_tokens: int
    withdrawn_keys: int
    evicted_keys: int
    groups: _containers.RepeatedCompositeFieldContainer[GroupCounters]
    unaligned_chunks: int
    def __init__(self, steps: _Optional[int] = ..., admitted: _Optional[int] = ..., ended: _Optional[int] = ..., preempted: _Optional[int] = ..., refused: _Optional[int] = ..., queried_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., granted_tokens: _Optional[int] = ..., withdrawn_keys: _Optional[int] = ..., evicted_keys: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GroupCounters, _Mapping]]] = ..., unaligned_chunks: _Optional[int] = ...) -> None: ...

class Residency(_message.Message):
    __slots__ = ("lifetime", "idle_before_evict", "reuse_gap")
    LIFETIME_FIELD_NUMBER: _ClassVar[int]
    IDLE_BEFORE_EVICT_FIELD_NUMBER: _ClassVar[int]
    REUSE_GAP_FIELD_NUMBER: _ClassVar[int]
    lifetime: _containers.RepeatedScalarFieldContainer[int]
    idle_before_evict: _containers.RepeatedScalarFieldContainer[int]
    reuse_gap: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lifetime: _Optional[_Iterable[int]] = ..., idle_before_evict: _Optional[_Iterable[int]] = ..., reuse_gap: _Optional[_Iterable[int]] = ...) -> None: ...

class DescribeReplicaRequest(_message.Message):
    __slots__ = ("replica", "map_cells", "with_history")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    MAP_CELLS_FIELD_NUMBER: _ClassVar[int]
    WITH_HISTORY_FIELD_NUMBER: _ClassVar[int]
    replica: str
    map_cells: int
    with_history: bool
    def __init__(self, replica: _Optional[str] = ..., map_cells: _Optional[int] = ..., with_history: bool = ...) -> None: ...

class DescribeReplicaResponse(_message.Message):
    __slots__ = ("replica", "spec", "state", "epoch", "free_blocks", "running_requests", "seq", "executed_through", "counters", "num_ranks", "common_prefix_blocks", "residency", "workers", "event_seq", "refusals", "preemptions", "removed_keys", "slowest_steps", "store", "busy_blocks", "mirror", "miss_curve", "core", "tiers", "tier_jobs", "tier_counts", "retained_prefixes", "retained_blocks", "retain_counts", "slack_blocks", "waiting_requests", "model_name", "age_ms", "last_seen_ms", "pool_map", "history", "peer_namespace", "peers")
    class RefusalsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class PreemptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RemovedKeysEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class TierJobsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class TierCountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RetainCountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    EXECUTED_THROUGH_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    COMMON_PREFIX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    EVENT_SEQ_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_KEYS_FIELD_NUMBER: _ClassVar[int]
    SLOWEST_STEPS_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    BUSY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MIRROR_FIELD_NUMBER: _ClassVar[int]
    MISS_CURVE_FIELD_NUMBER: _ClassVar[int]
    CORE_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    TIER_JOBS_FIELD_NUMBER: _ClassVar[int]
    TIER_COUNTS_FIELD_NUMBER: _ClassVar[int]
    RETAINED_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    RETAINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RETAIN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    SLACK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_MS_FIELD_NUMBER: _ClassVar[int]
    POOL_MAP_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    PEER_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    replica: str
    spec: _replica_pb2.ReplicaSpec
    state: ReplicaState
    epoch: int
    free_blocks: int
    running_requests: int
    seq: int
    executed_through: int
    counters: ReplicaCounters
    num_ranks: int
    common_prefix_blocks: _containers.RepeatedScalarFieldContainer[int]
    residency: Residency
    workers: _containers.RepeatedCompositeFieldContainer[_plan_pb2.WorkerInfo]
    event_seq: int
    refusals: _containers.ScalarMap[str, int]
    preemptions: _containers.ScalarMap[str, int]
    removed_keys: _containers.ScalarMap[str, int]
    slowest_steps: _containers.RepeatedCompositeFieldContainer[StepTime]
    store: StoreStatus
    busy_blocks: int
    mirror: MirrorStatus
    miss_curve: MissCurve
    core: CoreStatus
    tiers: _containers.RepeatedCompositeFieldContainer[TierStatus]
    tier_jobs: _containers.ScalarMap[str, int]
    tier_counts: _containers.ScalarMap[str, int]
    retained_prefixes: int
    retained_blocks: int
    retain_counts: _containers.ScalarMap[str, int]
    slack_blocks: int
    waiting_requests: int
    model_name: str
    age_ms: int
    last_seen_ms: int
    pool_map: PoolMap
    history: ReplicaHistory
    peer_namespace: bytes
    peers: _containers.RepeatedCompositeFieldContainer[PeerStatus]
    def __init__(self, replica: _Optional[str] = ..., spec: _Optional[_Union[_replica_pb2.ReplicaSpec, _Mapping]] = ..., state: _Optional[_Union[ReplicaState, str]] = ..., epoch: _Optional[int] = ..., free_blocks: _Optional[int] = ..., running_requests: _Optional[int] = ..., seq: _Optional[int] = ..., executed_through: _Optional[int] = ..., counters: _Optional[_Union[ReplicaCounters, _Mapping]] = ..., num_ranks: _Optional[int] = ..., common_prefix_blocks: _Optional[_Iterable[int]] = ..., residency: _Optional[_Union[Residency, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[_plan_pb2.WorkerInfo, _Mapping]]] = ..., event_seq: _Optional[int] = ..., refusals: _Optional[_Mapping[str, int]] = ..., preemptions: _Optional[_Mapping[str, int]] = ..., removed_keys: _Optional[_Mapping[str, int]] = ..., slowest_steps: _Optional[_Iterable[_Union[StepTime, _Mapping]]] = ..., store: _Optional[_Union[StoreStatus, _Mapping]] = ..., busy_blocks: _Optional[int] = ..., mirror: _Optional[_Union[MirrorStatus, _Mapping]] = ..., miss_curve: _Optional[_Union[MissCurve, _Mapping]] = ..., core: _Optional[_Union[CoreStatus, _Mapping]] = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., tier_jobs: _Optional[_Mapping[str, int]] = ..., tier_counts: _Optional[_Mapping[str, int]] = ..., retained_prefixes: _Optional[int] = ..., retained_blocks: _Optional[int] = ..., retain_counts: _Optional[_Mapping[str, int]] = ..., slack_blocks: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., model_name: _Optional[str] = ..., age_ms: _Optional[int] = ..., last_seen_ms: _Optional[int] = ..., pool_map: _Optional[_Union[PoolMap, _Mapping]] = ..., history: _Optional[_Union[ReplicaHistory, _Mapping]] = ..., peer_namespace: _Optional[bytes] = ..., peers: _Optional[_Iterable[_Union[PeerStatus, _Mapping]]] = ...) -> None: ...

class PeerStatus(_message.Message):
    __slots__ = ("replica", "service", "num_slots", "held_blocks", "is_read")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IS_READ_FIELD_NUMBER: _ClassVar[int]
    replica: str
    service: str
    num_slots: int
    held_blocks: int
    is_read: bool
    def __init__(self, replica: _Optional[str] = ..., service: _Optional[str] = ..., num_slots: _Optional[int] = ..., held_blocks: _Optional[int] = ..., is_read: bool = ...) -> None: ...

class PoolMap(_message.Message):
    __slots__ = ("cells", "groups", "other")
    CELLS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    cells: int
    groups: _containers.RepeatedCompositeFieldContainer[GroupMap]
    other: bytes
    def __init__(self, cells: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GroupMap, _Mapping]]] = ..., other: _Optional[bytes] = ...) -> None: ...

class GroupMap(_message.Message):
    __slots__ = ("held", "cached")
    HELD_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    held: bytes
    cached: bytes
    def __init__(self, held: _Optional[bytes] = ..., cached: _Optional[bytes] = ...) -> None: ...

class ReplicaHistory(_message.Message):
    __slots__ = ("interval_ms", "held", "hit", "running", "waiting", "steps_per_s")
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    HIT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    held: _containers.RepeatedScalarFieldContainer[float]
    hit: _containers.RepeatedScalarFieldContainer[float]
    running: _containers.RepeatedScalarFieldContainer[float]
    waiting: _containers.RepeatedScalarFieldContainer[float]
    steps_per_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, interval_ms: _Optional[int] = ..., held: _Optional[_Iterable[float]] = ..., hit: _Optional[_Iterable[float]] = ..., running: _Optional[_Iterable[float]] = ..., waiting: _Optional[_Iterable[float]] = ..., steps_per_s: _Optional[_Iterable[float]] = ...) -> None: ...

class TierStatus(_message.Message):
    __slots__ = ("kind", "num_blocks", "held_blocks", "shadow_blocks", "free_blocks", "hit_tokens", "groups", "retained_blocks")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHADOW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    RETAINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    kind: _replica_pb2.TierKind
    num_blocks: int
    held_blocks: int
    shadow_blocks: int
    free_blocks: int
    hit_tokens: int
    groups: _containers.RepeatedCompositeFieldContainer[TierGroup]
    retained_blocks: int
    def __init__(self, kind: _Optional[_Union[_replica_pb2.TierKind, str]] = ..., num_blocks: _Optional[int] = ..., held_blocks: _Optional[int] = ..., shadow_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[TierGroup, _Mapping]]] = ..., retained_blocks: _Optional[int] = ...) -> None: ...

class TierGroup(_message.Message):
    __slots__ = ("held_blocks", "stored_blocks", "loaded_blocks", "evicted_blocks")
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    held_blocks: int
    stored_blocks: int
    loaded_blocks: int
    evicted_blocks: int
    def __init__(self, held_blocks: _Optional[int] = ..., stored_blocks: _Optional[int] = ..., loaded_blocks: _Optional[int] = ..., evicted_blocks: _Optional[int] = ...) -> None: ...

class MissCurve(_message.Message):
    __slots__ = ("queried_tokens", "sizes")
    QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    queried_tokens: int
    sizes: _containers.RepeatedCompositeFieldContainer[SizeHits]
    def __init__(self, queried_tokens: _Optional[int] = ..., sizes: _Optional[_Iterable[_Union[SizeHits, _Mapping]]] = ...) -> None: ...

class SizeHits(_message.Message):
    __slots__ = ("blocks", "hit_tokens")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    hit_tokens: int
    def __init__(self, blocks: _Optional[int] = ..., hit_tokens: _Optional[int] = ...) -> None: ...

class CoreStatus(_message.Message):
    __slots__ = ("name", "fallbacks", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    fallbacks: int
    reason: str
    def __init__(self, name: _Optional[str] = ..., fallbacks: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class MirrorStatus(_message.Message):
    __slots__ = ("lag_steps", "lag_ms", "hidden", "images", "divergences", "diverged_seq", "diverged")
    LAG_STEPS_FIELD_NUMBER: _ClassVar[int]
    LAG_MS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    DIVERGENCES_FIELD_NUMBER: _ClassVar[int]
    DIVERGED_SEQ_FIELD_NUMBER: _ClassVar[int]
    DIVERGED_FIELD_NUMBER: _ClassVar[int]
    lag_steps: int
    lag_ms: int
    hidden: str
    images: int
    divergences: int
    diverged_seq: int
    diverged: str
    def __init__(self, lag_steps: _Optional[int] = ..., lag_ms: _Optional[int] = ..., hidden: _Optional[str] = ..., images: _Optional[int] = ..., divergences: _Optional[int] = ..., diverged_seq: _Optional[int] = ..., diverged: _Optional[str] = ...) -> None: ...

class StepTime(_message.Message):
    __slots__ = ("epoch", "seq", "took_ns", "rows", "age_ms")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    TOOK_NS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    seq: int
    took_ns: int
    rows: int
    age_ms: int
    def __init__(self, epoch: _Optional[int] = ..., seq: _Optional[int] = ..., took_ns: _Optional[int] = ..., rows: _Optional[int] = ..., age_ms: _Optional[int] = ...) -> None: ...

class StoreStatus(_message.Message):
    __slots__ = ("state", "lag_entries", "lag_ms", "resync_blocks", "failures", "problem", "loaded_entries", "recovered_entries", "refused_chunks", "loading")
    class RefusedChunksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    LAG_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    LAG_MS_FIELD_NUMBER: _ClassVar[int]
    RESYNC_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    LOADED_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    RECOVERED_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    state: StoreState
    lag_entries: int
    lag_ms: int
    resync_blocks: int
    failures: int
    problem: str
    loaded_entries: int
    recovered_entries: int
    refused_chunks: _containers.ScalarMap[str, int]
    loading: bool
    def __init__(self, state: _Optional[_Union[StoreState, str]] = ..., lag_entries: _Optional[int] = ..., lag_ms: _Optional[int] = ..., resync_blocks: _Optional[int] = ..., failures: _Optional[int] = ..., problem: _Optional[str] = ..., loaded_entries: _Optional[int] = ..., recovered_entries: _Optional[int] = ..., refused_chunks: _Optional[_Mapping[str, int]] = ..., loading: bool = ...) -> None: ...

class ListReplicasRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ReplicaSummary(_message.Message):
    __slots__ = ("replica", "state", "epoch", "num_blocks", "free_blocks", "running_requests", "waiting_requests", "model_name", "age_ms", "last_seen_ms", "steps", "queried_tokens", "hit_tokens")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_MS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    replica: str
    state: ReplicaState
    epoch: int
    num_blocks: int
    free_blocks: int
    running_requests: int
    waiting_requests: int
    model_name: str
    age_ms: int
    last_seen_ms: int
    steps: int
    queried_tokens: int
    hit_tokens: int
    def __init__(self, replica: _Optional[str] = ..., state: _Optional[_Union[ReplicaState, str]] = ..., epoch: _Optional[int] = ..., num_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., model_name: _Optional[str] = ..., age_ms: _Optional[int] = ..., last_seen_ms: _Optional[int] = ..., steps: _Optional[int] = ..., queried_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ...) -> None: ...

class ListReplicasResponse(_message.Message):
    __slots__ = ("replicas", "next_page_token")
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaSummary]
    next_page_token: str
    def __init__(self, replicas: _Optional[_Iterable[_Union[ReplicaSummary, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class RequestContent(_message.Message):
    __slots__ = ("token_ids", "hashes", "num_tokens", "extra_keys", "domain", "skip_reading", "max_tokens")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEYS_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    SKIP_READING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    num_tokens: int
    extra_keys: _step_pb2.ExtraKeys
    domain: str
    skip_reading: bool
    max_tokens: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., hashes: _Optional[_Iterable[bytes]] = ..., num_tokens: _Optional[int] = ..., extra_keys: _Optional[_Union[_step_pb2.ExtraKeys, _Mapping]] = ..., domain: _Optional[str] = ..., skip_reading: bool = ..., max_tokens: _Optional[int] = ...) -> None: ...

class AppendedTokens(_message.Message):
    __slots__ = ("token_ids", "num_tokens", "hashes")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: int
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[int] = ..., hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class MutationHeader(_message.Message):
    __slots__ = ("replica", "epoch", "op_id", "more", "executed_through")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OP_ID_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    EXECUTED_THROUGH_FIELD_NUMBER: _ClassVar[int]
    replica: str
    epoch: int
    op_id: str
    more: bool
    executed_through: int
    def __init__(self, replica: _Optional[str] = ..., epoch: _Optional[int] = ..., op_id: _Optional[str] = ..., more: bool = ..., executed_through: _Optional[int] = ...) -> None: ...

class GroupBlocks(_message.Message):
    __slots__ = ("block_ids",)
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PageCopy(_message.Message):
    __slots__ = ("group", "src_block", "dst_block")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SRC_BLOCK_FIELD_NUMBER: _ClassVar[int]
    DST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    group: int
    src_block: int
    dst_block: int
    def __init__(self, group: _Optional[int] = ..., src_block: _Optional[int] = ..., dst_block: _Optional[int] = ...) -> None: ...

class BlockStamp(_message.Message):
    __slots__ = ("block", "stamp")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    block: int
    stamp: int
    def __init__(self, block: _Optional[int] = ..., stamp: _Optional[int] = ...) -> None: ...

class PageZero(_message.Message):
    __slots__ = ("group", "block")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    group: int
    block: int
    def __init__(self, group: _Optional[int] = ..., block: _Optional[int] = ...) -> None: ...

class RankOrders(_message.Message):
    __slots__ = ("stamps", "copies", "zeroes")
    STAMPS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    ZEROES_FIELD_NUMBER: _ClassVar[int]
    stamps: _containers.RepeatedCompositeFieldContainer[BlockStamp]
    copies: _containers.RepeatedCompositeFieldContainer[PageCopy]
    zeroes: _containers.RepeatedCompositeFieldContainer[PageZero]
    def __init__(self, stamps: _Optional[_Iterable[_Union[BlockStamp, _Mapping]]] = ..., copies: _Optional[_Iterable[_Union[PageCopy, _Mapping]]] = ..., zeroes: _Optional[_Iterable[_Union[PageZero, _Mapping]]] = ...) -> None: ...

class MutationResult(_message.Message):
    __slots__ = ("seq", "free_blocks", "orders", "events")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    free_blocks: int
    orders: RankOrders
    events: _containers.RepeatedCompositeFieldContainer[_step_pb2.CacheEvent]
    def __init__(self, seq: _Optional[int] = ..., free_blocks: _Optional[int] = ..., orders: _Optional[_Union[RankOrders, _Mapping]] = ..., events: _Optional[_Iterable[_Union[_step_pb2.CacheEvent, _Mapping]]] = ...) -> None: ...

class FindCacheHitRequest(_message.Message):
    __slots__ = ("replica", "content", "request_id", "with_blocks")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WITH_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    replica: str
    content: RequestContent
    request_id: str
    with_blocks: bool
    def __init__(self, replica: _Optional[str] = ..., content: _Optional[_Union[RequestContent, _Mapping]] = ..., request_id: _Optional[str] = ..., with_blocks: bool = ...) -> None: ...

class FindCacheHitResponse(_message.Message):
    __slots__ = ("hit_tokens", "single_group_hit", "num_tokens", "num_hashes", "last_hash", "blocks")
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SINGLE_GROUP_HIT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_HASHES_FIELD_NUMBER: _ClassVar[int]
    LAST_HASH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    hit_tokens: int
    single_group_hit: int
    num_tokens: int
    num_hashes: int
    last_hash: bytes
    blocks: _containers.RepeatedCompositeFieldContainer[GroupBlocks]
    def __init__(self, hit_tokens: _Optional[int] = ..., single_group_hit: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_hashes: _Optional[int] = ..., last_hash: _Optional[bytes] = ..., blocks: _Optional[_Iterable[_Union[GroupBlocks, _Mapping]]] = ...) -> None: ...

class AllocateSlotsRequest(_message.Message):
    __slots__ = ("header", "request_id", "content", "computed_tokens", "appended", "max_new_tokens", "extra_tokens", "lookahead_tokens", "external_tokens", "in_flight_tokens", "delay_caching", "full_fit", "encoder_tokens", "reserved_blocks", "watermark", "expected_hit_tokens", "victims", "unaligned")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    APPENDED_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DELAY_CACHING_FIELD_NUMBER: _ClassVar[int]
    FULL_FIT_FIELD_NUMBER: _ClassVar[int]
    ENCODER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VICTIMS_FIELD_NUMBER: _ClassVar[int]
    UNALIGNED_FIELD_NUMBER: _ClassVar[int]
    header: MutationHeader
    request_id: str
    content: RequestContent
    computed_tokens: int
    appended: AppendedTokens
    max_new_tokens: int
    extra_tokens: int
    lookahead_tokens: int
    external_tokens: int
    in_flight_tokens: int
    delay_caching: bool
    full_fit: bool
    encoder_tokens: int
    reserved_blocks: int
    watermark: WatermarkUse
    expected_hit_tokens: int
    victims: _containers.RepeatedScalarFieldContainer[str]
    unaligned: bool
    def __init__(self, header: _Optional[_Union[MutationHeader, _Mapping]] = ..., request_id: _Optional[str] = ..., content: _Optional[_Union[RequestContent, _Mapping]] = ..., computed_tokens: _Optional[int] = ..., appended: _Optional[_Union[AppendedTokens, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., extra_tokens: _Optional[int] = ..., lookahead_tokens: _Optional[int] = ..., external_tokens: _Optional[int] = ..., in_flight_tokens: _Optional[int] = ..., delay_caching: bool = ..., full_fit: bool = ..., encoder_tokens: _Optional[int] = ..., reserved_blocks: _Optional[int] = ..., watermark: _Optional[_Union[WatermarkUse, str]] = ..., expected_hit_tokens: _Optional[int] = ..., victims: _Optional[_Iterable[str]] = ..., unaligned: bool = ...) -> None: ...

class AllocateSlotsResponse(_message.Message):
    __slots__ = ("status", "hit_tokens", "granted_tokens", "single_group_hit", "new_blocks", "block_table", "preempted", "result", "num_hashes", "last_hash", "load_after", "needed_blocks")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRANTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SINGLE_GROUP_HIT_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLE_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    NUM_HASHES_FIELD_NUMBER: _ClassVar[int]
    LAST_HASH_FIELD_NUMBER: _ClassVar[int]
    LOAD_AFTER_FIELD_NUMBER: _ClassVar[int]
    NEEDED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    status: AllocationStatus
    hit_tokens: int
    granted_tokens: int
    single_group_hit: int
    new_blocks: _containers.RepeatedCompositeFieldContainer[GroupBlocks]
    block_table: _containers.RepeatedCompositeFieldContainer[GroupBlocks]
    preempted: _containers.RepeatedScalarFieldContainer[str]
    result: MutationResult
    num_hashes: int
    last_hash: bytes
    load_after: int
    needed_blocks: int
    def __init__(self, status: _Optional[_Union[AllocationStatus, str]] = ..., hit_tokens: _Optional[int] = ..., granted_tokens: _Optional[int] = ..., single_group_hit: _Optional[int] = ..., new_blocks: _Optional[_Iterable[_Union[GroupBlocks, _Mapping]]] = ..., block_table: _Optional[_Iterable[_Union[GroupBlocks, _Mapping]]] = ..., preempted: _Optional[_Iterable[str]] = ..., result: _Optional[_Union[MutationResult, _Mapping]] = ..., num_hashes: _Optional[int] = ..., last_hash: _Optional[bytes] = ..., load_after: _Optional[int] = ..., needed_blocks: _Optional[int] = ...) -> None: ...

class CommitBlocksRequest(_message.Message):
    __slots__ = ("header", "request_id", "computed_tokens", "appended", "commit_tokens")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    APPENDED_FIELD_NUMBER: _ClassVar[int]
    COMMIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    header: MutationHeader
    request_id: str
    computed_tokens: int
    appended: AppendedTokens
    commit_tokens: int
    def __init__(self, header: _Optional[_Union[MutationHeader, _Mapping]] = ..., request_id: _Optional[str] = ..., computed_tokens: _Optional[int] = ..., appended: _Optional[_Union[AppendedTokens, _Mapping]] = ..., commit_tokens: _Optional[int] = ...) -> None: ...

class CommitBlocksResponse(_message.Message):
    __slots__ = ("num_hashes", "last_hash", "result")
    NUM_HASHES_FIELD_NUMBER: _ClassVar[int]
    LAST_HASH_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    num_hashes: int
    last_hash: bytes
    result: MutationResult
    def __init__(self, num_hashes: _Optional[int] = ..., last_hash: _Optional[bytes] = ..., result: _Optional[_Union[MutationResult, _Mapping]] = ...) -> None: ...

class FreeRequest(_message.Message):
    __slots__ = ("header", "request_id", "end", "fence_seq")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    FENCE_SEQ_FIELD_NUMBER: _ClassVar[int]
    header: MutationHeader
    request_id: str
    end: EndKind
    fence_seq: int
    def __init__(self, header: _Optional[_Union[MutationHeader, _Mapping]] = ..., request_id: _Optional[str] = ..., end: _Optional[_Union[EndKind, str]] = ..., fence_seq: _Optional[int] = ...) -> None: ...

class FreeResponse(_message.Message):
    __slots__ = ("result",)
    RESULT_FIELD_NUMBER: _ClassVar[int]
    result: MutationResult
    def __init__(self, result: _Optional[_Union[MutationResult, _Mapping]] = ...) -> None: ...

class EvictBlocksRequest(_message.Message):
    __slots__ = ("header", "block_ids")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    header: MutationHeader
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, header: _Optional[_Union[MutationHeader, _Mapping]] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class EvictBlocksResponse(_message.Message):
    __slots__ = ("result",)
    RESULT_FIELD_NUMBER: _ClassVar[int]
    result: MutationResult
    def __init__(self, result: _Optional[_Union[MutationResult, _Mapping]] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("header", "content", "within_ms")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
    header: MutationHeader
    content: RequestContent
    within_ms: int
    def __init__(self, header: _Optional[_Union[MutationHeader, _Mapping]] = ..., content: _Optional[_Union[RequestContent, _Mapping]] = ..., within_ms: _Optional[int] = ...) -> None: ...

class PrefetchResponse(_message.Message):
    __slots__ = ("seq", "hit_tokens", "copied_blocks", "outcome")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COPIED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    seq: int
    hit_tokens: int
    copied_blocks: int
    outcome: PrefetchOutcome
    def __init__(self, seq: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., copied_blocks: _Optional[int] = ..., outcome: _Optional[_Union[PrefetchOutcome, str]] = ...) -> None: ...

class RetainRequest(_message.Message):
    __slots__ = ("header", "content", "ttl_ms", "priority")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    header: MutationHeader
    content: RequestContent
    ttl_ms: int
    priority: int
    def __init__(self, header: _Optional[_Union[MutationHeader, _Mapping]] = ..., content: _Optional[_Union[RequestContent, _Mapping]] = ..., ttl_ms: _Optional[int] = ..., priority: _Optional[int] = ...) -> None: ...

class RetainResponse(_message.Message):
    __slots__ = ("seq", "retained_tokens", "retained_blocks", "left_blocks")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    RETAINED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETAINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEFT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    retained_tokens: int
    retained_blocks: int
    left_blocks: int
    def __init__(self, seq: _Optional[int] = ..., retained_tokens: _Optional[int] = ..., retained_blocks: _Optional[int] = ..., left_blocks: _Optional[int] = ...) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: MutationHeader
    def __init__(self, header: _Optional[_Union[MutationHeader, _Mapping]] = ...) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ("done", "result")
    DONE_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    done: bool
    result: MutationResult
    def __init__(self, done: bool = ..., result: _Optional[_Union[MutationResult, _Mapping]] = ...) -> None: ...

class SessionOpen(_message.Message):
    __slots__ = ("replica", "epoch", "nonce", "with_events", "client", "stamp_table", "incarnation", "step_version", "busy_blocks", "owner_epoch", "life_nonce", "mirror", "disk_incarnation")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    WITH_EVENTS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    STAMP_TABLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_VERSION_FIELD_NUMBER: _ClassVar[int]
    BUSY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OWNER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LIFE_NONCE_FIELD_NUMBER: _ClassVar[int]
    MIRROR_FIELD_NUMBER: _ClassVar[int]
    DISK_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    replica: str
    epoch: int
    nonce: int
    with_events: bool
    client: str
    stamp_table: bytes
    incarnation: int
    step_version: int
    busy_blocks: bytes
    owner_epoch: int
    life_nonce: int
    mirror: MirrorTerms
    disk_incarnation: int
    def __init__(self, replica: _Optional[str] = ..., epoch: _Optional[int] = ..., nonce: _Optional[int] = ..., with_events: bool = ..., client: _Optional[str] = ..., stamp_table: _Optional[bytes] = ..., incarnation: _Optional[int] = ..., step_version: _Optional[int] = ..., busy_blocks: _Optional[bytes] = ..., owner_epoch: _Optional[int] = ..., life_nonce: _Optional[int] = ..., mirror: _Optional[_Union[MirrorTerms, _Mapping]] = ..., disk_incarnation: _Optional[int] = ...) -> None: ...

class MirrorTerms(_message.Message):
    __slots__ = ("core_version", "commit", "takes_rows")
    CORE_VERSION_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    TAKES_ROWS_FIELD_NUMBER: _ClassVar[int]
    core_version: int
    commit: _replica_pb2.CommitRule
    takes_rows: bool
    def __init__(self, core_version: _Optional[int] = ..., commit: _Optional[_Union[_replica_pb2.CommitRule, str]] = ..., takes_rows: bool = ...) -> None: ...

class MirroredStep(_message.Message):
    __slots__ = ("step", "digest", "cache_request")
    STEP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CACHE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    step: _step_pb2.Step
    digest: bytes
    cache_request: int
    def __init__(self, step: _Optional[_Union[_step_pb2.Step, _Mapping]] = ..., digest: _Optional[bytes] = ..., cache_request: _Optional[int] = ...) -> None: ...

class MirroredSteps(_message.Message):
    __slots__ = ("steps", "newest", "age_ms")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[MirroredStep]
    newest: int
    age_ms: int
    def __init__(self, steps: _Optional[_Iterable[_Union[MirroredStep, _Mapping]]] = ..., newest: _Optional[int] = ..., age_ms: _Optional[int] = ...) -> None: ...

class ImageSlice(_message.Message):
    __slots__ = ("data", "first", "last")
    DATA_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    first: bool
    last: bool
    def __init__(self, data: _Optional[bytes] = ..., first: bool = ..., last: bool = ...) -> None: ...

class MirrorProgress(_message.Message):
    __slots__ = ("applied_through", "image_wanted", "reason", "message")
    APPLIED_THROUGH_FIELD_NUMBER: _ClassVar[int]
    IMAGE_WANTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    applied_through: int
    image_wanted: bool
    reason: str
    message: str
    def __init__(self, applied_through: _Optional[int] = ..., image_wanted: bool = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class CacheRequest(_message.Message):
    __slots__ = ("number", "block_ids", "reset", "rows")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    number: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    reset: bool
    rows: _step_pb2.Part
    def __init__(self, number: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., reset: bool = ..., rows: _Optional[_Union[_step_pb2.Part, _Mapping]] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("open", "step", "heartbeat", "close", "mirrored_steps", "image")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    MIRRORED_STEPS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    open: SessionOpen
    step: _step_pb2.Step
    heartbeat: Heartbeat
    close: SessionClose
    mirrored_steps: MirroredSteps
    image: ImageSlice
    def __init__(self, open: _Optional[_Union[SessionOpen, _Mapping]] = ..., step: _Optional[_Union[_step_pb2.Step, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., close: _Optional[_Union[SessionClose, _Mapping]] = ..., mirrored_steps: _Optional[_Union[MirroredSteps, _Mapping]] = ..., image: _Optional[_Union[ImageSlice, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("waiting_requests",)
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    waiting_requests: int
    def __init__(self, waiting_requests: _Optional[int] = ...) -> None: ...

class SessionClose(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionOpened(_message.Message):
    __slots__ = ("epoch", "seq", "next_part", "max_steps_in_flight", "max_rows", "lease_ms", "spec", "free_blocks", "kept_keys", "step_version", "busy_blocks", "mirror_window", "image_wanted")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    NEXT_PART_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KEPT_KEYS_FIELD_NUMBER: _ClassVar[int]
    STEP_VERSION_FIELD_NUMBER: _ClassVar[int]
    BUSY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MIRROR_WINDOW_FIELD_NUMBER: _ClassVar[int]
    IMAGE_WANTED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    seq: int
    next_part: int
    max_steps_in_flight: int
    max_rows: int
    lease_ms: int
    spec: _replica_pb2.ReplicaSpec
    free_blocks: int
    kept_keys: int
    step_version: int
    busy_blocks: bytes
    mirror_window: int
    image_wanted: bool
    def __init__(self, epoch: _Optional[int] = ..., seq: _Optional[int] = ..., next_part: _Optional[int] = ..., max_steps_in_flight: _Optional[int] = ..., max_rows: _Optional[int] = ..., lease_ms: _Optional[int] = ..., spec: _Optional[_Union[_replica_pb2.ReplicaSpec, _Mapping]] = ..., free_blocks: _Optional[int] = ..., kept_keys: _Optional[int] = ..., step_version: _Optional[int] = ..., busy_blocks: _Optional[bytes] = ..., mirror_window: _Optional[int] = ..., image_wanted: bool = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("grace_ms",)
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    grace_ms: int
    def __init__(self, grace_ms: _Optional[int] = ...) -> None: ...

class SessionClosed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("opened", "result", "error", "draining", "closed", "progress", "cache_request")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    CACHE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    opened: SessionOpened
    result: _step_pb2.StepResult
    error: _step_pb2.StepError
    draining: Draining
    closed: SessionClosed
    progress: MirrorProgress
    cache_request: CacheRequest
    def __init__(self, opened: _Optional[_Union[SessionOpened, _Mapping]] = ..., result: _Optional[_Union[_step_pb2.StepResult, _Mapping]] = ..., error: _Optional[_Union[_step_pb2.StepError, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., closed: _Optional[_Union[SessionClosed, _Mapping]] = ..., progress: _Optional[_Union[MirrorProgress, _Mapping]] = ..., cache_request: _Optional[_Union[CacheRequest, _Mapping]] = ...) -> None: ...
