"""The addresses of places as a proxy needs them: ip:port."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from urllib.parse import urlsplit

from kvplane_fleet.fleet import Fleet

KNOWN_S = 10.0  # for which the address of a name is used
RESOLVE_S = 1.0


class Endpoints:
    """Resolves the endpoints of places."""

    def __init__(self, fleet: Fleet, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds that never decrease."""
        self._fleet, self._clock = fleet, clock
        self._known: dict[str, tuple[float, str]] = {}  # by endpoint: until when, address

    async def of(self, places: Iterable[str]) -> dict[str, str]:
        """Return the address of each place that has one, by name."""
        found = {}
        for name in places:
            endpoint = self._fleet.followed[name].place.settings.endpoint
            address = await self._address(endpoint) if endpoint else ""
            if address:
                found[name] = address
        return found

    async def _address(self, endpoint: str) -> str:
        until_s, address = self._known.get(endpoint, (0.0, ""))
        if not address or until_s < self._clock():
            with suppress(OSError, ValueError, TimeoutError):  # else the last known address, if there is one
                address = await _resolve(endpoint)
            self._known[endpoint] = self._clock() + KNOWN_S, address
        return address


async def _resolve(endpoint: str) -> str:
    parts = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        async with asyncio.timeout(RESOLVE_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        address = ipaddress.ip_address(found[0][4][0])
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
