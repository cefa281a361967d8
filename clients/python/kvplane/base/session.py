"""What opens a session and what the answer says; the same types over the wire and in process."""

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
        epoch: NEW_EPOCH for a new engine life, the current epoch to resume after a broken stream.
        with_events: answers carry cache events.
        client: name of the client, for operators.
        stamp_table: new engine life on unchanged page memory: one stamp per block; keys whose stamp matches
            survive. Empty: no key survives.
        incarnation: names the life of that memory, 0 = not known; what was stored for another one is dropped.
        busy_blocks: new engine life: blocks that loads of earlier lives, or of requests that an image will list as
            loading, may still write, as far as the engine knows. The service allocates none of them.
        step_version: of the steps to come; another one than the service's is refused.
        owner_epoch: new engine life: the highest that owns a rank's memory (`RankGroup.owner_epoch`); the new life is
            numbered above it, whatever its service and store know. 0 = none, or not known.
        begun_by: to resume: nonce of the stream that began the epoch, 0 = not known; two services that do not know of
            each other may give two lives the same number.
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
    begun_by: int = 0

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
        next_part: parts applied of step seq + 1.
        max_steps_in_flight, max_rows: limits of the service.
        lease_ms: send something at least this often.
        spec: of the replica.
        free_blocks: exact.
        kept_keys: keys that survived into this epoch.
        busy_blocks: ascending; not allocated until `Cache.loads_over` names them, since loads of earlier engine lives
            may still write to them.
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

    A step that is refused is an answer like any other. What is raised is about the stream: Unavailable when it is
    broken, DeadlineExceeded when nothing came in time (either way it is opened again), another KvplaneError when the
    service has ended the session (StaleEpoch, OtherWriter, NotFound, InvalidArgument for a message that cannot be
    read). No method waits without end.

    Attributes:
        draining: the service has announced that it will go; known once an answer behind the notice was received.
        can_move: another service can be asked for the replica.
    """

    draining: bool
    can_move: bool

    def open(self, request: OpenRequest) -> Opened:
        """Open a stream, in place of the one before if there was one."""
        ...

    def send(self, step: Step) -> None:
        """Send without waiting. A stream that is broken or ended is `receive`'s to tell.

        InvalidArgument: the step holds a value that cannot be sent; nothing was sent.
        """
        ...

    def receive(self) -> StepResult | KvplaneError:
        """Wait for the next answer, in the order of send: the result, or the refusal of that step."""
        ...

    def heartbeat(self) -> None:
        """Keep the lease."""
        ...

    def close(self) -> None:
        """Say goodbye: requests are freed. Idempotent; silent when the service cannot be reached."""
        ...

    def abort(self) -> None:
        """End the stream without a goodbye, and open no other one; from any thread. What waits raises Unavailable."""
        ...
