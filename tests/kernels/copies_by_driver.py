"""The contract of `Copies`; as a program, run with the driver that cuda-bindings finds."""

from __future__ import annotations

import json
import sys

import torch

from kvplane.base.errors import FailedPrecondition
from kvplane_kernels.triton_ops.link import copies
from kvplane_kernels.triton_ops.link.copies import Copies, DriverCopies


def random_bytes(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


def copies_of_sizes(how: Copies, sizes: list[int], stream: int) -> bool:
    """Copy every second piece of a buffer to another one, in reverse order, and check that nothing else changed."""
    source, target, places, at = random_bytes(2 * sum(sizes)), random_bytes(2 * sum(sizes)), [], 0
    wanted = target.clone()
    for size in sizes:
        other = len(target) - at - size
        wanted[other : other + size] = source[at : at + size]
        places.append((source.data_ptr() + at, target.data_ptr() + other))
        at += 2 * size
    how.copy_runs([place[0] for place in places], [place[1] for place in places], sizes, stream)
    return torch.equal(target, wanted)


def copied_by(how: Copies, stream: int) -> dict[str, bool]:
    """Run all cases. Returns case → whether it passed."""
    return {
        "copies of many sizes": copies_of_sizes(how, [1, 2, 7, 16, 4096, 65536, 100_001], stream),
        "no copies": copies_of_sizes(how, [], stream),
        "more copies than go at once": copies_of_sizes(how, [3] * (copies.MAX_COPIES_AT_ONCE + 5), stream),
    }


def refuses_the_default_stream(how: Copies) -> bool:
    try:
        return not copies_of_sizes(how, [16], 0)
    except FailedPrecondition:
        return True


def main() -> int:
    version = copies.installed_bindings()
    why_not = copies.unfit_bindings(version) or copies.unfit_driver(version, copies.driver_cuda())
    found: dict[str, object] = {"why_not": why_not}
    if not why_not:
        how = DriverCopies()
        found |= copied_by(how, stream=7)
        found["the default stream is refused"] = refuses_the_default_stream(how)
    sys.stdout.write(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
