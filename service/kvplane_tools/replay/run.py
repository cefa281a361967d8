"""A replay of one workload on the replicas of one model, with a running service."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import reduce
from types import TracebackType

from kvplane.blocking.client import Client
from kvplane.v1.allocation_pb2 import DescribeReplicaResponse
from kvplane.wire.same import decode_same
from kvplane_tools.replay.engine import Engine
from kvplane_tools.replay.fleet import Fleet
from kvplane_tools.replay.plan import RunPlan
from kvplane_tools.replay.summary import ServiceCounts, Summary
from kvplane_tools.replay.workloads import MalformedTrace, TraceRequest


class ReplayRun:
    """A context manager that registers replicas and opens their sessions; on exit it closes and deregisters them.

    Attributes:
        names: names of the replicas.
        fleet: the engines.
        fault: why reading the trace stopped early; "" if it did not.
    """

    def __init__(self, client: Client, plan: RunPlan, name: str, trace: Iterable[TraceRequest]) -> None:
        """Register the replicas: one with the name `name`, or several named `name/0`, `name/1`, ..."""
        self.names = [name] if plan.replicas == 1 else [f"{name}/{i}" for i in range(plan.replicas)]
        self.fault = ""
        self._client = client
        self._plan = plan
        self._wall_s = 0.0
        with ExitStack() as if_failed:
            self.fleet = Fleet([self._engine(each, if_failed) for each in self.names], trace, plan.routing)
            self._undo = if_failed.pop_all()

    def __enter__(self) -> ReplayRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def run(self, after_step: Callable[[], bool]) -> None:
        """Run steps until all requests end or `after_step` returns False.

        A malformed trace ends the reading of requests; those that were read before still run.
        """
        started = time.monotonic()
        while self._step() and after_step():
            pass
        self._wall_s += time.monotonic() - started

    def describe(self) -> list[DescribeReplicaResponse]:
        """Return the service's description of each replica."""
        return [self._client.describe_replica(name) for name in self.names]

    def summary(self, workload: str) -> Summary:
        """Return the outcome. Call it after `run`."""
        progress = self.fleet.progress
        described = self.describe()
        return Summary(
            workload=workload,
            model=self._plan.model,
            spec=self.fleet.engines[0].spec,
            num_replicas=self._plan.replicas,
            cost=self._plan.cost,
            requests=progress.read,
            completed=progress.completed,
            refusals=[refusal for engine in self.fleet.engines for refusal in engine.refusals],
            counts=reduce(ServiceCounts.add, map(counts_of, described)),
            tally=self.fleet.tally(),
            counts_evictions=self._plan.with_events,
            virtual_ns=progress.clock_ns,
            wall_s=self._wall_s,
            fault=self.fault,
        )

    def _engine(self, name: str, undo: ExitStack) -> Engine:
        namespace = b"replay" if self._plan.tiers else b""
        source = self._plan.source()
        self._client.register_replica(name, source, num_ranks=self._plan.tensor_parallel, namespace_digest=namespace)
        undo.callback(self._client.deregister_replica, name)
        session = self._client.session(name, with_events=self._plan.with_events)
        undo.callback(session.close)
        return Engine(session, self._plan.engine, self._plan.cost)

    def _step(self) -> bool:
        try:
            return self.fleet.run_step()
        except MalformedTrace as error:
            self.fault = str(error)
            self.fleet.stop_reading()
            return True


def counts_of(described: DescribeReplicaResponse) -> ServiceCounts:
    """Return the counters of one replica."""
    counters, groups = described.counters, described.counters.groups
    return decode_same(
        ServiceCounts,
        counters,
        allocated_blocks=[group.allocated_blocks for group in groups],
        hit_blocks=[group.hit_blocks for group in groups],
        evicted_blocks=[group.evicted_blocks for group in groups],
        tier_hit_tokens=[tier.hit_tokens for tier in described.tiers],
    )
