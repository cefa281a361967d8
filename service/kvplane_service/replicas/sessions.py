"""The newest session of a replica, and the limits of a request to open one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from kvplane.base.errors import InvalidArgument, KvplaneError, ServiceRestarted
from kvplane.base.session import OpenRequest
from kvplane.base.stamps import MAX_EPOCH

MAX_CLIENT_CHARS = 128

OnEnd: TypeAlias = Callable[[KvplaneError], None]  # called once, with the reason, when a session loses its replica


@dataclass(slots=True)
class SessionSlot:
    """The session that may write to a replica.

    Attributes:
        deadline_ns: end of its lease, by the clock of the host.
        broken: its stream ended without a close.
    """

    nonce: int
    with_events: bool
    client: str
    on_end: OnEnd
    deadline_ns: int
    broken: bool = False


def check_request(request: OpenRequest, num_blocks: int) -> None:
    """Raise InvalidArgument naming the field at fault."""
    if len(request.client) > MAX_CLIENT_CHARS:
        raise InvalidArgument(
            f"{len(request.client)} characters", field="client", remedy=f"give at most {MAX_CLIENT_CHARS}"
        )
    if len(request.stamp_table) not in (0, num_blocks):
        raise InvalidArgument(
            f"{len(request.stamp_table)} stamps for {num_blocks} blocks",
            field="stamp_table",
            remedy="give one stamp per block, or none when no page is to be kept",
        )
    busy = request.busy_blocks
    if busy and not 0 < min(busy) <= max(busy) < num_blocks:
        raise InvalidArgument(
            f"blocks {min(busy)} to {max(busy)}",
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
    """The error for a session that resumes an engine life unknown to this service; `epoch` is the newest known one."""
    return ServiceRestarted(
        why,
        field="epoch",
        remedy="open with epoch 0 and the stamp table, and send the requests again",
        metadata={"epoch": str(epoch)},
    )
