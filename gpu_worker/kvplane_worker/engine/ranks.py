"""The memory that an engine works on: its ranks' pages, with what stands beside them."""

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
    """One rank's pages, the stamp table beside them, and what moves whole pages."""

    pages: PageBuffers
    stamps: StampTable
    mover: PageMover


def attach_ranks(addresses: Sequence[str], ops: PagedOps) -> list[RankMemory]:
    """Take the pages of the workers at these addresses, by rank; raises as `kvplane_worker.attach.attach`.

    They stay with this process until it exits.
    """
    attached = [attach(address) for address in addresses]
    return [RankMemory(one.buffers, one.stamps, pages.PageMover(one.buffers, ops)) for one in attached]
