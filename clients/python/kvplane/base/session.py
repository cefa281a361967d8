"""The messages that open a session and the interface of its transport, for gRPC and for a service in the same
process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvplane.base.errors import InvalidArgument, KvplaneError
from kvplane.base.groups import CommitRule, ReplicaSpec
from kvplane.base.step import STEP_VERSION, Part, Step, StepResult

NEW_EPOCH = 0

# Version of the rules by which the core decides. Raised with every change after which equal steps may have other
# results, because a mirror needs equal rules in the engine and in the service. `tests/core/test_core_version.py`
# fails when recorded steps have other results, or the exported state has other bytes.
CORE_VERSION = 7

# Defaults of a transport: seconds that a call waits for the service.
OPEN_TIMEOUT_S = 10.0
STEP_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class MirrorTerms:
    """How an engine decides that runs the core in its own process; the service of its mirror must decide equally.

    `takes_rows`: it carries out `CacheRequest.rows`.
    """

    commit: CommitRule
    core_version: int = CORE_VERSION
    takes_rows: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """What a service has applied of the steps of a mirror's engine.

    Attributes:
        applied_through: number of the last step that it has applied.
        image_wanted: it needs the whole state of the engine's allocator before further steps.
        reason: why, as the reason of an error, for example DIVERGED.
        message: details of the reason.
    """

    applied_through: int
    image_wanted: bool = False
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """A change of the prefix cache that a caller of the service asks of a mirror's engine. It may come twice.

    Attributes:
        number: names it in the step that carries it out.
        blocks: blocks whose keys are removed, in order.
        reset: remove all keys, if no request holds a block.
        rows: a prompt to prefetch, or a prefix to retain: one row of that section. Its times are on the clock of
            `Retain.now_ns`; the engine states them on its own.
    """

    number: int
    blocks: tuple[int, ...] = ()
    reset: bool = False
    rows: Part | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """The first message of a session, from the client.

    Attributes:
        replica: name of the replica.
        nonce: u64 chosen at random for each stream; only the newest session of a replica may apply steps.
        epoch: NEW_EPOCH begins a new epoch; the current epoch continues the
            current epoch after a broken stream.
        with_events: whether answers contain cache events.
        client: name of the client, for operators.
        stamp_table: for a new epoch on unchanged page memory: one stamp per block; a prefix cache key stays valid if
            its stamp is the block's stamp. Empty: no key stays valid.
        incarnation: identifies the page memory, 0 = unknown; cache entries stored for another incarnation are dropped.
        busy_blocks: for a new epoch: blocks that loads (transfers into pages from outside) may still write: loads
            of earlier lives, or of requests that `Resume` lists as loading. The service does not allocate these blocks.
        step_version: version of the step format; must equal the service's version.
        owner_epoch: for a new epoch: the highest epoch that owns a rank's memory (`RankGroup.owner_epoch`), 0 =
            none or unknown. The new life gets a higher epoch, even if the service and its store have lost the current
            one.
        life_nonce: with an epoch, required: nonce of the stream that began this epoch. The nonce identifies the
            life, since two services that do not know of each other may give two lives the same epoch. In a mirror: a
            number that the engine draws once.
        mirror: set if the engine decides in its own process and the service applies the same steps after it.
        disk_incarnation: identifies what the disk tiers hold (`RankGroup.disk_incarnation`), 0 = unknown. With another
            page memory, keys of slots of disks stay valid only if this number is as before.
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
    mirror: MirrorTerms | None = None
    disk_incarnation: int = 0

    def __post_init__(self) -> None:
        """Raise InvalidArgument if the steps have another version than this code supports."""
        if self.step_version != STEP_VERSION:
            raise InvalidArgument(
                f"the client sends steps of version {self.step_version}, this side accepts version {STEP_VERSION}",
                field="step_version",
                remedy="use the same version of client and service",
            )


@dataclass(frozen=True, slots=True)
class Opened:
    """The service's answer to OpenRequest.

    Attributes:
        epoch: the epoch that the client puts into its steps.
        seq: number of the last step that was applied completely.
        next_part: number of parts of step seq + 1 that were applied.
        max_steps_in_flight: most steps without an answer; a limit of the service.
        max_rows: most rows of a part; a limit of the service.
        lease_ms: the session expires if no message arrives for this number of milliseconds.
        spec: settings of the replica.
        free_blocks: number of free blocks, exact.
        kept_keys: number of keys of the prefix cache that are valid in this epoch.
        busy_blocks: blocks that loads (transfers into pages from outside) of earlier epochs may still write,
            ascending. The service does not allocate a block of these until `Cache.loads_over` lists it.
        mirror_window: in a mirror, most messages without an answer.
        image_wanted: in a mirror, the service needs an image before steps.
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
    mirror_window: int = 0
    image_wanted: bool = False


class SessionTransport(Protocol):
    """The interface between a session and its service: gRPC (`kvplane.blocking.transport`), in process, or simulated.

    The refusal of a step is returned as an answer. A raised error concerns the stream: Unavailable if it broke,
    DeadlineExceeded if no answer arrived in time (after both errors the session reopens the stream), and any other
    KvplaneError if the service ended the session (StaleEpoch, OtherWriter, NotFound, InvalidArgument for a malformed
    message). Every method has a timeout.

    A transport may also have a method `ready`, which returns the next answer if it is here and a result, and otherwise
    None; it does not wait and raises nothing. A session calls it before `receive`, but only if the class that defines
    the transport's `receive` defines `ready` too: a class that replaces or passes on `receive` alone is asked through
    `receive`.

    Attributes:
        draining: whether the service drains (finishes the running steps and exits); set when an answer after the
            service's notice was received.
        can_move: another service is available for the replica.
    """

    draining: bool
    can_move: bool

    def open(self, request: OpenRequest) -> Opened:
        """Open a new stream to the service instead of the previous one, and return the service's first answer."""

    def send(self, step: Step) -> None:
        """Send a step without waiting for its answer. A broken stream is not an error here: `receive` raises it.

        Raises:
            InvalidArgument: a value cannot be encoded; nothing was sent.
        """

    def receive(self) -> StepResult | KvplaneError:
        """Wait for the next answer, in the order in which steps were sent: the result of a step, or the refusal of a
        step.
        """

    def heartbeat(self, waiting_requests: int | None = None) -> None:
        """Send a heartbeat, so that the session's lease does not expire."""

    def close(self) -> None:
        """Close the stream, so that the service frees the session's requests. Ignores an unreachable service."""

    def abort(self) -> None:
        """Cancel the stream and refuse to open another stream. Any thread may call this method. Calls that wait raise
        Unavailable.
        """
