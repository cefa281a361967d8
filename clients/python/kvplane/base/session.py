"""Opening a session: the request, the answer, and the transport; the same types over gRPC and in process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvplane.base.errors import InvalidArgument, KvplaneError
from kvplane.base.groups import ReplicaSpec
from kvplane.base.step import STEP_VERSION, Step, StepResult

NEW_EPOCH = 0

# Defaults of a transport: seconds that a call waits for the service.
OPEN_TIMEOUT_S = 10.0
STEP_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """First message of a session.

    Attributes:
        replica: name of the replica.
        nonce: u64 drawn at random for each stream; only the newest session of a replica may apply steps.
        epoch: NEW_EPOCH begins a new engine life; the current epoch resumes it after a broken stream.
        with_events: answers carry cache events.
        client: name of the client, for operators.
        stamp_table: new engine life on unchanged page memory: one stamp per block; keys whose stamp matches
            survive. Empty: no key survives.
        incarnation: identifies that memory, 0 = unknown; entries stored for another incarnation are dropped.
        busy_blocks: new engine life: blocks that loads of earlier lives, or of requests that the image lists as
            loading, may still write. The service does not allocate them.
        step_version: version of the steps; must be the service's.
        owner_epoch: new engine life: the highest epoch that owns a rank's memory (`RankGroup.owner_epoch`), 0 = none
            or unknown. The new life gets a higher epoch, even if the service and its store have lost count.
        life_nonce: to resume: nonce of the stream that began the epoch, 0 = unknown. It identifies the life, since two
            services that are not aware of each other may number two lives equally.
    """

    replica: str
    nonce: int
    epoch: int = NEW_EPOCH
    with_events: bool = False
    client: str = ""
    stamp_table: Sequence[int] = ()
    incarnation: int = 0
    busy_blocks: tuple[int, ...] = ()
    step_version: int = STEP_VERSION
    owner_epoch: int = 0
    life_nonce: int = 0

    def __post_init__(self) -> None:
        """Raise InvalidArgument for steps of another version than this code's."""
        if self.step_version != STEP_VERSION:
            raise InvalidArgument(
                f"steps of version {self.step_version}; this service takes version {STEP_VERSION}",
                field="step_version",
                remedy="use client and service of one version",
            )


@dataclass(frozen=True, slots=True)
class Opened:
    """Answer to OpenRequest.

    Attributes:
        epoch: the epoch that steps are sent under.
        seq: last step applied completely.
        next_part: number of applied parts of step seq + 1.
        max_steps_in_flight, max_rows: limits of the service.
        lease_ms: the session lapses when no message arrives for this long.
        spec: of the replica.
        free_blocks: exact number of free blocks.
        kept_keys: number of keys that survived into this epoch.
        busy_blocks: ascending; not allocated until `Cache.loads_over` names them, since loads of earlier engine lives
            may still write them.
    """

    epoch: int
    seq: int
    next_part: int
    max_steps_in_flight: int
    max_rows: int
    lease_ms: int
    spec: ReplicaSpec
    free_blocks: int
    kept_keys: int
    busy_blocks: tuple[int, ...] = ()


class SessionTransport(Protocol):
    """Carries one session: gRPC (`kvplane.blocking.transport`), in process, or a simulated network.

    The refusal of a step is returned as an answer. Raised errors concern the stream: Unavailable when it broke,
    DeadlineExceeded when no answer arrived in time (after both the session reopens it), any other KvplaneError when the
    service ended the session (StaleEpoch, OtherWriter, NotFound, InvalidArgument for a malformed message). Every
    method has a timeout.

    Attributes:
        draining: the service drains; set once an answer after its notice was received.
        can_move: another service is available for the replica.
    """

    draining: bool
    can_move: bool

    def open(self, request: OpenRequest) -> Opened:
        """Open a stream, which replaces the previous one."""
        ...

    def send(self, step: Step) -> None:
        """Send without waiting. A broken stream is not an error here: `receive` raises it.

        Raises InvalidArgument for a value that cannot be encoded; nothing was sent.
        """
        ...

    def receive(self) -> StepResult | KvplaneError:
        """Wait for the next answer, in the order of send: the result, or the refusal of that step."""
        ...

    def heartbeat(self) -> None:
        """Keep the lease."""
        ...

    def close(self) -> None:
        """Close the stream, so that the service frees the requests. Idempotent; ignores an unreachable service."""
        ...

    def abort(self) -> None:
        """Cancel the stream, and refuse to open another one; from any thread. Waiting calls raise Unavailable."""
        ...
