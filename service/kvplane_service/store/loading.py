"""Reads a log: its usable entries, and the number of refused chunks by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvplane_service.core.entries import Entries
from kvplane_service.store.errors import RecordRefused, Refusal
from kvplane_service.store.interface import LogName, StoredChunk
from kvplane_service.store.record import unpack_chunk


@dataclass(slots=True)
class LoadedLog:
    """A log as read from the store.

    Attributes:
        chunks: chunks with their entries; None where the chunk was refused.
        rows, num_bytes: totals.
        refused: number of refused chunks by reason.
    """

    chunks: list[tuple[StoredChunk, Entries | None]] = field(default_factory=list)
    rows: int = 0
    num_bytes: int = 0
    refused: Counter[Refusal] = field(default_factory=Counter)

    def entries(self) -> list[Entries]:
        """Entries of the usable chunks, newest first: the first entry of a block is the current one."""
        return [entries for _, entries in reversed(self.chunks) if entries is not None]

    def add(self, log: LogName, chunk: StoredChunk) -> None:
        """Add a chunk."""
        self.num_bytes += len(chunk.raw)
        try:
            entries = unpack_chunk(log, chunk)
        except RecordRefused as error:
            self.refused[error.why] += 1
            self.chunks.append((chunk, None))
        else:
            self.rows += len(entries)
            self.chunks.append((chunk, entries))

    def add_all(self, log: LogName, chunks: Iterable[StoredChunk]) -> None:
        """Add several chunks."""
        for chunk in chunks:
            self.add(log, chunk)
