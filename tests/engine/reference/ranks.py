"""The memory of an engine's ranks: their pages and stamp tables (version numbers of the pages' contents), attached from
the workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvplane.base.job_table import JobTable
from kvplane.base.stamp_table import StampTable
from kvplane.rank import PageMover
from kvplane_kernels.interface import PagedOps
from kvplane_worker import pages
from kvplane_worker.attach import attach
from kvplane_worker.pages import PageBuffers


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The pages of one rank, their stamp table (the version number of each page's content), the mover that zeroes and
    copies the pages, and the job table of the movers of its tiers; None without tiers.
    """

    pages: PageBuffers
    stamps: StampTable
    mover: PageMover
    jobs: JobTable | None = None


def attach_ranks(addresses: Sequence[str], ops: PagedOps) -> list[RankMemory]:
    """Map the pages of the workers at these addresses, in rank order. Raises the errors of
    `kvplane_worker.attach.attach`.

    The pages stay lent to this process until it exits.
    """
    attached = [attach(address) for address in addresses]
    return [RankMemory(one.buffers, one.stamps, pages.PageMover(one.buffers, ops), one.jobs) for one in attached]
