"""The command line `kvplane`. Commands print text on standard output, and an error as one line on standard error.

Only the module of the given command is imported, and the commands import gRPC, torch and the service
inside their functions, so that `kvplane --help`, which imports every module, loads none of them.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import typer
from typer.core import TyperGroup

from kvplane.base.errors import InvalidArgument, KvplaneError, NotFound, Unavailable
from kvplane_tools.cli import interrupt
from kvplane_tools.cli.options import FAILED, UNAVAILABLE, WRONG_USE, connection_options, root_command

# The commands as the help lists them, each with the module that has its function or, of a group of commands, its `app`.
# A function is named after its command, except that of `worker`.
SECTIONS = {
    "Run": {
        "demo": "kvplane_tools.cli.replay.commands",
        "serve": "kvplane_tools.cli.server",
        "worker": "kvplane_worker.cli",
        "router": "kvplane_tools.cli.fleet",
    },
    "Watch a service": {
        "status": "kvplane_tools.cli.query.service",
        "replicas": "kvplane_tools.cli.query.service",
        "top": "kvplane_tools.cli.query.service",
        "describe": "kvplane_tools.cli.query.replica",
        "requests": "kvplane_tools.cli.query.state",
        "events": "kvplane_tools.cli.query.replica",
        "fleet": "kvplane_tools.cli.fleet",
    },
    "Explain hits and find faults": {
        "explain": "kvplane_tools.cli.query.explain",
        "lookup": "kvplane_tools.cli.query.state",
        "doctor": "kvplane_tools.cli.query.service",
        "health": "kvplane_tools.cli.query.service",
        "snapshot": "kvplane_tools.cli.query.state",
    },
    "Change a service": {
        "prefetch": "kvplane_tools.cli.query.changes",
        "retain": "kvplane_tools.cli.query.changes",
        "evict": "kvplane_tools.cli.query.changes",
        "reset": "kvplane_tools.cli.query.changes",
        "deregister": "kvplane_tools.cli.query.changes",
        "drain": "kvplane_tools.cli.query.service",
    },
    "Plan and measure": {
        "plan": "kvplane_tools.cli.plan",
        "models": "kvplane_tools.cli.plan",
        "mrc": "kvplane_tools.cli.query.curve",
        "record": "kvplane_tools.cli.query.replica",
        "replay": "kvplane_tools.cli.replay.commands",
        "bench": "kvplane_tools.cli.replay.bench",
    },
    "Configure and maintain": {
        "config": "kvplane_tools.cli.server",
        "token": "kvplane_tools.cli.server",
        "store": "kvplane_tools.cli.store",
        "erase": "kvplane_worker.cli",
        "decode": "kvplane_tools.cli.server",
        "version": "kvplane_tools.cli.server",
    },
}
MODULES = {name: module for section in SECTIONS.values() for name, module in section.items()}
GROUPS = frozenset({"fleet", "store"})
COMMANDS = tuple(name for name in MODULES if name not in GROUPS)

# Which connection options a command lacks: all of them, if it calls nothing; a router is no service.
_LOCAL = frozenset({"demo", "serve", "plan", "models", "config", "token", "store", "erase", "decode", "version"})
_NOT_OF_PROBES = ("service", "tls_ca", "tls_cert", "tls_key", "tls_server_name", "token_file")
_LEFT_OUT = {"fleet": ("service",), "router": ("service",), "health": _NOT_OF_PROBES}

# Former names of options, by command; they are accepted, and not documented.
FORMER = {
    "bench": {"blocks": "pool-blocks", "seconds": "duration"},
    "fleet": {"within": "request-timeout"},
    "mrc": {"requests": "limit"},
    "plan": {"host": "host-size", "disk": "disk-size"},
    "replay": {"address": "service", "decode-step-us": "decode-step"},
    "worker": {"host-mib": "host-size", "disk-mib": "disk-size", "staging-mib": "staging-size"},
}
_EPILOG = "Where the service is and how it is called: `kvplane --help`. These options are also accepted here."


class Commands(TyperGroup):
    """Imports a command when it is looked up, and all of them to list them or to suggest one for a wrong name."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401 - click's or typer's own, by version
        """Return a command, or None if there is none of this name."""
        for name in (cmd_name,) if cmd_name in MODULES else MODULES:
            if name not in self.commands:
                self.commands[name] = _load(name, self)
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401
        """Return the names of all commands, in their order in the help."""
        self.get_command(ctx, "")
        return [*MODULES]

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        """Write the commands by section."""
        width = max(map(len, MODULES))
        for title, section in SECTIONS.items():
            texts = [self.get_command(ctx, name).get_short_help_str(formatter.width - 6 - width) for name in section]
            rows = [(name.ljust(width), text) for name, text in zip(section, texts, strict=True)]
            with formatter.section(title):
                formatter.write_dl(rows)


def _load(name: str, root: Any) -> Any:  # noqa: ANN401
    app, module = typer.Typer(add_completion=False, rich_markup_mode=None), importlib.import_module(MODULES[name])
    if name in GROUPS:
        app.add_typer(module.app, name=name)
        group: Any = typer.main.get_command(app)
        found = group.commands[name]
        of_group = list(found.commands.values())
    else:
        app.command(name)(getattr(module, "command" if name == "worker" else f"{name}_command"))
        found = typer.main.get_command(app)
        of_group = [found]
    for command in of_group:
        former = FORMER.get(name, {})
        command.context_settings = {**command.context_settings, "token_normalize_func": partial(_current, former)}
        if name not in _LOCAL:
            command.params.extend(connection_options(root, _LEFT_OUT.get(name, ())))
            command.epilog = _EPILOG
    return found


def _current(former: Mapping[str, str], name: str) -> str:
    return former.get(name, name)


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
        from kvplane_tools.cli.output import escaped

        shown = escaped(str(error), "\n")
        sys.stderr.write(f"kvplane: {shown}\n")
        sys.exit(exit_code(error))
