"""The public face of kvplane, all of it. `import kvplane` loads this when one of the names is first used."""

from __future__ import annotations

import kvplane.aio as aio
from kvplane.access import (
    Access,
    Tls,
)
from kvplane.base.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    KvplaneError,
    LimitExceeded,
    Moved,
    NotFound,
    OpIdReused,
    OtherWriter,
    ReplicaLapsed,
    SequenceError,
    ServiceRestarted,
    StaleEpoch,
    Unavailable,
)
from kvplane.base.groups import (
    AlignSpec,
    CommitRule,
    GroupKind,
    GroupSpec,
    HashAlgorithm,
    MambaMode,
    ReplicaSpec,
)
from kvplane.base.session import (
    NEW_EPOCH,
    Opened,
    OpenRequest,
    SessionTransport,
)
from kvplane.base.step import (
    Admit,
    AdmitStatus,
    Blocks,
    Budget,
    Cache,
    CacheEvent,
    End,
    EventKind,
    ExtraKeys,
    Facts,
    Multimodal,
    News,
    OnRefusal,
    Orders,
    Part,
    PartResult,
    Peek,
    RemoveReason,
    RowFlag,
    Run,
    StepResult,
    Watermark,
)
from kvplane.events import (
    EventBatch,
)
from kvplane.requests import (
    Allocate,
    Appended,
    At,
    Commit,
    Content,
    Ending,
)
from kvplane.retry import (
    RetryPolicy,
)
from kvplane.revival import (
    Revival,
)
from kvplane.rows import (
    AdmitRow,
    FactRow,
    NewsRow,
    PeekRow,
    RunRow,
    part_of,
)
from kvplane.session import Session, draw_nonce
from kvplane.sources import (
    LayerSource,
    ModelSource,
)
from kvplane.tables import (
    BlockTables,
)
from kvplane.transport import (
    GrpcTransport,
)
from kvplane.unary import (
    Client,
    connect,
)

__all__ = [
    "NEW_EPOCH",
    "Access",
    "Admit",
    "AdmitRow",
    "AdmitStatus",
    "AlignSpec",
    "Allocate",
    "AlreadyExists",
    "Appended",
    "At",
    "BlockTables",
    "Blocks",
    "Budget",
    "Cache",
    "CacheEvent",
    "Client",
    "Commit",
    "CommitRule",
    "Content",
    "DeadlineExceeded",
    "End",
    "Ending",
    "EventBatch",
    "EventKind",
    "ExtraKeys",
    "FactRow",
    "Facts",
    "FailedPrecondition",
    "GroupKind",
    "GroupSpec",
    "GrpcTransport",
    "HashAlgorithm",
    "InternalError",
    "InvalidArgument",
    "KvplaneError",
    "LayerSource",
    "LimitExceeded",
    "MambaMode",
    "ModelSource",
    "Moved",
    "Multimodal",
    "News",
    "NewsRow",
    "NotFound",
    "OnRefusal",
    "OpIdReused",
    "OpenRequest",
    "Opened",
    "Orders",
    "OtherWriter",
    "Part",
    "PartResult",
    "Peek",
    "PeekRow",
    "RemoveReason",
    "ReplicaLapsed",
    "ReplicaSpec",
    "RetryPolicy",
    "Revival",
    "RowFlag",
    "Run",
    "RunRow",
    "SequenceError",
    "ServiceRestarted",
    "Session",
    "SessionTransport",
    "StaleEpoch",
    "StepResult",
    "Tls",
    "Unavailable",
    "Watermark",
    "aio",
    "connect",
    "draw_nonce",
    "part_of",
]
