"""`kvplane demo`: four models at once through a service of one's own, live."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    seed: Annotated[int, typer.Option(help="of the workload; equal seeds, equal decisions")] = 8,
    plain: Annotated[bool, typer.Option(help="lines in place of the live view, also on a terminal")] = False,
    svg: Annotated[Path | None, typer.Option(hidden=True, help="write a picture of the live view")] = None,
) -> None:
    """Start a service, drive four models through it and show their pools, hits, evictions and preemptions.

    The traffic is made from a seed: chats and agents that call tools, with shared system prompts. The last line tells
    what the service counted, which must be what the engines count in its answers.
    """
    from kvplane_service.cli.demo_show import show_demo

    raise typer.Exit(show_demo(seed, plain, svg))
