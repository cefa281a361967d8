from kvplane.v1 import step_pb2 as _step_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RoutingPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROUTING_POLICY_UNSPECIFIED: _ClassVar[RoutingPolicy]
    ROUTING_POLICY_COST: _ClassVar[RoutingPolicy]
    ROUTING_POLICY_TTFT: _ClassVar[RoutingPolicy]
    ROUTING_POLICY_WEIGHTS: _ClassVar[RoutingPolicy]
    ROUTING_POLICY_LEAST_LOADED: _ClassVar[RoutingPolicy]
    ROUTING_POLICY_ROUND_ROBIN: _ClassVar[RoutingPolicy]
    ROUTING_POLICY_RANDOM: _ClassVar[RoutingPolicy]

class ReportStage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPORT_STAGE_UNSPECIFIED: _ClassVar[ReportStage]
    REPORT_STAGE_STARTED: _ClassVar[ReportStage]
    REPORT_STAGE_FIRST_TOKEN: _ClassVar[ReportStage]
    REPORT_STAGE_ENDED: _ClassVar[ReportStage]
ROUTING_POLICY_UNSPECIFIED: RoutingPolicy
ROUTING_POLICY_COST: RoutingPolicy
ROUTING_POLICY_TTFT: RoutingPolicy
ROUTING_POLICY_WEIGHTS: RoutingPolicy
ROUTING_POLICY_LEAST_LOADED: RoutingPolicy
ROUTING_POLICY_ROUND_ROBIN: RoutingPolicy
ROUTING_POLICY_RANDOM: RoutingPolicy
REPORT_STAGE_UNSPECIFIED: ReportStage
REPORT_STAGE_STARTED: ReportStage
REPORT_STAGE_FIRST_TOKEN: ReportStage
REPORT_STAGE_ENDED: ReportStage

class Prompt(_message.Message):
    __slots__ = ("token_ids", "keys", "num_tokens", "extra_keys", "domain", "key_bytes")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEYS_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    KEY_BYTES_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    keys: bytes
    num_tokens: int
    extra_keys: _step_pb2.ExtraKeys
    domain: str
    key_bytes: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., keys: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., extra_keys: _Optional[_Union[_step_pb2.ExtraKeys, _Mapping]] = ..., domain: _Optional[str] = ..., key_bytes: _Optional[int] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("model", "prompt", "candidates", "max_places", "policy", "book", "expected_output_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    MAX_PLACES_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    BOOK_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt: Prompt
    candidates: _containers.RepeatedScalarFieldContainer[str]
    max_places: int
    policy: RoutingPolicy
    book: bool
    expected_output_tokens: int
    def __init__(self, model: _Optional[str] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ..., candidates: _Optional[_Iterable[str]] = ..., max_places: _Optional[int] = ..., policy: _Optional[_Union[RoutingPolicy, str]] = ..., book: bool = ..., expected_output_tokens: _Optional[int] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("decision_id", "places", "reason")
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    decision_id: str
    places: _containers.RepeatedCompositeFieldContainer[PlaceScore]
    reason: str
    def __init__(self, decision_id: _Optional[str] = ..., places: _Optional[_Iterable[_Union[PlaceScore, _Mapping]]] = ..., reason: _Optional[str] = ...) -> None: ...

class PlaceScore(_message.Message):
    __slots__ = ("place", "endpoint", "hit_tokens", "expected_tokens", "groups", "inexact", "cost", "in_flight", "host_tokens", "disk_tokens", "peer_tokens", "peer")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    INEXACT_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PEER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    place: str
    endpoint: str
    hit_tokens: int
    expected_tokens: int
    groups: _containers.RepeatedCompositeFieldContainer[PlaceGroupHit]
    inexact: str
    cost: PlaceCost
    in_flight: int
    host_tokens: int
    disk_tokens: int
    peer_tokens: int
    peer: str
    def __init__(self, place: _Optional[str] = ..., endpoint: _Optional[str] = ..., hit_tokens: _Optional[int] = ..., expected_tokens: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[PlaceGroupHit, _Mapping]]] = ..., inexact: _Optional[str] = ..., cost: _Optional[_Union[PlaceCost, _Mapping]] = ..., in_flight: _Optional[int] = ..., host_tokens: _Optional[int] = ..., disk_tokens: _Optional[int] = ..., peer_tokens: _Optional[int] = ..., peer: _Optional[str] = ...) -> None: ...

class PlaceGroupHit(_message.Message):
    __slots__ = ("group", "kind", "tokens_alone", "limits")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TOKENS_ALONE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    group: int
    kind: str
    tokens_alone: int
    limits: bool
    def __init__(self, group: _Optional[int] = ..., kind: _Optional[str] = ..., tokens_alone: _Optional[int] = ..., limits: bool = ...) -> None: ...

