"""The command line `kvplane`. Commands print text on standard output, and an error as one line on standard error.

A command is a function `<name>_command` in the module that COMMANDS lists; a group of commands is the `app` of a module
that GROUPS lists. Only the module of the given command is imported, and the commands import gRPC, torch and the service
inside their functions, so that `kvplane --help`, which imports every module, loads none of them.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from kvplane.base.errors import InvalidArgument, KvplaneError, NotFound, Unavailable
from kvplane_tools.cli import interrupt
from kvplane_tools.cli.options import FAILED, UNAVAILABLE, WRONG_USE, root_command

# The module that has the function of each command. A function is named after its command, except that of `worker`.
COMMANDS = {
    "bench": "kvplane_tools.cli.replay.bench",
    "demo": "kvplane_tools.cli.replay.commands",
    "serve": "kvplane_tools.cli.server",
    "worker": "kvplane_worker.cli",
    "status": "kvplane_tools.cli.query.service",
    "replicas": "kvplane_tools.cli.query.service",
    "describe": "kvplane_tools.cli.query.replica",
    "top": "kvplane_tools.cli.query.service",
    "events": "kvplane_tools.cli.query.replica",
    "mrc": "kvplane_tools.cli.query.curve",
    "lookup": "kvplane_tools.cli.query.state",
    "explain": "kvplane_tools.cli.query.explain",
    "requests": "kvplane_tools.cli.query.state",
    "snapshot": "kvplane_tools.cli.query.state",
    "evict": "kvplane_tools.cli.query.changes",
    "reset": "kvplane_tools.cli.query.changes",
    "prefetch": "kvplane_tools.cli.query.changes",
    "retain": "kvplane_tools.cli.query.changes",
    "deregister": "kvplane_tools.cli.query.changes",
    "doctor": "kvplane_tools.cli.query.service",
    "health": "kvplane_tools.cli.query.service",
    "drain": "kvplane_tools.cli.query.service",
    "plan": "kvplane_tools.cli.plan",
    "models": "kvplane_tools.cli.plan",
    "record": "kvplane_tools.cli.query.replica",
    "replay": "kvplane_tools.cli.replay.commands",
    "decode": "kvplane_tools.cli.server",
    "config": "kvplane_tools.cli.server",
    "token": "kvplane_tools.cli.server",
    "router": "kvplane_tools.cli.fleet",
    "version": "kvplane_tools.cli.server",
}

GROUPS = {"store": "kvplane_tools.cli.store", "fleet": "kvplane_tools.cli.fleet"}


class Commands(TyperGroup):
    """Imports a command when it is looked up, and all of them to list them or to suggest one for a wrong name."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401 - click's or typer's own, by version
        """Return a command, or None if there is none of this name."""
        names = (*COMMANDS, *GROUPS)
        for name in (cmd_name,) if cmd_name in names else names:
            if name not in self.commands:
                self.commands[name] = _load(name)
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401
        """Return the names of all commands, in their order in the help."""
        self.get_command(ctx, "")
        return [*COMMANDS, *GROUPS]


def _load(name: str) -> Any:  # noqa: ANN401
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    if name in GROUPS:
        app.add_typer(importlib.import_module(GROUPS[name]).app, name=name)
        group: Any = typer.main.get_command(app)
        return group.commands[name]
    function = "command" if name == "worker" else f"{name}_command"
    app.command(name)(getattr(importlib.import_module(COMMANDS[name]), function))
    return typer.main.get_command(app)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain text: rich takes half of the time of --help
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
app.callback(help="Control plane of the KV cache of LLM inference engines.")(root_command)


def exit_code(error: KvplaneError) -> int:
    """Return the exit code of the process for an error."""
    if isinstance(error, (InvalidArgument, NotFound)):
        return WRONG_USE
    return UNAVAILABLE if isinstance(error, Unavailable) else FAILED


def main() -> None:
    """Run the command line. A KvplaneError is printed as one line and ends the process with its exit code.

    gRPC logs nothing unless the user sets GRPC_VERBOSITY: a command would print a line of gRPC when a service that
    drains ends its connection, and clients without identity could fill the disk of a service with refused calls.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        with interrupt.handled():
            app()
    except KvplaneError as error:
        sys.stderr.write(f"kvplane: {error}\n")
        sys.exit(exit_code(error))
