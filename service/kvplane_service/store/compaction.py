"""Rewrites a log to what its blocks said last. For a log that no service writes now: a service keeps its own short."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import compress

from kvplane_service.core.entries import Entries, KeyRun
from kvplane_service.store.interface import IndexStore, LogName
from kvplane_service.store.loading import LoadedLog
from kvplane_service.store.record import pack_chunk


@dataclass(frozen=True, slots=True)
class Compacted:
    """What a compaction left: chunks, rows and bytes, before and after."""

    chunks: tuple[int, int]
    rows: tuple[int, int]
    num_bytes: tuple[int, int]


async def compact(store: IndexStore, name: LogName, loaded: LoadedLog, tick: Callable[[int], None]) -> Compacted:
    """Write the last words behind the log, then drop what was before. `tick` is called with the rows of each chunk.

    A compaction that is cut short leaves a longer log that says the same.
    """
    before = max((chunk.seq for chunk, _ in loaded.chunks), default=0)
    seq, rows, num_bytes = before, 0, 0
    for entries in reversed(list(last_words(loaded.entries()))):
        seq += 1
        chunk = pack_chunk(name, seq, entries)
        await store.append(name, chunk, 0)
        rows, num_bytes = rows + len(entries), num_bytes + len(chunk.raw)
        tick(len(entries))
    if seq == before:
        await store.drop(name)
    else:
        await store.append(name, chunk, before + 1)
    return Compacted((len(loaded.chunks), seq - before), (loaded.rows, rows), (loaded.num_bytes, num_bytes))


def last_words(newest_first: Iterable[Entries]) -> Iterator[Entries]:
    """Of each chunk, the rows of blocks that no newer one speaks of; chunks without any are left out."""
    spoken_of = set[int]()
    for entries in newest_first:
        wanted = [block not in spoken_of for block in entries.block]
        spoken_of.update(entries.block, entries.bare_block)
        if any(wanted):
            yield _select(entries, wanted)


def _select(entries: Entries, wanted: list[bool]) -> Entries:
    size, runs, start = entries.digest_size, [], 0
    for run in entries.runs:
        count = sum(wanted[start : start + run.count])
        if count:
            runs.append(KeyRun(run.domain, run.group, count))
        start += run.count
    digests = (entries.digests[at : at + size] for at in range(0, len(entries.digests), size))
    return Entries(
        size,
        runs,
        list(compress(entries.block, wanted)),
        list(compress(entries.stamp, wanted)),
        list(compress(entries.num_tokens, wanted)),
        list(compress(entries.age, wanted)),
        b"".join(compress(digests, wanted)),
        used_block=entries.used_block,
        used_age=entries.used_age,
    )
