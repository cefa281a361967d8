"""The HTTP endpoint that Prometheus scrapes: GET /metrics, in the text format of Prometheus or, on request,
OpenMetrics. It passes other requests to the status page.

It runs on the service's event loop, because a scrape must read the state between two steps. It yields to other tasks
after each replica, so that steps are served in between. A thread would block the interpreter for the same time. A page
is built at most once per second and format, whatever the number of scrapes.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol, TypeAlias

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder

from kvplane.base.errors import Unavailable
from kvplane_service.runtime.rota import Busy
from kvplane_service.runtime.slices import Turns, in_slices

_PATH = "/metrics"
_MAX_HEAD_BYTES = 16 << 10
_MAX_BODY_BYTES = 16 << 10  # of a call of the status page, which names a replica or a request
_MAX_CONNECTIONS = 128
_TIMEOUT_S = 5.0
_MAX_WAITING = 16
_KEPT_NS = 1_000_000_000  # time for which a page is answered again
_OPENMETRICS = "application/openmetrics-text"
_EOF = b"# EOF\n"  # last line of a page in the OpenMetrics format

Encode: TypeAlias = Callable[[CollectorRegistry], bytes]


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request that is not a scrape.

    Attributes:
        authorization, host, content_type: headers; "" = absent.
        peer: address of the client.
        may_scrape: it has the token that scrapes must have, or they need none.
    """

    method: str
    path: str
    authorization: str
    host: str
    content_type: str
    peer: str
    body: bytes
    may_scrape: bool


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """The answer to an HttpRequest."""

    status: HTTPStatus
    body: bytes
    content_type: str
    headers: Mapping[str, str]


Page: TypeAlias = Callable[[HttpRequest], Awaitable[HttpResponse | None]]


class Parts(Protocol):
    """What collects metrics."""

    def parts(self) -> Iterable[Iterable[Metric]]:
        """Yield metric families; a family may be in several parts, with other values. The caller pauses in between."""


