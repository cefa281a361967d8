"""Named shared memory: files of a memory file system, readable by their owner alone.

Plain files and not `multiprocessing.shared_memory`, whose tracker removes a name when any process that knew it ends.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from kvplane.base.errors import NotFound, OutOfMemory, PermissionDenied
from kvplane_worker.memory.handle import MemoryHandle, MemoryKind

SHM_FOLDER = Path("/dev/shm")
MODE = 0o600
CPU = "cpu"


class SharedMemory:
    """One mapped file.

    Attributes:
        handle: how others map it.
        view: its bytes.
    """

    def __init__(self, handle: MemoryHandle, mapping: mmap.mmap, owned: bool) -> None:
        self.handle = handle
        self._owned = owned
        self.view = memoryview(mapping)

    @classmethod
    def create(cls, path: Path, size_bytes: int) -> SharedMemory:
        """Create a file of zeroes, its memory reserved.

        Raises:
            OutOfMemory: the file system has too little; nothing is left behind.
        """
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, MODE)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
            mapping = mmap.mmap(descriptor, size_bytes)
        except OSError as error:
            path.unlink()
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise OutOfMemory(f"{size_bytes} bytes: {error.strerror}", field="device", remedy="plan less") from None
        finally:
            os.close(descriptor)
        return cls(MemoryHandle(MemoryKind.SHARED, size_bytes, CPU, path=str(path)), mapping, owned=True)

    @classmethod
    def open(cls, handle: MemoryHandle, writable: bool = True) -> SharedMemory:
        """Map what another process created.

        Raises:
            NotFound: it is gone.
            PermissionDenied: it belongs to another user.
        """
        try:
            descriptor = os.open(handle.path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFound(f"{handle.path} is gone", field="pages", remedy="attach to a worker that lives") from None
        except PermissionError:
            raise PermissionDenied(f"{handle.path} is not yours", field="pages", remedy="run as its user") from None
        try:
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            mapping = mmap.mmap(descriptor, handle.size_bytes, access=access)
        finally:
            os.close(descriptor)
        return cls(handle, mapping, owned=False)

    def tensor(self) -> Tensor:
        """Its bytes as a uint8 tensor."""
        return torch.frombuffer(self.view, dtype=torch.uint8)

    def close(self, lent: bool = False) -> None:
        """Give the name back, if it was created here. The memory goes with the last view of it, in any process."""
        del lent
        if self._owned:
            Path(self.handle.path).unlink(missing_ok=True)


def free_shared_bytes() -> int:
    """Bytes that shared memory may still take: of its file system, and of the machine."""
    found = os.statvfs(SHM_FOLDER)
    available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return min(found.f_bavail * found.f_frsize, int(available.split()[1]) * 1024)
