"""The commands `kvplane worker` and `kvplane erase`. They import torch and gRPC within their functions, so that
`kvplane --help` is fast.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from kvplane.base.errors import InvalidArgument, NotFound
from kvplane.base.groups import TierKind
from kvplane.base.installed import command_for
from kvplane.base.units import parse_bytes
from kvplane_worker.nixl.transport import PeerTransport

_IN_USE = 1
_SIZE = "Size of the {}, such as 256GiB. A worker: at most; default: what is free."


def _parse_size(text: str | int) -> int:
    try:
        return text if isinstance(text, int) else parse_bytes(text, "", "MiB")
    except InvalidArgument as error:
        raise typer.BadParameter(str(error)) from None


def _size(name: str, text: str) -> Any:  # noqa: ANN401 - an option of typer
    """Return an option that is a size; a number without a unit is in MiB."""
    return typer.Option(name, parser=_parse_size, metavar="SIZE", show_default=False, help=text)


def command(
    context: typer.Context,
    replica: Annotated[
        str, typer.Option(help="Replica name; with a service, it must be registered from a model or a list of layers.")
    ],
    opaque: Annotated[
        bool, typer.Option("--opaque", help="No service: lend raw memory to an engine that gives its size (vLLM).")
    ] = False,
    rank: Annotated[int, typer.Option(help="Rank whose pages this worker holds.")] = 0,
    device: Annotated[str, typer.Option(help="Device of the pages: cpu (shared memory) or cuda:N.")] = "cpu",
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Private directory for the socket and the token. Default: one per replica and rank."),
    ] = None,
    staging_size: Annotated[
        int, _size("--staging-size", "Size of the host staging buffer for page transfers. Default: 16MiB.")
    ] = 16 << 20,
    disk: Annotated[
        Path | None, typer.Option(help="Folder on a local disk for the disk tier, if the replica has one.")
    ] = None,
    host_size: Annotated[int | None, _size("--host-size", _SIZE.format("host tier of one rank"))] = None,
    disk_size: Annotated[int | None, _size("--disk-size", _SIZE.format("disk tier of one rank"))] = None,
    backend: Annotated[str, typer.Option(help="Backend of page operations: auto, cudnn, triton or torch.")] = "auto",
    peer_transport: Annotated[
        PeerTransport,
        typer.Option(
            help="How host tiers of peers are read: mapped on this host; nixl: on others too. See SECURITY.md."
        ),
    ] = PeerTransport.SHARED_MEMORY,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until it is possible and done: for a service, a step, an exit.")
    ] = False,
) -> None:
    """Hold the pages of one rank. On SIGTERM or Ctrl-C, exit once the attached engine has exited; on a second signal,
    exit now.
    """
    import logging

    given = context.find_root().obj  # the connection options: kvplane_tools.cli.options.Given
    if opaque == bool(given.service):
        raise InvalidArgument(
            "a worker gets its memory layout from a service or from its engine",
            field="--service",
            remedy="give either --service or --opaque",
        )
    _require_torch()
    from kvplane_worker.process import WorkerOptions, run

    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    backend = "torch" if opaque else backend  # the engine moves its pages: no kernel needs to be tested
    sizes = {TierKind.HOST: host_size, TierKind.DISK: disk_size}
    most_bytes = {kind: num_bytes for kind, num_bytes in sizes.items() if num_bytes is not None}
    options = WorkerOptions(
        given.service, replica, rank, device, run_dir, staging_size, backend, given.access(), wait, disk, most_bytes,
        peer_transport,
    )  # fmt: skip
    run(options, _print_address)


def erase_command(folder: Annotated[Path, typer.Argument(help="Folder that `--disk` of workers names.")]) -> None:
    """Remove what disk tiers left in a folder. Files that a worker uses stay, and the exit code is 1."""
    _require_torch()
    from kvplane_worker.tiers.disk import erase_left

    found = list(erase_left(folder))
    for path, is_erased in found:
        sys.stdout.write(f"{'erased' if is_erased else 'a worker uses'} {path}\n")
    if not found:
        sys.stdout.write(f"{folder} holds no file of a disk tier of this user\n")
    if not all(is_erased for _, is_erased in found):
        raise typer.Exit(_IN_USE)


def _require_torch() -> None:
    missing = [name for name in ("torch", "grpc_health") if find_spec(name) is None]
    if missing:
        remedy = command_for("cli,worker")
        raise NotFound(f"the package {missing[0]} is not installed", field="worker", remedy=remedy)


def _print_address(address: str) -> None:
    """Print the worker's address, unbuffered, so that the process that started the worker can attach its pages."""
    sys.stdout.write(f"kvplane: pages at {address}\n")
    sys.stdout.flush()