class PlaceCost(_message.Message):
    __slots__ = ("queue_s", "miss_s", "delay_s", "displacement_s", "decode_s", "total_s", "later_s", "load_s", "memory_s")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    MISS_S_FIELD_NUMBER: _ClassVar[int]
    DELAY_S_FIELD_NUMBER: _ClassVar[int]
    DISPLACEMENT_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    LATER_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    MEMORY_S_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    miss_s: float
    delay_s: float
    displacement_s: float
    decode_s: float
    total_s: float
    later_s: float
    load_s: float
    memory_s: float
    def __init__(self, queue_s: _Optional[float] = ..., miss_s: _Optional[float] = ..., delay_s: _Optional[float] = ..., displacement_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., total_s: _Optional[float] = ..., later_s: _Optional[float] = ..., load_s: _Optional[float] = ..., memory_s: _Optional[float] = ...) -> None: ...

class ScoreStreamRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: ScoreRequest
    def __init__(self, request: _Optional[_Union[ScoreRequest, _Mapping]] = ...) -> None: ...

class ScoreStreamResponse(_message.Message):
    __slots__ = ("response", "error")
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    response: ScoreResponse
    error: RoutingError
    def __init__(self, response: _Optional[_Union[ScoreResponse, _Mapping]] = ..., error: _Optional[_Union[RoutingError, _Mapping]] = ...) -> None: ...

class RoutingError(_message.Message):
    __slots__ = ("reason", "message", "field", "remedy")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    field: str
    remedy: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., remedy: _Optional[str] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("decision_id", "stage", "cached_tokens", "output_tokens", "elapsed_s")
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    decision_id: str
    stage: ReportStage
    cached_tokens: int
    output_tokens: int
    elapsed_s: float
    def __init__(self, decision_id: _Optional[str] = ..., stage: _Optional[_Union[ReportStage, str]] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., elapsed_s: _Optional[float] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ("claimed_tokens", "cause")
    CLAIMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    claimed_tokens: int
    cause: str
    def __init__(self, claimed_tokens: _Optional[int] = ..., cause: _Optional[str] = ...) -> None: ...

class ListPlacesRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ListPlacesResponse(_message.Message):
    __slots__ = ("places",)
    PLACES_FIELD_NUMBER: _ClassVar[int]
    places: _containers.RepeatedCompositeFieldContainer[PlaceInfo]
    def __init__(self, places: _Optional[_Iterable[_Union[PlaceInfo, _Mapping]]] = ...) -> None: ...

class PlaceInfo(_message.Message):
    __slots__ = ("place", "endpoint", "model", "state", "batches", "events", "entries", "groups", "hashes", "faults", "in_flight", "prefill_tokens_per_s", "samples", "claimed_tokens", "real_tokens", "other_models")
    class FaultsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PLACE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OTHER_MODELS_FIELD_NUMBER: _ClassVar[int]
    place: str
    endpoint: str
    model: str
    state: str
    batches: int
    events: int
    entries: int
    groups: _containers.RepeatedCompositeFieldContainer[PlaceGroup]
    hashes: str
    faults: _containers.ScalarMap[str, int]
    in_flight: int
    prefill_tokens_per_s: float
    samples: int
    claimed_tokens: int
    real_tokens: int
    other_models: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, place: _Optional[str] = ..., endpoint: _Optional[str] = ..., model: _Optional[str] = ..., state: _Optional[str] = ..., batches: _Optional[int] = ..., events: _Optional[int] = ..., entries: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[PlaceGroup, _Mapping]]] = ..., hashes: _Optional[str] = ..., faults: _Optional[_Mapping[str, int]] = ..., in_flight: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., samples: _Optional[int] = ..., claimed_tokens: _Optional[int] = ..., real_tokens: _Optional[int] = ..., other_models: _Optional[_Iterable[str]] = ...) -> None: ...

class PlaceGroup(_message.Message):
    __slots__ = ("group", "kind", "block_size", "window")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    group: int
    kind: str
    block_size: int
    window: int
    def __init__(self, group: _Optional[int] = ..., kind: _Optional[str] = ..., block_size: _Optional[int] = ..., window: _Optional[int] = ...) -> None: ...

class WatchIndexRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class WatchIndexResponse(_message.Message):
    __slots__ = ("place", "stored", "removed", "cleared", "snapshot_end")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_END_FIELD_NUMBER: _ClassVar[int]
    place: str
    stored: IndexKeys
    removed: IndexKeys
    cleared: bool
    snapshot_end: bool
    def __init__(self, place: _Optional[str] = ..., stored: _Optional[_Union[IndexKeys, _Mapping]] = ..., removed: _Optional[_Union[IndexKeys, _Mapping]] = ..., cleared: bool = ..., snapshot_end: bool = ...) -> None: ...

class IndexKeys(_message.Message):
    __slots__ = ("group", "tier", "keys", "form", "key_bytes")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    KEY_BYTES_FIELD_NUMBER: _ClassVar[int]
    group: int
    tier: str
    keys: bytes
    form: PlaceGroup
    key_bytes: int
    def __init__(self, group: _Optional[int] = ..., tier: _Optional[str] = ..., keys: _Optional[bytes] = ..., form: _Optional[_Union[PlaceGroup, _Mapping]] = ..., key_bytes: _Optional[int] = ...) -> None: ...
