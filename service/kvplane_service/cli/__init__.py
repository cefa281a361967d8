"""The command line `kvplane`. Commands print text on standard output, and an error as one line on standard error.

A command is a function `<name>_command` in the module that COMMANDS lists. It imports gRPC, torch and the service
inside the function, so that `kvplane --help` loads none of them.
"""

from __future__ import annotations

import importlib
import sys

import typer

from kvplane.base.errors import InvalidArgument, KvplaneError, NotFound, Unavailable
from kvplane_service.cli import interrupt
from kvplane_service.cli.options import FAILED, UNAVAILABLE, WRONG_USE, root_command

# The module that has the function of each command. A function is named after its command, except that of `worker`.
COMMANDS = {
    "bench": "kvplane_service.cli.replay.bench",
    "demo": "kvplane_service.cli.replay.commands",
    "serve": "kvplane_service.cli.server",
    "worker": "kvplane_worker.cli",
    "status": "kvplane_service.cli.query.service",
    "replicas": "kvplane_service.cli.query.service",
    "describe": "kvplane_service.cli.query.replica",
    "top": "kvplane_service.cli.query.service",
    "events": "kvplane_service.cli.query.replica",
    "lookup": "kvplane_service.cli.query.state",
    "explain": "kvplane_service.cli.query.explain",
    "requests": "kvplane_service.cli.query.state",
    "snapshot": "kvplane_service.cli.query.state",
    "evict": "kvplane_service.cli.query.changes",
    "reset": "kvplane_service.cli.query.changes",
    "deregister": "kvplane_service.cli.query.changes",
    "doctor": "kvplane_service.cli.query.service",
    "health": "kvplane_service.cli.query.service",
    "drain": "kvplane_service.cli.query.service",
    "plan": "kvplane_service.cli.plan",
    "models": "kvplane_service.cli.plan",
    "record": "kvplane_service.cli.query.replica",
    "replay": "kvplane_service.cli.replay.commands",
    "decode": "kvplane_service.cli.server",
    "config": "kvplane_service.cli.server",
    "token": "kvplane_service.cli.server",
    "router": "kvplane_fleet.cli",
    "version": "kvplane_service.cli.server",
}

app = typer.Typer(no_args_is_help=True, add_completion=True, context_settings={"help_option_names": ["-h", "--help"]})
app.callback(help="Control plane of the KV cache of LLM inference engines.")(root_command)
for name, module in COMMANDS.items():
    function = "command" if name == "worker" else f"{name}_command"
    app.command(name)(getattr(importlib.import_module(module), function))
app.add_typer(importlib.import_module("kvplane_service.cli.store").app, name="store")
app.add_typer(importlib.import_module("kvplane_fleet.cli").app, name="fleet")


def exit_code(error: KvplaneError) -> int:
    """Return the exit code of the process for an error."""
    if isinstance(error, (InvalidArgument, NotFound)):
        return WRONG_USE
    return UNAVAILABLE if isinstance(error, Unavailable) else FAILED


def main() -> None:
    """Run the command line. A KvplaneError is printed as one line and ends the process with its exit code."""
    try:
        with interrupt.handled():
            app()
    except KvplaneError as error:
        sys.stderr.write(f"kvplane: {error}\n")
        sys.exit(exit_code(error))
