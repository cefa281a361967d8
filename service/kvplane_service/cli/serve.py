"""`kvplane serve`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kvplane_service.cli.options import ConfigFile, Listen, Settings, load_config

if TYPE_CHECKING:
    from kvplane_service.process.app import App


def command(
    config: ConfigFile = None,
    listen: Listen = None,
    metrics: Annotated[str | None, typer.Option(help="host:port of the HTTP port for Prometheus.")] = None,
    settings: Settings = None,
) -> None:
    """Serve allocation over gRPC until SIGTERM or Ctrl-C; a second signal stops at once."""
    import asyncio
    import logging

    from kvplane_service.process.app import serve

    if metrics is not None:
        settings = [*(settings or ()), f"metrics_listen={metrics}"]
    loaded = load_config(config, listen, settings).config
    logging.basicConfig(level=loaded.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run = asyncio.run
    if loaded.uvloop:
        import uvloop

        run = uvloop.run
    run(serve(loaded, _tell_addresses))


def _tell_addresses(app: App) -> None:
    """On standard output and at once, so that who started the service can read the ports."""
    sys.stdout.write(f"kvplane: serving on {app.address}\n")
    if app.metrics_address:
        sys.stdout.write(f"kvplane: metrics on http://{app.metrics_address}/metrics\n")
    if app.health_address:
        sys.stdout.write(f"kvplane: health on {app.health_address}\n")
    sys.stdout.flush()
