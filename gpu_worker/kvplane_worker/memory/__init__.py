"""Memory that two processes of a host map: allocated by a worker on the CPU or a GPU, mapped by an engine.

handle  what another process needs to map the memory
shared  files in /dev/shm, for CPU pages, stamps and staging
folders folders that no other user can write to or replace
cuda    allocations on a GPU, shared by CUDA IPC
kinds   one interface for both
"""

from kvplane_worker.memory.handle import MemoryHandle as MemoryHandle
from kvplane_worker.memory.handle import MemoryKind as MemoryKind
from kvplane_worker.memory.kinds import Memory as Memory
from kvplane_worker.memory.kinds import allocate_memory as allocate_memory
from kvplane_worker.memory.kinds import check_device as check_device
from kvplane_worker.memory.kinds import free_bytes as free_bytes
from kvplane_worker.memory.kinds import open_memory as open_memory
from kvplane_worker.memory.kinds import pin_host_memory as pin_host_memory
from kvplane_worker.memory.kinds import use_device as use_device
from kvplane_worker.memory.shared import SharedMemory as SharedMemory
from kvplane_worker.memory.shared import free_host_bytes as free_host_bytes
from kvplane_worker.memory.shared import is_in_memory as is_in_memory
