"""A worker, which holds the pages of a rank: the facts that it registers, and the plan that it receives."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvplane.base.errors import InvalidArgument
from kvplane.base.rank_plan import RankPlan
from kvplane.base.stamps import MAX_EPOCH

MAX_ADDRESS_CHARS = 512
MAX_DEVICE_CHARS = 64


class WorkerState(Enum):
    """The state of a worker. The value is the name used on the wire."""

    STARTING = "starting"  # it has its plan, but no pages yet
    READY = "ready"  # engines can attach its pages
    LEAVING = "leaving"  # it is shutting down


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One worker.

    Attributes:
        rank: the rank whose pages it holds.
        worker_id: u64 drawn at random by each worker process, not 0.
        address: where it serves `kvplane.v1.Worker`.
        pid: its process id.
        device: device of its pages, such as "cpu" or "cuda:0".
        state: see WorkerState.
        incarnation: identifies its page memory; 0 while it has none.
        owner_epoch: the engine life that owns its pages.
        plan_digest: digest of the plan of its pages, "" while it has none.
    """

    rank: int
    worker_id: int
    address: str
    pid: int
    device: str
    state: WorkerState = WorkerState.STARTING
    incarnation: int = 0
    owner_epoch: int = 0
    plan_digest: str = ""

    def validate(self) -> None:
        """Raise InvalidArgument, naming the field, for an impossible worker."""
        _require(self.worker_id > 0, "worker.worker_id", "draw a u64 at random")
        _require(len(self.address) <= MAX_ADDRESS_CHARS, "worker.address", f"give at most {MAX_ADDRESS_CHARS}")
        _require(len(self.device) <= MAX_DEVICE_CHARS, "worker.device", f"give at most {MAX_DEVICE_CHARS}")
        _require(self.owner_epoch < MAX_EPOCH, "worker.owner_epoch", f"give less than {MAX_EPOCH}")
        _require(len(self.plan_digest) <= MAX_DEVICE_CHARS, "worker.plan_digest", "give the digest of a plan")


@dataclass(frozen=True, slots=True)
class Assignment:
    """The answer to a worker's registration.

    Attributes:
        plan: memory layout of its rank.
        num_ranks: number of ranks of the replica.
        lease_ms: the registration expires when it is not renewed for this long.
    """

    plan: RankPlan
    num_ranks: int
    lease_ms: int


def _require(holds: bool, field_name: str, remedy: str) -> None:
    if not holds:
        raise InvalidArgument("value out of range", field=field_name, remedy=remedy)
