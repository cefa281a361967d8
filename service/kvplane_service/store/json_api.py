"""Call an HTTP server that answers with JSON: bounded answers, deadlines, no redirection, a thread for each server.

Every call has a connection of its own, so that changed tokens and certificates take effect at once; these calls are
few.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvplane_service.runtime.executors import Offload
from kvplane_service.runtime.rota import Busy
from kvplane_service.store.errors import StoreDenied, StoreUnavailable

_MAX_ANSWER_BYTES = 4 << 20
_MAX_TOKEN_BYTES = 64 << 10
_MAX_PAUSE_S = 60.0
_FIELD = "ownership"


class Answer(NamedTuple):
    """Status and body of an answer that is not an error of the server as a whole."""

    status: int
    body: dict[str, Any]


@dataclass(frozen=True)
class Endpoint:
    """A server, and how a client proves itself.

    Attributes:
        url: http(s)://HOST[:PORT].
        ca: PEM file of certificate authorities; "" = those of the system.
        cert, key: PEM files of the client's certificate; "" = none.
        token: file with a bearer token, read for each call because it is rotated; "" = none.
    """

    url: str
    ca: str = ""
    cert: str = ""
    key: str = ""
    token: str = ""


class JsonApi:
    """The calls of one server."""

    def __init__(
        self, at: Endpoint, offload: Offload, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`offload` has one thread; `timeout_s` limits each call."""
        self._at, self._offload, self._timeout_s, self._clock = at, offload, timeout_s, clock
        self._pause_until_s = clock()

    async def call(self, method: str, path: str, body: dict[str, Any] | None, expected: tuple[int, ...]) -> Answer:
        """Return the answer if its status is below 400 or one of `expected`.

        Raises:
            StoreDenied: the server does not permit the call.
            StoreUnavailable: anything else; the call may have taken effect, or takes effect later.
        """
        if self._clock() < self._pause_until_s:
            raise self._unavailable(f"it asked to be called later (in {self._pause_until_s - self._clock():.1f} s)")
        try:
            async with asyncio.timeout(self._timeout_s):
                status, raw, pause = await self._offload(lambda: self._exchange(method, path, body))
        except TimeoutError:
            raise self._unavailable(f"no answer within {self._timeout_s} s") from None
        except (OSError, http.client.HTTPException, Busy, ValueError) as error:  # ValueError: a file that is not PEM
            raise self._unavailable(f"{type(error).__name__}: {error}") from error
        if status in (401, 403):
            what = f"{self._at.url} does not permit {method} {path}: {_message(raw) or status}"
            raise StoreDenied(what, field=_FIELD, remedy="permit it (the chart's Role does), and check the credentials")
        if pause is not None:
            self._pause_until_s = self._clock() + pause
        if status >= 300 and status not in expected:
            raise self._unavailable(f"status {status} {_message(raw)}")
        content = _parsed(raw)
        if content is None:
            raise self._unavailable(f"the answer is not an object of JSON of at most {_MAX_ANSWER_BYTES} bytes")
        return Answer(status, content)

    def _exchange(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, bytes, float | None]:
        ends_s = time.monotonic() + self._timeout_s
        connection = self._connect()
        try:
            headers = {"Accept": "application/json", "Content-Type": "application/json"}
            if self._at.token:
                with Path(self._at.token).open("rb") as file:
                    headers["Authorization"] = f"Bearer {file.read(_MAX_TOKEN_BYTES).decode('ascii').strip()}"
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            raw = b""
            while piece := answer.read1(1 << 16):
                raw += piece
                if len(raw) > _MAX_ANSWER_BYTES or time.monotonic() > ends_s:
                    break
            return answer.status, raw, _pause_of(answer)
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        at = urlsplit(self._at.url)
        host = at.hostname or ""
        if at.scheme == "http":
            return http.client.HTTPConnection(host, at.port, timeout=self._timeout_s)
        context = ssl.create_default_context(cafile=self._at.ca or None)
        if self._at.cert:
            context.load_cert_chain(self._at.cert, self._at.key)
        return http.client.HTTPSConnection(host, at.port, timeout=self._timeout_s, context=context)

    def _unavailable(self, what: str) -> StoreUnavailable:
        remedy = "check the server and the network; open sessions continue meanwhile"
        return StoreUnavailable(f"{self._at.url}: {what}", field=_FIELD, remedy=remedy)


def _pause_of(answer: http.client.HTTPResponse) -> float | None:
    """Return the seconds of Retry-After, if the answer is one of those that have it."""
    text = answer.getheader("Retry-After", "")
    if answer.status not in (429, 503) or not text.isdecimal():
        return None
    return min(float(text[:9]), _MAX_PAUSE_S)


def _parsed(raw: bytes) -> dict[str, Any] | None:
    if len(raw) > _MAX_ANSWER_BYTES:
        return None
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _message(raw: bytes) -> str:
    """Return what the server states about an error."""
    return str((_parsed(raw) or {}).get("message", ""))[:200]
