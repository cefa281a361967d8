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

from kvplane.base.errors import NotFound, OutOfMemory
from kvplane_worker.memory.handle import MemoryHandle, MemoryKind

# Smaller allocations share one of the driver's granules, and a handle lends the whole granule.
GRANULE_BYTES = 2 << 20


class CudaMemory:
    """One allocation, or the mapping of another process's.

    Attributes:
        handle: how others map it.
    """

    def __init__(self, handle: MemoryHandle, index: int, base: int, owned: bool) -> None:
        self.handle = handle
        self._index = index  # of the device, as this process counts
        self._base = base
        self._owned = owned

    @classmethod
    def create(cls, device: str, size_bytes: int) -> CudaMemory:
        """Allocate zeroes. Raises OutOfMemory."""
        cupy = _cupy()
        whole = -(-size_bytes // GRANULE_BYTES) * GRANULE_BYTES
        index = torch.device(device).index or 0
        with cupy.cuda.Device(index):
            try:
                pointer = cupy.cuda.runtime.malloc(whole)
            except cupy.cuda.runtime.CUDARuntimeError as error:
                raise OutOfMemory(f"{size_bytes} bytes: {error}", field="device", remedy="plan less") from None
            cupy.cuda.runtime.memset(pointer, 0, whole)
            ipc = bytes(cupy.cuda.runtime.ipcGetMemHandle(pointer))
            offset = pointer - _allocation_base(pointer)
        handle = MemoryHandle(
            MemoryKind.CUDA_IPC, size_bytes, device, ipc=ipc, offset_bytes=offset, device_uuid=_uuid(index)
        )
        return cls(handle, index, pointer - offset, owned=True)

    @classmethod
    def open(cls, handle: MemoryHandle) -> CudaMemory:
        """Map what another process allocated. Raises NotFound when this process does not see the device."""
        cupy = _cupy()
        index = _index_of(handle)
        with cupy.cuda.Device(index):
            base = cupy.cuda.runtime.ipcOpenMemHandle(handle.ipc)
        return cls(handle, index, base, owned=False)

    def tensor(self) -> Tensor:
        """Its bytes as a uint8 tensor, valid until `close`."""
        cupy = _cupy()
        size, start = self.handle.size_bytes, self._base + self.handle.offset_bytes
        memory = cupy.cuda.UnownedMemory(start, size, self, self._index)
        with cupy.cuda.Device(self._index):
            array = cupy.ndarray((size,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
            return from_dlpack(array)

    def close(self, lent: bool = False) -> None:
        """Free the allocation, or unmap it. No tensor over it may be used afterwards.

        What is `lent` is not freed here: cudaFree before the importer has closed its mapping is undefined behaviour
        (CUDA runtime API, cudaIpcOpenMemHandle).
        """
        if not self._base or (self._owned and lent):
            return
        runtime = _cupy().cuda.runtime
        with _cupy().cuda.Device(self._index):
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


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _index_of(handle: MemoryHandle) -> int:
    """The device of a handle, as this process counts."""
    for index in range(torch.cuda.device_count()):
        if _uuid(index) == handle.device_uuid:
            return index
    raise NotFound(
        f"this process does not see the worker's {handle.device}, GPU {handle.device_uuid}",
        field="device",
        remedy="let the engine see the worker's device (CUDA_VISIBLE_DEVICES, NVIDIA_VISIBLE_DEVICES)",
    )


def _allocation_base(pointer: int) -> int:
    """Where the driver's allocation begins: what the handle of any pointer into it stands for."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer))
    assert status == 0, f"cuMemGetAddressRange: {status}"
    return base.value
