"""vLLM's KVCacheManager on pages that a kvplane worker lends: they outlive the engine, and so does its cache.

    start:     stamps of all ranks + key records  ->  Replica.recover  ->  the keys whose content is still in memory
    schedule:  orders of the step  ->  Launch, on the SchedulerOutput  ->  each rank writes the stamps, then launches
    executed:  keys of the step  ->  key records, next to the stamps of rank 0

A stamp is the version number of a page's content. A key is recorded only after its step was executed, with the stamp
of its page; a page gets its next stamp before a launch overwrites it. So an engine may be killed at any point: a record
whose stamp is still in memory names the content of the page.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvplane.base.errors import FailedPrecondition, InvalidArgument, NoPlan
from kvplane.base.groups import ReplicaSpec
from kvplane.base.key_records import KeyRecord, KeyRecords
from kvplane.base.stamp_table import StampTable
from kvplane.base.stamps import newest_epoch
from kvplane.base.step import EventKind, Orders, PartResult
from kvplane.rank import RankGroup
from kvplane_core.face.entries import Entries
from kvplane_core.face.loader import new_in_process
from kvplane_core.face.recovery import RecoveryOutcome
from kvplane_vllm.launch import Launch
from kvplane_vllm.manager import InProcessManager
from kvplane_vllm.records import entries_of
from kvplane_worker.attach import attached_pid, map_stamps

if TYPE_CHECKING:
    from kvplane_core.face.native import NativeReplica

logger = logging.getLogger("vllm.kvplane")  # with the handlers of vLLM
NO_HOOK = "start vLLM with --worker-cls kvplane_vllm.Worker"


class RankMemory:
    """The stamp tables of all ranks, and the key records of rank 0, mapped by the engine's scheduler.

    Attributes:
        tables: the stamp tables, in rank order.
        records: the records of the published keys.
    """

    def __init__(self, addresses: Sequence[str], num_blocks: int, digest_bytes: int) -> None:
        """Map the memory of the workers at these addresses.

        Raises:
            FailedPrecondition: a rank of this engine has not attached the pages of its worker, so that nothing would
                write their stamps.
            InvalidArgument: the pages have another number of blocks.
        """
        mapped = [_map(rank, address) for rank, address in enumerate(addresses)]
        self.tables: list[StampTable] = [table for table, _ in mapped]
        for rank, table in enumerate(self.tables):
            if table.num_blocks != num_blocks:
                raise InvalidArgument(
                    f"rank {rank} has pages of {table.num_blocks} blocks, the scheduler has {num_blocks}",
                    field="num_gpu_blocks",
                )
        memory = mapped[0][1]
        try:
            self.records = KeyRecords(memory)
        except InvalidArgument:  # new memory
            self.records = KeyRecords.create(memory, num_blocks, digest_bytes)
        self._group = RankGroup(self.tables)

    def stamps(self) -> list[tuple[int, ...]]:
        """Return the stamps of each rank."""
        return [table.read_all() for table in self.tables]

    @property
    def incarnation(self) -> int:
        """The number of this memory, drawn when it was allocated."""
        return self._group.incarnation

    def begin_life(self, known_epoch: int = 0) -> int:
        """Make this engine life the only one whose orders the ranks accept. Returns its epoch, which is above every
        epoch that the memory shows and above `known_epoch`.
        """
        epoch = max(known_epoch, self._group.owner_epoch, *(newest_epoch(stamps) for stamps in self.stamps())) + 1
        self.own(epoch)
        return epoch

    def terms(self) -> dict[str, Any]:
        """Return the options with which a session begins a new engine life on this memory."""
        group = self._group
        stamps, incarnation, owner_epoch = group.agreed_stamps(), group.incarnation, group.owner_epoch
        return {"stamp_table": stamps, "incarnation": incarnation, "owner_epoch": owner_epoch}

    def own(self, epoch: int) -> None:
        """Make the engine life of this epoch the only one whose orders the ranks accept."""
        for table in self.tables:
            table.begin_life(epoch)

    def entries(self) -> Entries:
        """Return all records, also those of keys that are no longer in memory."""
        return entries_of(self.records)

    def write_stamps(self, orders: Orders) -> None:
        """Write the stamps of orders before the ranks do."""
        for table in self.tables:
            table.write(orders.stamp_block, orders.stamp)

    def invalidate(self) -> None:
        """Let the stamps prove no key any more."""
        for each in self.tables:
            each.invalidate(range(1, each.num_blocks))

    def check_carried_out(self, seq: int) -> None:
        """Raise FailedPrecondition unless all ranks have carried out the orders of this step. Before that, take all
        stamps away: they no longer prove what the pages contain.
        """
        for rank, table in enumerate(self.tables):
            if table.position[0] < seq:
                position = table.position[0]
                self.invalidate()
                raise FailedPrecondition(
                    f"rank {rank} launched step {seq} without writing its stamps, only those up to step {position}",
                    field="worker_cls",
                    remedy=NO_HOOK,
                )


def _map(rank: int, address: str) -> tuple[StampTable, memoryview]:
    """Map stamps and records of a worker, after a check that a rank of this engine has attached its pages."""
    try:
        pid = attached_pid(address)
    except NoPlan:
        pid = 0
    if not pid or os.getpid() not in (pid, _parent_of(pid)):
        raise FailedPrecondition(
            f"rank {rank} of this engine has not attached the pages of the worker at {address}",
            field="worker_cls",
            remedy=NO_HOOK,
        )
    return map_stamps(address)


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class PagesOfWorker(InProcessManager):
    """vLLM's manager with kvplane's allocator, whose keys survive the engine.

    Attributes:
        recovered: how many recorded keys this engine life has kept, and why it has not kept the others.
    """

    needs_events = True  # they name the blocks to record
    recovered: RecoveryOutcome

    def __init__(self, *args: Any, addresses: Sequence[str], **options: Any) -> None:
        """Take the arguments of vLLM's manager. Raises the errors of InProcessManager and RankMemory."""
        self._addresses = addresses
        self._orders: list[tuple[int, int, Orders]] = []  # (step, part, orders) since the last launch
        self._unrecorded: deque[tuple[int, Sequence[int]]] = deque()  # (step, blocks that it gave a key)
        self._num_parts = (0, 0)  # step, its parts so far
        super().__init__(*args, **options)

    def new_replica(self, spec: ReplicaSpec) -> NativeReplica:
        """Return the allocator of this engine life, with the recorded keys that are still in memory."""
        replica = new_in_process(spec)
        self._memory = memory = RankMemory(self._addresses, spec.num_blocks, replica.digest_size)
        self.epoch = memory.begin_life(self.known_epoch())
        stored = self.stored_entries()
        self.recovered = found = replica.recover(self.epoch, memory.stamps(), stored)
        replica.take_events()
        self._age = max((int(max(one.age, default=0)) for one in stored), default=0) + 1
        logger.info("epoch %d: %d keys kept, %d not in memory", self.epoch, found.kept, found.unproven)
        return replica

    def known_epoch(self) -> int:
        """Return the newest epoch of this replica that is known outside of the page memory; 0 = none."""
        return 0

    def memory_incarnation(self) -> int:
        """Return the number of the memory that has the pages."""
        return self._memory.incarnation

    def stored_entries(self) -> list[Entries]:
        """Return the keys that earlier engine lives published, of which the page memory then proves some."""
        return [self._memory.entries()]

    def _take(self, results: Iterable[PartResult]) -> None:
        results, seq = list(results), self.replica.seq
        for result in results:
            part = self._num_parts[1] if self._num_parts[0] == seq else 0
            self._num_parts = seq, part + 1
            self._orders.append((seq, part, result.orders))
            self._unrecorded += [(seq, event.blocks) for event in result.events if event.kind is EventKind.STORED]
        super()._take(results)

    def take_launch(self) -> Launch:
        """Return the orders since the last launch. The open step must have ended."""
        orders, self._orders = self._orders, []
        return Launch(self.epoch, self.executed or 0, orders)

    def step_executed(self, seq: int) -> None:
        """Record the keys of this step and of all earlier ones. Raises FailedPrecondition if a rank launched the step
        without its orders.
        """
        self._memory.check_carried_out(seq)
        super().step_executed(seq)
        waiting = self._unrecorded
        while waiting and waiting[0][0] <= seq:
            self._record(waiting.popleft()[1], seq)

    def _record(self, blocks: Iterable[int], executed: int) -> None:
        pool, records = self.pool, self._memory.records
        for block in blocks:
            key = pool.key_of(block)
            if key is not None and pool.key_step[block] <= executed:
                _, group, digest = key
                records.write(KeyRecord(block, pool.stamp[block], digest, group, pool.key_tokens[block], self._age))
        self._age += 1

    def evict_blocks(self, block_ids: set[int]) -> None:
        """See vLLM's KVCacheManager. The eviction holds even if the engine is killed before its next launch."""
        super().evict_blocks(block_ids)
        self._write_ahead()

    def reset_prefix_cache(self) -> bool:
        """See vLLM's KVCacheManager. The reset holds even if the engine is killed before its next launch."""
        done = super().reset_prefix_cache()
        self._write_ahead()
        return done

    def _write_ahead(self) -> None:
        """Write the stamps of all orders that wait for a launch. Safe: a stamp that is written early only costs hits,
        and the ranks write the same stamps again.
        """
        self._flush()
        for _, _, orders in self._orders:
            self._memory.write_stamps(orders)
