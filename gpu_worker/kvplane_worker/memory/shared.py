"""Named shared memory: files in /dev/shm that only their owner can read.

`multiprocessing.shared_memory` is not used: its resource tracker removes a name when any process that opened it exits.
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
    """A file in memory, mapped into this process.

    Attributes:
        handle: what other processes need to map it.
        view: the bytes of the file.
    """

    def __init__(self, handle: MemoryHandle, mapping: mmap.mmap, owned: bool) -> None:
        self.handle = handle
        self._owned = owned
        self.view = memoryview(mapping)

    @classmethod
    def create(cls, path: Path, size_bytes: int) -> SharedMemory:
        """Create a file of zeroes and reserve its memory.

        Raises:
            OutOfMemory: there is too little memory; the file is removed.
        """
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, MODE)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
            mapping = mmap.mmap(descriptor, size_bytes)
        except OSError as error:
            path.unlink()
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise OutOfMemory(
                f"{size_bytes} bytes cannot be allocated in {path.parent}: {error.strerror}",
                field="device",
                remedy="register the replica with fewer blocks, or give /dev/shm more space",
            ) from None
        finally:
            os.close(descriptor)
        return cls(MemoryHandle(MemoryKind.SHARED, size_bytes, CPU, path=str(path)), mapping, owned=True)

    @classmethod
    def open(cls, handle: MemoryHandle, writable: bool = True) -> SharedMemory:
        """Map a file that another process created.

        Raises:
            NotFound: the file was removed.
            PermissionDenied: the file belongs to another user.
        """
        try:
            descriptor = os.open(handle.path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFound(
                f"the shared memory {handle.path} does not exist",
                field="pages",
                remedy="attach to a running worker; this one has exited",
            ) from None
        except PermissionError:
            raise PermissionDenied(
                f"the shared memory {handle.path} belongs to another user",
                field="pages",
                remedy="run the engine as the worker's user",
            ) from None
        try:
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            mapping = mmap.mmap(descriptor, handle.size_bytes, access=access)
        finally:
            os.close(descriptor)
        return cls(handle, mapping, owned=False)

    def tensor(self) -> Tensor:
        """Return a view of the bytes as a uint8 tensor [size_bytes]."""
        return torch.frombuffer(self.view, dtype=torch.uint8)

    def close(self, lent: bool = False) -> None:
        """Remove the file, if this process created it. The memory is freed when no process maps it any more."""
        if self._owned:
            Path(self.handle.path).unlink(missing_ok=True)


def free_shared_bytes() -> int:
    """Return the number of bytes that are free for shared memory: in the file system or on the machine, whichever has
    fewer.
    """
    found = os.statvfs(SHM_FOLDER)
    return min(found.f_bavail * found.f_frsize, free_host_bytes())


def free_host_bytes(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of bytes that are free on the machine, and within the memory limit of this container.

    `group`: folder of the control group (v2) that a container sees as its own.
    """
    available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    free = int(available.split()[1]) * 1024
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no such group, or no limit: "max"
        return free
    return min(free, max(0, limit - used))


def is_in_memory(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Return whether the files of a folder are in memory (tmpfs, ramfs). `mounts`: the mounted file systems."""
    at = folder.resolve()
    kinds = {Path(one.split()[1].replace("\\040", " ")): one.split()[2] for one in mounts.read_text().splitlines()}
    nearest = next((path for path in (at, *at.parents) if path in kinds), None)
    return nearest is not None and kinds[nearest] in ("tmpfs", "ramfs")
