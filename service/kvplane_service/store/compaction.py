"""Rewrite a log to the latest entry of each block. For stores without a running service: a service compacts its own
logs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import compress

from kvplane_core.face.entries import Entries, KeyRun
from kvplane_service.store.interface import IndexStore, LogName
from kvplane_service.store.loading import LoadedLog
from kvplane_service.store.record import pack_chunk


@dataclass(frozen=True, slots=True)
class Compacted:
    """Size of a log before and after compaction: number of chunks, number of entries, bytes."""

    chunks: tuple[int, int]
    rows: tuple[int, int]
    num_bytes: tuple[int, int]


async def compact(store: IndexStore, name: LogName, loaded: LoadedLog, tick: Callable[[int], None]) -> Compacted:
    """Append the latest entry of every block to the log in new chunks, then drop all older chunks. `tick` is called
    with the number of entries of each new chunk.

    An interrupted compaction leaves a longer log with the same content.
    """
    before = max((chunk.seq for chunk, _ in loaded.chunks), default=0)
    seq, rows, num_bytes = before, 0, 0
    for entries in reversed(list(latest_entries(loaded.entries()))):
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


def latest_entries(newest_first: Iterable[Entries]) -> Iterator[Entries]:
    """Yield, for each chunk, those entries whose block has no entry in a newer chunk; a chunk without such entries is
    skipped.
    """
    newer = set[int]()
    for entries in newest_first:
        is_latest = [block not in newer for block in entries.block]
        newer.update(entries.block, entries.unkeyed_block)
        if any(is_latest):
            yield _select(entries, is_latest)


def _select(entries: Entries, selected: list[bool]) -> Entries:
    size, runs, start = entries.digest_size, [], 0
    for run in entries.runs:
        count = sum(selected[start : start + run.count])
        if count:
            runs.append(KeyRun(run.domain, run.group, count))
        start += run.count
    digests = (entries.digests[at : at + size] for at in range(0, len(entries.digests), size))
    return Entries(
        size,
        runs,
        list(compress(entries.block, selected)),
        list(compress(entries.stamp, selected)),
        list(compress(entries.num_tokens, selected)),
        list(compress(entries.age, selected)),
        b"".join(compress(digests, selected)),
        used_block=entries.used_block,
        used_age=entries.used_age,
    )
