"""`kvplane serve`."""

from __future__ import annotations

import sys

from kvplane_service.cli.options import ConfigFile, Listen, Settings, load_config


def command(config: ConfigFile = None, listen: Listen = None, settings: Settings = None) -> None:
    """Serve allocation over gRPC until SIGTERM or Ctrl-C; a second signal stops at once."""
    import asyncio
    import logging

    from kvplane_service.app import serve

    loaded = load_config(config, listen, settings).config
    logging.basicConfig(level=loaded.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run = asyncio.run
    if loaded.uvloop:
        import uvloop

        run = uvloop.run
    run(serve(loaded, _tell_address))


def _tell_address(address: str) -> None:
    """On standard output and at once, so that who started the service can read the port."""
    sys.stdout.write(f"kvplane: serving on {address}\n")
    sys.stdout.flush()
