"""The port that Prometheus scrapes: GET /metrics, in Prometheus' text format or, when asked, OpenMetrics.

On the service's own event loop, since a scrape must see the state between two steps. Only the reading happens there;
the text is made in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from http import HTTPStatus

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kvplane.base.errors import Unavailable

_PATH = "/metrics"
_MAX_HEAD_BYTES = 16 << 10
_TIMEOUT_S = 5.0


class MetricsServer:
    """Serves one collector over HTTP/1.1, a connection per request."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._server: asyncio.Server | None = None

    async def start(self, address: str) -> str:
        """Begin to serve on host:port; returns the address, with the port that was chosen for port 0.

        Raises Unavailable naming `metrics_listen` when it is taken.
        """
        host, _, port = address.rpartition(":")
        try:
            self._server = await asyncio.start_server(
                self._answer, host.strip("[]"), int(port), limit=_MAX_HEAD_BYTES, reuse_address=True
            )
        except OSError as error:
            raise Unavailable(
                f"cannot serve metrics on {address}: {error.strerror or error}",
                field="metrics_listen",
                remedy="choose another with --metrics; port 0 takes a free one, an empty one serves none",
            ) from None
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Serve no longer."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _TIMEOUT_S)
            writer.write(await self._response(head.decode("latin-1").split("\r\n")))
            await asyncio.wait_for(writer.drain(), _TIMEOUT_S)
        except asyncio.LimitOverrunError:
            writer.write(_response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE))
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
            pass  # the client is slow or gone: nobody to tell
        finally:
            writer.close()

    async def _response(self, head: Sequence[str]) -> bytes:
        method, _, rest = head[0].partition(" ")
        if method not in ("GET", "HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED)
        if rest.partition(" ")[0].partition("?")[0] != _PATH:
            return _response(HTTPStatus.NOT_FOUND, f"metrics are at {_PATH}\n".encode())
        accept = next((line.partition(":")[2] for line in head[1:] if line.lower().startswith("accept:")), "")
        encode, content_type = choose_encoder(accept)
        page = _Page(list(self._collector.collect()))
        body = await asyncio.to_thread(encode, page.registry)
        return _response(HTTPStatus.OK, body if method == "GET" else b"", content_type)


class _Page(Collector):
    """Metrics as they were at one moment."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        yield from self._families

    def describe(self) -> Iterator[Metric]:
        """Nothing: the registry need not compare names."""
        yield from ()


def _response(status: HTTPStatus, body: bytes = b"", content_type: str = "text/plain; charset=utf-8") -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
