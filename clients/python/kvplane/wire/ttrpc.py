"""Frames of ttrpc, containerd's protocol for calls between processes of one machine: a header, then data.

A session is one stream of a connection of its own. The layout is that of
https://github.com/containerd/ttrpc/blob/main/PROTOCOL.md, version 1.2. Data may be longer than the 4 MB of ttrpc's
libraries, up to the limits of client and service: an answer whose step was applied must reach the client.
"""

from __future__ import annotations

from struct import Struct

HEADER = Struct(">IIBB")  # bytes of data, stream, kind of frame, flags
REQUEST, RESPONSE, DATA = 1, 2, 3  # kinds of frames
REMOTE_CLOSED, REMOTE_OPEN, NO_DATA = 1, 2, 4  # flags
FIRST_STREAM = 1  # streams of clients have odd numbers


def frame(kind: int, data: bytes, flags: int = 0, stream: int = FIRST_STREAM) -> bytes:
    """Return the bytes of a frame."""
    return HEADER.pack(len(data), stream, kind, flags) + data
