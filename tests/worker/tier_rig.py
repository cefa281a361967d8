"""Pages, stamps, a host tier and its movers in this process, without an engine."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from kvplane.base.groups import TierKind, TierSpec
from kvplane.base.job_table import JobKind, JobRow, JobTable, job_table_bytes
from kvplane.base.stamp_table import StampTable, table_bytes
from kvplane_kernels.torch_ops import TorchOps
from kvplane_plan.planner import Layout
from kvplane_worker.pages import PageBuffers
from kvplane_worker.tiers import DiskSlots, HostSlots, MoverMemory, Movers, Slots
from kvplane_worker.tiers.movers import NUM_THREADS
from tests.base.job_rows import record, results
from tests.worker.test_page_buffers import BLOCKS, rank_plan

SLOTS, WAIT_S, EPOCH, STAMP = 40, 30, 3, 100
IDENTITY = b"sixteen byte id."


class Rig:
    """The stamp of block b is STAMP + b; pages have random bytes.

    Attributes:
        ended: jobs that ended, with whether they are done.
    """

    def __init__(
        self,
        layout: Layout = Layout.LAYER_OUTERMOST,
        ops: TorchOps | None = None,
        num_threads: int = NUM_THREADS,
        disk: Path | None = None,
    ) -> None:
        self.pages = PageBuffers.allocate(rank_plan(layout))
        noise = torch.randint(0, 256, self.pages.memory.shape, generator=torch.manual_seed(1))
        self.pages.memory.copy_(noise.to(torch.uint8))
        stamps = BLOCKS + SLOTS * (1 + (disk is not None))
        self.stamps = StampTable.create(bytearray(table_bytes(stamps)), stamps, incarnation=1)
        self.stamps.write(range(1, BLOCKS), range(STAMP + 1, STAMP + BLOCKS))
        self.stamps.claim(EPOCH)
        self.stamps.launches_ended()
        self.step(1)
        self.table = JobTable.create(bytearray(job_table_bytes(4096)), 4096)
        groups = range(self.pages.num_groups)
        width = max(self.pages.group(group).bytes_per_block for group in groups)
        self.slots = HostSlots(TierSpec(TierKind.HOST, SLOTS), width, "cpu")
        tiers: list[Slots] = [self.slots]
        if disk is not None:
            self.disk = DiskSlots(TierSpec(TierKind.DISK, SLOTS), width, disk, "rank")
            tiers.append(self.disk)
        memory = MoverMemory(self.pages, self.stamps, tiers)
        self.movers = Movers(memory, ops or TorchOps(), self.table, num_threads)
        self.ended: dict[int, bool] = {}
        self._position = 0

    def step(self, seq: int) -> None:
        """The orders of a step were carried out; its launch runs."""
        self.stamps.begin(seq, 0)
        self.stamps.finish()

    def page(self, group: int, block: int) -> bytes:
        return b"".join(bytes(layer[block].tolist()) for layer in self.pages.group(group).layers)

    def save(self, job: int, block: int, slot: int, group: int = 0, **changes: int) -> None:
        self.save_all([self.row_of_save(job, block, slot, group)._replace(**changes)])

    def row_of_save(self, job: int, block: int, slot: int, group: int = 0) -> JobRow:
        return JobRow(job, JobKind.SAVE, EPOCH, 1, 0, 0, 0, slot, job, block, STAMP + block, group)

    def save_all(self, rows: list[JobRow]) -> None:
        """Saves of one part."""
        assert self.table.order(record(rows))

    def load(self, job: int, rows: list[tuple[int, int, int]], group: int = 0, **changes: int) -> None:
        """`rows`: slot, version, block."""
        made = [
            JobRow(job, JobKind.LOAD, EPOCH, 1, 0, 0, 0, slot, version, block, STAMP + block, group)
            for slot, version, block in rows
        ]
        assert self.table.order(record([row._replace(**changes) for row in made]))

    def move(self, job: int, slot: int, version: int, to_slot: int) -> None:
        """Move a slot of the host to the disk."""
        assert self.table.order(record([JobRow(job, JobKind.MOVE, EPOCH, 1, 0, 0, 0, slot, version, 1, to_slot, 0)]))

    def until(self, job: int) -> bool:
        """Wait for the end of a job; returns whether it is done."""
        deadline = time.monotonic() + WAIT_S
        while job not in self.ended:
            assert time.monotonic() < deadline, f"job {job} has not ended"
            ends = self.table.ends_from(self._position)
            self._position += len(ends)
            self.ended.update(results(ends))
            time.sleep(0.0005)
        return self.ended[job]
