"""`kvplane drain`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from kvplane_service.cli.asking import DEFAULT_SERVICE, Grpcurl, Service, client_of, grpcurl_line

_POLL_S = 0.2


def command(
    wait: Annotated[bool, typer.Option("--wait", help="return when it has gone")] = False,
    service: Service = DEFAULT_SERVICE,
    grpcurl: Grpcurl = False,
) -> None:
    """Send a service away as SIGTERM does: no new sessions, the open ones are asked to finish, then it stops."""
    from kvplane import calls

    if grpcurl:
        print(grpcurl_line(service, calls.drain()))
        return
    with client_of(service) as client:
        client.drain()
        print(f"{service} drains", flush=True)
    if wait:
        _wait_for_end(service)
        print(f"{service} has gone")


def _wait_for_end(service: str) -> None:
    from kvplane import Unavailable

    with client_of(service) as client:
        while True:
            try:
                client.status()
            except Unavailable:
                return
            time.sleep(_POLL_S)
