"""Messages between a worker and the process that has NIXL. They cross Unix sockets that keep boundaries of messages.

control   worker: an order and its content      agent: one byte, and the content of the answer
lane      worker: `Read`                        agent: one byte, when no read of the lane can write any more
"""

from __future__ import annotations

import struct
from typing import NamedTuple

PACKAGES = ("nixl_cu12", "nixl_cu13")  # either works without CUDA
MAX_MESSAGE_BYTES = 1 << 16
DONE, FAILED = b"+", b"-"
ADD, REMOVE = b"a", b"r"
PEER = struct.Struct("<I")
ADDRESS = struct.Struct("<Q")  # before the metadata of an agent: where the memory begins in its process
_READ = struct.Struct("<I6Q")


class Read(NamedTuple):
    """A read into a lane: the headers of some slots, then their payloads.

    Attributes:
        peer: number of the peer.
        headers, header_bytes: address of the headers in the peer's process, and how many bytes of them.
        payloads, stride, width, num_payloads: address of the first payload, bytes from one to the next, bytes of each
            that are read, and how many.
    """

    peer: int
    headers: int
    header_bytes: int
    payloads: int
    stride: int
    width: int
    num_payloads: int

    def pack(self) -> bytes:
        """Return the message."""
        return _READ.pack(*self)

    @classmethod
    def unpack(cls, message: bytes) -> Read:
        """Return the read of a message."""
        return cls(*_READ.unpack(message))

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Address and size of each piece that is read, in the order of the lane."""
        if self.width == self.stride:  # without a gap: one piece
            return [(self.headers, self.header_bytes), (self.payloads, self.num_payloads * self.width)]
        payloads = [(self.payloads + at * self.stride, self.width) for at in range(self.num_payloads)]
        return [(self.headers, self.header_bytes), *(payloads if self.width else ())]