class MetricsServer:
    """Serves the metrics of one collector over HTTP/1.1, with one request per connection."""

    def __init__(
        self,
        collector: Parts,
        token: Callable[[], bytes] | None = None,
        page: Page | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`token` returns the bearer token that a scrape must have; None = scrapes need none. `page` answers all other
        requests. `clock` returns the monotonic time in nanoseconds.
        """
        self._page_of = page
        self._collector = collector
        self._token = token
        self._clock = clock
        self._kept: dict[str, tuple[int, list[bytes]]] = {}  # by content type: when its page was begun, and the page
        self._turns = Turns("metrics", _MAX_WAITING)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, address: str) -> str:
        """Start serving on host:port, and return the address, with the selected port instead of port 0.

        Raises Unavailable, which names `metrics_listen`, if the address cannot be used.
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
                remedy="choose another address with --metrics; port 0 selects a free port",
            ) from None
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Stop serving metrics; open connections are closed."""
        if self._server is not None:
            self._server.close()
            for one in self._connections:
                one.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
            await self._server.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._connections) >= _MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._connections.add(task)
        try:
            await self._answer_one(reader, writer)
        finally:
            self._connections.discard(task)

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            raw = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _TIMEOUT_S)
            head = raw.decode("latin-1").split("\r\n")
            body = await asyncio.wait_for(_body(head, reader), _TIMEOUT_S)
            for piece in await self._response(head, body, str(writer.get_extra_info("peername"))):
                writer.write(piece)
                await asyncio.wait_for(writer.drain(), _TIMEOUT_S)
                await asyncio.sleep(0)
        except asyncio.LimitOverrunError:
            writer.writelines(_response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE))
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
            writer.transport.abort()  # the client is slow or gone: drop what is buffered for it
        finally:
            writer.close()

    async def _response(self, head: Sequence[str], body: bytes | None = b"", peer: str = "") -> list[bytes]:
        method, _, rest = head[0].partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if body is None:
            return _response(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        if path != _PATH:
            return await self._other(head, method, path, body, peer)
        if method not in ("GET", "HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED)
        if not self._is_allowed(_header(head, "authorization")):
            return _response(HTTPStatus.UNAUTHORIZED, [b"send the token of metrics_token_file as a bearer token\n"])
        encode, content_type = choose_encoder(_OPENMETRICS if _OPENMETRICS in _header(head, "accept") else "")
        try:
            page = self._kept_page(content_type)
            if page is None:
                async with self._turns.take():
                    page = self._kept_page(content_type)
                    if page is None:
                        begun_ns = self._clock()
                        page = await self._page(encode)
                        self._kept[content_type] = (begun_ns, page)
        except Busy as error:
            return _response(HTTPStatus.SERVICE_UNAVAILABLE, [f"{error}\n".encode()])
        return _response(HTTPStatus.OK, page if method == "GET" else [], content_type)

    async def _other(self, head: Sequence[str], method: str, path: str, body: bytes, peer: str) -> list[bytes]:
        """Return the answer of the status page to a request that is no scrape."""
        names = ("authorization", "host", "content-type")
        authorization, host, content_type = (_header(head, name).strip() for name in names)
        kind, may_scrape = content_type.partition(";")[0].lower(), self._is_allowed(authorization)
        request = HttpRequest(method, path, authorization, host, kind, peer, body, may_scrape)
        answer = await self._page_of(request) if self._page_of is not None else None
        if answer is None:
            if method not in ("GET", "HEAD"):
                return _response(HTTPStatus.METHOD_NOT_ALLOWED)
            return _response(HTTPStatus.NOT_FOUND, [f"metrics are at {_PATH}\n".encode()])
        pieces = [answer.body] if method != "HEAD" else []
        return _response(answer.status, pieces, answer.content_type, answer.headers)

    def _is_allowed(self, authorization: str) -> bool:
        if self._token is None:
            return True
        scheme, _, given = authorization.strip().partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), self._token())

    def _kept_page(self, content_type: str) -> list[bytes] | None:
        begun_ns, page = self._kept.get(content_type, (0, None))
        return page if self._clock() - begun_ns < _KEPT_NS else None

    async def _page(self, encode: Encode) -> list[bytes]:
        """Return the page of metrics in pieces, one per metric family. It is built in time slices of the event loop."""
        texts: dict[str, list[bytes]] = {}
        async for part in in_slices(self._collector.parts()):
            for metric in part:
                lines = encode(_One(metric)).removesuffix(_EOF)
                known = texts.setdefault(metric.name, [])
                known.append(_without_header(lines) if known else lines)
        pieces = []
        for of_family in texts.values():
            pieces.append(b"".join(of_family))
            await asyncio.sleep(0)
        return [*pieces, encode(_One())]  # the end of the page, if its format has one


class _One(CollectorRegistry):
    """A Prometheus registry that contains only the given metric families."""

    def __init__(self, *families: Metric) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Yield the given metric families (see prometheus_client.CollectorRegistry)."""
        yield from self._families


def _header(head: Sequence[str], name: str) -> str:
    """Return the value of a header of a request; "" without it."""
    return next((line.partition(":")[2] for line in head[1:] if line.lower().startswith(f"{name}:")), "")


def _without_header(text: bytes) -> bytes:
    """Return the text of a metric family without its HELP and TYPE lines."""
    while text.startswith(b"# "):
        text = text[text.index(b"\n") + 1 :]
    return text


async def _body(head: Sequence[str], reader: asyncio.StreamReader) -> bytes | None:
    """Return the body of a request, None if it is too large; raises IncompleteReadError."""
    length = _header(head, "content-length").strip()
    if not length:
        return b""
    if not length.isdecimal() or len(length) > 9 or int(length) > _MAX_BODY_BYTES:
        return None
    return await reader.readexactly(int(length))


def _response(
    status: HTTPStatus,
    body: Sequence[bytes] = (),
    content_type: str = "text/plain; charset=utf-8",
    headers: Mapping[str, str] | None = None,
) -> list[bytes]:
    challenge = "WWW-Authenticate: Bearer\r\n" if status is HTTPStatus.UNAUTHORIZED else ""
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n{challenge}{more}"
        f"Content-Length: {sum(map(len, body))}\r\nConnection: close\r\n\r\n"
    )
    return [head.encode(), *body]
