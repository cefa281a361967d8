from kvplane.v1 import replica_pb2 as _replica_pb2
from kvplane.v1 import step_pb2 as _step_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_STARTING: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_LEAVING: _ClassVar[WorkerState]
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_STARTING: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_LEAVING: WorkerState

class TensorPlacement(_message.Message):
    __slots__ = ("group", "layer_names", "offset_bytes", "layer_stride_bytes", "block_stride_bytes")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LAYER_NAMES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYER_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    group: int
    layer_names: _containers.RepeatedScalarFieldContainer[str]
    offset_bytes: int
    layer_stride_bytes: int
    block_stride_bytes: int
    def __init__(self, group: _Optional[int] = ..., layer_names: _Optional[_Iterable[str]] = ..., offset_bytes: _Optional[int] = ..., layer_stride_bytes: _Optional[int] = ..., block_stride_bytes: _Optional[int] = ...) -> None: ...

class GroupLayers(_message.Message):
    __slots__ = ("layers",)
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedCompositeFieldContainer[_replica_pb2.Layer]
    def __init__(self, layers: _Optional[_Iterable[_Union[_replica_pb2.Layer, _Mapping]]] = ...) -> None: ...

class RankPlan(_message.Message):
    __slots__ = ("num_blocks", "size_bytes", "bytes_per_block", "groups", "tensors", "shared_layers", "opaque_layout")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    SHARED_LAYERS_FIELD_NUMBER: _ClassVar[int]
    OPAQUE_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    size_bytes: int
    bytes_per_block: int
    groups: _containers.RepeatedCompositeFieldContainer[GroupLayers]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorPlacement]
    shared_layers: _containers.RepeatedCompositeFieldContainer[_replica_pb2.Layer]
    opaque_layout: str
    def __init__(self, num_blocks: _Optional[int] = ..., size_bytes: _Optional[int] = ..., bytes_per_block: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GroupLayers, _Mapping]]] = ..., tensors: _Optional[_Iterable[_Union[TensorPlacement, _Mapping]]] = ..., shared_layers: _Optional[_Iterable[_Union[_replica_pb2.Layer, _Mapping]]] = ..., opaque_layout: _Optional[str] = ...) -> None: ...

class TierUse(_message.Message):
    __slots__ = ("kind", "slot_bytes", "saved_blocks", "saved_bytes", "loaded_blocks", "loaded_bytes", "discarded_blocks", "refused_blocks", "failed_blocks", "suspended")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SAVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISCARDED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FAILED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SUSPENDED_FIELD_NUMBER: _ClassVar[int]
    kind: _replica_pb2.TierKind
    slot_bytes: int
    saved_blocks: int
    saved_bytes: int
    loaded_blocks: int
    loaded_bytes: int
    discarded_blocks: int
    refused_blocks: int
    failed_blocks: int
    suspended: bool
    def __init__(self, kind: _Optional[_Union[_replica_pb2.TierKind, str]] = ..., slot_bytes: _Optional[int] = ..., saved_blocks: _Optional[int] = ..., saved_bytes: _Optional[int] = ..., loaded_blocks: _Optional[int] = ..., loaded_bytes: _Optional[int] = ..., discarded_blocks: _Optional[int] = ..., refused_blocks: _Optional[int] = ..., failed_blocks: _Optional[int] = ..., suspended: bool = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("rank", "worker_id", "address", "pid", "device", "state", "incarnation", "owner_epoch", "plan_digest", "tiers", "host_incarnation", "mapped", "nixl_arena", "nixl_peers")
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    OWNER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PLAN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    HOST_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MAPPED_FIELD_NUMBER: _ClassVar[int]
    NIXL_ARENA_FIELD_NUMBER: _ClassVar[int]
    NIXL_PEERS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    worker_id: int
    address: str
    pid: int
    device: str
    state: WorkerState
    incarnation: int
    owner_epoch: int
    plan_digest: str
    tiers: _containers.RepeatedCompositeFieldContainer[TierUse]
    host_incarnation: bytes
    mapped: _containers.RepeatedScalarFieldContainer[bytes]
    nixl_arena: bytes
    nixl_peers: int
    def __init__(self, rank: _Optional[int] = ..., worker_id: _Optional[int] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., device: _Optional[str] = ..., state: _Optional[_Union[WorkerState, str]] = ..., incarnation: _Optional[int] = ..., owner_epoch: _Optional[int] = ..., plan_digest: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[TierUse, _Mapping]]] = ..., host_incarnation: _Optional[bytes] = ..., mapped: _Optional[_Iterable[bytes]] = ..., nixl_arena: _Optional[bytes] = ..., nixl_peers: _Optional[int] = ...) -> None: ...

