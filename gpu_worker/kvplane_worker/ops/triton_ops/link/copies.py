"""Many copies of bytes in one call: by the driver's `cuMemcpyBatchAsync`, or on the host, one after the other."""

from __future__ import annotations

import ctypes
import importlib.metadata
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kvplane.base.errors import FailedPrecondition

# The first CUDA with batched copies; the bindings of a later major need a driver of that major for them.
FIRST_CUDA = (12, 8)
# The driver holds a description of each copy until it is done.
MAX_COPIES_AT_ONCE = 1 << 14


class Copies(Protocol):
    """Copies `sizes[i]` bytes from `sources[i]` to `targets[i]` (addresses), in any order, in order with a stream.

    No target overlaps another target or a source. All three are of one length, which may be 0.
    """

    def copy_runs(self, sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int], stream: int) -> None:
        """Begin the copies; memory of the host is pinned, and stays until the stream has come so far.

        Raises:
            FailedPrecondition: the driver refuses them.
        """


class HostCopies:
    """Between memory of the host; done on return. The twin of `DriverCopies` where there is no device."""

    def copy_runs(self, sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int], stream: int) -> None:
        """See `Copies`."""
        for source, target, size in zip(sources, targets, sizes, strict=True):
            ctypes.memmove(target, source, size)


class DriverCopies:
    """By the driver's copy engines. Sources are read in the stream's order: any other order may read a page before the
    kernels that write it have finished.
    """

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver: Any = driver
        self._attributes = driver.CUmemcpyAttributes()
        self._attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM

    def copy_runs(self, sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int], stream: int) -> None:
        """See `Copies`. The stream is not the default one (0), which the driver does not take here."""
        assert len(sources) == len(targets) == len(sizes), "a source and a target for each size"
        for start in range(0, len(sizes), MAX_COPIES_AT_ONCE):
            some = slice(start, start + MAX_COPIES_AT_ONCE)
            self._copy(sources[some], targets[some], list(sizes[some]), stream)

    def _copy(self, sources: Sequence[int], targets: Sequence[int], sizes: list[int], stream: int) -> None:
        driver = self._driver
        to, of = (list(map(driver.CUdeviceptr, addresses)) for addresses in (targets, sources))
        # CUDA 12 also returns the index of the copy that is wrong, CUDA 13 does not.
        status, *where = driver.cuMemcpyBatchAsync(to, of, sizes, len(sizes), [self._attributes], [0], 1, stream)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise FailedPrecondition(
                f"cuMemcpyBatchAsync: {status.name}, copies {len(sizes)}, failed {where}",
                field="staging",
                remedy="give pinned staging and pages of this device; buffers move other memory",
            )


def copies_for(device: torch.device) -> tuple[Copies | None, str]:
    """What copies runs for a device; None and why there is nothing."""
    if device.type != "cuda":
        return HostCopies(), ""
    version = installed_bindings()
    why_not = unfit_bindings(version) or unfit_driver(version, driver_cuda())
    return (None, why_not) if why_not else (DriverCopies(), "")


def installed_bindings() -> str:
    """The version of cuda-bindings, "" when it is not installed."""
    try:
        return importlib.metadata.version("cuda-bindings")
    except importlib.metadata.PackageNotFoundError:
        return ""


def driver_cuda() -> tuple[int, int]:
    """The CUDA version of the driver; (0, 0) when there is none."""
    from cuda.bindings import driver

    status, number = driver.cuDriverGetVersion()
    return (number // 1000, number % 1000 // 10) if status == driver.CUresult.CUDA_SUCCESS else (0, 0)


def unfit_bindings(version: str) -> str:
    """Why these bindings have no batched copies, "" when they have."""
    if not version:
        return "cuda-bindings is not installed (kvplane[worker-cuda12], kvplane[worker-cuda13])"
    return f"cuda-bindings {version} is older than 12.8" if numbers(version) < FIRST_CUDA else ""


def unfit_driver(version: str, cuda: tuple[int, int]) -> str:
    """Why a driver has no batched copies for bindings of a version, "" when it has."""
    needed = max(FIRST_CUDA, (numbers(version)[0], 0))
    if cuda >= needed:
        return ""
    return f"the driver is for CUDA {cuda[0]}.{cuda[1]}: cuda-bindings {version} needs {needed[0]}.{needed[1]}"


def numbers(version: str) -> tuple[int, int]:
    """The first two numbers of a version."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
