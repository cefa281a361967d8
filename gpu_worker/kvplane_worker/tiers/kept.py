"""What a disk tier holds over restarts of its worker: the versions of its slots.

    the worker runs    movers and ranks write the versions to the stamp table
    it leaves          they are written to an index next to the file, when no process can write them any more
    it is killed       they are in its stamp table in shared memory, which the next worker of the rank reads

Without an index and a table, as after a crash of the host, the tier is empty: a reset or an eviction since the last
index would be undone. For the same reason an index is removed, durably, before the first slot is written.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import NULL_BLOCK
from kvplane.base.stamp_table import StampTable
from kvplane.base.stamps import in_time

MAGIC = b"kvpindx1"
_HEAD = struct.Struct("<8s16sQQ")  # magic, what the slots are, owner epoch, number of slots
_SUM_BYTES = 16


@dataclass(frozen=True, slots=True)
class Kept:
    """What a tier kept.

    Attributes:
        owner_epoch: the highest epoch of an engine life that may have written slots.
        versions: of each slot, 0 = nothing.
    """

    owner_epoch: int
    versions: Sequence[int]


def kept_of(table: StampTable, first: int, num_slots: int) -> Kept:
    """Return what a stamp table says of the slots from this id on; nothing from before the last reset."""
    last_reset = in_time(table.read(NULL_BLOCK))
    versions = (table.read(block) for block in range(first, first + num_slots))
    return Kept(table.owner_epoch, [version if in_time(version) > last_reset else 0 for version in versions])


def left_table(table: bytes, num_stamps: int) -> StampTable | None:
    """Return the stamp table of a killed worker; None if it is of another number of blocks and slots."""
    try:
        left = StampTable(bytearray(table))
    except InvalidArgument:
        return None  # there is none, or it was being created
    return left if left.num_blocks == num_stamps else None


def write_index(path: Path, identity: bytes, kept: Kept) -> None:
    """Write an index, durably: it exists after a crash of the host as a whole or not at all."""
    body = _HEAD.pack(MAGIC, identity, kept.owner_epoch, len(kept.versions)) + array("Q", kept.versions).tobytes()
    fresh = path.with_name(f"{path.name}.new")
    with open(fresh, "wb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600)) as file:
        file.write(body + xxhash.xxh3_128(body).digest())
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)
    _sync(path.parent)


def read_index(path: Path, identity: bytes, num_slots: int) -> Kept | None:
    """Return the content of an index; None if there is none, it is damaged, or of other slots."""
    size = _HEAD.size + 8 * num_slots
    try:
        # A pipe in its place would wait for a writer, and a file without end would fill the memory.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            raw = file.read(size + _SUM_BYTES + 1)
    except OSError:
        return None
    body, versions = raw[:-_SUM_BYTES], array("Q")
    if len(body) != size or xxhash.xxh3_128(body).digest() != raw[-_SUM_BYTES:]:
        return None
    magic, of, owner_epoch, count = _HEAD.unpack_from(body)
    versions.frombytes(body[_HEAD.size :])
    return Kept(owner_epoch, versions) if (magic, of, count) == (MAGIC, identity, num_slots) else None


def remove_index(path: Path) -> None:
    """Remove an index, durably."""
    path.unlink(missing_ok=True)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
