"""Options before the command: how every command reaches a service."""

from __future__ import annotations

import os
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated

import typer

from kvplane.access import PLAIN, Access, Tls
from kvplane.base.errors import InvalidArgument

SYSTEM = "system"
TOKEN_VARIABLE = "KVPLANE_TOKEN"
_GIVEN: ContextVar[Access] = ContextVar("access", default=PLAIN)


def take_access(
    context: typer.Context,
    tls_ca: Annotated[
        str, typer.Option(envvar="KVPLANE_CA_FILE", help="Speak TLS: PEM file of the authorities, or `system`.")
    ] = "",
    tls_cert: Annotated[str, typer.Option(envvar="KVPLANE_CERT_FILE", help="PEM file of our certificate.")] = "",
    tls_key: Annotated[str, typer.Option(envvar="KVPLANE_KEY_FILE", help="PEM file of its key.")] = "",
    tls_server_name: Annotated[str, typer.Option(help="Name that the service's certificate has.")] = "",
    token_file: Annotated[
        Path | None, typer.Option(envvar="KVPLANE_TOKEN_FILE", help=f"File with our token; or {TOKEN_VARIABLE}.")
    ] = None,
) -> None:
    """Keep how to reach a service, for the command that follows."""
    if not tls_ca and (tls_cert or tls_key or tls_server_name):
        raise InvalidArgument("it is empty", field="--tls-ca", remedy=f"name a PEM file, or {SYSTEM}")
    tls = Tls("" if tls_ca == SYSTEM else tls_ca, tls_cert, tls_key, tls_server_name) if tls_ca else None
    context.obj = Access(tls, token_file or os.environ.get(TOKEN_VARIABLE, ""))  # which kvplane_worker looks at
    _GIVEN.set(context.obj)


def given_access() -> Access:
    """How the command line says to reach a service."""
    return _GIVEN.get()
