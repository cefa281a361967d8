"""The workers' half: carries out the orders of a step on one rank, and says what has ended."""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING

import torch

from kvplane.base.errors import FailedPrecondition, KvplaneError, OutOfMemory
from kvplane.base.job_table import JobTable, job_table_bytes, rows_for
from kvplane.base.stamp_table import StampTable, table_bytes
from kvplane.base.step import Orders
from kvplane.rank import Rank
from kvplane_kernels.torch_ops import TorchOps
from kvplane_vllm.tiers import disk
from kvplane_vllm.tiers.copier import Copier, Task
from kvplane_vllm.tiers.kept import content_of
from kvplane_vllm.tiers.layout import Views, device_pages, host_plan, row_bytes
from kvplane_vllm.tiers.messages import Progress, Ready, Seals, StepOrders
from kvplane_vllm.tiers.peers import PeerOptions, RankPeers
from kvplane_vllm.tiers.settings import FIELD, Settings, tiers_of
from kvplane_worker.memory import free_host_bytes, pin_host_memory
from kvplane_worker.pages import PageBuffers, PageMover
from kvplane_worker.tiers.arena import Arena

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

MOST_OF_FREE = 0.8  # share of the free host memory that the tier may take
_log = logging.getLogger("vllm.kvplane")


class TierRank:
    """One rank."""

    def __init__(
        self, config: VllmConfig, cache: KVCacheConfig, settings: Settings, views: Views, number: int = 0
    ) -> None:
        """Allocate the tiers of the rank of this number. Raises WrongLayout, and OutOfMemory for host memory."""
        self._overlaps = not config.use_v2_model_runner  # which zeroes and copies pages before it calls the connector
        self._number = number
        content = self._content(config, cache, views) if settings.disk is not None or settings.peers else b""
        rows, (num_blocks, specs) = row_bytes(cache), tiers_of(cache, settings)
        ops, plan, lends = TorchOps(), host_plan(rows, num_blocks), bool(settings.peers and content)
        num_ids = num_blocks + (0 if settings.peers else sum(one.num_blocks for one in specs))
        device = device_pages(cache, views)
        free = int(free_host_bytes() * MOST_OF_FREE)
        if plan.size_bytes > free:
            raise OutOfMemory(
                f"the tier in host memory needs {plan.size_bytes} bytes, {free} bytes are {MOST_OF_FREE:.0%} of what "
                "is free",
                field=f"{FIELD}.host",
                remedy=f"give at most {free // plan.bytes_per_block * plan.bytes_per_block} bytes",
            )
        arena = Arena.create(num_blocks, plan.bytes_per_block) if lends else None
        buffers = PageBuffers.allocate(plan) if arena is None else PageBuffers(plan, _tensor_of(arena))
        pin_host_memory(buffers.memory, str(device[0].layers[0].device))
        num_rows = rows_for(num_ids)
        jobs = JobTable.create(bytearray(job_table_bytes(num_rows)), num_rows)
        self._disk: disk.Disk | None = None
        self.peers: RankPeers | None = None
        if settings.disk is not None:
            name = f"vllm-{config.parallel_config.data_parallel_index}-{number}"
            self._disk = disk.start(disk.DiskOptions(settings.disk, content, specs, name, number), buffers, jobs, ops)
        stamps = self._disk.stamps if self._disk is not None else _new_stamps(num_blocks)
        if arena is not None and settings.service is not None:
            options = PeerOptions(settings.service, specs[0], settings.peer_transport, content, rows, number)
            self.peers = _start_peers(options, arena, buffers, stamps, jobs, ops)
        has_tiers = self._disk is not None or self.peers is not None
        self._rank = Rank(stamps, PageMover(buffers, ops))
        self._epoch = stamps.owner_epoch + 1
        self._rank.claim(self._epoch)
        named = content if has_tiers else b""
        self.ready = Ready(self._epoch, stamps.read_all(), has_tiers, named, stamps.disk_incarnation)
        self._jobs, self._num_ends = jobs, 0
        seal = self.peers.seal if self.peers is not None else _seal_nothing
        self.copier = Copier(device, [buffers.group(group) for group in range(len(rows))], ops, seal)
        self._loaded: set[str] = set()
        self._failed: set[str] = set()

    def begin(self, orders: StepOrders) -> None:
        """Carry out the orders of a step, before vLLM computes anything of it, and zeroes or copies what saves read."""
        self._poll()
        if orders.epoch > self._epoch:  # memory of another rank was used more often
            self._epoch = orders.epoch
            self._rank.claim(self._epoch)
        for part in orders.parts:
            stamps = Orders(stamp_block=list(part.blocks), stamp=list(part.stamps))
            self._rank.carry_out(self._epoch, part.seq, part.part, stamps)
            if part.jobs and not self._jobs.order(part.jobs):
                _log.error("the job table of the disk is full")
        if orders.seq or orders.seals.blocks:  # it has ended with its loads, if there are some
            self.copier.submit(Task(0 if orders.loads else orders.seq, orders.saves, {}, orders.seals))
        self.copier.fence(orders.overwritten)

    def end(self, orders: StepOrders) -> None:
        """Copy what a step loads, behind its computation."""
        if orders.loads:
            self.copier.submit(Task(orders.seq, (), orders.loads))
        if not self._overlaps:
            self.copier.drain()

    def take_loads(self) -> tuple[set[str], set[str]]:
        """Return the requests whose load has ended, and those of them whose load failed, since the last call."""
        self._poll()
        ended = self._loaded, self._failed
        self._loaded, self._failed = set(), set()
        return ended

    def progress(self) -> Progress:
        """Return what has ended."""
        self._poll()
        ends = self._jobs.ends_from(self._num_ends)
        self._num_ends += len(ends)
        return Progress({self._number: self._rank.executed_through}, {self._number: ends}, self.copier.is_broken)

    def _poll(self) -> None:
        executed, loaded = self.copier.ended()
        if executed > self._rank.executed_through:
            self._rank.executed(executed)
        self._loaded.update(loaded)
        self._failed.update(name for name, is_good in loaded.items() if not is_good)

    def close(self) -> None:
        """Stop. Does not wait for a disk that hangs."""
        self.copier.close()
        if self._disk is not None:
            self._disk.close()
        if self.peers is not None:
            self.peers.close()

    @staticmethod
    def _content(config: VllmConfig, cache: KVCacheConfig, views: Views) -> bytes:
        try:
            return content_of(config, cache, views)
        except FailedPrecondition as error:
            _log.warning("%s (%s)", error.message, error.remedy)
            return b""


def _start_peers(
    options: PeerOptions, arena: Arena, buffers: PageBuffers, stamps: StampTable, jobs: JobTable, ops: TorchOps
) -> RankPeers | None:
    """Begin to lend and to read; None, with the reason in the log, if it cannot be: the engine continues without."""
    try:
        return RankPeers(options, arena, buffers, stamps, jobs, ops)
    except KvplaneError as error:
        _log.error("kvplane's tiers continue without peers: %s", error)
        return None


def _tensor_of(arena: Arena) -> torch.Tensor:
    return torch.frombuffer(arena.rows, dtype=torch.uint8)


def _seal_nothing(_: Seals) -> None:
    """No peer reads this memory."""


def _new_stamps(num_ids: int) -> StampTable:
    return StampTable.create(bytearray(table_bytes(num_ids)), num_ids, secrets.randbits(64) or 1)
