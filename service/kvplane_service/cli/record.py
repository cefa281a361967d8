"""`kvplane record`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvplane_service.cli.asking import DEFAULT_SERVICE, Replica, Service, naming_the_service


def command(
    replica: Replica,
    file: Annotated[Path, typer.Argument(help="where to; must not be there yet")],
    decisions: Annotated[int | None, typer.Option(min=1, help="end after so many; else with the replica")] = None,
    service: Service = DEFAULT_SERVICE,
) -> None:
    """Record every decision of a replica, from its registration on, to be replayed by `kvplane replay --log`.

    The file holds hashes, names of requests and domains; no tokens, no salts.
    """
    from kvplane_service.cli.recorder import record

    with naming_the_service():
        count = record(service, replica, file, decisions)
    print(f"{count:,} decisions of {replica} in {file}")
