"""What a worker holds: the pages of one rank, the stamp table beside them, and a staging buffer of the host."""

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
    """How another process maps what a worker holds."""

    pages: MemoryHandle
    stamps: MemoryHandle
    staging: MemoryHandle


@dataclass(slots=True)
class Holdings:
    """Pages, stamps and staging buffer of one rank, allocated or mapped here.

    Attributes:
        buffers: the pages.
        stamps: their stamp table.
        staging: uint8 [bytes] on the host.
        handles: how another process maps them.
    """

    buffers: PageBuffers
    stamps: StampTable
    staging: Tensor
    handles: Handles
    _memories: tuple[Memory, ...] = field(repr=False)

    @classmethod
    def allocate(cls, plan: RankPlan, device: str, place: RunDir, staging_bytes: int) -> Holdings:
        """Allocate zeroed pages of a new incarnation.

        Raises:
            OutOfMemory: with the bytes asked and free, and the most blocks that would fit.
            InvalidArgument: the plan contradicts itself.
        """
        plan.validate()
        staging_bytes = max(staging_bytes, plan.bytes_per_block)
        _check_memory(plan, device, staging_bytes)
        with ExitStack() as unless_all_is_there:
            pages = allocate_memory(device, allocation_bytes(plan), place.shared_path(PAGES))
            unless_all_is_there.callback(pages.close)
            stamps = SharedMemory.create(place.shared_path(STAMPS), table_bytes(plan.num_blocks))
            unless_all_is_there.callback(stamps.close)
            staging = SharedMemory.create(place.shared_path(STAGING), staging_bytes)
            unless_all_is_there.callback(staging.close)
            buffers = PageBuffers(plan, pages.tensor())
            unless_all_is_there.pop_all()
        incarnation = secrets.randbits(64) or 1
        buffers.write_incarnation(incarnation)
        table = StampTable.create(stamps.view, plan.num_blocks, incarnation)
        handles = Handles(pages.handle, stamps.handle, staging.handle)
        return cls(buffers, table, staging.tensor(), handles, (pages, stamps, staging))

    @classmethod
    def map(cls, plan: RankPlan, handles: Handles) -> Holdings:
        """Map what a worker of this host holds.

        Raises:
            NotFound, PermissionDenied: it is gone, or another user's.
            FailedPrecondition: stamps and pages are not of one incarnation.
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
        """Raise FailedPrecondition when the stamp table does not speak of these pages."""
        told, found = self.stamps.incarnation, self.buffers.read_incarnation()
        if told != found:
            raise FailedPrecondition(
                f"the stamp table is of incarnation {told:x}, the pages are of {found:x}",
                field="incarnation",
                remedy="restart the worker: its memory is damaged",
            )

    def rows(self, group: int) -> int:
        """Blocks of a group that the staging buffer holds."""
        width = self.buffers.group(group).bytes_per_block
        return self.staging.numel() // width if width else 0

    def staging_rows(self, group: int, first: int, count: int) -> Tensor:
        """Rows of the staging buffer, uint8 [count, bytes per block of the group]."""
        width = self.buffers.group(group).bytes_per_block
        return self.staging[first * width : (first + count) * width].view(count, width)

    def close(self, lent: bool = False) -> None:
        """Let go of everything; no view of it may be used afterwards.

        What is `lent` to a living process is not freed.
        """
        self.stamps.release()
        for memory in self._memories:
            memory.close(lent)


def _check_memory(plan: RankPlan, device: str, staging_bytes: int) -> None:
    """Refuse a plan before anything is allocated."""
    host = table_bytes(plan.num_blocks) + staging_bytes
    needs = {device: allocation_bytes(plan)}
    needs[CPU] = needs.get(CPU, 0) + host
    for where, asked in needs.items():
        free = free_bytes(where)
        if asked <= free:
            continue
        fits = _most_blocks(plan, where, device, free - (staging_bytes if where == CPU else 0))
        raise OutOfMemory(
            f"{asked} bytes are asked for on {where}, {free} are free",
            field="device",
            remedy=f"plan at most {fits} blocks" if fits else "choose another device",
            metadata={"asked": str(asked), "free": str(free), "num_blocks": str(fits)},
        )


def _most_blocks(plan: RankPlan, where: str, device: str, free: int) -> int:
    """Blocks of this plan that would fit, 0 when not even the null block and one more."""
    per_block = plan.bytes_per_block if where == device else 0
    if where == CPU:
        per_block += STAMP_BYTES
        free -= HEADER_BYTES
    blocks = max(free, 0) // per_block
    return blocks if blocks > 1 else 0
