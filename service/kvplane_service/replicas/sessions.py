"""The newest session of a replica, and checks of a request to open a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from kvplane.base.errors import DeadlineExceeded, InvalidArgument, KvplaneError, ServiceRestarted
from kvplane.base.groups import ReplicaSpec
from kvplane.base.session import NEW_EPOCH, OpenRequest
from kvplane.base.stamps import MAX_EPOCH

MAX_CLIENT_CHARS = 128
SILENT_MS = 10_000

OnEnd: TypeAlias = Callable[[KvplaneError], None]  # called once, with the reason, when a session loses its replica


@dataclass(slots=True)
class SessionSlot:
    """The session that may write to a replica.

    Attributes:
        nonce: random number of the session.
        with_events: whether its answers include cache events.
        client: name of the client, for operators.
        on_end: called when the session may no longer write to the replica.
        deadline_ns: end of its lease, by the host's monotonic clock, in nanoseconds.
        broken: whether the stream of the session ended without a close.
        is_held: whether a message of the session waits in the service; meanwhile the lease does not expire.
        waiting_requests: number of requests that wait for admission in the engine; None = the engine has not said.
    """

    nonce: int
    with_events: bool
    client: str
    on_end: OnEnd
    deadline_ns: int
    broken: bool = False
    is_held: bool = False
    waiting_requests: int | None = None

    def left_ns(self, now_ns: int) -> int:
        """Return the nanoseconds until the lease expires, 0 if it has expired."""
        return 0 if self.broken else max(0, self.deadline_ns - now_ns)

    def is_expired(self, now_ns: int) -> bool:
        """Whether the lease of the session has expired."""
        return now_ns > self.deadline_ns and not self.is_held

    def end_if_silent(self, now_ns: int) -> None:
        """End the stream if no whole message has arrived for SILENT_MS after the lease expired. Of a part of a message
        gRPC shows nothing, and keeps up to `max_message_bytes` of it as long as the stream is open.
        """
        if self.is_expired(now_ns - SILENT_MS * 1_000_000) and not self.broken:
            self.broken = True
            what = f"no whole message arrived for {SILENT_MS / 1000:g} s after the lease had expired"
            self.on_end(DeadlineExceeded(what, remedy="send a heartbeat in time; open the session again"))

    @contextmanager
    def held(self, deadline_ns: Callable[[], int]) -> Iterator[None]:
        """Keep the lease valid inside the `with` block, then set its end to `deadline_ns()`.

        The lease must not expire inside the block, because messages of the session are not read there.
        """
        self.is_held = True
        try:
            yield
        finally:
            self.is_held, self.deadline_ns = False, deadline_ns()


def check_request(request: OpenRequest, spec: ReplicaSpec) -> None:
    """Raise InvalidArgument, naming the field at fault, if a request does not fit the pool and the tiers of a spec."""
    num_blocks = spec.num_blocks
    if len(request.client) > MAX_CLIENT_CHARS:
        raise InvalidArgument(
            f"{len(request.client)} characters", field="client", remedy=f"give at most {MAX_CLIENT_CHARS} characters"
        )
    if request.epoch != NEW_EPOCH and not request.life_nonce:
        raise InvalidArgument(
            f"epoch {request.epoch} alone does not identify an engine's epoch",  # two services may give it
            field="life_nonce",
            remedy="send the nonce of the stream that began this epoch, or open with epoch 0",
        )
    if len(request.stamp_table) not in (0, num_blocks, spec.num_stamps):
        slots = f" and {spec.num_stamps - num_blocks} slots of tiers" if spec.tiers else ""
        raise InvalidArgument(
            f"{len(request.stamp_table)} stamps for {num_blocks} blocks{slots}",
            field="stamp_table",
            remedy="give one stamp per block, or none when no page is to be kept",
        )
    busy = request.busy_blocks
    if busy and not 0 < min(busy) <= max(busy) < num_blocks:
        raise InvalidArgument(
            f"the blocks are {min(busy)} to {max(busy)}, the pool has {num_blocks}",
            field="busy_blocks",
            remedy=f"name blocks 1 to {num_blocks - 1} that a load may still write",
        )
    if not 0 <= request.owner_epoch < MAX_EPOCH:
        raise InvalidArgument(
            f"{request.owner_epoch} is not a valid owner epoch",
            field="owner_epoch",
            remedy=f"give the highest owner epoch of the stamp tables, 0 to {MAX_EPOCH - 1}",
        )


def restarted(why: str, epoch: int) -> ServiceRestarted:
    """Make the error for a session that resumes an engine life (epoch) unknown to this service.

    `epoch` is the newest epoch that the service knows.
    """
    return ServiceRestarted(
        why,
        field="epoch",
        remedy="open with epoch 0 and the stamp table, and send the requests again",
        metadata={"epoch": str(epoch)},
    )
