"""Allocates the tiers of a replica on one rank, and starts their movers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from kvplane.base.errors import InvalidArgument, OutOfMemory
from kvplane.base.groups import TierKind, TierSpec
from kvplane.base.job_table import JobTable
from kvplane.base.stamp_table import StampTable
from kvplane_kernels.interface import PageOps
from kvplane_worker.memory import is_in_memory
from kvplane_worker.pages import PageBuffers
from kvplane_worker.tiers.disk import ENDING, DiskSlots
from kvplane_worker.tiers.kept import left_table
from kvplane_worker.tiers.movers import MoverMemory, Movers
from kvplane_worker.tiers.peers import PeerSlots
from kvplane_worker.tiers.seal import IDENTITY_BYTES
from kvplane_worker.tiers.slots import HostSlots, Slots

MOST_AT_ONCE = 0x7FFFF000  # bytes that Linux reads or writes in one call

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Where the tiers of a rank are.

    Attributes:
        specs: the tiers of the replica.
        disk: folder of the files of disk tiers; None = there is none.
        name: of this rank, for the names of these files.
        content_id: as in `Assignment`.
        rank: the rank.
        left: stamp table of a worker of this rank that was killed; b"" = there is none.
        forget_left: removes it, when the stamp table of this worker says the same.
        namespace: as in `Assignment`.
        most_bytes: limits of the operator by kind of tier; a kind without one has the free memory, or the free disk.
    """

    specs: Sequence[TierSpec]
    disk: Path | None
    name: str
    content_id: bytes = b""
    rank: int = 0
    left: bytes = b""
    forget_left: Callable[[], None] = lambda: None
    most_bytes: Mapping[TierKind, int] = field(default_factory=dict)
    namespace: bytes = b""

    def namespace_of(self, plan: str) -> bytes:
        """Return what names the meaning of a slot's bytes in all replicas with this plan: for seals."""
        named = f"{plan} {self.rank}".encode() + self.namespace
        return blake2b(named, digest_size=IDENTITY_BYTES, person=b"kvplane slots").digest()


def start_movers(pages: PageBuffers, stamps: StampTable, jobs: JobTable, options: TierOptions, ops: PageOps) -> Movers:
    """Allocate the slots of all tiers of a replica, and start the movers between them and the pages.

    Raises:
        InvalidArgument: the folder of a disk tier is missing, or cannot be used, or its file is of no tier.
        OutOfMemory: a tier does not fit into the free memory of the host, the free room of the disk, or the limit of
            the operator.
        WorkerExists: another worker uses the file of a disk tier.
        PermissionDenied: other users can write to the folder of a disk tier, or replace it.
    """
    width = max(pages.group(group).bytes_per_block for group in range(pages.num_groups))
    with ExitStack() as cleanup:
        slots, first = list[Slots](), pages.num_blocks
        for index, spec in enumerate(options.specs):
            _check_size(options, index, width)
            made = _slots(options, index, width, pages)
            slots.append(made)
            cleanup.callback(made.close)
            if isinstance(made, DiskSlots):
                _take_over(made, first, stamps, options)
            first += spec.num_blocks
        cleanup.pop_all()
    return Movers(MoverMemory(pages, stamps, slots), ops, jobs)


def _check_size(options: TierOptions, index: int, width: int) -> None:
    """Raise OutOfMemory for a tier above the limit of the operator, InvalidArgument for blocks that no disk reads at
    once.
    """
    spec = options.specs[index]
    if spec.kind is TierKind.PEERS:
        return
    slot_bytes, most = spec.kind.slot_bytes(width), options.most_bytes.get(spec.kind)
    if most is not None and spec.num_blocks * slot_bytes > most:
        raise OutOfMemory(
            f"the {spec.kind.value} tier needs {spec.num_blocks * slot_bytes} bytes, this worker may use {most}",
            field=f"tiers[{index}].num_blocks",
            remedy=f"register the replica with at most {most // slot_bytes} blocks, or raise --{spec.kind.value}-size",
            metadata={"num_blocks": str(most // slot_bytes)},
        )
    if spec.kind is TierKind.DISK and slot_bytes > MOST_AT_ONCE:
        raise InvalidArgument(
            f"a block has {width} bytes on this rank, and the system reads at most {MOST_AT_ONCE} at once",
            field=f"tiers[{index}]",
            remedy="use smaller blocks, or register the replica without a disk tier",
        )


def _slots(options: TierOptions, index: int, width: int, pages: PageBuffers) -> Slots:
    spec, namespace = options.specs[index], options.namespace_of(pages.plan.digest())
    if spec.kind is TierKind.HOST:
        return HostSlots(spec, width, str(pages.memory.device), namespace)
    if spec.kind is TierKind.PEERS:
        return PeerSlots(spec, width, namespace)
    return _disk(options, index, width, pages)


def _take_over(slots: DiskSlots, first: int, stamps: StampTable, options: TierOptions) -> None:
    """Let the stamp table say what a file holds from the time of an earlier worker of this rank."""
    num_slots = slots.spec.num_blocks
    kept = slots.take_over(left_table(options.left, stamps.num_blocks), first)
    if kept is not None:
        stamps.write(range(first, first + num_slots), kept.versions)
        stamps.begin_above(max(stamps.owner_epoch, kept.owner_epoch))
        stamps.name_disks(slots.number)
        _log.info("%s: %d slots kept their content", slots.path, num_slots - kept.versions.count(0))
    options.forget_left()  # before the file changes: a worker that is killed earlier leaves it to the next one
    slots.begin(kept)
    stamps.name_disks(slots.number)  # an empty file has another


def _disk(options: TierOptions, index: int, width: int, pages: PageBuffers) -> DiskSlots:
    spec, plan = options.specs[index], pages.plan.digest()
    if options.disk is None:
        raise InvalidArgument(
            "the replica has a disk tier, and this worker has no disk",
            field=f"tiers[{index}]",
            remedy="start the worker with --disk FOLDER, or register the replica without a disk tier",
        )
    if is_in_memory(options.disk):
        _log.warning(
            "%s is in memory, not on a disk: its tier takes memory, and is lost with the machine", options.disk
        )
    # Each namespace has files of its own: none is emptied because a worker starts with other weights.
    namespace = blake2b(f"{plan} {options.rank}".encode() + options.content_id[:8], digest_size=8).hexdigest()
    content = blake2b(f"{plan} {options.rank} {index}".encode() + options.content_id, digest_size=IDENTITY_BYTES)
    name = f"{options.name}-{namespace}-{index}{ENDING}"
    return DiskSlots(spec, width, options.disk, name, content.digest())
