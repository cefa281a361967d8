"""Memory that two processes of a host map: allocated by a worker on the CPU or a GPU, mapped by an engine.

handle  what another process needs to map the memory
shared  files in /dev/shm, for CPU pages, stamps and staging
folders folders that no other user can write to or replace
cuda    allocations on a GPU, shared by CUDA IPC
kinds   one interface for both
"""

from kvplane_worker.memory.handle import MemoryHandle, MemoryKind
from kvplane_worker.memory.kinds import (
    Memory,
    allocate_memory,
    check_device,
    free_bytes,
    open_memory,
    pin_host_memory,
    use_device,
)
from kvplane_worker.memory.shared import SharedMemory, free_host_bytes, is_in_memory

__all__ = [
    "Memory",
    "MemoryHandle",
    "MemoryKind",
    "SharedMemory",
    "allocate_memory",
    "check_device",
    "free_bytes",
    "free_host_bytes",
    "is_in_memory",
    "open_memory",
    "pin_host_memory",
    "use_device",
]
