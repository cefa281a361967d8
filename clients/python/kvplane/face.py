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
    PermissionDenied,
    QuotaExceeded,
    ReplicaLapsed,
    SequenceError,
    ServiceRestarted,
    StaleEpoch,
    Unauthenticated,
    Unavailable,
)
from kvplane.base.groups import (
    AlignSpec,
    CommitRule,
    Drafter,
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
    Resume,
    RowFlag,
    Run,
    StepResult,
    Watermark,
)
from kvplane.events import (
    EventBatch,
)
from kvplane.known import (
    KnownRequests,
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
    ResumeRow,
    RunRow,
    part_of,
    resume_of,
)
from kvplane.session import Session, draw_nonce
from kvplane.sessions import (
    SessionOptions,
)
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
    "Drafter",
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
    "KnownRequests",
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
    "PermissionDenied",
    "QuotaExceeded",
    "RemoveReason",
    "ReplicaLapsed",
    "ReplicaSpec",
    "Resume",
    "ResumeRow",
    "RetryPolicy",
    "Revival",
    "RowFlag",
    "Run",
    "RunRow",
    "SequenceError",
    "ServiceRestarted",
    "Session",
    "SessionOptions",
    "SessionTransport",
    "StaleEpoch",
    "StepResult",
    "Tls",
    "Unauthenticated",
    "Unavailable",
    "Watermark",
    "aio",
    "connect",
    "draw_nonce",
    "part_of",
    "resume_of",
]
