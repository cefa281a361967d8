"""The command `kvplane worker`. The command imports torch and gRPC within its function, so that `kvplane --help` is
fast.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from kvplane.base.errors import InvalidArgument, NotFound
from kvplane.base.groups import TierKind
from kvplane.base.installed import command_for


def command(
    context: typer.Context,
    replica: Annotated[
        str, typer.Option(help="Replica name; with a service, it must be registered from a model or a list of layers.")
    ],
    service: Annotated[
        str, typer.Option(envvar="KVPLANE_SERVICE", help="Address of the service, or several: A,B,*.SUFFIX.")
    ] = "",
    opaque: Annotated[
        bool, typer.Option("--opaque", help="No service: lend raw memory to an engine that gives its size (vLLM).")
    ] = False,
    rank: Annotated[int, typer.Option(help="Rank whose pages this worker holds.")] = 0,
    device: Annotated[str, typer.Option(help="Device of the pages: cpu (shared memory) or cuda:N.")] = "cpu",
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Private directory for the socket and the token. Default: one per replica and rank."),
    ] = None,
    staging_mib: Annotated[int, typer.Option(help="Size of the host staging buffer for page transfers, in MiB.")] = 16,
    disk: Annotated[
        Path | None, typer.Option(help="Folder on a local disk for the disk tier, if the replica has one.")
    ] = None,
    host_mib: Annotated[
        int | None, typer.Option(min=1, help="Most host memory of a host tier, in MiB. Default: 80 % of what is free.")
    ] = None,
    disk_mib: Annotated[
        int | None, typer.Option(min=1, help="Most room of a disk tier, in MiB. Default: what is free.")
    ] = None,
    backend: Annotated[str, typer.Option(help="Backend of page operations: auto, cudnn, triton or torch.")] = "auto",
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the service is reachable and the replica is registered.")
    ] = False,
) -> None:
    """Hold the pages of one rank. On SIGTERM or Ctrl-C, exit once the attached engine has exited; on a second signal,
    exit now.
    """
    import logging

    if opaque == bool(service):
        raise InvalidArgument(
            "a worker gets its memory layout from a service or from its engine",
            field="--service",
            remedy="give either --service or --opaque",
        )
    _require_torch()
    from kvplane_worker.process import WorkerOptions, run

    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    access = context.find_root().obj  # set by the options before the command
    staging_bytes = staging_mib << 20
    backend = "torch" if opaque else backend  # the engine moves its pages: no kernel needs to be tested
    sizes = {TierKind.HOST: host_mib, TierKind.DISK: disk_mib}
    most_bytes = {kind: mib << 20 for kind, mib in sizes.items() if mib is not None}
    options = WorkerOptions(
        service, replica, rank, device, run_dir, staging_bytes, backend, access, wait, disk, most_bytes
    )
    run(options, _print_address)


def _require_torch() -> None:
    missing = [name for name in ("torch", "grpc_health") if find_spec(name) is None]
    if missing:
        remedy = command_for("cli,worker")
        raise NotFound(f"the package {missing[0]} is not installed", field="worker", remedy=remedy)


def _print_address(address: str) -> None:
    """Print the worker's address, unbuffered, so that the process that started the worker can attach its pages."""
    sys.stdout.write(f"kvplane: pages at {address}\n")
    sys.stdout.flush()
