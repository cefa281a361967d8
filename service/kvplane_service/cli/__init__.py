"""The command line `kvplane`: arguments and `KVPLANE_*` variables in; text on standard output, one line per error on
standard error and an exit code out. A command is a function `<name>_command`, listed in COMMANDS. Its module imports
gRPC, torch and the service inside the function, so that `kvplane --help` loads none of them.
"""

from __future__ import annotations

import importlib
import sys

import typer

from kvplane.base.errors import InvalidArgument, KvplaneError, NotFound, Unavailable
from kvplane_service.cli.options import FAILED, UNAVAILABLE, WRONG_USE, root_command

# Command: module with its function. A function is named after its command, but for the worker's.
COMMANDS = {
    "demo": "kvplane_service.cli.replay.commands",
    "serve": "kvplane_service.cli.server",
    "worker": "kvplane_worker.cli",
    "status": "kvplane_service.cli.query.service",
    "replicas": "kvplane_service.cli.query.service",
    "describe": "kvplane_service.cli.query.replica",
    "top": "kvplane_service.cli.query.service",
    "events": "kvplane_service.cli.query.replica",
    "explain": "kvplane_service.cli.query.explain",
    "doctor": "kvplane_service.cli.query.service",
    "health": "kvplane_service.cli.query.service",
    "drain": "kvplane_service.cli.query.service",
    "plan": "kvplane_service.cli.plan",
    "record": "kvplane_service.cli.query.replica",
    "replay": "kvplane_service.cli.replay.commands",
    "decode": "kvplane_service.cli.server",
    "config": "kvplane_service.cli.server",
    "token": "kvplane_service.cli.server",
    "version": "kvplane_service.cli.server",
}

app = typer.Typer(no_args_is_help=True, add_completion=True, context_settings={"help_option_names": ["-h", "--help"]})
app.callback(help="Control plane of the KV cache of LLM inference engines.")(root_command)
for name, module in COMMANDS.items():
    function = "command" if name == "worker" else f"{name}_command"
    app.command(name)(getattr(importlib.import_module(module), function))
app.add_typer(importlib.import_module("kvplane_service.cli.store").app, name="store")


def exit_code(error: KvplaneError) -> int:
    """The exit code of the process for an error."""
    if isinstance(error, (InvalidArgument, NotFound)):
        return WRONG_USE
    return UNAVAILABLE if isinstance(error, Unavailable) else FAILED


def main() -> None:
    """Run the command line; a KvplaneError is printed as one line."""
    try:
        app()
    except KvplaneError as error:
        sys.stderr.write(f"kvplane: {error}\n")
        sys.exit(exit_code(error))
