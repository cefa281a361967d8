"""What a worker holds: the pages of one rank, their stamp table, and a staging buffer in host memory."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from dataclasses import dataclass, field

from torch import Tensor

from kvplane.base.errors import FailedPrecondition, OutOfMemory
from kvplane.base.rank_plan import RankPlan
from kvplane.base.stamp_table import HEADER_BYTES, STAMP_BYTES, StampTable, table_bytes
from kvplane_worker.lending.rundir import RunDir
from kvplane_worker.memory import Memory, SharedMemory, allocate_memory, free_bytes, open_memory
from kvplane_worker.memory.handle import MemoryHandle
from kvplane_worker.memory.shared import CPU
from kvplane_worker.pages import PageBuffers
from kvplane_worker.pages.buffers import allocation_bytes

PAGES, STAMPS, STAGING = "pages", "stamps", "staging"


@dataclass(frozen=True, slots=True)
class Handles:
    """Handles with which another process maps what a worker holds."""

    pages: MemoryHandle
    stamps: MemoryHandle
    staging: MemoryHandle


@dataclass(slots=True)
class Holdings:
    """Pages, stamps and staging buffer of one rank, allocated or mapped here.

    Attributes:
        buffers: views of the pages.
        stamps: the stamp table of the pages.
        staging: staging buffer, uint8 [bytes] in host memory.
        handles: with which another process maps all three.
    """

    buffers: PageBuffers
    stamps: StampTable
    staging: Tensor
    handles: Handles
    _memories: tuple[Memory, ...] = field(repr=False)

    @classmethod
    def allocate(cls, plan: RankPlan, device: str, place: RunDir, staging_bytes: int) -> Holdings:
        """Allocate zeroed pages, a stamp table and a staging buffer, with a new incarnation.

        Raises:
            OutOfMemory: too little memory; `metadata` has the bytes needed and free, and the most blocks that would
                fit.
            InvalidArgument: the plan is inconsistent.
        """
        plan.validate()
        staging_bytes = max(staging_bytes, plan.bytes_per_block)
        _check_memory(plan, device, staging_bytes)
        with ExitStack() as cleanup:
            pages = allocate_memory(device, allocation_bytes(plan), place.shared_path(PAGES))
            cleanup.callback(pages.close)
            stamps = SharedMemory.create(place.shared_path(STAMPS), table_bytes(plan.num_blocks))
            cleanup.callback(stamps.close)
            staging = SharedMemory.create(place.shared_path(STAGING), staging_bytes)
            cleanup.callback(staging.close)
            buffers = PageBuffers(plan, pages.tensor())
            cleanup.pop_all()
        incarnation = secrets.randbits(64) or 1
        buffers.write_incarnation(incarnation)
        table = StampTable.create(stamps.view, plan.num_blocks, incarnation)
        handles = Handles(pages.handle, stamps.handle, staging.handle)
        return cls(buffers, table, staging.tensor(), handles, (pages, stamps, staging))

    @classmethod
    def map(cls, plan: RankPlan, handles: Handles) -> Holdings:
        """Map what a worker on this host holds.

        Raises:
            NotFound, PermissionDenied: the memory no longer exists, or belongs to another user.
            FailedPrecondition: stamps and pages belong to different incarnations.
        """
        pages = open_memory(handles.pages)
        stamps, staging = SharedMemory.open(handles.stamps), SharedMemory.open(handles.staging)
        holdings = cls(
            PageBuffers(plan, pages.tensor()),
            StampTable(stamps.view),
            staging.tensor(),
            handles,
            (pages, stamps, staging),
        )
        holdings.check_incarnation()
        return holdings

    def check_incarnation(self) -> None:
        """Raise FailedPrecondition when the stamp table belongs to other pages."""
        expected, found = self.stamps.incarnation, self.buffers.read_incarnation()
        if expected != found:
            raise FailedPrecondition(
                f"the stamp table has incarnation {expected:x}, the pages have {found:x}",
                field="incarnation",
                remedy="restart the worker: its memory is damaged",
            )

    def rows(self, group: int) -> int:
        """Rows of the staging buffer for a group; a row holds one block."""
        width = self.buffers.group(group).bytes_per_block
        return self.staging.numel() // width if width else 0

    def staging_rows(self, group: int, first: int, count: int) -> Tensor:
        """View rows of the staging buffer, uint8 [count, bytes per block of the group]."""
        width = self.buffers.group(group).bytes_per_block
        return self.staging[first * width : (first + count) * width].view(count, width)

    def close(self, lent: bool = False) -> None:
        """Release the memory. Views of it are invalid afterwards.

        With `lent`, the owner frees nothing: a running process still maps the memory.
        """
        self.stamps.release()
        for memory in self._memories:
            memory.close(lent)


def _check_memory(plan: RankPlan, device: str, staging_bytes: int) -> None:
    """Raise OutOfMemory for a plan that does not fit, before anything is allocated."""
    host = table_bytes(plan.num_blocks) + staging_bytes
    needs = {device: allocation_bytes(plan)}
    needs[CPU] = needs.get(CPU, 0) + host
    for where, asked in needs.items():
        free = free_bytes(where)
        if asked <= free:
            continue
        fits = _most_blocks(plan, where, device, free - (staging_bytes if where == CPU else 0))
        raise OutOfMemory(
            f"the plan needs {asked} bytes on {where}, {free} are free",
            field="device",
            remedy=f"plan at most {fits} blocks" if fits else "choose another device",
            metadata={"asked": str(asked), "free": str(free), "num_blocks": str(fits)},
        )


def _most_blocks(plan: RankPlan, where: str, device: str, free: int) -> int:
    """Most blocks of this plan that would fit; 0 when fewer than two would (block 0 is the null block)."""
    per_block = plan.bytes_per_block if where == device else 0
    if where == CPU:
        per_block += STAMP_BYTES
        free -= HEADER_BYTES
    blocks = max(free, 0) // per_block
    return blocks if blocks > 1 else 0
