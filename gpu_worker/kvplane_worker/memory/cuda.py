"""CUDA memory by raw IPC handles, which the drivers of both processes settle between them.

CuPy allocates and opens, torch sees the same bytes. Never torch's own IPC: its counters live in /dev/shm, which two
containers need not share.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from kvplane.base.errors import OutOfMemory
from kvplane_worker.memory.handle import MemoryHandle, MemoryKind

# Smaller allocations share one of the driver's granules, and a handle lends the whole granule.
GRANULE_BYTES = 2 << 20


class CudaMemory:
    """One allocation, or the mapping of another process's.

    Attributes:
        handle: how others map it.
    """

    def __init__(self, handle: MemoryHandle, base: int, owned: bool) -> None:
        self.handle = handle
        self._base = base
        self._owned = owned

    @classmethod
    def create(cls, device: str, size_bytes: int) -> CudaMemory:
        """Allocate zeroes. Raises OutOfMemory."""
        cupy = _cupy()
        whole = -(-size_bytes // GRANULE_BYTES) * GRANULE_BYTES
        with cupy.cuda.Device(_index(device)):
            try:
                pointer = cupy.cuda.runtime.malloc(whole)
            except cupy.cuda.runtime.CUDARuntimeError as error:
                raise OutOfMemory(f"{size_bytes} bytes: {error}", field="device", remedy="plan less") from None
            cupy.cuda.runtime.memset(pointer, 0, whole)
            ipc = bytes(cupy.cuda.runtime.ipcGetMemHandle(pointer))
        offset = pointer - _allocation_base(pointer)
        handle = MemoryHandle(MemoryKind.CUDA_IPC, size_bytes, device, ipc=ipc, offset_bytes=offset)
        return cls(handle, pointer - offset, owned=True)

    @classmethod
    def open(cls, handle: MemoryHandle) -> CudaMemory:
        """Map what another process allocated."""
        cupy = _cupy()
        with cupy.cuda.Device(_index(handle.device)):
            base = cupy.cuda.runtime.ipcOpenMemHandle(handle.ipc)
        return cls(handle, base, owned=False)

    def tensor(self) -> Tensor:
        """Its bytes as a uint8 tensor, valid until `close`."""
        cupy = _cupy()
        size, start = self.handle.size_bytes, self._base + self.handle.offset_bytes
        index = _index(self.handle.device)
        memory = cupy.cuda.UnownedMemory(start, size, self, index)
        with cupy.cuda.Device(index):
            array = cupy.ndarray((size,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
            return from_dlpack(array)

    def close(self) -> None:
        """Free the allocation, or unmap it. No tensor over it may be used afterwards."""
        if not self._base:
            return
        runtime = _cupy().cuda.runtime
        with _cupy().cuda.Device(_index(self.handle.device)):
            if self._owned:
                runtime.free(self._base + self.handle.offset_bytes)
            else:
                runtime.ipcCloseMemHandle(self._base)
        self._base = 0


def free_cuda_bytes(device: str) -> int:
    """Bytes that the device has free."""
    return torch.cuda.mem_get_info(torch.device(device))[0]


def _cupy() -> Any:  # noqa: ANN401
    """Loaded only where a CUDA device is asked for; `check_device` has said so when it is not installed."""
    import cupy

    return cupy


def _index(device: str) -> int:
    return torch.device(device).index or 0


def _allocation_base(pointer: int) -> int:
    """Where the driver's allocation begins: what the handle of any pointer into it stands for."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer))
    assert status == 0, f"cuMemGetAddressRange: {status}"
    return base.value
