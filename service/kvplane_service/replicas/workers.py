"""The workers of one replica: records which worker holds the pages of each rank, while the lease of the worker is
valid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvplane.base.errors import FailedPrecondition, InvalidArgument, NoPlan, NotFound, WorkerExists
from kvplane.base.groups import TierSpec
from kvplane.base.rank_plan import RankPlan
from kvplane.base.worker import Assignment, WorkerInfo

_NS_PER_MS = 1_000_000


@dataclass(slots=True)
class _Member:
    info: WorkerInfo
    deadline_ns: int


@dataclass(frozen=True)
class TiersOfWorkers:
    """What workers learn of the tiers of their replica: as in `Assignment`."""

    tiers: tuple[TierSpec, ...] = ()
    content_id: bytes = b""
    namespace: bytes = b""


class WorkerRoster:
    """Registers at most one worker per rank. When a lease expires, only the registration is removed; the pages may
    still exist.
    """

    def __init__(
        self,
        plans: tuple[RankPlan, ...],
        num_ranks: int,
        lease_ms: int,
        clock: Callable[[], int],
        tiers: TiersOfWorkers | None = None,
        lends_pool: bool = False,
    ) -> None:
        """`plans`: memory plans, one per pipeline stage; empty if the groups were given explicitly. `clock`: monotonic
        nanoseconds. `tiers`: None = none. `lends_pool`: peers read the pool, which is in host memory; each rank of
        the engine registers as the worker of its memory, which has no plan.
        """
        self._plans = plans
        self._tiers = tiers or TiersOfWorkers()
        self._num_ranks = num_ranks
        self._lends_pool = lends_pool
        self.lease_ms = lease_ms
        self._clock = clock
        self._members: dict[int, _Member] = {}

    def register(self, info: WorkerInfo) -> Assignment:
        """Register this worker for its rank.

        Raises:
            WorkerExists: another worker holds the rank, and its lease is valid.
            NoPlan, InvalidArgument, FailedPrecondition: there is no plan for the rank.
        """
        plan = self._plan_of(info.rank, has_memory=info.host_incarnation != b"")
        self._check_free(info)
        self._keep(info)
        return Assignment(plan, self._num_ranks, self.lease_ms, **vars(self._tiers))

    def renew(self, info: WorkerInfo) -> None:
        """Renew the worker's lease.

        Raises:
            WorkerExists: another worker holds the rank.
            NotFound: the worker is not registered, or its lease expired.
        """
        self._check_free(info)
        if info.rank not in self._members:
            raise NotFound(f"no worker is registered for rank {info.rank}", field="worker", remedy="register it again")
        self._keep(info)

    def leave(self, worker_id: int) -> None:
        """Remove a worker; does nothing if it is not registered."""
        self._members = {rank: one for rank, one in self._members.items() if one.info.worker_id != worker_id}

    def extend_leases(self, late_ns: int) -> None:
        """Extend every lease by `late_ns` nanoseconds."""
        for member in self._members.values():
            member.deadline_ns += late_ns

    def alive(self) -> list[WorkerInfo]:
        """Return the workers whose lease is valid, in order of rank."""
        self._forget_silent()
        return [self._members[rank].info for rank in sorted(self._members)]

    def _plan_of(self, rank: int, has_memory: bool) -> RankPlan | None:
        is_lent = self._lends_pool and has_memory
        if not self._plans and not is_lent:
            raise NoPlan(
                "the replica was registered with explicit groups",
                field="replica",
                remedy="register it by model or by layers, so that its memory is planned",
            )
        if not 0 <= rank < self._num_ranks:
            raise InvalidArgument(
                f"the replica has no rank {rank}", field="worker.rank", remedy=f"give 0 to {self._num_ranks - 1}"
            )
        if is_lent:
            return None
        stages = len(self._plans)
        if self._num_ranks % stages:
            raise FailedPrecondition(
                f"{self._num_ranks} ranks do not divide into {stages} pipeline stages",
                field="worker.rank",
                remedy="register the replica with num_ranks a multiple of its stages",
            )
        return self._plans[rank * stages // self._num_ranks]

    def _check_free(self, info: WorkerInfo) -> None:
        self._forget_silent()
        holder = self._members.get(info.rank)
        if holder is not None and holder.info.worker_id != info.worker_id:
            raise WorkerExists(
                f"rank {info.rank} has a worker, process {holder.info.pid} at {holder.info.address}",
                field="worker.rank",
                remedy="stop that worker first, or wait until its lease expires",
                metadata={"address": holder.info.address, "pid": str(holder.info.pid)},
            )

    def _keep(self, info: WorkerInfo) -> None:
        self._members[info.rank] = _Member(info, self._clock() + self.lease_ms * _NS_PER_MS)

    def _forget_silent(self) -> None:
        now = self._clock()
        self._members = {rank: one for rank, one in self._members.items() if now <= one.deadline_ns}
