"""The memory of a host tier, which workers of peers on this host map read-only.

    | headers of all slots | payload of slot 0 | payload of slot 1 | ...

It is a file without a name (memfd). Its owner maps it, then seals it: the kernel refuses every later mapping or write
that could change it, also of a process that got the descriptor, however it opens it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from contextlib import ExitStack
from typing import Protocol, Self

from kvplane_worker.tiers.seal import HEADER_BYTES, IDENTITY_BYTES

ALIGNMENT_BYTES = 4096
_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE of Linux 5.1, which fcntl does not name


def aligned(num_bytes: int) -> int:
    """Return a number of bytes, rounded up to whole pages of memory and of disks."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class PeerMemory(Protocol):
    """The host tier of a peer, of which bytes are copied here. What is copied proves nothing: its seal does. `Arena` is
    memory of this host, `NixlMemory` that of another one.
    """

    num_slots: int
    slot_bytes: int

    def read(self, slot: int, headers: memoryview, payloads: memoryview) -> bool:
        """Copy the headers of consecutive slots from this one on, and of each payload as many bytes as fit: `headers`
        has room for HEADER_BYTES of each, `payloads` for an equal number of bytes of each. Returns False if they cannot
        be read.
        """

    def close(self) -> None:
        """Release the memory."""


class Arena:
    """The memory of a host tier. See `PeerMemory`.

    Attributes:
        num_slots, slot_bytes: its layout.
        headers, rows: the memory, writable by its owner alone.
        descriptor: of the file, in its owner; -1 where it was closed.
        incarnation: 16 bytes that name the memory, in its owner; no slot outlives it.
    """

    def __init__(self, descriptor: int, num_slots: int, slot_bytes: int, is_owner: bool) -> None:
        self.num_slots, self.slot_bytes, self.descriptor = num_slots, slot_bytes, descriptor
        self.incarnation = secrets.token_bytes(IDENTITY_BYTES) if is_owner else b""
        access = mmap.ACCESS_WRITE if is_owner else mmap.ACCESS_READ
        memory = memoryview(mmap.mmap(descriptor, arena_bytes(num_slots, slot_bytes), access=access))
        first = aligned(num_slots * HEADER_BYTES)
        self.headers, self.rows = memory[:first], memory[first:]

    @classmethod
    def create(cls, num_slots: int, slot_bytes: int) -> Self:
        """Allocate the memory, zeroed."""
        descriptor = os.memfd_create("kvplane-host-tier", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with ExitStack() as undo:
            undo.callback(os.close, descriptor)
            os.ftruncate(descriptor, arena_bytes(num_slots, slot_bytes))
            arena = cls(descriptor, num_slots, slot_bytes, is_owner=True)
            seals = _FUTURE_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            undo.pop_all()
        return arena

    @classmethod
    def open(cls, descriptor: int, num_slots: int, slot_bytes: int) -> Self:
        """Map the memory of a peer, of which this is a descriptor; it then belongs to the result. Raises OSError or
        ValueError if the file is smaller than such a memory, or can shrink: reading it would end this process.
        """
        needed = fcntl.F_SEAL_SHRINK | _FUTURE_WRITE
        is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & needed == needed
        if not is_sealed or os.fstat(descriptor).st_size < arena_bytes(num_slots, slot_bytes):
            raise ValueError("the file is no sealed memory of this size")
        arena = cls(descriptor, num_slots, slot_bytes, is_owner=False)
        arena.close()  # the mapping has a descriptor of its own
        return arena

    def read(self, slot: int, headers: memoryview, payloads: memoryview) -> bool:
        """See `PeerMemory.read`."""
        count, width, first = *sizes(headers, payloads), slot * self.slot_bytes
        headers[:] = self.headers[slot * HEADER_BYTES : (slot + count) * HEADER_BYTES]
        for at in range(count):
            payloads[at * width : (at + 1) * width] = self.rows[first : first + width]
            first += self.slot_bytes
        return True

    def close(self) -> None:
        """Close the descriptor; the memory is unmapped with its last view."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


def sizes(headers: memoryview, payloads: memoryview) -> tuple[int, int]:
    """Return the number of slots that are read, and the bytes of each payload. See `PeerMemory.read`."""
    count = len(headers) // HEADER_BYTES
    return count, len(payloads) // count


def arena_bytes(num_slots: int, slot_bytes: int) -> int:
    """Return the size of the memory of a host tier."""
    return aligned(num_slots * HEADER_BYTES) + num_slots * slot_bytes
