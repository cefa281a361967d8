"""Memory that two processes of a host see: allocated by the worker, mapped by the engine."""

from kvplane_worker.memory.handle import MemoryHandle, MemoryKind
from kvplane_worker.memory.kinds import Memory, allocate_memory, check_device, free_bytes, open_memory, use_device
from kvplane_worker.memory.shared import SharedMemory

__all__ = [
    "Memory",
    "MemoryHandle",
    "MemoryKind",
    "SharedMemory",
    "allocate_memory",
    "check_device",
    "free_bytes",
    "open_memory",
    "use_device",
]
