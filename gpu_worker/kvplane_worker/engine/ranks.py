"""The memory of an engine: pages and stamp tables of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvplane.base.stamp_table import StampTable
from kvplane.rank import PageMover
from kvplane_worker import pages
from kvplane_worker.attach import attach
from kvplane_worker.ops.interface import PagedOps
from kvplane_worker.pages import PageBuffers


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Pages and stamp table of one rank, and the mover of whole pages."""

    pages: PageBuffers
    stamps: StampTable
    mover: PageMover


def attach_ranks(addresses: Sequence[str], ops: PagedOps) -> list[RankMemory]:
    """Attach to the workers at these addresses, in order of the ranks. Raises as `kvplane_worker.attach.attach`.

    The pages stay lent to this process until it exits.
    """
    attached = [attach(address) for address in addresses]
    return [RankMemory(one.buffers, one.stamps, pages.PageMover(one.buffers, ops)) for one in attached]
