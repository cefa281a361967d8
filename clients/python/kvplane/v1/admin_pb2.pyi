from kvplane.v1 import allocation_pb2 as _allocation_pb2
from kvplane.v1 import replica_pb2 as _replica_pb2
from kvplane.v1 import step_pb2 as _step_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MissCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISS_CAUSE_UNSPECIFIED: _ClassVar[MissCause]
    MISS_CAUSE_NOTHING: _ClassVar[MissCause]
    MISS_CAUSE_CACHING_OFF: _ClassVar[MissCause]
    MISS_CAUSE_NOT_READ: _ClassVar[MissCause]
    MISS_CAUSE_BELOW_ONE_BLOCK: _ClassVar[MissCause]
    MISS_CAUSE_EVICTED: _ClassVar[MissCause]
    MISS_CAUSE_DROPPED: _ClassVar[MissCause]
    MISS_CAUSE_WITHDRAWN: _ClassVar[MissCause]
    MISS_CAUSE_UNVERIFIED: _ClassVar[MissCause]
    MISS_CAUSE_RESET: _ClassVar[MissCause]
    MISS_CAUSE_TENTATIVE: _ClassVar[MissCause]
    MISS_CAUSE_WINDOW_NOT_RESIDENT: _ClassVar[MissCause]
    MISS_CAUSE_NO_STATE_AT_BOUNDARY: _ClassVar[MissCause]
    MISS_CAUSE_OTHER_DOMAIN: _ClassVar[MissCause]
    MISS_CAUSE_OTHER_SALT: _ClassVar[MissCause]
    MISS_CAUSE_OTHER_LORA: _ClassVar[MissCause]
    MISS_CAUSE_OTHER_MULTIMODAL: _ClassVar[MissCause]
    MISS_CAUSE_DIFFERS: _ClassVar[MissCause]
    MISS_CAUSE_NEVER_CACHED: _ClassVar[MissCause]
    MISS_CAUSE_LAST_BLOCK_DROPPED: _ClassVar[MissCause]
    MISS_CAUSE_NOT_RECORDED: _ClassVar[MissCause]
    MISS_CAUSE_WITHOUT_STAMPS: _ClassVar[MissCause]
    MISS_CAUSE_LEFT_WINDOW: _ClassVar[MissCause]
    MISS_CAUSE_IN_TIER: _ClassVar[MissCause]
    MISS_CAUSE_TOO_SLOW: _ClassVar[MissCause]
    MISS_CAUSE_NO_JOB: _ClassVar[MissCause]
    MISS_CAUSE_WAITS: _ClassVar[MissCause]
    MISS_CAUSE_GIVEN_UP: _ClassVar[MissCause]
    MISS_CAUSE_UNPROVEN_KEYS: _ClassVar[MissCause]
    MISS_CAUSE_MISMATCH: _ClassVar[MissCause]
