from kvplane.v1 import column_pb2 as _column_pb2
from kvplane.v1 import replica_pb2 as _replica_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OnRefusal(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ON_REFUSAL_UNSPECIFIED: _ClassVar[OnRefusal]
    ON_REFUSAL_STOP: _ClassVar[OnRefusal]
    ON_REFUSAL_SKIP: _ClassVar[OnRefusal]
    ON_REFUSAL_PREEMPT: _ClassVar[OnRefusal]

class CacheEventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_EVENT_KIND_UNSPECIFIED: _ClassVar[CacheEventKind]
    CACHE_EVENT_KIND_STORED: _ClassVar[CacheEventKind]
    CACHE_EVENT_KIND_REMOVED: _ClassVar[CacheEventKind]
    CACHE_EVENT_KIND_CLEARED: _ClassVar[CacheEventKind]

class RemoveReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REMOVE_REASON_UNSPECIFIED: _ClassVar[RemoveReason]
    REMOVE_REASON_EVICTED: _ClassVar[RemoveReason]
    REMOVE_REASON_DROPPED: _ClassVar[RemoveReason]
    REMOVE_REASON_PROMOTED: _ClassVar[RemoveReason]
    REMOVE_REASON_WITHDRAWN: _ClassVar[RemoveReason]
    REMOVE_REASON_UNVERIFIED: _ClassVar[RemoveReason]
    REMOVE_REASON_MOVED: _ClassVar[RemoveReason]
    REMOVE_REASON_LEFT_WINDOW: _ClassVar[RemoveReason]
ON_REFUSAL_UNSPECIFIED: OnRefusal
ON_REFUSAL_STOP: OnRefusal
ON_REFUSAL_SKIP: OnRefusal
ON_REFUSAL_PREEMPT: OnRefusal
CACHE_EVENT_KIND_UNSPECIFIED: CacheEventKind
CACHE_EVENT_KIND_STORED: CacheEventKind
CACHE_EVENT_KIND_REMOVED: CacheEventKind
CACHE_EVENT_KIND_CLEARED: CacheEventKind
REMOVE_REASON_UNSPECIFIED: RemoveReason
REMOVE_REASON_EVICTED: RemoveReason
REMOVE_REASON_DROPPED: RemoveReason
REMOVE_REASON_PROMOTED: RemoveReason
REMOVE_REASON_WITHDRAWN: RemoveReason
REMOVE_REASON_UNVERIFIED: RemoveReason
REMOVE_REASON_MOVED: RemoveReason
REMOVE_REASON_LEFT_WINDOW: RemoveReason

class Facts(_message.Message):
    __slots__ = ("slot", "computed", "appended", "tokens", "num_hashes", "hashes", "commit", "end", "fence", "release_skipped", "hint")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    APPENDED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_HASHES_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    slot: bytes
    computed: bytes
    appended: bytes
    tokens: bytes
    num_hashes: bytes
    hashes: bytes
    commit: bytes
    end: bytes
    fence: bytes
    release_skipped: bytes
    hint: bytes
    def __init__(self, slot: _Optional[bytes] = ..., computed: _Optional[bytes] = ..., appended: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., num_hashes: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., commit: _Optional[bytes] = ..., end: _Optional[bytes] = ..., fence: _Optional[bytes] = ..., release_skipped: _Optional[bytes] = ..., hint: _Optional[bytes] = ...) -> None: ...

class Cache(_message.Message):
    __slots__ = ("failed_steps", "evicted", "released", "reset", "loads_over", "jobs_done", "jobs_failed", "jobs_before", "costs_ns", "mismatched", "hits_checked")
    FAILED_STEPS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    LOADS_OVER_FIELD_NUMBER: _ClassVar[int]
    JOBS_DONE_FIELD_NUMBER: _ClassVar[int]
    JOBS_FAILED_FIELD_NUMBER: _ClassVar[int]
    JOBS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    COSTS_NS_FIELD_NUMBER: _ClassVar[int]
    MISMATCHED_FIELD_NUMBER: _ClassVar[int]
    HITS_CHECKED_FIELD_NUMBER: _ClassVar[int]
    failed_steps: bytes
    evicted: bytes
    released: bytes
    reset: bool
    loads_over: bytes
    jobs_done: bytes
    jobs_failed: bytes
    jobs_before: int
    costs_ns: bytes
    mismatched: bytes
    hits_checked: int
    def __init__(self, failed_steps: _Optional[bytes] = ..., evicted: _Optional[bytes] = ..., released: _Optional[bytes] = ..., reset: bool = ..., loads_over: _Optional[bytes] = ..., jobs_done: _Optional[bytes] = ..., jobs_failed: _Optional[bytes] = ..., jobs_before: _Optional[int] = ..., costs_ns: _Optional[bytes] = ..., mismatched: _Optional[bytes] = ..., hits_checked: _Optional[int] = ...) -> None: ...

class MultimodalItem(_message.Message):
    __slots__ = ("identifier", "offset", "length")
    IDENTIFIER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    identifier: str
    offset: int
    length: int
    def __init__(self, identifier: _Optional[str] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class ExtraKeys(_message.Message):
    __slots__ = ("lora_name", "lora_path", "salt", "multimodal", "prompt_embeds")
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    LORA_PATH_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    MULTIMODAL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_EMBEDS_FIELD_NUMBER: _ClassVar[int]
    lora_name: str
    lora_path: str
    salt: str
    multimodal: _containers.RepeatedCompositeFieldContainer[MultimodalItem]
    prompt_embeds: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, lora_name: _Optional[str] = ..., lora_path: _Optional[str] = ..., salt: _Optional[str] = ..., multimodal: _Optional[_Iterable[_Union[MultimodalItem, _Mapping]]] = ..., prompt_embeds: _Optional[_Iterable[bytes]] = ...) -> None: ...

class News(_message.Message):
    __slots__ = ("slot", "num_tokens", "tokens", "num_hashes", "hashes", "request_id", "domain", "extra_keys", "skip_reading", "max_tokens", "traceparent", "hint", "waited")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_HASHES_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEYS_FIELD_NUMBER: _ClassVar[int]
    SKIP_READING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    WAITED_FIELD_NUMBER: _ClassVar[int]
    slot: bytes
    num_tokens: bytes
    tokens: bytes
    num_hashes: bytes
    hashes: bytes
    request_id: _containers.RepeatedScalarFieldContainer[str]
    domain: _containers.RepeatedScalarFieldContainer[str]
    extra_keys: _containers.RepeatedCompositeFieldContainer[ExtraKeys]
    skip_reading: bytes
    max_tokens: bytes
    traceparent: _containers.RepeatedScalarFieldContainer[str]
    hint: bytes
    waited: bytes
    def __init__(self, slot: _Optional[bytes] = ..., num_tokens: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., num_hashes: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., request_id: _Optional[_Iterable[str]] = ..., domain: _Optional[_Iterable[str]] = ..., extra_keys: _Optional[_Iterable[_Union[ExtraKeys, _Mapping]]] = ..., skip_reading: _Optional[bytes] = ..., max_tokens: _Optional[bytes] = ..., traceparent: _Optional[_Iterable[str]] = ..., hint: _Optional[bytes] = ..., waited: _Optional[bytes] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("slot", "extra", "cap", "lookahead", "in_flight", "flags", "victims", "on_refusal", "reserved")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    CAP_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    VICTIMS_FIELD_NUMBER: _ClassVar[int]
    ON_REFUSAL_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    slot: bytes
    extra: bytes
    cap: bytes
    lookahead: bytes
    in_flight: bytes
    flags: bytes
    victims: bytes
    on_refusal: OnRefusal
    reserved: bytes
    def __init__(self, slot: _Optional[bytes] = ..., extra: _Optional[bytes] = ..., cap: _Optional[bytes] = ..., lookahead: _Optional[bytes] = ..., in_flight: _Optional[bytes] = ..., flags: _Optional[bytes] = ..., victims: _Optional[bytes] = ..., on_refusal: _Optional[_Union[OnRefusal, str]] = ..., reserved: _Optional[bytes] = ...) -> None: ...

class Admit(_message.Message):
    __slots__ = ("slot", "extra", "cap", "lookahead", "external", "expected_hit", "encoder_tokens", "reserved", "watermark", "flags", "max_running", "on_refusal", "only_if_no_preemption", "hit_limit", "min_new", "skip_zero_groups", "single_group_hit")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    CAP_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_HIT_FIELD_NUMBER: _ClassVar[int]
    ENCODER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    ON_REFUSAL_FIELD_NUMBER: _ClassVar[int]
    ONLY_IF_NO_PREEMPTION_FIELD_NUMBER: _ClassVar[int]
    HIT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_FIELD_NUMBER: _ClassVar[int]
    SKIP_ZERO_GROUPS_FIELD_NUMBER: _ClassVar[int]
    SINGLE_GROUP_HIT_FIELD_NUMBER: _ClassVar[int]
    slot: bytes
    extra: bytes
    cap: bytes
    lookahead: bytes
    external: bytes
    expected_hit: bytes
    encoder_tokens: bytes
    reserved: bytes
    watermark: bytes
    flags: bytes
    max_running: int
    on_refusal: OnRefusal
    only_if_no_preemption: bool
    hit_limit: bytes
    min_new: bytes
    skip_zero_groups: bytes
    single_group_hit: bytes
    def __init__(self, slot: _Optional[bytes] = ..., extra: _Optional[bytes] = ..., cap: _Optional[bytes] = ..., lookahead: _Optional[bytes] = ..., external: _Optional[bytes] = ..., expected_hit: _Optional[bytes] = ..., encoder_tokens: _Optional[bytes] = ..., reserved: _Optional[bytes] = ..., watermark: _Optional[bytes] = ..., flags: _Optional[bytes] = ..., max_running: _Optional[int] = ..., on_refusal: _Optional[_Union[OnRefusal, str]] = ..., only_if_no_preemption: bool = ..., hit_limit: _Optional[bytes] = ..., min_new: _Optional[bytes] = ..., skip_zero_groups: _Optional[bytes] = ..., single_group_hit: _Optional[bytes] = ...) -> None: ...

class Peek(_message.Message):
    __slots__ = ("slot", "with_blocks", "limit")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    WITH_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    slot: bytes
    with_blocks: bool
    limit: bytes
    def __init__(self, slot: _Optional[bytes] = ..., with_blocks: bool = ..., limit: _Optional[bytes] = ...) -> None: ...

class Prefetch(_message.Message):
    __slots__ = ("slot", "num_hashes", "hashes", "domain", "within_ns")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    NUM_HASHES_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    WITHIN_NS_FIELD_NUMBER: _ClassVar[int]
    slot: bytes
    num_hashes: bytes
    hashes: bytes
    domain: _containers.RepeatedScalarFieldContainer[str]
    within_ns: bytes
    def __init__(self, slot: _Optional[bytes] = ..., num_hashes: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., domain: _Optional[_Iterable[str]] = ..., within_ns: _Optional[bytes] = ...) -> None: ...

class Prefetched(_message.Message):
    __slots__ = ("hit", "blocks", "outcome")
    HIT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    hit: bytes
    blocks: bytes
    outcome: bytes
    def __init__(self, hit: _Optional[bytes] = ..., blocks: _Optional[bytes] = ..., outcome: _Optional[bytes] = ...) -> None: ...

class Peers(_message.Message):
    __slots__ = ("slot", "version", "group", "hashes", "domain", "gone")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    slot: bytes
    version: bytes
    group: bytes
    hashes: bytes
    domain: _containers.RepeatedScalarFieldContainer[str]
    gone: bytes
    def __init__(self, slot: _Optional[bytes] = ..., version: _Optional[bytes] = ..., group: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., domain: _Optional[_Iterable[str]] = ..., gone: _Optional[bytes] = ...) -> None: ...

class Retain(_message.Message):
    __slots__ = ("num_hashes", "hashes", "domain", "owner", "priority", "until_ns", "percent", "now_ns")
    NUM_HASHES_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    UNTIL_NS_FIELD_NUMBER: _ClassVar[int]
    PERCENT_FIELD_NUMBER: _ClassVar[int]
    NOW_NS_FIELD_NUMBER: _ClassVar[int]
    num_hashes: bytes
    hashes: bytes
    domain: _containers.RepeatedScalarFieldContainer[str]
    owner: _containers.RepeatedScalarFieldContainer[str]
    priority: bytes
    until_ns: bytes
    percent: bytes
    now_ns: bytes
    def __init__(self, num_hashes: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., domain: _Optional[_Iterable[str]] = ..., owner: _Optional[_Iterable[str]] = ..., priority: _Optional[bytes] = ..., until_ns: _Optional[bytes] = ..., percent: _Optional[bytes] = ..., now_ns: _Optional[bytes] = ...) -> None: ...

class Retained(_message.Message):
    __slots__ = ("hit", "blocks", "left", "outcome", "next_end_ns")
    HIT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    NEXT_END_NS_FIELD_NUMBER: _ClassVar[int]
    hit: bytes
    blocks: bytes
    left: bytes
    outcome: bytes
    next_end_ns: bytes
    def __init__(self, hit: _Optional[bytes] = ..., blocks: _Optional[bytes] = ..., left: _Optional[bytes] = ..., outcome: _Optional[bytes] = ..., next_end_ns: _Optional[bytes] = ...) -> None: ...

class Budget(_message.Message):
    __slots__ = ("tokens", "input", "overhead")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    OVERHEAD_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    input: int
    overhead: int
    def __init__(self, tokens: _Optional[int] = ..., input: _Optional[int] = ..., overhead: _Optional[int] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("slot", "computed", "launch_end", "num_prompt", "single_group_hit", "loading", "num_cached_blocks", "num_blocks", "blocks", "held_slot", "held_count", "held_blocks", "held_loading")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_END_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_FIELD_NUMBER: _ClassVar[int]
    SINGLE_GROUP_HIT_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_SLOT_FIELD_NUMBER: _ClassVar[int]
    HELD_COUNT_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_LOADING_FIELD_NUMBER: _ClassVar[int]
    slot: bytes
    computed: bytes
    launch_end: bytes
    num_prompt: bytes
    single_group_hit: bytes
    loading: bytes
    num_cached_blocks: bytes
    num_blocks: bytes
    blocks: bytes
    held_slot: bytes
    held_count: bytes
    held_blocks: bytes
    held_loading: bytes
    def __init__(self, slot: _Optional[bytes] = ..., computed: _Optional[bytes] = ..., launch_end: _Optional[bytes] = ..., num_prompt: _Optional[bytes] = ..., single_group_hit: _Optional[bytes] = ..., loading: _Optional[bytes] = ..., num_cached_blocks: _Optional[bytes] = ..., num_blocks: _Optional[bytes] = ..., blocks: _Optional[bytes] = ..., held_slot: _Optional[bytes] = ..., held_count: _Optional[bytes] = ..., held_blocks: _Optional[bytes] = ..., held_loading: _Optional[bytes] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("facts", "cache", "peers", "news", "resume", "run", "admit", "peek", "prefetch", "retain", "budget", "with_hashes", "with_tables")
    FACTS_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    NEWS_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    PEEK_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    RETAIN_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    WITH_HASHES_FIELD_NUMBER: _ClassVar[int]
    WITH_TABLES_FIELD_NUMBER: _ClassVar[int]
    facts: Facts
    cache: Cache
    peers: Peers
    news: News
    resume: Resume
    run: Run
    admit: Admit
    peek: Peek
    prefetch: Prefetch
    retain: Retain
    budget: Budget
    with_hashes: bool
    with_tables: bool
    def __init__(self, facts: _Optional[_Union[Facts, _Mapping]] = ..., cache: _Optional[_Union[Cache, _Mapping]] = ..., peers: _Optional[_Union[Peers, _Mapping]] = ..., news: _Optional[_Union[News, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., run: _Optional[_Union[Run, _Mapping]] = ..., admit: _Optional[_Union[Admit, _Mapping]] = ..., peek: _Optional[_Union[Peek, _Mapping]] = ..., prefetch: _Optional[_Union[Prefetch, _Mapping]] = ..., retain: _Optional[_Union[Retain, _Mapping]] = ..., budget: _Optional[_Union[Budget, _Mapping]] = ..., with_hashes: bool = ..., with_tables: bool = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("epoch", "seq", "part", "more", "executed_through", "parts", "traceparent")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    EXECUTED_THROUGH_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    seq: int
    part: int
    more: bool
    executed_through: int
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    traceparent: str
    def __init__(self, epoch: _Optional[int] = ..., seq: _Optional[int] = ..., part: _Optional[int] = ..., more: bool = ..., executed_through: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Blocks(_message.Message):
    __slots__ = ("row", "group", "count", "ids")
    ROW_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    row: bytes
    group: bytes
    count: bytes
    ids: bytes
    def __init__(self, row: _Optional[bytes] = ..., group: _Optional[bytes] = ..., count: _Optional[bytes] = ..., ids: _Optional[bytes] = ...) -> None: ...

class Declined(_message.Message):
    __slots__ = ("row", "why", "tier", "hit", "load_ns", "compute_ns")
    ROW_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    HIT_FIELD_NUMBER: _ClassVar[int]
    LOAD_NS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_NS_FIELD_NUMBER: _ClassVar[int]
    row: bytes
    why: bytes
    tier: bytes
    hit: bytes
    load_ns: bytes
    compute_ns: bytes
    def __init__(self, row: _Optional[bytes] = ..., why: _Optional[bytes] = ..., tier: _Optional[bytes] = ..., hit: _Optional[bytes] = ..., load_ns: _Optional[bytes] = ..., compute_ns: _Optional[bytes] = ...) -> None: ...

class Orders(_message.Message):
    __slots__ = ("stamp_block", "stamp", "copy_src", "copy_dst", "copy_group", "zero_block", "zero_group", "load_job", "load_tier", "load_slot", "load_version", "load_block", "load_group", "load_stamp", "load_key", "save_job", "save_block", "save_group", "save_stamp", "save_tier", "save_slot", "save_key", "move_job", "move_tier", "move_slot", "move_version", "move_to_tier", "move_to_slot", "move_key")
    STAMP_BLOCK_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    COPY_SRC_FIELD_NUMBER: _ClassVar[int]
    COPY_DST_FIELD_NUMBER: _ClassVar[int]
    COPY_GROUP_FIELD_NUMBER: _ClassVar[int]
    ZERO_BLOCK_FIELD_NUMBER: _ClassVar[int]
    ZERO_GROUP_FIELD_NUMBER: _ClassVar[int]
    LOAD_JOB_FIELD_NUMBER: _ClassVar[int]
    LOAD_TIER_FIELD_NUMBER: _ClassVar[int]
    LOAD_SLOT_FIELD_NUMBER: _ClassVar[int]
    LOAD_VERSION_FIELD_NUMBER: _ClassVar[int]
    LOAD_BLOCK_FIELD_NUMBER: _ClassVar[int]
    LOAD_GROUP_FIELD_NUMBER: _ClassVar[int]
    LOAD_STAMP_FIELD_NUMBER: _ClassVar[int]
    LOAD_KEY_FIELD_NUMBER: _ClassVar[int]
    SAVE_JOB_FIELD_NUMBER: _ClassVar[int]
    SAVE_BLOCK_FIELD_NUMBER: _ClassVar[int]
    SAVE_GROUP_FIELD_NUMBER: _ClassVar[int]
    SAVE_STAMP_FIELD_NUMBER: _ClassVar[int]
    SAVE_TIER_FIELD_NUMBER: _ClassVar[int]
    SAVE_SLOT_FIELD_NUMBER: _ClassVar[int]
    SAVE_KEY_FIELD_NUMBER: _ClassVar[int]
    MOVE_JOB_FIELD_NUMBER: _ClassVar[int]
    MOVE_TIER_FIELD_NUMBER: _ClassVar[int]
    MOVE_SLOT_FIELD_NUMBER: _ClassVar[int]
    MOVE_VERSION_FIELD_NUMBER: _ClassVar[int]
    MOVE_TO_TIER_FIELD_NUMBER: _ClassVar[int]
    MOVE_TO_SLOT_FIELD_NUMBER: _ClassVar[int]
    MOVE_KEY_FIELD_NUMBER: _ClassVar[int]
    stamp_block: bytes
    stamp: bytes
    copy_src: bytes
    copy_dst: bytes
    copy_group: bytes
    zero_block: bytes
    zero_group: bytes
    load_job: bytes
    load_tier: bytes
    load_slot: bytes
    load_version: bytes
    load_block: bytes
    load_group: bytes
    load_stamp: bytes
    load_key: bytes
    save_job: bytes
    save_block: bytes
    save_group: bytes
    save_stamp: bytes
    save_tier: bytes
    save_slot: bytes
    save_key: bytes
    move_job: bytes
    move_tier: bytes
    move_slot: bytes
    move_version: bytes
    move_to_tier: bytes
    move_to_slot: bytes
    move_key: bytes
    def __init__(self, stamp_block: _Optional[bytes] = ..., stamp: _Optional[bytes] = ..., copy_src: _Optional[bytes] = ..., copy_dst: _Optional[bytes] = ..., copy_group: _Optional[bytes] = ..., zero_block: _Optional[bytes] = ..., zero_group: _Optional[bytes] = ..., load_job: _Optional[bytes] = ..., load_tier: _Optional[bytes] = ..., load_slot: _Optional[bytes] = ..., load_version: _Optional[bytes] = ..., load_block: _Optional[bytes] = ..., load_group: _Optional[bytes] = ..., load_stamp: _Optional[bytes] = ..., load_key: _Optional[bytes] = ..., save_job: _Optional[bytes] = ..., save_block: _Optional[bytes] = ..., save_group: _Optional[bytes] = ..., save_stamp: _Optional[bytes] = ..., save_tier: _Optional[bytes] = ..., save_slot: _Optional[bytes] = ..., save_key: _Optional[bytes] = ..., move_job: _Optional[bytes] = ..., move_tier: _Optional[bytes] = ..., move_slot: _Optional[bytes] = ..., move_version: _Optional[bytes] = ..., move_to_tier: _Optional[bytes] = ..., move_to_slot: _Optional[bytes] = ..., move_key: _Optional[bytes] = ...) -> None: ...

class CacheEvent(_message.Message):
    __slots__ = ("kind", "group", "hashes", "blocks", "domain", "parent", "block_size", "slot", "start", "end", "block_starts", "reason", "tier")
    KIND_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STARTS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    kind: CacheEventKind
    group: int
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    blocks: bytes
    domain: str
    parent: bytes
    block_size: int
    slot: int
    start: int
    end: int
    block_starts: bytes
    reason: RemoveReason
    tier: _replica_pb2.TierKind
    def __init__(self, kind: _Optional[_Union[CacheEventKind, str]] = ..., group: _Optional[int] = ..., hashes: _Optional[_Iterable[bytes]] = ..., blocks: _Optional[bytes] = ..., domain: _Optional[str] = ..., parent: _Optional[bytes] = ..., block_size: _Optional[int] = ..., slot: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., block_starts: _Optional[bytes] = ..., reason: _Optional[_Union[RemoveReason, str]] = ..., tier: _Optional[_Union[_replica_pb2.TierKind, str]] = ...) -> None: ...

class PartResult(_message.Message):
    __slots__ = ("granted", "preempted", "admit_status", "admit_hit", "admit_granted", "admit_single_group_hit", "admit_load_after", "new_blocks", "tables", "peek_hit", "peek_single_group_hit", "peek_blocks", "num_hashes", "last_hash", "reset_done", "orders", "free_blocks", "events", "admit_job", "admit_tier_tokens", "declined", "prefetched", "retained", "admit_needed", "run_needed")
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    ADMIT_STATUS_FIELD_NUMBER: _ClassVar[int]
    ADMIT_HIT_FIELD_NUMBER: _ClassVar[int]
    ADMIT_GRANTED_FIELD_NUMBER: _ClassVar[int]
    ADMIT_SINGLE_GROUP_HIT_FIELD_NUMBER: _ClassVar[int]
    ADMIT_LOAD_AFTER_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    PEEK_HIT_FIELD_NUMBER: _ClassVar[int]
    PEEK_SINGLE_GROUP_HIT_FIELD_NUMBER: _ClassVar[int]
    PEEK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HASHES_FIELD_NUMBER: _ClassVar[int]
    LAST_HASH_FIELD_NUMBER: _ClassVar[int]
    RESET_DONE_FIELD_NUMBER: _ClassVar[int]
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    ADMIT_JOB_FIELD_NUMBER: _ClassVar[int]
    ADMIT_TIER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    PREFETCHED_FIELD_NUMBER: _ClassVar[int]
    RETAINED_FIELD_NUMBER: _ClassVar[int]
    ADMIT_NEEDED_FIELD_NUMBER: _ClassVar[int]
    RUN_NEEDED_FIELD_NUMBER: _ClassVar[int]
    granted: bytes
    preempted: bytes
    admit_status: bytes
    admit_hit: bytes
    admit_granted: bytes
    admit_single_group_hit: bytes
    admit_load_after: bytes
    new_blocks: Blocks
    tables: Blocks
    peek_hit: bytes
    peek_single_group_hit: bytes
    peek_blocks: Blocks
    num_hashes: bytes
    last_hash: _containers.RepeatedScalarFieldContainer[bytes]
    reset_done: bool
    orders: Orders
    free_blocks: int
    events: _containers.RepeatedCompositeFieldContainer[CacheEvent]
    admit_job: bytes
    admit_tier_tokens: bytes
    declined: Declined
    prefetched: Prefetched
    retained: Retained
    admit_needed: bytes
    run_needed: bytes
    def __init__(self, granted: _Optional[bytes] = ..., preempted: _Optional[bytes] = ..., admit_status: _Optional[bytes] = ..., admit_hit: _Optional[bytes] = ..., admit_granted: _Optional[bytes] = ..., admit_single_group_hit: _Optional[bytes] = ..., admit_load_after: _Optional[bytes] = ..., new_blocks: _Optional[_Union[Blocks, _Mapping]] = ..., tables: _Optional[_Union[Blocks, _Mapping]] = ..., peek_hit: _Optional[bytes] = ..., peek_single_group_hit: _Optional[bytes] = ..., peek_blocks: _Optional[_Union[Blocks, _Mapping]] = ..., num_hashes: _Optional[bytes] = ..., last_hash: _Optional[_Iterable[bytes]] = ..., reset_done: bool = ..., orders: _Optional[_Union[Orders, _Mapping]] = ..., free_blocks: _Optional[int] = ..., events: _Optional[_Iterable[_Union[CacheEvent, _Mapping]]] = ..., admit_job: _Optional[bytes] = ..., admit_tier_tokens: _Optional[bytes] = ..., declined: _Optional[_Union[Declined, _Mapping]] = ..., prefetched: _Optional[_Union[Prefetched, _Mapping]] = ..., retained: _Optional[_Union[Retained, _Mapping]] = ..., admit_needed: _Optional[bytes] = ..., run_needed: _Optional[bytes] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("seq", "part", "parts", "published_through")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_THROUGH_FIELD_NUMBER: _ClassVar[int]
    seq: int
    part: int
    parts: _containers.RepeatedCompositeFieldContainer[PartResult]
    published_through: int
    def __init__(self, seq: _Optional[int] = ..., part: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[PartResult, _Mapping]]] = ..., published_through: _Optional[int] = ...) -> None: ...

class StepError(_message.Message):
    __slots__ = ("seq", "part", "reason", "message", "field", "remedy", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SEQ_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    seq: int
    part: int
    reason: str
    message: str
    field: str
    remedy: str
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, seq: _Optional[int] = ..., part: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., remedy: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...
