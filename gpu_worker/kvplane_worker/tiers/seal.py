"""The seal of a slot: a header that says what its bytes are, and a checksum over both.

A slot counts only as what its seal says: another version, page, rank or model, a change of any bit, and bytes that were
written in part are all detected. The checksum is XXH3-128: it finds damage, and is no proof against a forger.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

FORMAT = b"kvpslot1"
IDENTITY_BYTES = 16
CHECKSUM_BYTES = 16
_HEADER = struct.Struct(f"<8s{IDENTITY_BYTES}sIIQQ")
HEADER_BYTES = _HEADER.size + CHECKSUM_BYTES
UNSEALED = bytes(HEADER_BYTES)


class Content(NamedTuple):
    """What a slot holds.

    Attributes:
        identity: 16 bytes that name everything that gives the bytes their meaning: replica, layout of a block, rank.
        tier, slot: where it is.
        group: KV cache group of the block.
        version: number of the job that wrote it; no other content of the slot ever has it.
    """

    identity: bytes
    tier: int
    slot: int
    group: int
    version: int

    def seal(self, payload: memoryview) -> bytes:
        """Return the header of these bytes."""
        place = self.tier << 24 | self.group
        header = _HEADER.pack(FORMAT, self.identity, place, self.slot, self.version, len(payload))
        checksum = xxhash.xxh3_128(header)
        checksum.update(payload)
        return header + checksum.digest()


def held_in(header: bytes) -> tuple[int, int]:
    """Return the group and the bytes of the payload that a header names, unverified; zeroes if it is none."""
    form, _, place, _, _, num_bytes = _HEADER.unpack_from(header)
    return (place & 0xFFFFFF, num_bytes) if form == FORMAT else (0, 0)
