"""Page memory that outlives engines: the pages of one rank, their stamp table, and which process may write.

When a worker dies its memory is lost: the next worker allocates new memory, with another incarnation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from kvplane import wire
from kvplane.base.errors import KvplaneError, NotFound
from kvplane.base.groups import ReplicaSpec
from kvplane.base.rank_plan import GroupLayers, RankPlan
from kvplane.base.stamp_table import StampTable, table_bytes
from kvplane.base.worker import WorkerInfo, WorkerState
from kvplane.sansio.owners import Owners
from kvplane.v1 import plan_pb2 as pb
from kvplane_core.face.entries import Entries
from kvplane_worker.lending.writer import ProcessName, Writer
from tests.core.page_memory import Memory
from tests.sim.loop import Process
from tests.sim.transport import call

RENEW_S = 0.7


def plan_of(spec: ReplicaSpec) -> RankPlan:
    """A plan with a number of blocks and no layers: the simulated pages have none."""
    return RankPlan(spec.num_blocks, spec.num_blocks, 1, tuple(GroupLayers((), ()) for _ in spec.groups), ())


class RankMemory:
    """Memory of one worker. With `stamps` of other memory, these pages have the same stamps by chance.

    Attributes:
        records, records_of: the published keys of an engine that decides itself, and the incarnation of all ranks'
            memory that they belong to.
    """

    records: Entries | None = None
    records_of = 0
    tiers: Any = None  # SimTiers, of a replica with tiers

    def __init__(self, spec: ReplicaSpec, incarnation: int, find: Processes, stamps: Sequence[int] = ()) -> None:
        self.pages = Memory(spec)
        self.table = StampTable.create(bytearray(table_bytes(spec.num_stamps)), spec.num_stamps, incarnation)
        self.table.write(range(len(stamps)), stamps)
        self.writer = Writer(find.watch)


class Processes:
    """All processes by pid, as in a kernel."""

    def __init__(self) -> None:
        self._by_pid: dict[int, Process] = {}

    def start(self, name: str) -> Process:
        process = Process(name, len(self._by_pid) + 1)
        self._by_pid[process.pid] = process
        return process

    def watch(self, name: ProcessName) -> Process:
        """See Writer."""
        return self._by_pid[name.pid]

    def __iter__(self):
        return iter(list(self._by_pid.values()))


class FragileMover:
    """Moves pages; its process may die before each move."""

    def __init__(self, pages: Memory, process: Process) -> None:
        self._pages, self._process = pages, process
        self.die_in = -1

    @property
    def num_groups(self) -> int:
        return self._pages.num_groups

    def zero(self, group: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._tick()
            self._pages.zero(group, [block])

    def copy(self, group: int, src: Sequence[int], dst: Sequence[int]) -> None:
        for source, target in zip(src, dst, strict=True):
            self._tick()
            self._pages.copy(group, [source], [target])

    def moves(self) -> None:
        """Calls end before they return."""

    def _tick(self) -> None:
        if self.die_in >= 0:
            self.die_in -= 1
            if self.die_in < 0:
                self._process.die_here()


@dataclass
class Worker:
    """The worker of one rank, as the service sees it: registered, and renewed."""

    replica: str
    rank: int
    process: Process
    memory: RankMemory
    plan_digest: str
    rng: Random

    async def run(self, network, owners: Owners[str]) -> None:
        """Register with the service and report the owner epoch of the memory."""
        while True:
            info = self._info()
            request = pb.RenewWorkerRequest(replica=self.replica, worker=wire.encode_worker(info))
            try:
                await call(network, owners, "host", "Workers/RenewWorker", request)
            except NotFound:
                await self._register(network, owners, info)
            except KvplaneError:
                pass  # the pages wait for the service
            await asyncio.sleep(RENEW_S * (0.5 + self.rng.random()))

    async def _register(self, network, owners: Owners[str], info: WorkerInfo) -> None:
        request = pb.RegisterWorkerRequest(replica=self.replica, worker=wire.encode_worker(info))
        try:
            await call(network, owners, "host", "Workers/RegisterWorker", request)
        except KvplaneError:
            return  # not registered yet, or the service is unavailable: retry in the next round

    def _info(self) -> WorkerInfo:
        table = self.memory.table
        return WorkerInfo(
            self.rank,
            self.process.pid,
            f"unix:{self.replica}/{self.rank}",
            self.process.pid,
            "cpu",
            WorkerState.READY,
            table.incarnation,
            table.owner_epoch,
            self.plan_digest,
        )
