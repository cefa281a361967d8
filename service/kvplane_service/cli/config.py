"""`kvplane config`."""

from __future__ import annotations

import sys

from kvplane_service.cli.options import ConfigFile, Listen, Settings, load_config


def command(config: ConfigFile = None, listen: Listen = None, settings: Settings = None) -> None:
    """Print the configuration that `kvplane serve` would run with, and where each value comes from."""
    sys.stdout.write(load_config(config, listen, settings).as_yaml())
