"""Allocates the tiers of a replica on one rank, and starts their movers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import TierKind, TierSpec
from kvplane_worker.lending.holdings import Holdings
from kvplane_worker.ops.interface import PageOps
from kvplane_worker.tiers.disk import DiskSlots
from kvplane_worker.tiers.movers import MoverMemory, Movers
from kvplane_worker.tiers.seal import IDENTITY_BYTES
from kvplane_worker.tiers.slots import HostSlots, Slots


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Where the tiers of a rank are.

    Attributes:
        specs: the tiers of the replica.
        disk: folder of the files of disk tiers; None = there is none.
        name: of this rank, for the names of these files.
    """

    specs: Sequence[TierSpec]
    disk: Path | None
    name: str


def start_movers(holdings: Holdings, options: TierOptions, ops: PageOps) -> Movers:
    """Allocate the slots of all tiers of a replica, and start the movers between them and the pages.

    Raises:
        InvalidArgument: the folder of a disk tier is missing, or cannot be used.
        OutOfMemory: a tier does not fit into the free memory of the host, or the free room of the disk.
        WorkerExists: another worker uses the file of a disk tier.
    """
    pages = holdings.buffers
    assert holdings.jobs is not None, "the holdings were allocated with tiers"
    width = max(pages.group(group).bytes_per_block for group in range(pages.num_groups))
    # No slot outlives the pages: the incarnation names them.
    name = f"{pages.plan.digest()} {holdings.stamps.incarnation:x}".encode()
    identity = blake2b(name, digest_size=IDENTITY_BYTES).digest()
    with ExitStack() as cleanup:
        slots = list[Slots]()
        for index in range(len(options.specs)):
            slots.append(_slots(options, index, width, str(pages.memory.device)))
            cleanup.callback(slots[-1].close)
        cleanup.pop_all()
    return Movers(MoverMemory(pages, holdings.stamps, slots, identity), ops, holdings.jobs)


def _slots(options: TierOptions, index: int, width: int, device: str) -> Slots:
    spec = options.specs[index]
    if spec.kind is TierKind.HOST:
        return HostSlots(spec, width, device)
    if options.disk is None:
        raise InvalidArgument(
            "the replica has a disk tier, and this worker has no disk",
            field=f"tiers[{index}]",
            remedy="start the worker with --disk FOLDER, or register the replica without a disk tier",
        )
    return DiskSlots(spec, width, options.disk, f"{options.name}-{index}.slots")
