"""CUDA memory that two processes share by raw CUDA IPC handles.

CuPy allocates and maps the memory, and PyTorch has a view of the same bytes. PyTorch's own IPC is not used: it keeps
reference counters in /dev/shm, which two containers need not share.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from kvplane.base.errors import NotFound, OutOfMemory
from kvplane_worker.memory.handle import MemoryHandle, MemoryKind

# Allocations are multiples of this size. Smaller ones would share a unit of the driver's memory with other allocations,
# and an IPC handle exports the whole unit.
GRANULE_BYTES = 2 << 20


class CudaMemory:
    """An allocation of this process on a GPU, or a mapping of another process's allocation.

    Attributes:
        handle: what other processes need to map it.
    """

    def __init__(self, handle: MemoryHandle, index: int, base: int, owned: bool) -> None:
        self.handle = handle
        self._index = index  # device index in this process
        self._base = base
        self._owned = owned

    @classmethod
    def create(cls, device: str, size_bytes: int) -> CudaMemory:
        """Allocate zeroed memory. Raises OutOfMemory if the device has too little."""
        cupy = _cupy()
        whole = -(-size_bytes // GRANULE_BYTES) * GRANULE_BYTES
        index = torch.device(device).index or 0
        with cupy.cuda.Device(index):
            try:
                pointer = cupy.cuda.runtime.malloc(whole)
            except cupy.cuda.runtime.CUDARuntimeError as error:
                raise OutOfMemory(
                    f"{size_bytes} bytes cannot be allocated on {device}: {error}",
                    field="device",
                    remedy="register the replica with fewer blocks",
                ) from None
            cupy.cuda.runtime.memset(pointer, 0, whole)
            ipc = bytes(cupy.cuda.runtime.ipcGetMemHandle(pointer))
            offset = pointer - _allocation_base(pointer)
        handle = MemoryHandle(
            MemoryKind.CUDA_IPC, size_bytes, device, ipc=ipc, offset_bytes=offset, device_uuid=_uuid(index)
        )
        return cls(handle, index, pointer - offset, owned=True)

    @classmethod
    def open(cls, handle: MemoryHandle) -> CudaMemory:
        """Map an allocation of another process. Raises NotFound if its device is not visible to this process."""
        cupy = _cupy()
        index = _index_of(handle)
        with cupy.cuda.Device(index):
            base = cupy.cuda.runtime.ipcOpenMemHandle(handle.ipc)
        return cls(handle, index, base, owned=False)

    def tensor(self) -> Tensor:
        """Return a view of the bytes as a uint8 tensor [size_bytes], valid until `close`."""
        cupy = _cupy()
        size, start = self.handle.size_bytes, self._base + self.handle.offset_bytes
        memory = cupy.cuda.UnownedMemory(start, size, self, self._index)
        with cupy.cuda.Device(self._index):
            array = cupy.ndarray((size,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
            return from_dlpack(array)

    def close(self, lent: bool = False) -> None:
        """Free the allocation, or unmap it. Tensors in it must not be used afterwards.

        With `lent`, an allocation of this process is not freed: to free it before the other process has closed its
        mapping is undefined behaviour (CUDA runtime API, cudaIpcOpenMemHandle).
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
    """Return the number of free bytes on a device."""
    return torch.cuda.mem_get_info(torch.device(device))[0]


def _cupy() -> Any:  # noqa: ANN401
    """Return the module CuPy, imported only for CUDA devices. `check_device` has raised an error if it is not
    installed.
    """
    import cupy

    return cupy


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _index_of(handle: MemoryHandle) -> int:
    """Return the index in this process of a handle's GPU. Raises NotFound if this process does not see that GPU."""
    for index in range(torch.cuda.device_count()):
        if _uuid(index) == handle.device_uuid:
            return index
    raise NotFound(
        f"the worker's device {handle.device} (GPU {handle.device_uuid}) is not visible to this process",
        field="device",
        remedy="make the GPU visible with CUDA_VISIBLE_DEVICES or NVIDIA_VISIBLE_DEVICES",
    )


def _allocation_base(pointer: int) -> int:
    """Return the base address of the driver's allocation that contains a pointer. A CUDA IPC handle exports that whole
    allocation.
    """
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer))
    assert status == 0, f"cuMemGetAddressRange: {status}"
    return base.value
