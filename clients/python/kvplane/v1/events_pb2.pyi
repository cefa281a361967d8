from kvplane.v1 import step_pb2 as _step_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SubscribeRequest(_message.Message):
    __slots__ = ("replica", "after_seq", "entries", "digest_period_s")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQ_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_PERIOD_S_FIELD_NUMBER: _ClassVar[int]
    replica: str
    after_seq: int
    entries: bool
    digest_period_s: int
    def __init__(self, replica: _Optional[str] = ..., after_seq: _Optional[int] = ..., entries: bool = ..., digest_period_s: _Optional[int] = ...) -> None: ...

class SubscribeResponse(_message.Message):
    __slots__ = ("seq", "epoch", "events", "gap", "withdrawn", "restored", "digests")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    epoch: int
    events: _containers.RepeatedCompositeFieldContainer[_step_pb2.CacheEvent]
    gap: bool
    withdrawn: bool
    restored: bool
    digests: _containers.RepeatedCompositeFieldContainer[GroupDigest]
    def __init__(self, seq: _Optional[int] = ..., epoch: _Optional[int] = ..., events: _Optional[_Iterable[_Union[_step_pb2.CacheEvent, _Mapping]]] = ..., gap: bool = ..., withdrawn: bool = ..., restored: bool = ..., digests: _Optional[_Iterable[_Union[GroupDigest, _Mapping]]] = ...) -> None: ...

class GroupDigest(_message.Message):
    __slots__ = ("group", "keys", "sum")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    group: int
    keys: int
    sum: bytes
    def __init__(self, group: _Optional[int] = ..., keys: _Optional[int] = ..., sum: _Optional[bytes] = ...) -> None: ...
