"""Allocates the tiers of a replica on one rank, and starts their movers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from hashlib import blake2b

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import TierKind, TierSpec
from kvplane_worker.lending.holdings import Holdings
from kvplane_worker.ops.interface import PageOps
from kvplane_worker.tiers.movers import MoverMemory, Movers
from kvplane_worker.tiers.seal import IDENTITY_BYTES
from kvplane_worker.tiers.slots import HostSlots


def start_movers(holdings: Holdings, specs: Sequence[TierSpec], ops: PageOps) -> Movers:
    """Allocate the slots of all tiers of a replica, and start the movers between them and the pages.

    Raises:
        InvalidArgument: a tier is not in host memory; the error names it.
        OutOfMemory: a tier does not fit into the free memory of the host.
    """
    pages = holdings.buffers
    for index, spec in enumerate(specs):
        if spec.kind is not TierKind.HOST:
            raise InvalidArgument(
                f"it is {spec.kind.value!r}, but workers hold tiers in host memory only",
                field=f"tiers[{index}].kind",
                remedy="register the replica with a host tier alone",
            )
    assert holdings.jobs is not None, "the holdings were allocated with tiers"
    width = max(pages.group(group).bytes_per_block for group in range(pages.num_groups))
    # Slots in host memory do not outlive the pages: the incarnation names them.
    name = f"{pages.plan.digest()} {holdings.stamps.incarnation:x}".encode()
    identity = blake2b(name, digest_size=IDENTITY_BYTES).digest()
    with ExitStack() as cleanup:
        slots = []
        for spec in specs:
            slots.append(HostSlots(spec, width, str(pages.memory.device)))
            cleanup.callback(slots[-1].close)
        cleanup.pop_all()
    return Movers(MoverMemory(pages, holdings.stamps, slots, identity), ops, holdings.jobs)
