"""`kvplane top`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvplane_service.cli.asking import DEFAULT_SERVICE, Service, client_of


def command(
    interval: Annotated[float, typer.Option(min=0.1, help="seconds between looks")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="print one look and end")] = False,
    svg: Annotated[Path | None, typer.Option(hidden=True, help="write a picture and end")] = None,
    service: Service = DEFAULT_SERVICE,
) -> None:
    """Watch the replicas of a service: pools, hits, evictions, preemptions, slowest steps. q quits, p pauses."""
    with client_of(service) as client:
        if once:
            import time

            from rich.console import Console

            from kvplane_service.cli.top_view import NO_REPLICA, Watchers

            panels = Watchers(client).look(time.monotonic())
            Console().print(*(panels or [NO_REPLICA]), sep="\n")
            return
        from kvplane_service.cli.top_app import Top

        client.status()  # said at once when nobody answers
        app = Top(client, service, interval)
        app.run() if svg is None else app.save_picture(svg)