MISS_CAUSE_UNSPECIFIED: MissCause
MISS_CAUSE_NOTHING: MissCause
MISS_CAUSE_CACHING_OFF: MissCause
MISS_CAUSE_NOT_READ: MissCause
MISS_CAUSE_BELOW_ONE_BLOCK: MissCause
MISS_CAUSE_EVICTED: MissCause
MISS_CAUSE_DROPPED: MissCause
MISS_CAUSE_WITHDRAWN: MissCause
MISS_CAUSE_UNVERIFIED: MissCause
MISS_CAUSE_RESET: MissCause
MISS_CAUSE_TENTATIVE: MissCause
MISS_CAUSE_WINDOW_NOT_RESIDENT: MissCause
MISS_CAUSE_NO_STATE_AT_BOUNDARY: MissCause
MISS_CAUSE_OTHER_DOMAIN: MissCause
MISS_CAUSE_OTHER_SALT: MissCause
MISS_CAUSE_OTHER_LORA: MissCause
MISS_CAUSE_OTHER_MULTIMODAL: MissCause
MISS_CAUSE_DIFFERS: MissCause
MISS_CAUSE_NEVER_CACHED: MissCause
MISS_CAUSE_LAST_BLOCK_DROPPED: MissCause
MISS_CAUSE_NOT_RECORDED: MissCause
MISS_CAUSE_WITHOUT_STAMPS: MissCause
MISS_CAUSE_LEFT_WINDOW: MissCause
MISS_CAUSE_IN_TIER: MissCause
MISS_CAUSE_TOO_SLOW: MissCause
MISS_CAUSE_NO_JOB: MissCause
MISS_CAUSE_WAITS: MissCause
MISS_CAUSE_GIVEN_UP: MissCause
MISS_CAUSE_UNPROVEN_KEYS: MissCause
MISS_CAUSE_MISMATCH: MissCause

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("version", "now_unix_ms", "uptime_ms", "draining", "replicas", "live_replicas", "lapsed_replicas", "tracing", "metrics_address", "recovering_replicas", "core")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NOW_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    LIVE_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    LAPSED_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    TRACING_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RECOVERING_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    CORE_FIELD_NUMBER: _ClassVar[int]
    version: str
    now_unix_ms: int
    uptime_ms: int
    draining: bool
    replicas: int
    live_replicas: int
    lapsed_replicas: int
    tracing: bool
    metrics_address: str
    recovering_replicas: int
    core: _allocation_pb2.CoreStatus
    def __init__(self, version: _Optional[str] = ..., now_unix_ms: _Optional[int] = ..., uptime_ms: _Optional[int] = ..., draining: bool = ..., replicas: _Optional[int] = ..., live_replicas: _Optional[int] = ..., lapsed_replicas: _Optional[int] = ..., tracing: bool = ..., metrics_address: _Optional[str] = ..., recovering_replicas: _Optional[int] = ..., core: _Optional[_Union[_allocation_pb2.CoreStatus, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("replica", "summary")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    replica: str
    summary: bool
    def __init__(self, replica: _Optional[str] = ..., summary: bool = ...) -> None: ...

class CachedKey(_message.Message):
    __slots__ = ("block", "group", "domain", "hash", "num_tokens", "tentative")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENTATIVE_FIELD_NUMBER: _ClassVar[int]
    block: int
    group: int
    domain: str
    hash: bytes
    num_tokens: int
    tentative: bool
    def __init__(self, block: _Optional[int] = ..., group: _Optional[int] = ..., domain: _Optional[str] = ..., hash: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., tentative: bool = ...) -> None: ...

class RequestState(_message.Message):
    __slots__ = ("slot", "request_id", "num_tokens", "computed_tokens", "tables", "running", "held", "num_blocks")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    request_id: str
    num_tokens: int
    computed_tokens: int
    tables: _containers.RepeatedCompositeFieldContainer[BlockTable]
    running: bool
    held: bool
    num_blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slot: _Optional[int] = ..., request_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[BlockTable, _Mapping]]] = ..., running: bool = ..., held: bool = ..., num_blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("replica", "limit")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    replica: str
    limit: int
    def __init__(self, replica: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests", "num_requests")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestState]
    num_requests: int
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestState, _Mapping]]] = ..., num_requests: _Optional[int] = ...) -> None: ...

