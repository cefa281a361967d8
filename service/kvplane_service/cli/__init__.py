"""The command `kvplane`.

A command is a module with a function `command`; COMMANDS names it. These modules import what
is heavy (gRPC, torch, the service) inside the function, so that `kvplane --help` stays quick.
"""

from __future__ import annotations

import importlib
import sys

import typer

from kvplane.base.errors import InvalidArgument, KvplaneError, NotFound, Unavailable
from kvplane_service.cli.access import take_access

# Exit codes: 0 done, 1 failed, 2 wrong use, 3 the service (or its address) is not available, 130 after Ctrl-C.
FAILED, WRONG_USE, UNAVAILABLE, INTERRUPTED = 1, 2, 3, 130

COMMANDS = {
    "demo": "kvplane_service.cli.demo",
    "serve": "kvplane_service.cli.serve",
    "worker": "kvplane_worker.cli",
    "status": "kvplane_service.cli.status",
    "replicas": "kvplane_service.cli.replicas",
    "describe": "kvplane_service.cli.describe",
    "top": "kvplane_service.cli.top",
    "events": "kvplane_service.cli.events",
    "explain": "kvplane_service.cli.explain",
    "doctor": "kvplane_service.cli.doctor",
    "health": "kvplane_service.cli.health",
    "drain": "kvplane_service.cli.drain",
    "plan": "kvplane_service.cli.plan",
    "record": "kvplane_service.cli.record",
    "replay": "kvplane_service.cli.replay",
    "decode": "kvplane_service.cli.decode",
    "config": "kvplane_service.cli.config",
    "token": "kvplane_service.cli.token",
    "version": "kvplane_service.cli.version",
}


app = typer.Typer(no_args_is_help=True, add_completion=True)
app.callback(help="Control plane of the KV cache of LLM inference engines.")(take_access)
for name, module in COMMANDS.items():
    app.command(name)(importlib.import_module(module).command)
app.add_typer(importlib.import_module("kvplane_service.cli.store").app, name="store")


def exit_code(error: KvplaneError) -> int:
    """What the process ends with for a refusal."""
    if isinstance(error, (InvalidArgument, NotFound)):
        return WRONG_USE
    return UNAVAILABLE if isinstance(error, Unavailable) else FAILED


def main() -> None:
    """Run the command line; a refusal is told in one line."""
    try:
        app()
    except KvplaneError as error:
        sys.stderr.write(f"kvplane: {error}\n")
        sys.exit(exit_code(error))
