"""How a process names memory that another one maps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class MemoryKind(Enum):
    """Who knows the memory's name."""

    SHARED = "shared"  # a file of shared memory
    CUDA_IPC = "cuda_ipc"  # the CUDA driver; needs no shared /dev/shm


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """A piece of memory of this host.

    Attributes:
        kind: of the name.
        path: SHARED: of the file.
        ipc: CUDA_IPC: 64 bytes, which name a whole allocation at its base.
        offset_bytes: where the piece begins in the file or allocation.
        size_bytes: of the piece.
        device: "cpu" or "cuda:N", N as the worker counts.
        device_uuid: CUDA_IPC: of the device; processes may count differently.
    """

    kind: MemoryKind
    size_bytes: int
    device: str
    path: str = ""
    ipc: bytes = b""
    offset_bytes: int = 0
    device_uuid: str = ""
