"""Options that several commands take: where the configuration comes from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

if TYPE_CHECKING:
    from kvplane_service.config import Loaded

ConfigFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--config", envvar="KVPLANE_CONFIG", help="YAML file with lines of `key: value`."),
]
Listen: TypeAlias = Annotated[
    str | None, typer.Option("--listen", help="host:port (port 0 takes a free one) or unix:PATH.")
]
Settings: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any key of `kvplane config`; may be repeated."),
]


def load_config(file: Path | None, listen: str | None, settings: list[str] | None) -> Loaded:
    """Flag > environment > file > default. Raises KvplaneError for what cannot be."""
    from kvplane_service import config

    flags = dict(config.split_setting(text) for text in settings or ())
    if listen is not None:
        flags["listen"] = listen
    return config.load(flags, os.environ, file)
