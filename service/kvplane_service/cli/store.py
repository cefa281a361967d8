"""`kvplane store`: what lies in a store, whether all of it can be used, and how to make it small."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvplane_service.cli.options import ConfigFile, Settings, load_config

if TYPE_CHECKING:
    from kvplane_service.store.interface import IndexStore
    from kvplane_service.store.loading import LoadedLog
    from kvplane_service.store.registration import ReplicaRecord

app = typer.Typer(no_args_is_help=True, help="Look at, check and compact what a service has stored.")

Place = Annotated[str | None, typer.Option("--store", help="As the key `store`, such as sqlite:PATH.")]

_DAMAGED = 1


@app.command()
def inspect(config: ConfigFile = None, store: Place = None, settings: Settings = None) -> None:
    """List the replicas of a store."""
    console = Console()
    with _opened(config, store, settings) as (place, records, refused):
        for record in records:
            chunks = sum(1 for _ in place.load(record.log))
            age_s = max(0.0, time.time() - record.written_ms / 1000)
            console.print(
                f"{record.name}: owner {record.owner}, epoch {record.epoch}, incarnation {record.incarnation:016x}, "
                f"written {age_s:,.0f} s ago, {chunks:,} chunks, {place.size_bytes(record.log):,} bytes",
                soft_wrap=True,
            )
    _tell_refused(console, refused)


@app.command()
def verify(config: ConfigFile = None, store: Place = None, settings: Settings = None) -> None:
    """Read every record and check it; exit status 1 when something cannot be used."""
    console = Console()
    with _opened(config, store, settings) as (place, records, refused):
        for record in records:
            log = _read(console, place, record)
            refused.update(why.value for why in log.refused.elements())
            console.print(f"{record.name}: {len(log.chunks):,} chunks, {log.rows:,} entries, {log.num_bytes:,} bytes")
    _tell_refused(console, refused)
    if refused:
        raise typer.Exit(_DAMAGED)


@app.command()
def compact(config: ConfigFile = None, store: Place = None, settings: Settings = None) -> None:
    """Keep of each block what was said last. Run it while no service writes: a service keeps its own store short."""
    from kvplane_service.store import compaction

    console = Console()
    with _opened(config, store, settings) as (place, records, refused):
        for record in records:
            log = _read(console, place, record)
            with _bar(console, f"compact {record.name}", log.rows) as tick:
                done = compaction.compact(place, record.log, log, tick)
            console.print(
                f"{record.name}: {done.chunks[0]:,} chunks to {done.chunks[1]:,}, {done.rows[0]:,} entries to "
                f"{done.rows[1]:,}, {done.num_bytes[0]:,} bytes to {done.num_bytes[1]:,}",
                soft_wrap=True,
            )
    _tell_refused(console, refused)


@contextmanager
def _opened(
    file: ConfigFile, place: str | None, settings: list[str] | None
) -> Iterator[tuple[IndexStore, list[ReplicaRecord], Counter[str]]]:
    """The store, its records, and those that cannot be read."""
    from kvplane.base.errors import InvalidArgument
    from kvplane_service.store.errors import RecordRefused
    from kvplane_service.store.opening import open_store
    from kvplane_service.store.registration import unpack_record

    chosen = [f"store={place}"] if place is not None else []
    store = open_store(load_config(file, None, [*(settings or ()), *chosen]).config)
    if store is None:
        raise InvalidArgument("no store is named", field="store", remedy="give --store sqlite:PATH, or another")
    records, refused = [], Counter[str]()
    with closing(store):
        for _, raw in store.records():
            try:
                records.append(unpack_record(raw))
            except RecordRefused as error:
                refused[error.why.value] += 1
        yield store, records, refused


def _read(console: Console, store: IndexStore, record: ReplicaRecord) -> LoadedLog:
    from kvplane_service.store.loading import LoadedLog

    log, size = LoadedLog(), store.size_bytes(record.log)
    with _bar(console, f"read {record.name}", size) as tick:
        for chunk in store.load(record.log):
            log.add(record.log, chunk)
            tick(len(chunk.raw))
    return log


@contextmanager
def _bar(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing elsewhere; yields what moves it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda amount: bar.advance(task, amount)


def _tell_refused(console: Console, refused: Counter[str]) -> None:
    for why, count in sorted(refused.items()):
        console.print(f"not used: {count:,} {why}", style="red")
