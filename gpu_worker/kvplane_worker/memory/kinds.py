"""One interface for shared memory and CUDA memory; the device selects which."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kvplane.base.errors import InvalidArgument
from kvplane_worker.memory.cuda import CudaMemory, free_cuda_bytes
from kvplane_worker.memory.handle import MemoryHandle, MemoryKind
from kvplane_worker.memory.shared import CPU, SharedMemory, free_shared_bytes

_log = logging.getLogger(__name__)


class Memory(Protocol):
    """Memory that this process allocated or mapped."""

    @property
    def handle(self) -> MemoryHandle:
        """The handle with which other processes map the memory."""

    def tensor(self) -> Tensor:
        """Return a view of the bytes as a uint8 tensor [size_bytes]."""

    def close(self, lent: bool = False) -> None:
        """Free or unmap the memory. With `lent`, memory that this process allocated is not freed until this process and
        the process that maps the memory have exited.
        """


def check_device(device: str) -> None:
    """Raise InvalidArgument if pages cannot be allocated on a device; the message states why."""
    if device == CPU:
        return
    problem = _cuda_problem(device)
    if problem:
        raise InvalidArgument(
            f"pages cannot be on the device {device!r}: {problem}",
            field="device",
            remedy="use cpu, or cuda:N with an existing N",
        )


def use_device(device: str) -> None:
    """Make a device current in this thread: kernels, streams and pinned memory belong to the current device."""
    if device != CPU:
        torch.cuda.set_device(torch.device(device))


def pin_host_memory(memory: Tensor, device: str) -> bool:
    """Register host memory with CUDA, so that a GPU `device` copies from and to it without the processor.

    Returns False, after a warning, if CUDA refuses: copies then take the processor's time. Does nothing for the CPU.
    The memory must not be unmapped before the process exits.
    """
    if device == CPU:
        return False
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))  # type: ignore[no-untyped-call]
    if status:
        _log.warning("%d bytes of host memory are not registered with CUDA (error %d)", memory.numel(), status)
    return not status


def allocate_memory(device: str, size_bytes: int, path: Path) -> Memory:
    """Allocate zeroed memory on a device; on the CPU as the shared file `path`. Raises OutOfMemory."""
    return SharedMemory.create(path, size_bytes) if device == CPU else CudaMemory.create(device, size_bytes)


def open_memory(handle: MemoryHandle) -> Memory:
    """Map memory that another process allocated."""
    return SharedMemory.open(handle) if handle.kind is MemoryKind.SHARED else CudaMemory.open(handle)


def free_bytes(device: str) -> int:
    """Return the number of bytes that are free for pages on a device."""
    return free_shared_bytes() if device == CPU else free_cuda_bytes(device)


def _cuda_problem(device: str) -> str:
    name, _, number = device.partition(":")
    if name != "cuda" or not (number.isdecimal() or device == "cuda"):
        return "not a device name"
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA device"
    if int(number or 0) >= torch.cuda.device_count():
        return f"there are {torch.cuda.device_count()} CUDA devices"
    return "" if find_spec("cupy") else "CuPy is not installed; it exports CUDA memory to engines"
