"""What the status page draws of a replica: the blocks of its pool in cells, and the samples of the last hour."""

from __future__ import annotations

from array import array

from kvplane.base.errors import InvalidArgument
from kvplane.v1 import allocation_pb2 as pb
from kvplane_core.face.interface import ReplicaCore
from kvplane_service.replicas.recent import INTERVAL_MS, Recent

MAX_CELLS = 4096
MAX_NUMBERS = 1 << 16  # of a map, whatever the number of groups


def check_cells(cells: int) -> None:
    """Raise InvalidArgument if a map may not have this many cells."""
    if cells > MAX_CELLS:
        raise InvalidArgument(f"it is {cells}", field="map_cells", remedy=f"give at most {MAX_CELLS}")


def encode_map(core: ReplicaCore, wanted: int) -> pb.PoolMap:
    """Return the blocks in at most `wanted` cells. Passes over the pool: a few milliseconds per million blocks."""
    cells = min(wanted, core.spec.num_blocks, MAX_NUMBERS // (2 * len(core.spec.groups) + 1))
    *of_groups, other = (array("I", counts).tobytes() for counts in core.block_map(cells))
    pairs = zip(of_groups[::2], of_groups[1::2], strict=True)
    groups = [pb.GroupMap(held=held, cached=cached) for held, cached in pairs]
    return pb.PoolMap(cells=cells, groups=groups, other=other)


def encode_history(recent: Recent) -> pb.ReplicaHistory:
    """Return the samples of a replica."""
    return pb.ReplicaHistory(
        interval_ms=INTERVAL_MS,
        held=recent.held,
        hit=recent.hit,
        running=recent.running,
        waiting=recent.waiting,
        steps_per_s=recent.steps_per_s,
    )
