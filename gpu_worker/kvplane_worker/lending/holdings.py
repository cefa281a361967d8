"""The memory of a worker: the pages of one rank, their stamp table, and a staging buffer on the host."""

from __future__ import annotations

import secrets
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field

from torch import Tensor

from kvplane.base.errors import FailedPrecondition, OutOfMemory
from kvplane.base.job_table import JobTable, job_table_bytes, rows_for
from kvplane.base.key_records import RECORD_BYTES, records_bytes
from kvplane.base.rank_plan import RankPlan
from kvplane.base.stamp_table import HEADER_BYTES, STAMP_BYTES, StampTable, table_bytes
from kvplane_worker.lending.rundir import RunDir
from kvplane_worker.memory import (
    Memory,
    SharedMemory,
    allocate_memory,
    free_bytes,
    open_memory,
    pin_host_memory,
)
from kvplane_worker.memory.handle import MemoryHandle
from kvplane_worker.memory.shared import CPU
from kvplane_worker.pages import PageBuffers
from kvplane_worker.pages.buffers import allocation_bytes

PAGES, STAMPS, STAGING, JOBS = "pages", "stamps", "staging", "jobs"


def stamps_bytes(plan: RankPlan, num_slots: int = 0) -> int:
    """Return the bytes of the stamp table of these pages, and of this number of slots of tiers.

    With an opaque layout, the engine's records of its keys follow (`kvplane.base.key_records`), and live as long.
    """
    return table_bytes(plan.num_blocks + num_slots) + (records_bytes(plan.num_blocks) if plan.opaque_layout else 0)


@dataclass(frozen=True, slots=True)
class Handles:
    """The handles with which another process maps a worker's memory."""

    pages: MemoryHandle
    stamps: MemoryHandle
    staging: MemoryHandle
    jobs: MemoryHandle | None = None


