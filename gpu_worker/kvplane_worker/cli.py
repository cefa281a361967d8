"""`kvplane worker`. What is heavy (torch, gRPC) is imported inside, so that `kvplane --help` stays quick."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from kvplane.base.errors import NotFound


def command(
    context: typer.Context,
    service: Annotated[str, typer.Option(envvar="KVPLANE_SERVICE", help="Address of the service, or several: A,B.")],
    replica: Annotated[str, typer.Option(help="Name of the replica, registered by a model or by layers.")],
    rank: Annotated[int, typer.Option(help="Rank whose pages to hold.")] = 0,
    device: Annotated[str, typer.Option(help="cpu (shared memory) or cuda:N.")] = "cpu",
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory of socket and token; the user's alone. Default: one per rank.")
    ] = None,
    staging_mib: Annotated[int, typer.Option(help="Host buffer for pages on their way, in MiB.")] = 16,
    backend: Annotated[str, typer.Option(help="Of the operations on pages; auto: the best that fits.")] = "auto",
    wait: Annotated[bool, typer.Option("--wait", help="Until the service is there and knows the replica.")] = False,
) -> None:
    """Hold the pages of one rank until SIGTERM or Ctrl-C, then until the engine exits; a second signal leaves."""
    import logging

    _require_torch()
    from kvplane_worker.process import WorkerOptions, run

    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    access = context.find_root().obj  # of the options before the command
    staging_bytes = staging_mib << 20
    options = WorkerOptions(service, replica, rank, device, run_dir, staging_bytes, backend, access, wait)
    run(options, _tell_address)


def _require_torch() -> None:
    missing = [name for name in ("torch", "grpc_health") if find_spec(name) is None]
    if missing:
        raise NotFound(f"{missing[0]} is not installed", field="worker", remedy="install kvplane[worker]")


def _tell_address(address: str) -> None:
    """On standard output and at once, so that who started the worker can attach."""
    sys.stdout.write(f"kvplane: pages at {address}\n")
    sys.stdout.flush()
