"""The commands `kvplane store inspect | verify | compact`: list, check and compact the contents of a store."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kvplane_tools.cli.options import ConfigFile, Settings, load_config
from kvplane_tools.cli.output import age, counted, size

if TYPE_CHECKING:
    from rich.console import Console

    from kvplane_service.store.interface import IndexStore
    from kvplane_service.store.loading import LoadedLog
    from kvplane_service.store.registration import ReplicaRecord

app = typer.Typer(no_args_is_help=True, help="Inspect, verify and compact the store of a service.")

Store = Annotated[str | None, typer.Option("--store", help="Store, as the key `store`: such as sqlite:PATH.")]

_DAMAGED = 1


@app.command()
def inspect(config: ConfigFile = None, store: Store = None, settings: Settings = None) -> None:
    """List the replicas of a store. Writes nothing."""
    _run(_inspect, _make(config, store, settings, read_only=True))


@app.command()
def verify(config: ConfigFile = None, store: Store = None, settings: Settings = None) -> None:
    """Read and check every record. Exits 1 if a record cannot be used. Writes nothing."""
    _run(_verify, _make(config, store, settings, read_only=True))


@app.command()
def compact(config: ConfigFile = None, store: Store = None, settings: Settings = None) -> None:
    """Keep only the latest entry of each block. Run it while no service writes: a service compacts its own store."""
    _run(_compact, _make(config, store, settings, read_only=False))


async def _inspect(console: Console, content: Content) -> None:
    for record in content.records:
        chunks = 0
        async for page in content.store.load(record.log):
            chunks += len(page)
        age_ms = max(0, round(time.time() * 1000) - record.written_ms)
        held = f"{counted(chunks, 'chunk')}, {size(await content.store.size_bytes(record.log))}"
        console.print(
            f"{record.name}: owner {record.owner}, epoch {record.epoch}, incarnation {record.incarnation:016x}, "
            f"written {age(age_ms)} ago, {held}",
            soft_wrap=True,
        )


async def _verify(console: Console, content: Content) -> None:
    for record in content.records:
        log = await _read(console, content.store, record)
        content.refused.update(why.value for why in log.refused.elements())
        console.print(
            f"{record.name}: {counted(len(log.chunks), 'chunk')}, {log.rows:,} entries, {size(log.num_bytes)}"
        )
    if content.refused:
        _print_refused(console, content.refused)
        raise typer.Exit(_DAMAGED)


async def _compact(console: Console, content: Content) -> None:
    from kvplane_service.store import compaction

    for record in content.records:
        log = await _read(console, content.store, record)
        with _bar(console, f"compact {record.name}", log.rows) as tick:
            done = await compaction.compact(content.store, record.log, log, tick)
        console.print(
            f"{record.name}: {done.chunks[0]:,} chunks to {done.chunks[1]:,}, {done.rows[0]:,} entries to "
            f"{done.rows[1]:,}, {done.num_bytes[0]:,} bytes to {done.num_bytes[1]:,}",
            soft_wrap=True,
        )


@dataclass(frozen=True, slots=True)
class Content:
    """An open store, its readable records of replicas, and the number of unreadable records by reason."""

    store: IndexStore
    records: list[ReplicaRecord]
    refused: Counter[str]


def _make(file: ConfigFile, address: str | None, settings: list[str] | None, read_only: bool) -> IndexStore:
    from kvplane.base.errors import InvalidArgument
    from kvplane_service.store.opening import make_store

    chosen = [f"store={address}"] if address is not None else []
    store = make_store(load_config(file, None, [*(settings or ()), *chosen]).config, read_only)
    if store is None:
        raise InvalidArgument(
            "it is `none`: no store is configured", field="store", remedy="give --store, such as --store sqlite:PATH"
        )
    return store


def _run(command: Callable[[Console, Content], Awaitable[None]], store: IndexStore) -> None:
    """Open the store, run the command on its content, close the store, and print the number of records that cannot be
    read.
    """
    import asyncio

    from rich.console import Console

    console = Console()

    async def run() -> None:
        await store.open()
        try:
            content = await _content(store)
            if not content.records and not content.refused:
                console.print("the store is empty: it has no record of a replica", soft_wrap=True)
            await command(console, content)
            _print_refused(console, content.refused)
        finally:
            await store.close()

    asyncio.run(run())


async def _content(store: IndexStore) -> Content:
    from kvplane_service.store.errors import RecordRefused
    from kvplane_service.store.registration import unpack_record

    content = Content(store, [], Counter())
    for _, raw in await store.records():
        try:
            content.records.append(unpack_record(raw))
        except RecordRefused as error:
            content.refused[error.why.value] += 1
    return content


async def _read(console: Console, store: IndexStore, record: ReplicaRecord) -> LoadedLog:
    from kvplane_service.store.loading import LoadedLog

    log, size = LoadedLog(), await store.size_bytes(record.log)
    with _bar(console, f"read {record.name}", size) as tick:
        async for page in store.load(record.log):
            log.add_all(record.log, page)
            tick(sum(len(chunk.raw) for chunk in page))
    return log


@contextmanager
def _bar(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar if the output is a terminal, and yield a function that advances it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda amount: bar.advance(task, amount)


def _print_refused(console: Console, refused: Counter[str]) -> None:
    for why, count in sorted(refused.items()):
        console.print(f"unusable: {count:,} {why}", style="red")