@dataclass(slots=True)
class Holdings(AbstractContextManager["Holdings"]):
    """The pages, the stamp table and the staging buffer of one rank, allocated or mapped by this process.

    Attributes:
        buffers: tensor views of the pages.
        stamps: the stamp table of the pages: the version number of each page's content.
        staging: staging buffer, uint8 [bytes] in host memory.
        handles: the handles with which another process maps pages, stamp table, staging buffer and job table.
        jobs: the job table of the movers of the replica's tiers; None without tiers.
    """

    buffers: PageBuffers
    stamps: StampTable
    staging: Tensor
    handles: Handles
    jobs: JobTable | None
    _memories: tuple[Memory, ...] = field(repr=False)

    @classmethod
    def allocate(cls, plan: RankPlan, device: str, place: RunDir, staging_bytes: int, num_slots: int = 0) -> Holdings:
        """Allocate zeroed pages, a stamp table, a staging buffer and, for tiers of this number of slots, a job table,
        with a new incarnation (a random number that identifies the memory).

        Raises:
            OutOfMemory: the device or the host has too little memory; `metadata` has the bytes needed and free, and the
                most blocks that would fit.
            InvalidArgument: the memory layout is impossible.
        """
        plan.validate()
        staging_bytes = max(staging_bytes, plan.bytes_per_block)
        _check_memory(plan, device, staging_bytes)
        with ExitStack() as cleanup:
            pages = allocate_memory(device, allocation_bytes(plan), place.shared_path(PAGES))
            cleanup.callback(pages.close)
            stamps = SharedMemory.create(place.shared_path(STAMPS), stamps_bytes(plan, num_slots))
            cleanup.callback(stamps.close)
            staging = SharedMemory.create(place.shared_path(STAGING), staging_bytes)
            cleanup.callback(staging.close)
            num_rows = rows_for(plan.num_blocks)
            shared = [SharedMemory.create(place.shared_path(JOBS), job_table_bytes(num_rows))] if num_slots else []
            for one in shared:
                cleanup.callback(one.close)
            buffers = PageBuffers(plan, pages.tensor())
            pin_host_memory(staging.tensor(), device)
            cleanup.pop_all()
        incarnation = secrets.randbits(64) or 1
        buffers.write_incarnation(incarnation)
        table = StampTable.create(stamps.view, plan.num_blocks + num_slots, incarnation)
        handles = Handles(pages.handle, stamps.handle, staging.handle, *(one.handle for one in shared))
        jobs = JobTable.create(shared[0].view, num_rows) if shared else None
        return cls(buffers, table, staging.tensor(), handles, jobs, (pages, stamps, staging, *shared))

    @classmethod
    def map(cls, plan: RankPlan, handles: Handles) -> Holdings:
        """Map the memory of a worker on this host.

        Raises:
            NotFound: the memory no longer exists.
            PermissionDenied: the memory belongs to another user.
            FailedPrecondition: stamp table and pages belong to different incarnations (allocations).
        """
        pages = open_memory(handles.pages)
        stamps, staging = SharedMemory.open(handles.stamps), SharedMemory.open(handles.staging)
        shared = [SharedMemory.open(handles.jobs)] if handles.jobs else []
        holdings = cls(
            PageBuffers(plan, pages.tensor()),
            StampTable(stamps.view),
            staging.tensor(),
            handles,
            JobTable(shared[0].view) if shared else None,
            (pages, stamps, staging, *shared),
        )
        holdings.check_incarnation()
        return holdings

    @property
    def plan(self) -> RankPlan:
        """The memory layout of the pages."""
        return self.buffers.plan

    @property
    def records(self) -> memoryview:
        """The memory behind the stamp table, for the key records of an opaque plan; empty for other plans."""
        stamps = self._memories[1]
        assert isinstance(stamps, SharedMemory)
        return stamps.view[table_bytes(self.stamps.num_blocks) :]

    def check_incarnation(self) -> None:
        """Raise FailedPrecondition if the stamp table has another incarnation (random number of the allocation) than
        the pages.
        """
        expected, found = self.stamps.incarnation, self.buffers.read_incarnation()
        if expected != found:
            raise FailedPrecondition(
                f"the stamp table has incarnation {expected:x}, the pages have {found:x}, so the memory is damaged",
                field="incarnation",
                remedy="restart the worker",
            )

    def rows(self, group: int) -> int:
        """Return how many blocks of a group fit into the staging buffer; a block takes one row."""
        width = self.buffers.group(group).bytes_per_block
        return self.staging.numel() // width if width else 0

    def staging_rows(self, group: int, first: int, count: int) -> Tensor:
        """Return rows of the staging buffer as a view, uint8 [count, bytes per block of the group]."""
        width = self.buffers.group(group).bytes_per_block
        return self.staging[first * width : (first + count) * width].view(count, width)

    def close(self, lent: bool = False) -> None:
        """Release the memory. Tensors in it must not be used afterwards.

        With `lent`, the process that allocated the memory frees nothing, because a running process still maps it.
        """
        self.stamps.release()
        if self.jobs is not None:
            self.jobs.release()
        for memory in self._memories:
            memory.close(lent)

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_memory(plan: RankPlan, device: str, staging_bytes: int) -> None:
    """Raise OutOfMemory if the pages do not fit, before anything is allocated."""
    host = stamps_bytes(plan) + staging_bytes  # a job table is small compared with them
    needs = {device: allocation_bytes(plan)}
    needs[CPU] = needs.get(CPU, 0) + host
    for where, asked in needs.items():
        free = free_bytes(where)
        if asked <= free:
            continue
        fits = _most_blocks(plan, where, device, free - (staging_bytes if where == CPU else 0))
        raise OutOfMemory(
            f"the pages need {asked} bytes of memory on {where}, {free} bytes are free",
            field="device",
            remedy=f"register the replica with at most {fits} blocks" if fits else "choose another device",
            metadata={"asked": str(asked), "free": str(free), "num_blocks": str(fits)},
        )


def _most_blocks(plan: RankPlan, where: str, device: str, free: int) -> int:
    """Return the most blocks of this layout that would fit; 0 if fewer than two would (block 0 is the null block)."""
    per_block = plan.bytes_per_block if where == device else 0
    if where == CPU:
        per_block += STAMP_BYTES + (RECORD_BYTES if plan.opaque_layout else 0)
        free -= HEADER_BYTES
    blocks = max(free, 0) // per_block
    return blocks if blocks > 1 else 0