class BlockTable(_message.Message):
    __slots__ = ("block_ids",)
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SnapshotResponse(_message.Message):
    __slots__ = ("digest", "free_blocks", "distinct_keys", "keys", "requests", "usage", "num_free_blocks")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DISTINCT_KEYS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    free_blocks: _containers.RepeatedScalarFieldContainer[int]
    distinct_keys: int
    keys: _containers.RepeatedCompositeFieldContainer[CachedKey]
    requests: _containers.RepeatedCompositeFieldContainer[RequestState]
    usage: float
    num_free_blocks: int
    def __init__(self, digest: _Optional[str] = ..., free_blocks: _Optional[_Iterable[int]] = ..., distinct_keys: _Optional[int] = ..., keys: _Optional[_Iterable[_Union[CachedKey, _Mapping]]] = ..., requests: _Optional[_Iterable[_Union[RequestState, _Mapping]]] = ..., usage: _Optional[float] = ..., num_free_blocks: _Optional[int] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("step", "result", "logged")
    STEP_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    LOGGED_FIELD_NUMBER: _ClassVar[int]
    step: _step_pb2.Step
    result: _step_pb2.StepResult
    logged: _containers.RepeatedCompositeFieldContainer[LoggedPart]
    def __init__(self, step: _Optional[_Union[_step_pb2.Step, _Mapping]] = ..., result: _Optional[_Union[_step_pb2.StepResult, _Mapping]] = ..., logged: _Optional[_Iterable[_Union[LoggedPart, _Mapping]]] = ...) -> None: ...

class LoggedPart(_message.Message):
    __slots__ = ("hashed_facts", "hashed_news", "taken_back", "went_back")
    HASHED_FACTS_FIELD_NUMBER: _ClassVar[int]
    HASHED_NEWS_FIELD_NUMBER: _ClassVar[int]
    TAKEN_BACK_FIELD_NUMBER: _ClassVar[int]
    WENT_BACK_FIELD_NUMBER: _ClassVar[int]
    hashed_facts: _containers.RepeatedScalarFieldContainer[bytes]
    hashed_news: _containers.RepeatedScalarFieldContainer[bytes]
    taken_back: int
    went_back: int
    def __init__(self, hashed_facts: _Optional[_Iterable[bytes]] = ..., hashed_news: _Optional[_Iterable[bytes]] = ..., taken_back: _Optional[int] = ..., went_back: _Optional[int] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("replica", "content", "request_id", "block")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    replica: str
    content: _allocation_pb2.RequestContent
    request_id: str
    block: int
    def __init__(self, replica: _Optional[str] = ..., content: _Optional[_Union[_allocation_pb2.RequestContent, _Mapping]] = ..., request_id: _Optional[str] = ..., block: _Optional[int] = ...) -> None: ...

class KeyChange(_message.Message):
    __slots__ = ("block", "group", "domain", "hash", "stored", "cause", "by", "epoch", "seq", "age_ms", "tier")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    block: int
    group: int
    domain: str
    hash: bytes
    stored: bool
    cause: MissCause
    by: str
    epoch: int
    seq: int
    age_ms: int
    tier: str
    def __init__(self, block: _Optional[int] = ..., group: _Optional[int] = ..., domain: _Optional[str] = ..., hash: _Optional[bytes] = ..., stored: bool = ..., cause: _Optional[_Union[MissCause, str]] = ..., by: _Optional[str] = ..., epoch: _Optional[int] = ..., seq: _Optional[int] = ..., age_ms: _Optional[int] = ..., tier: _Optional[str] = ...) -> None: ...

class GroupHit(_message.Message):
    __slots__ = ("group", "kind", "hit_tokens")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    group: int
    kind: _replica_pb2.GroupKind
    hit_tokens: int
    def __init__(self, group: _Optional[int] = ..., kind: _Optional[_Union[_replica_pb2.GroupKind, str]] = ..., hit_tokens: _Optional[int] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("num_tokens", "hit_tokens", "longest_hit", "groups", "cut_by", "wanted", "cause", "start", "end", "by", "epoch", "seq", "age_ms", "admit_status", "admit_seq", "log_is_complete", "admit_epoch", "load_ns", "compute_ns", "changes", "admit_needed", "admit_free", "run_seq", "run_needed", "run_free", "run_preempted", "peers")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_HIT_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    CUT_BY_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    ADMIT_STATUS_FIELD_NUMBER: _ClassVar[int]
    ADMIT_SEQ_FIELD_NUMBER: _ClassVar[int]
    LOG_IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    ADMIT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOAD_NS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_NS_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    ADMIT_NEEDED_FIELD_NUMBER: _ClassVar[int]
    ADMIT_FREE_FIELD_NUMBER: _ClassVar[int]
    RUN_SEQ_FIELD_NUMBER: _ClassVar[int]
    RUN_NEEDED_FIELD_NUMBER: _ClassVar[int]
    RUN_FREE_FIELD_NUMBER: _ClassVar[int]
    RUN_PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    hit_tokens: int
    longest_hit: int
    groups: _containers.RepeatedCompositeFieldContainer[GroupHit]
    cut_by: _containers.RepeatedScalarFieldContainer[int]
    wanted: int
    cause: MissCause
    start: int
    end: int
    by: str
    epoch: int
    seq: int
    age_ms: int
    admit_status: int
    admit_seq: int
    log_is_complete: bool
    admit_epoch: int
    load_ns: int
    compute_ns: int
    changes: _containers.RepeatedCompositeFieldContainer[KeyChange]
    admit_needed: int
    admit_free: int
    run_seq: int
    run_needed: int
    run_free: int
    run_preempted: bool
    peers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, num_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., longest_hit: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GroupHit, _Mapping]]] = ..., cut_by: _Optional[_Iterable[int]] = ..., wanted: _Optional[int] = ..., cause: _Optional[_Union[MissCause, str]] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., by: _Optional[str] = ..., epoch: _Optional[int] = ..., seq: _Optional[int] = ..., age_ms: _Optional[int] = ..., admit_status: _Optional[int] = ..., admit_seq: _Optional[int] = ..., log_is_complete: bool = ..., admit_epoch: _Optional[int] = ..., load_ns: _Optional[int] = ..., compute_ns: _Optional[int] = ..., changes: _Optional[_Iterable[_Union[KeyChange, _Mapping]]] = ..., admit_needed: _Optional[int] = ..., admit_free: _Optional[int] = ..., run_seq: _Optional[int] = ..., run_needed: _Optional[int] = ..., run_free: _Optional[int] = ..., run_preempted: bool = ..., peers: _Optional[_Iterable[str]] = ...) -> None: ...