class PeerArena(_message.Message):
    __slots__ = ("first_slot", "num_slots", "address", "incarnation", "nixl_arena")
    FIRST_SLOT_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NIXL_ARENA_FIELD_NUMBER: _ClassVar[int]
    first_slot: int
    num_slots: int
    address: str
    incarnation: bytes
    nixl_arena: bytes
    def __init__(self, first_slot: _Optional[int] = ..., num_slots: _Optional[int] = ..., address: _Optional[str] = ..., incarnation: _Optional[bytes] = ..., nixl_arena: _Optional[bytes] = ...) -> None: ...

class RegisterWorkerRequest(_message.Message):
    __slots__ = ("replica", "worker")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    replica: str
    worker: WorkerInfo
    def __init__(self, replica: _Optional[str] = ..., worker: _Optional[_Union[WorkerInfo, _Mapping]] = ...) -> None: ...

class RegisterWorkerResponse(_message.Message):
    __slots__ = ("plan", "plan_digest", "num_ranks", "lease_ms", "tiers", "content_id", "namespace")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    PLAN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    plan: RankPlan
    plan_digest: str
    num_ranks: int
    lease_ms: int
    tiers: _containers.RepeatedCompositeFieldContainer[_replica_pb2.TierSpec]
    content_id: bytes
    namespace: bytes
    def __init__(self, plan: _Optional[_Union[RankPlan, _Mapping]] = ..., plan_digest: _Optional[str] = ..., num_ranks: _Optional[int] = ..., lease_ms: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[_replica_pb2.TierSpec, _Mapping]]] = ..., content_id: _Optional[bytes] = ..., namespace: _Optional[bytes] = ...) -> None: ...

class RenewWorkerRequest(_message.Message):
    __slots__ = ("replica", "worker")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    replica: str
    worker: WorkerInfo
    def __init__(self, replica: _Optional[str] = ..., worker: _Optional[_Union[WorkerInfo, _Mapping]] = ...) -> None: ...

class RenewWorkerResponse(_message.Message):
    __slots__ = ("lease_ms", "peers")
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    lease_ms: int
    peers: _containers.RepeatedCompositeFieldContainer[PeerArena]
    def __init__(self, lease_ms: _Optional[int] = ..., peers: _Optional[_Iterable[_Union[PeerArena, _Mapping]]] = ...) -> None: ...

class DeregisterWorkerRequest(_message.Message):
    __slots__ = ("replica", "worker_id")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    replica: str
    worker_id: int
    def __init__(self, replica: _Optional[str] = ..., worker_id: _Optional[int] = ...) -> None: ...

class DeregisterWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchPeersRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    def __init__(self, namespace: _Optional[bytes] = ...) -> None: ...

class WatchPeersResponse(_message.Message):
    __slots__ = ("replica", "is_gone", "arenas", "rows")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    IS_GONE_FIELD_NUMBER: _ClassVar[int]
    ARENAS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    replica: str
    is_gone: bool
    arenas: _containers.RepeatedCompositeFieldContainer[PeerArena]
    rows: _step_pb2.Peers
    def __init__(self, replica: _Optional[str] = ..., is_gone: bool = ..., arenas: _Optional[_Iterable[_Union[PeerArena, _Mapping]]] = ..., rows: _Optional[_Union[_step_pb2.Peers, _Mapping]] = ...) -> None: ...
