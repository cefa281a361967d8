"""HTTP/2 by hand, for clients that do what no library would: see RFC 9113 and RFC 7541."""

from __future__ import annotations

import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9  # frame types
ACK = END_STREAM = 1
END_HEADERS = 4
INITIAL_WINDOW_SIZE = 4
HEADER_BYTES = 9
WINDOW_BYTES = 65_535  # of a connection and of a stream, before any WINDOW_UPDATE


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def literal(name: bytes, value: bytes) -> bytes:
    """A header, neither compressed nor indexed."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def call_headers(path: str, **more: str) -> bytes:
    """The header block of a gRPC call. `more`: further headers, with _ for -."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
    fields |= {"content-type": "application/grpc", "te": "trailers"}
    fields |= {name.replace("_", "-"): value for name, value in more.items()}
    return b"".join(literal(name.encode(), value.encode()) for name, value in fields.items())


def message(body: bytes, compressed: bool = False) -> bytes:
    """A length-prefixed message of gRPC."""
    return struct.pack(">BI", compressed, len(body)) + body
