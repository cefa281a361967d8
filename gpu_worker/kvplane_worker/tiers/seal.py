"""The seal of a slot: a header that says what its bytes are, and a checksum over both.

A slot counts only as what its seal says: another version, key, page, rank, model or memory, a change of any bit, and
bytes that were written in part are all detected. So a reader in another process needs no lock: it copies header and
payload to memory of its own, and verifies them there. The checksum is XXH3-128: it finds damage, and is no proof
against a forger.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

FORMAT = b"kvpslot2"
IDENTITY_BYTES = 16
CHECKSUM_BYTES = 16
_HEADER = struct.Struct(f"<8s{2 * IDENTITY_BYTES}sIIQQQ")
HEADER_BYTES = _HEADER.size + CHECKSUM_BYTES
UNSEALED = bytes(HEADER_BYTES)


class Content(NamedTuple):
    """What a slot holds.

    Attributes:
        identity: 16 bytes that name what gives the bytes their meaning (weights, layout of a block, rank), and 16 that
            name the memory, drawn when it begins empty.
        tier, slot: where it is.
        group: KV cache group of the block.
        version: number of the job that wrote it; no other content of the slot ever has it.
        key: of the block (`Orders.load_key`); 0 if the identity names it.
    """

    identity: bytes
    tier: int
    slot: int
    group: int
    version: int
    key: int = 0

    def seal(self, payload: memoryview) -> bytes:
        """Return the header of these bytes."""
        place = self.tier << 24 | self.group
        header = _HEADER.pack(FORMAT, self.identity, place, self.slot, self.version, self.key, len(payload))
        checksum = xxhash.xxh3_128(header)
        checksum.update(payload)
        return header + checksum.digest()


def was_written_again(header: bytes, content: Content) -> bool:
    """Return whether the header of a slot says that it holds something else than this content by now, or nothing; False
    if it is that of another memory or slot, or of this content.
    """
    if header == UNSEALED:
        return True
    form, identity, place, slot, version, key, _ = _HEADER.unpack_from(header)
    is_slot = (form, identity, place >> 24, slot) == (FORMAT, content.identity, content.tier, content.slot)
    return is_slot and (place & 0xFFFFFF, version, key) != (content.group, content.version, content.key)


def held_in(header: bytes) -> tuple[int, int]:
    """Return the group and the bytes of the payload that a header names, unverified; zeroes if it is none."""
    form, _, place, _, _, _, num_bytes = _HEADER.unpack_from(header)
    return (place & 0xFFFFFF, num_bytes) if form == FORMAT else (0, 0)
