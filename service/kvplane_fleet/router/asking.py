"""Asks engines by HTTP: the only place where a router opens an HTTP connection.

An engine may be slow, hostile, or another one than its name says. So a question has a deadline as a whole, is never
sent elsewhere (no redirections, no proxies of the environment), takes a bounded answer, and waits on the event loop: an
engine that does not answer holds no thread, and of each engine a few questions are open at a time: others wait for one
of them within their own deadline, so that who asks a slow engine often is slow, and costs the router little.
"""

from __future__ import annotations

import asyncio
import ssl
from http.client import HTTPException, HTTPResponse
from io import BytesIO
from urllib.parse import urlsplit

MOST_OPEN = 8  # questions to one engine
MOST_HEAD_BYTES = 16 << 10
MOST_CHUNKS = 1 << 14  # of one answer: each costs some microseconds of the event loop
LINE_END = b"\r\n"


class Engines:
    """Asks engines, a bounded number of questions of each."""

    def __init__(self) -> None:
        self._free: dict[str, asyncio.Semaphore] = {}  # by endpoint; those of places, so there are few

    async def post(self, endpoint: str, path: str, body: bytes, most_bytes: int, within_s: float) -> bytes:
        """Return the answer of an engine to a JSON text.

        Raises:
            OSError: it does not answer; TimeoutError: not completely within `within_s` seconds.
            ValueError: its answer is none of HTTP, is longer than `most_bytes`, or has another status than 200.
        """
        free = self._free.setdefault(endpoint, asyncio.Semaphore(MOST_OPEN))
        try:
            async with asyncio.timeout(within_s), free:
                return await _post(endpoint if "://" in endpoint else f"http://{endpoint}", path, body, most_bytes)
        except TimeoutError:
            raise TimeoutError(f"no complete answer within {within_s:g} s") from None
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, HTTPException) as error:
            raise ValueError(f"the answer is no valid HTTP: {error!r}") from error


async def _post(url: str, path: str, body: bytes, most_bytes: int) -> bytes:
    parts = urlsplit(url)
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure, limit=MOST_HEAD_BYTES)
    try:
        head = (
            f"POST {parts.path.rstrip('/')}{path} HTTP/1.1\r\nhost: {parts.netloc.rpartition('@')[2]}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        writer.write(head.encode("latin-1") + body)
        await writer.drain()
        return await _answer(reader, most_bytes)
    finally:
        writer.transport.abort()  # not `close`, which would wait for an engine that does not read


async def _answer(reader: asyncio.StreamReader, most_bytes: int) -> bytes:
    answer = HTTPResponse(_Received(await reader.readuntil(2 * LINE_END)))  # type: ignore[arg-type]
    answer.begin()
    if answer.status != 200:
        raise ValueError(f"status {answer.status}")
    if answer.chunked:
        return await _chunks(reader, most_bytes)
    if answer.length is None:  # until the connection ends, which was asked for
        received = bytearray()
        while len(received) <= most_bytes and (part := await reader.read(1 << 16)):
            received += part
    else:
        _check_length(answer.length, most_bytes)
        received = bytearray(await reader.readexactly(answer.length))
    _check_length(len(received), most_bytes)
    return bytes(received)


async def _chunks(reader: asyncio.StreamReader, most_bytes: int) -> bytes:
    received = bytearray()
    for _ in range(MOST_CHUNKS):
        size = int((await reader.readuntil(LINE_END)).partition(b";")[0], 16)
        _check_length(len(received) + size, most_bytes)
        if not size:
            return bytes(received)
        received += (await reader.readexactly(size + len(LINE_END)))[:size]
    raise ValueError(f"more than {MOST_CHUNKS} chunks")


def _check_length(num_bytes: int, most_bytes: int) -> None:
    if num_bytes > most_bytes:
        raise ValueError(f"{num_bytes} bytes or more, of {most_bytes} allowed")


class _Received:
    """What HTTPResponse takes for a socket: a head that has arrived."""

    def __init__(self, head: bytes) -> None:
        self._head = head

    def makefile(self, *_: object) -> BytesIO:
        """Return the head as a file."""
        return BytesIO(self._head)