class RecordRequest(_message.Message):
    __slots__ = ("replica", "divergence", "from_now")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    DIVERGENCE_FIELD_NUMBER: _ClassVar[int]
    FROM_NOW_FIELD_NUMBER: _ClassVar[int]
    replica: str
    divergence: bool
    from_now: bool
    def __init__(self, replica: _Optional[str] = ..., divergence: bool = ..., from_now: bool = ...) -> None: ...

class RecordResponse(_message.Message):
    __slots__ = ("header", "decision", "life")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    header: RecordHeader
    decision: RecordedDecision
    life: RecordedLife
    def __init__(self, header: _Optional[_Union[RecordHeader, _Mapping]] = ..., decision: _Optional[_Union[RecordedDecision, _Mapping]] = ..., life: _Optional[_Union[RecordedLife, _Mapping]] = ...) -> None: ...

class RecordHeader(_message.Message):
    __slots__ = ("replica", "version", "spec", "step_version")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    STEP_VERSION_FIELD_NUMBER: _ClassVar[int]
    replica: str
    version: str
    spec: _replica_pb2.ReplicaSpec
    step_version: int
    def __init__(self, replica: _Optional[str] = ..., version: _Optional[str] = ..., spec: _Optional[_Union[_replica_pb2.ReplicaSpec, _Mapping]] = ..., step_version: _Optional[int] = ...) -> None: ...

class RecordedDecision(_message.Message):
    __slots__ = ("step", "result_digest", "took_ns")
    STEP_FIELD_NUMBER: _ClassVar[int]
    RESULT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOOK_NS_FIELD_NUMBER: _ClassVar[int]
    step: _step_pb2.Step
    result_digest: bytes
    took_ns: int
    def __init__(self, step: _Optional[_Union[_step_pb2.Step, _Mapping]] = ..., result_digest: _Optional[bytes] = ..., took_ns: _Optional[int] = ...) -> None: ...

class RecordedLife(_message.Message):
    __slots__ = ("epoch", "stamp_table", "busy_blocks", "memory_is_new", "state")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STAMP_TABLE_FIELD_NUMBER: _ClassVar[int]
    BUSY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_IS_NEW_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    stamp_table: bytes
    busy_blocks: bytes
    memory_is_new: bool
    state: bytes
    def __init__(self, epoch: _Optional[int] = ..., stamp_table: _Optional[bytes] = ..., busy_blocks: _Optional[bytes] = ..., memory_is_new: bool = ..., state: _Optional[bytes] = ...) -> None: ...
