from kvplane.v1 import step_pb2 as _step_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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
    __slots__ = ("slot", "request_id", "num_tokens", "computed_tokens", "tables", "running")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    slot: int
    request_id: str
    num_tokens: int
    computed_tokens: int
    tables: _containers.RepeatedCompositeFieldContainer[BlockTable]
    running: bool
    def __init__(self, slot: _Optional[int] = ..., request_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[BlockTable, _Mapping]]] = ..., running: bool = ...) -> None: ...

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
    __slots__ = ("step", "result")
    STEP_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    step: _step_pb2.Step
    result: _step_pb2.StepResult
    def __init__(self, step: _Optional[_Union[_step_pb2.Step, _Mapping]] = ..., result: _Optional[_Union[_step_pb2.StepResult, _Mapping]] = ...) -> None: ...
