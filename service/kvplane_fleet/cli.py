"""The commands `kvplane fleet describe | hits`: follow the engines of a file once, and print what they have cached.

What the commands use is imported inside them, so that `kvplane --help` loads neither ZeroMQ nor msgspec.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvplane.base.errors import InvalidArgument, NotFound, Unavailable

if TYPE_CHECKING:
    from kvplane_fleet.fleet import Fleet, Followed

app = typer.Typer(no_args_is_help=True, help="Show what the caches of many engines hold.")

PlacesFile = Annotated[Path, typer.Argument(metavar="FILE", help="YAML file with the engines, as in docs/fleet.md.")]
Within = Annotated[float, typer.Option("--within", min=0.1, max=3600.0, help="Seconds to wait for the engines.")]
Model = Annotated[str, typer.Option("--model", help="The model of the prompt.")]
TokenIds = Annotated[str, typer.Option("--tokens", help="The prompt's token ids, separated by commas.")]


@app.command()
def describe(file: PlacesFile, within: Within = 30.0) -> None:
    """List the engines with their entries, groups, kind of hashes, and faults of their events."""
    _print(_once(file, within, _places))


@app.command()
def hits(file: PlacesFile, tokens: TokenIds, model: Model = "", within: Within = 30.0) -> None:
    """List how many tokens of a prompt each engine would hit, and which groups limit it."""
    try:
        prompt = [int(one) for one in tokens.split(",")]
    except ValueError:
        raise InvalidArgument("not a list of numbers", field="tokens", remedy="separate token ids by commas") from None
    _print(_once(file, within, lambda fleet: _hits(fleet, model, prompt)))


def _once(file: Path, within_s: float, rows: Callable[[Fleet], list[list[str]]]) -> list[list[str]]:
    missing = [name for name in ("zmq", "msgspec") if find_spec(name) is None]
    if missing:
        raise NotFound(f"the package {missing[0]} is not installed", field="fleet", remedy="install kvplane[fleet]")
    import asyncio

    from kvplane_fleet.settings import load

    settings = load(file)

    async def run() -> list[list[str]]:
        from kvplane_fleet.fleet import Fleet, following

        fleet = Fleet()
        async with following(fleet, settings.places):
            try:
                await asyncio.wait_for(fleet.wait_until_current(), within_s)
            except TimeoutError:
                if not any(one.source.is_connected for one in fleet.followed.values()):
                    raise Unavailable(f"no engine of {file} was connected within {within_s:g} s") from None
            return rows(fleet)

    return asyncio.run(run())


def _places(fleet: Fleet) -> list[list[str]]:
    heading = ["PLACE", "MODEL", "STATE", "BATCHES", "ENTRIES", "GROUPS", "HASHES", "FAULTS"]
    return [heading, *(_place(name, one) for name, one in sorted(fleet.followed.items()))]


def _place(name: str, one: Followed) -> list[str]:
    place, groups = one.place, []
    for number, form in sorted(one.place.formats.items()):
        window = f" of {form.window}" if form.window else ""
        groups.append(f"{number} {form.kind or 'not stated'}{window} in {form.block_size}")
    return [
        name,
        place.settings.model or "-",
        one.state,
        str(place.batches),
        str(place.entries),
        "; ".join(groups) or "-",
        str(place.domain or "not proven"),
        str(place.faults) or "-",
    ]


def _hits(fleet: Fleet, model: str, prompt: Sequence[int]) -> list[list[str]]:
    from kvplane_fleet.fleet import Prompt

    rows = [["PLACE", "TOKENS", "LIMITED BY GROUPS", "ALONE", "REMARK"]]
    for one in fleet.claims(model, Prompt(prompt)):
        limits = ", ".join(map(str, one.claim.limits)) if one.claim else ""
        alone = ", ".join(map(str, one.claim.alone)) if one.claim else ""
        rows.append([one.place, str(one.tokens), limits or "-", alone or "-", one.inexact or "-"])
    return rows


def _print(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
