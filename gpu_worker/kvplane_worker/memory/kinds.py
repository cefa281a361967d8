"""The kinds of memory behind one face, chosen by the device."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kvplane.base.errors import InvalidArgument
from kvplane_worker.memory.cuda import CudaMemory, free_cuda_bytes
from kvplane_worker.memory.handle import MemoryHandle, MemoryKind
from kvplane_worker.memory.shared import CPU, SharedMemory, free_shared_bytes


class Memory(Protocol):
    """A piece of memory that is allocated or mapped here."""

    @property
    def handle(self) -> MemoryHandle:
        """How others map it."""
        ...

    def tensor(self) -> Tensor:
        """Its bytes, uint8."""
        ...

    def close(self, lent: bool = False) -> None:
        """Free or unmap it; what is `lent` to a living process stays until that and this one have exited."""
        ...


def check_device(device: str) -> None:
    """Raise InvalidArgument when pages cannot be kept on a device, saying why."""
    if device == CPU:
        return
    problem = _cuda_problem(device)
    if problem:
        raise InvalidArgument(f"{device!r}: {problem}", field="device", remedy="use cpu, or cuda:N where there is one")


def use_device(device: str) -> None:
    """Make a device the current one of this thread: kernels, streams and pinned memory are of the current device."""
    if device != CPU:
        torch.cuda.set_device(torch.device(device))


def allocate_memory(device: str, size_bytes: int, path: Path) -> Memory:
    """Zeroes on a device; `path` names them where they are shared memory. Raises OutOfMemory."""
    return SharedMemory.create(path, size_bytes) if device == CPU else CudaMemory.create(device, size_bytes)


def open_memory(handle: MemoryHandle) -> Memory:
    """What another process allocated."""
    return SharedMemory.open(handle) if handle.kind is MemoryKind.SHARED else CudaMemory.open(handle)


def free_bytes(device: str) -> int:
    """Bytes that pages can still take there."""
    return free_shared_bytes() if device == CPU else free_cuda_bytes(device)


def _cuda_problem(device: str) -> str:
    name, _, number = device.partition(":")
    if name != "cuda" or not (number.isdecimal() or device == "cuda"):
        return "no device is called so"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if int(number or 0) >= torch.cuda.device_count():
        return f"there are {torch.cuda.device_count()}"
    return "" if find_spec("cupy") else "CuPy is not installed, which lends CUDA memory to engines"
