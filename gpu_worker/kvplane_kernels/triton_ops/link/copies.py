"""Many copies in one call: by the driver's `cuMemcpyBatchAsync`, or on the host, in a loop."""

from __future__ import annotations

import ctypes
import importlib.metadata
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kvplane.base.errors import FailedPrecondition

# The first CUDA version with batched copies. Bindings of a later major version need a driver of that version for them.
FIRST_CUDA = (12, 8)
# The driver stores a descriptor of each copy until it is done.
MAX_COPIES_AT_ONCE = 1 << 14


class Copies(Protocol):
    """The interface that copies `sizes[i]` bytes from address `sources[i]` to `targets[i]`, in order with a stream's
    work.

    The copies of a call may run in any order: no target overlaps another target or a source. All three sequences have
    the same length, which may be 0.
    """

    def copy_runs(self, sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int], stream: int) -> None:
        """Queue the copies. Host memory must be pinned and stay allocated until the stream has completed the copies.

        Raises:
            FailedPrecondition: the driver refuses the copies.
        """


class HostCopies:
    """Synchronous copies in host memory, for machines without a device."""

    def copy_runs(self, sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int], stream: int) -> None:
        """Carry out the copies before returning; see `Copies`."""
        for source, target, size in zip(sources, targets, sizes, strict=True):
            ctypes.memmove(target, source, size)


class DriverCopies:
    """Copies by the driver's copy engines.

    Sources are read in stream order; any other access order could read a page before the kernels that write it have
    finished.
    """

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver: Any = driver
        self._attributes = driver.CUmemcpyAttributes()
        self._attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM

    def copy_runs(self, sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int], stream: int) -> None:
        """Queue the copies; see `Copies`. The driver does not support the default stream (0) in this call."""
        assert len(sources) == len(targets) == len(sizes), "a source and a target for each size"
        for start in range(0, len(sizes), MAX_COPIES_AT_ONCE):
            some = slice(start, start + MAX_COPIES_AT_ONCE)
            self._copy(sources[some], targets[some], list(sizes[some]), stream)

    def _copy(self, sources: Sequence[int], targets: Sequence[int], sizes: list[int], stream: int) -> None:
        driver = self._driver
        to, of = (list(map(driver.CUdeviceptr, addresses)) for addresses in (targets, sources))
        # CUDA 12 also returns the index of the copy that failed, CUDA 13 does not.
        status, *where = driver.cuMemcpyBatchAsync(to, of, sizes, len(sizes), [self._attributes], [0], 1, stream)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise FailedPrecondition(
                f"cuMemcpyBatchAsync refused {len(sizes)} copies with {status.name}; index of the failed one: {where}",
                field="staging",
                remedy="give pinned staging and pages of this device; use the buffered route for other memory",
            )


def copies_for(device: torch.device) -> tuple[Copies | None, str]:
    """Return the implementation for a device; (None, the reason) if it does not support batched copies."""
    if device.type != "cuda":
        return HostCopies(), ""
    version = installed_bindings()
    why_not = unfit_bindings(version) or unfit_driver(version, driver_cuda())
    return (None, why_not) if why_not else (DriverCopies(), "")


def installed_bindings() -> str:
    """Return the installed version of cuda-bindings; "" if it is not installed."""
    try:
        return importlib.metadata.version("cuda-bindings")
    except importlib.metadata.PackageNotFoundError:
        return ""


def driver_cuda() -> tuple[int, int]:
    """Return the CUDA version of the driver; (0, 0) if there is no driver."""
    from cuda.bindings import driver

    status, number = driver.cuDriverGetVersion()
    return (number // 1000, number % 1000 // 10) if status == driver.CUresult.CUDA_SUCCESS else (0, 0)


def unfit_bindings(version: str) -> str:
    """Return why this version of cuda-bindings has no batched copies; "" if it has."""
    if not version:
        return "cuda-bindings is not installed (the extras worker-cuda12 and worker-cuda13 have it)"
    return f"cuda-bindings {version} is older than 12.8" if numbers(version) < FIRST_CUDA else ""


def unfit_driver(version: str, cuda: tuple[int, int]) -> str:
    """Return why a driver of this CUDA version does not support batched copies with these bindings; "" if it does."""
    needed = max(FIRST_CUDA, (numbers(version)[0], 0))
    if cuda >= needed:
        return ""
    return f"the driver supports CUDA {cuda[0]}.{cuda[1]}, cuda-bindings {version} needs {needed[0]}.{needed[1]}"


def numbers(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
