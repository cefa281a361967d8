from kvplane.v1 import plan_pb2 as _plan_pb2
from kvplane.v1 import replica_pb2 as _replica_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TransferKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSFER_KIND_UNSPECIFIED: _ClassVar[TransferKind]
    TRANSFER_KIND_COPY: _ClassVar[TransferKind]
    TRANSFER_KIND_ZERO: _ClassVar[TransferKind]
    TRANSFER_KIND_GATHER: _ClassVar[TransferKind]
    TRANSFER_KIND_SCATTER: _ClassVar[TransferKind]
TRANSFER_KIND_UNSPECIFIED: TransferKind
TRANSFER_KIND_COPY: TransferKind
TRANSFER_KIND_ZERO: TransferKind
TRANSFER_KIND_GATHER: TransferKind
TRANSFER_KIND_SCATTER: TransferKind

class MemoryHandle(_message.Message):
    __slots__ = ("shared_path", "cuda_ipc", "offset_bytes", "size_bytes", "device", "device_uuid")
    SHARED_PATH_FIELD_NUMBER: _ClassVar[int]
    CUDA_IPC_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    shared_path: str
    cuda_ipc: bytes
    offset_bytes: int
    size_bytes: int
    device: str
    device_uuid: str
    def __init__(self, shared_path: _Optional[str] = ..., cuda_ipc: _Optional[bytes] = ..., offset_bytes: _Optional[int] = ..., size_bytes: _Optional[int] = ..., device: _Optional[str] = ..., device_uuid: _Optional[str] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: str
    def __init__(self, token: _Optional[str] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("replica", "worker", "orders_seq", "orders_part", "executed_seq", "size_bytes", "free_bytes", "backend", "backend_reasons", "attached_pid", "staging_rows", "busy", "tiers")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ORDERS_SEQ_FIELD_NUMBER: _ClassVar[int]
    ORDERS_PART_FIELD_NUMBER: _ClassVar[int]
    EXECUTED_SEQ_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    BACKEND_REASONS_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_PID_FIELD_NUMBER: _ClassVar[int]
    STAGING_ROWS_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    replica: str
    worker: _plan_pb2.WorkerInfo
    orders_seq: int
    orders_part: int
    executed_seq: int
    size_bytes: int
    free_bytes: int
    backend: str
    backend_reasons: _containers.RepeatedScalarFieldContainer[str]
    attached_pid: int
    staging_rows: _containers.RepeatedScalarFieldContainer[int]
    busy: bytes
    tiers: _containers.RepeatedCompositeFieldContainer[WorkerTier]
    def __init__(self, replica: _Optional[str] = ..., worker: _Optional[_Union[_plan_pb2.WorkerInfo, _Mapping]] = ..., orders_seq: _Optional[int] = ..., orders_part: _Optional[int] = ..., executed_seq: _Optional[int] = ..., size_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., backend: _Optional[str] = ..., backend_reasons: _Optional[_Iterable[str]] = ..., attached_pid: _Optional[int] = ..., staging_rows: _Optional[_Iterable[int]] = ..., busy: _Optional[bytes] = ..., tiers: _Optional[_Iterable[_Union[WorkerTier, _Mapping]]] = ...) -> None: ...

class WorkerTier(_message.Message):
    __slots__ = ("kind", "num_blocks", "slot_bytes", "saved_blocks", "loaded_blocks", "loaded_bytes", "discarded_blocks", "refused_blocks", "saved_bytes", "failed_blocks", "suspended")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SAVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISCARDED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FAILED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SUSPENDED_FIELD_NUMBER: _ClassVar[int]
    kind: _replica_pb2.TierKind
    num_blocks: int
    slot_bytes: int
    saved_blocks: int
    loaded_blocks: int
    loaded_bytes: int
    discarded_blocks: int
    refused_blocks: int
    saved_bytes: int
    failed_blocks: int
    suspended: bool
    def __init__(self, kind: _Optional[_Union[_replica_pb2.TierKind, str]] = ..., num_blocks: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., saved_blocks: _Optional[int] = ..., loaded_blocks: _Optional[int] = ..., loaded_bytes: _Optional[int] = ..., discarded_blocks: _Optional[int] = ..., refused_blocks: _Optional[int] = ..., saved_bytes: _Optional[int] = ..., failed_blocks: _Optional[int] = ..., suspended: bool = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("token", "plan_digest", "stamps_only", "opaque_plan")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PLAN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    STAMPS_ONLY_FIELD_NUMBER: _ClassVar[int]
    OPAQUE_PLAN_FIELD_NUMBER: _ClassVar[int]
    token: str
    plan_digest: str
    stamps_only: bool
    opaque_plan: _plan_pb2.RankPlan
    def __init__(self, token: _Optional[str] = ..., plan_digest: _Optional[str] = ..., stamps_only: bool = ..., opaque_plan: _Optional[_Union[_plan_pb2.RankPlan, _Mapping]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("pages", "stamps", "staging", "plan", "incarnation", "jobs")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    STAMPS_FIELD_NUMBER: _ClassVar[int]
    STAGING_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    pages: MemoryHandle
    stamps: MemoryHandle
    staging: MemoryHandle
    plan: _plan_pb2.RankPlan
    incarnation: int
    jobs: MemoryHandle
    def __init__(self, pages: _Optional[_Union[MemoryHandle, _Mapping]] = ..., stamps: _Optional[_Union[MemoryHandle, _Mapping]] = ..., staging: _Optional[_Union[MemoryHandle, _Mapping]] = ..., plan: _Optional[_Union[_plan_pb2.RankPlan, _Mapping]] = ..., incarnation: _Optional[int] = ..., jobs: _Optional[_Union[MemoryHandle, _Mapping]] = ...) -> None: ...

class TransferRequest(_message.Message):
    __slots__ = ("token", "epoch", "kind", "group", "blocks", "dst_blocks", "first_row", "expected_stamps", "seq", "part", "load_after")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_STAMPS_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    LOAD_AFTER_FIELD_NUMBER: _ClassVar[int]
    token: str
    epoch: int
    kind: TransferKind
    group: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    dst_blocks: _containers.RepeatedScalarFieldContainer[int]
    first_row: int
    expected_stamps: _containers.RepeatedScalarFieldContainer[int]
    seq: int
    part: int
    load_after: int
    def __init__(self, token: _Optional[str] = ..., epoch: _Optional[int] = ..., kind: _Optional[_Union[TransferKind, str]] = ..., group: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., dst_blocks: _Optional[_Iterable[int]] = ..., first_row: _Optional[int] = ..., expected_stamps: _Optional[_Iterable[int]] = ..., seq: _Optional[int] = ..., part: _Optional[int] = ..., load_after: _Optional[int] = ...) -> None: ...

class TransferResponse(_message.Message):
    __slots__ = ("stamps", "discarded")
    STAMPS_FIELD_NUMBER: _ClassVar[int]
    DISCARDED_FIELD_NUMBER: _ClassVar[int]
    stamps: _containers.RepeatedScalarFieldContainer[int]
    discarded: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, stamps: _Optional[_Iterable[int]] = ..., discarded: _Optional[_Iterable[int]] = ...) -> None: ...

class ChecksumRequest(_message.Message):
    __slots__ = ("group", "blocks", "token")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    group: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    token: str
    def __init__(self, group: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., token: _Optional[str] = ...) -> None: ...

class ChecksumResponse(_message.Message):
    __slots__ = ("checksums", "stamps", "discarded")
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    STAMPS_FIELD_NUMBER: _ClassVar[int]
    DISCARDED_FIELD_NUMBER: _ClassVar[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    stamps: _containers.RepeatedScalarFieldContainer[int]
    discarded: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, checksums: _Optional[_Iterable[int]] = ..., stamps: _Optional[_Iterable[int]] = ..., discarded: _Optional[_Iterable[int]] = ...) -> None: ...

class ClaimRequest(_message.Message):
    __slots__ = ("token", "epoch", "worker_id")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    token: str
    epoch: int
    worker_id: int
    def __init__(self, token: _Optional[str] = ..., epoch: _Optional[int] = ..., worker_id: _Optional[int] = ...) -> None: ...

class ClaimResponse(_message.Message):
    __slots__ = ("incarnation", "stamps", "busy")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STAMPS_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    stamps: bytes
    busy: bytes
    def __init__(self, incarnation: _Optional[int] = ..., stamps: _Optional[bytes] = ..., busy: _Optional[bytes] = ...) -> None: ...
