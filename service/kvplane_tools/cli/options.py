"""Command-line options that several commands share: address of the service, credentials, configuration, output
format.
"""

from __future__ import annotations

import os
import sys
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from kvplane.base.errors import InvalidArgument
from kvplane.rpc.access import PLAIN, Access, Tls

if TYPE_CHECKING:
    from kvplane_service.config import Loaded

# Exit codes: 0 done, 1 failed, 2 wrong use, 3 service or address unavailable, 130 after Ctrl-C.
FAILED, WRONG_USE, UNAVAILABLE, INTERRUPTED = 1, 2, 3, 130

DEFAULT_SERVICE = "127.0.0.1:7070"
SERVICE_VARIABLE = "KVPLANE_SERVICE"
CA_VARIABLE = "KVPLANE_TLS_CA"
TOKEN_VARIABLE = "KVPLANE_TOKEN"
SYSTEM = "system"

# Names of earlier versions, read but not documented. They go with the next minor version.
_OLD_SERVICE_VARIABLE = "KVPLANE_ADDRESS"
_OLD_CA_VARIABLE = "KVPLANE_CA_FILE"

_ACCESS: ContextVar[Access] = ContextVar("access", default=PLAIN)


class Format(StrEnum):
    """The formats in which a command prints an answer. WIDE is a table with more columns, NAME is only names, one on
    each line.
    """

    TABLE = "table"
    WIDE = "wide"
    NAME = "name"
    JSON = "json"
    YAML = "yaml"
    JSONPATH = "jsonpath"


@dataclass(frozen=True, slots=True)
class Shape:
    """How a command prints an answer: the format, and the path of `jsonpath`."""

    format: Format
    path: str = ""


TABLE = Shape(Format.TABLE)


def parse_shape(given: str | Shape) -> Shape:
    """Parse the option --output. Raises InvalidArgument."""
    if isinstance(given, Shape):
        return given
    name, _, path = given.partition("=")
    if name not in list(Format) or (name == Format.JSONPATH) != bool(path):
        raise InvalidArgument(f"{given!r} is not an output format", field="--output", remedy=f"use one of {_FORMATS}")
    return Shape(Format(name), path)


_FORMATS = "table, wide, name, json, yaml, jsonpath=PATH"


def _complete_replica(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of replicas for shell completion, or nothing if the service does not answer within a second."""
    from kvplane.base.errors import KvplaneError
    from kvplane.blocking.client import connect

    try:
        address, access = context.params.get("service") or DEFAULT_SERVICE, given_access()
        with connect(address, tls=access.tls, token=access.token, timeout_s=1.0) as client:
            return [one.replica for one in client.list_replicas() if one.replica.startswith(incomplete)]
    except KvplaneError:
        return []


Service: TypeAlias = Annotated[
    str,
    typer.Option(
        "--service",
        envvar=[SERVICE_VARIABLE, _OLD_SERVICE_VARIABLE],
        show_envvar=False,
        help=f"Address of the service: host:port or unix:PATH; several by commas, then `*.SUFFIX` for hosts to which "
        f"they may redirect. (env: {SERVICE_VARIABLE})",
    ),
]
Output: TypeAlias = Annotated[
    Shape,
    typer.Option(
        "-o", "--output", parser=parse_shape, metavar="FORMAT", show_default=False,
        help=f"{_FORMATS} (such as replicas[*].replica). wide and name: where there are more columns, or names.",
    ),
]  # fmt: skip
Watch: TypeAlias = Annotated[
    float | None, typer.Option("--watch", "-w", min=0.1, help="Repeat at this interval in seconds, until Ctrl-C.")
]
Grpcurl: TypeAlias = Annotated[bool, typer.Option("--grpcurl", help="Print the equivalent grpcurl command and exit.")]
Replica: TypeAlias = Annotated[str, typer.Argument(autocompletion=_complete_replica, help="Name of the replica.")]
ConfigFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--config", envvar="KVPLANE_CONFIG", help="YAML configuration file with lines `key: value`."),
]
Listen: TypeAlias = Annotated[
    str | None, typer.Option("--listen", help="Listen address: host:port (port 0 = a free port) or unix:PATH.")
]
Settings: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key of `kvplane config`. May be repeated."),
]


def version_text() -> str:
    """Return the line that `--version` and `kvplane version` print."""
    from importlib.metadata import version

    return f"kvplane {version('kvplane')}\n"


def _print_version(is_requested: bool) -> None:
    if is_requested:
        sys.stdout.write(version_text())
        raise typer.Exit


def root_command(
    context: typer.Context,
    tls_ca: Annotated[
        str,
        typer.Option(
            envvar=[CA_VARIABLE, _OLD_CA_VARIABLE],
            show_envvar=False,
            help=f"Use TLS: PEM file of the trusted authorities, or `{SYSTEM}`. (env: {CA_VARIABLE})",
        ),
    ] = "",
    tls_cert: Annotated[str, typer.Option(envvar="KVPLANE_CERT_FILE", help="PEM file of the client certificate.")] = "",
    tls_key: Annotated[
        str, typer.Option(envvar="KVPLANE_KEY_FILE", help="PEM file of the client certificate's private key.")
    ] = "",
    tls_server_name: Annotated[str, typer.Option(help="Host name expected in the service's certificate.")] = "",
    token_file: Annotated[
        Path | None,
        typer.Option(envvar="KVPLANE_TOKEN_FILE", help=f"File with the bearer token. Default: ${TOKEN_VARIABLE}."),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Parse the options before the command and store the credentials for `given_access`. Raises InvalidArgument if a
    client certificate, key or server name is given without --tls-ca.
    """
    if not tls_ca and (tls_cert or tls_key or tls_server_name):
        raise InvalidArgument(
            "it is empty, although another --tls option is set",
            field="--tls-ca",
            remedy=f"name a PEM file of certificate authorities, or `{SYSTEM}`",
        )
    tls = Tls("" if tls_ca == SYSTEM else tls_ca, tls_cert, tls_key, tls_server_name) if tls_ca else None
    context.obj = Access(tls, token_file or os.environ.get(TOKEN_VARIABLE, ""))  # read by kvplane_worker.cli
    _ACCESS.set(context.obj)


def given_access() -> Access:
    """Return the credentials that the options before the command and the environment give."""
    return _ACCESS.get()


def load_config(file: Path | None, listen: str | None, settings: list[str] | None) -> Loaded:
    """Return the configuration; a flag has precedence over the environment, then the file, then the default. Raises
    InvalidArgument or NotFound as `config.load`.
    """
    from kvplane_service import config
    from kvplane_service.runtime.memory import available_memory

    flags = dict(config.split_setting(text) for text in settings or ())
    if listen is not None:
        flags["listen"] = listen
    return config.load(flags, os.environ, file, available_memory)
