"""The addresses of places as a proxy needs them: ip:port."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import socket
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from urllib.parse import urlsplit

from kvplane_fleet.fleet import Fleet

KNOWN_S = 10.0  # for which what is known of a name is used
RESOLVE_S = 1.0


async def resolve(endpoint: str) -> str:
    """Return the address of an endpoint. Raises OSError, ValueError, TimeoutError."""
    parts = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        async with asyncio.timeout(RESOLVE_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        address = ipaddress.ip_address(found[0][4][0])
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


class Endpoints:
    """Resolves the endpoints of places. A request waits only for endpoints that were never asked for, all at once."""

    def __init__(
        self,
        fleet: Fleet,
        clock: Callable[[], float] = time.monotonic,
        resolved: Callable[[str], Awaitable[str]] = resolve,
    ) -> None:
        """`clock` returns seconds that never decrease."""
        self._fleet, self._clock, self._resolved = fleet, clock, resolved
        self._known: dict[str, tuple[float, str]] = {}  # by endpoint: until when, last address or ""
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def of(self, places: Iterable[str]) -> dict[str, str]:
        """Return the address of each place that has one, by name."""
        endpoints = {name: self._fleet.followed[name].place.settings.endpoint for name in places}
        for endpoint in filter(None, endpoints.values()):
            if endpoint not in self._asking and self._known.get(endpoint, (-math.inf, ""))[0] < self._clock():
                self._asking[endpoint] = asyncio.create_task(self._ask(endpoint))
        if new := [self._asking[one] for one in {*endpoints.values()} & self._asking.keys() - self._known.keys()]:
            await asyncio.wait(new)
        addresses = {name: self._known[endpoint][1] for name, endpoint in endpoints.items() if endpoint}
        return {name: address for name, address in addresses.items() if address}

    async def _ask(self, endpoint: str) -> None:
        _, address = self._known.get(endpoint, (0.0, ""))
        with suppress(OSError, ValueError, TimeoutError):  # else the last known address, if there is one
            address = await self._resolved(endpoint)
        self._known[endpoint] = self._clock() + KNOWN_S, address
        del self._asking[endpoint]
