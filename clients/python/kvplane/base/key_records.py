"""Records of the published keys of a pool, in memory next to the pages, where an engine without a service stores them.

    byte 0     8         12       16            20       64
         | magic | version | blocks | digest bytes |   0   | records, RECORD_BYTES each ...

    record:  stamp | digest, 32 bytes | tokens | group | age | 0

All numbers are little-endian; `stamp` has eight bytes, the others four. The record of a block counts only if its stamp
is that of the block in the stamp table (`kvplane.base.stamp_table`). So a record need not be removed when its key is,
and a writer that is killed at any point leaves no wrong record: it first sets the record's stamp to 0 and writes the
new stamp last.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kvplane.base.errors import InvalidArgument

MAGIC = b"kvpkeys\0"
VERSION = 1
HEADER_BYTES = 64
RECORD_BYTES = 56
MAX_DIGEST_BYTES = 32

_PREFIX = struct.Struct("<8sIII")
_STAMP = struct.Struct("<Q")
_REST = struct.Struct(f"<{MAX_DIGEST_BYTES}sIII")


def records_bytes(num_blocks: int) -> int:
    """Return the size in bytes of the records of a pool with this number of blocks."""
    return HEADER_BYTES + RECORD_BYTES * num_blocks


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """The primary key of a block.

    Attributes:
        block: the block, not the null block.
        stamp: the version number of the block's content.
        digest: digest of the key; the key's domain is "".
        group: KV cache group of the key.
        num_tokens: tokens of the prefix that the key names.
        age: time of the last use, in a unit of the writer.
    """

    block: int
    stamp: int
    digest: bytes
    group: int
    num_tokens: int
    age: int = 0

    def writes(self) -> list[tuple[int, bytes]]:
        """Return what is written for it, in order, each with its position in the bytes of all records."""
        at = HEADER_BYTES + RECORD_BYTES * self.block
        rest = _REST.pack(self.digest, self.num_tokens, self.group, self.age)
        return [(at, _STAMP.pack(0)), (at + _STAMP.size, rest), (at, _STAMP.pack(self.stamp))]


class KeyRecords:
    """The records in a writable buffer of at least `records_bytes` bytes."""

    def __init__(self, buffer: memoryview | bytearray) -> None:
        """Open records that `create` wrote. Raises InvalidArgument if the buffer has none."""
        view = memoryview(buffer).cast("B")
        magic, version, num_blocks, digest_bytes = (
            _PREFIX.unpack_from(view) if len(view) >= HEADER_BYTES else (b"",) * 4
        )
        if (magic, version) != (MAGIC, VERSION) or len(view) < records_bytes(num_blocks):
            raise InvalidArgument(
                f"a buffer of {len(view)} bytes that begins with {magic!r} has no key records of version {VERSION}",
                field="buffer",
                remedy="create the records with KeyRecords.create",
            )
        self.num_blocks = num_blocks
        self.digest_bytes = digest_bytes
        self._bytes = view

    @classmethod
    def create(cls, buffer: memoryview | bytearray, num_blocks: int, digest_bytes: int) -> KeyRecords:
        """Write a table without records into a zeroed buffer and return it. Raises InvalidArgument for a digest of
        another size than 1 to 32 bytes, and for a buffer that is too small.
        """
        if not 1 <= digest_bytes <= MAX_DIGEST_BYTES:
            raise InvalidArgument(
                f"digests of {digest_bytes} bytes cannot be recorded",
                field="digest_bytes",
                remedy=f"use block hashes of 1 to {MAX_DIGEST_BYTES} bytes",
            )
        view = memoryview(buffer).cast("B")
        if len(view) >= HEADER_BYTES:
            _PREFIX.pack_into(view, 0, MAGIC, VERSION, num_blocks, digest_bytes)
        return cls(view)

    def write(self, record: KeyRecord) -> None:
        """Write the record of a block; the block must be in the pool."""
        assert len(record.digest) == self.digest_bytes, f"a digest of {len(record.digest)} bytes"
        for at, part in record.writes():
            self._bytes[at : at + len(part)] = part

    def header(self) -> bytes:
        """Return the bytes before the first record."""
        return bytes(self._bytes[:HEADER_BYTES])

    def records(self) -> memoryview:
        """Return the bytes of all records, RECORD_BYTES per block, the null block's first."""
        return self._bytes[HEADER_BYTES : records_bytes(self.num_blocks)]
