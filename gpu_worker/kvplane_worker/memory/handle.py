"""The handles that a process sends so that another one can map its memory."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class MemoryKind(Enum):
    """How a handle identifies the memory."""

    SHARED = "shared"  # by a path below /dev/shm
    CUDA_IPC = "cuda_ipc"  # by a CUDA IPC handle; needs no shared /dev/shm


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """A range of memory on this host, in a form that other processes can map.

    Attributes:
        kind: how the handle identifies the memory.
        path: path of the file, with SHARED.
        ipc: CUDA IPC handle of the whole allocation, 64 bytes, with CUDA_IPC.
        offset_bytes: start of the range in the file or allocation.
        size_bytes: size of the range.
        device: "cpu" or "cuda:N"; N is the index in the worker's process.
        device_uuid: UUID of the GPU, with CUDA_IPC: the index may differ between processes.
    """

    kind: MemoryKind
    size_bytes: int
    device: str
    path: str = ""
    ipc: bytes = b""
    offset_bytes: int = 0
    device_uuid: str = ""
