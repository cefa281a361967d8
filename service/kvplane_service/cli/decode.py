"""`kvplane decode`: the operations that a span carries, row by row."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def command(
    text: Annotated[str, typer.Argument(help="the attribute kvcache.ops of a span; - reads standard input")],
) -> None:
    """Print the operations of a traced step, one line per row, in the order in which they were done."""
    from kvplane_service.decisions.text import operation_lines
    from kvplane_service.telemetry.ops import unpack

    step, result = unpack((sys.stdin.read() if text == "-" else text).strip())
    for line in operation_lines(step, result):
        print(line)
