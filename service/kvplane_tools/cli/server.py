"""Commands that operators run on the machine of a service: `serve`, `config`, `token`, `decode`, `version`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kvplane_tools.cli.options import TABLE, ConfigFile, Listen, Metrics, Output, Settings, load_config, version_text
from kvplane_tools.cli.output import text_of

if TYPE_CHECKING:
    from kvplane_service.process.app import App


def serve_command(
    config: ConfigFile = None,
    listen: Listen = None,
    metrics: Metrics = None,
    settings: Settings = None,
) -> None:
    """Run the service until SIGTERM or Ctrl-C, which drain it. A second signal stops it at once."""
    import asyncio
    import logging

    from kvplane_core.face import loader
    from kvplane_service.process.app import serve

    loaded = load_config(config, listen, settings, metrics).config
    logging.basicConfig(level=loaded.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    core, reason = loader.chosen()
    if core == "python" and not reason.startswith(loader.VARIABLE):
        logging.warning("%s: the Python core runs, at many times the CPU time; %s", reason, loader.REMEDY)
    run = asyncio.run
    if loaded.uvloop:
        import uvloop

        run = uvloop.run
    run(serve(loaded, _print_addresses))


def _print_addresses(app: App) -> None:
    """Print the served addresses, so that a parent process can read the ports as soon as the service listens.

    One write: a parent that reads the first lines and closes the pipe does not end the service.
    """
    from kvplane.base.hashing import native
    from kvplane_core.face import loader

    lines = [f"serving on {app.address}"]
    if app.config.session_socket:
        lines.append(f"sessions on unix:{app.config.session_socket}")
    if app.metrics_address:
        lines.append(f"metrics on http://{app.metrics_address}/metrics, status page on http://{app.metrics_address}/")
    if app.health_address:
        lines.append(f"health on {app.health_address}")
    lines.append(f"block hashes: {native.describe()}; core: {loader.describe()}")
    sys.stdout.write("".join(f"kvplane: {line}\n" for line in lines))
    sys.stdout.flush()


def config_command(config: ConfigFile = None, listen: Listen = None, settings: Settings = None) -> None:
    """Print the configuration that `kvplane serve` would use, and where each value comes from."""
    sys.stdout.write(load_config(config, listen, settings).as_yaml())


def token_command(
    owner: Annotated[str, typer.Argument(help="Owner of the token, as named in auth_owners.")], output: Output = TABLE
) -> None:
    """Create a bearer token. Prints the token for the client, then the line for the file auth_tokens."""
    from kvplane_service.auth.tokens import line_of, new_token

    token = new_token()
    line = line_of(token, owner)
    labels = ("for the client, in its --token-file:\n", "for the service, in its auth_tokens:\n")
    first, second = labels if sys.stdout.isatty() else ("", "")
    text = f"{first}{token}\n{second}{line}"
    print(text_of(lambda: {"token": token, "line": line}, output, table=lambda: text))


def decode_command(
    text: Annotated[str, typer.Argument(help="Attribute kvcache.ops of a span; - reads standard input.")],
) -> None:
    """Print the operations of a traced step, one line per row, in the order in which they were applied."""
    from kvplane_service.decisions.text import operation_lines
    from kvplane_service.telemetry.ops import unpack

    step, result = unpack((sys.stdin.read() if text == "-" else text).strip())
    for line in operation_lines(step, result):
        print(line)


def version_command() -> None:
    """Print the version."""
    sys.stdout.write(version_text())
