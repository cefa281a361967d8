"""The interface of a store of published entries.

The hot path never waits for a store. A store may lose, repeat or reorder records: what is read back is verified, record
by record, and against the stamps of the page memory. So there are no transactions over several calls, no locks, and no
reads while the service runs.

    IndexStore      what a service calls: awaited, each call with a deadline of the driver
    BlockingStore   the same with blocking calls: a file, or the in-memory store. `Offloaded` adapts it to an IndexStore
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class LogName:
    """Identifies the log of one replica on one incarnation of its page memory.

    Attributes:
        replica: its name.
        namespace: 16 bytes, a digest of everything that makes entries incompatible.
        incarnation: incarnation of the page memory, u64.
    """

    replica: str
    namespace: bytes
    incarnation: int

    def __str__(self) -> str:
        return f"{self.replica} {self.namespace.hex()} {self.incarnation:016x}"


class StoredChunk(NamedTuple):
    """A chunk and its number in the log."""

    seq: int
    raw: bytes


class IndexStore(Protocol):
    """Logs of chunks, and one record per replica.

    Every method raises errors of `errors.STORE_ERRORS`; then nothing was changed, as far as the store can detect.
    """

    async def open(self) -> None:
        """Connect and check that the store can be used. Called before anything else, and again after a failure."""
        ...

    async def append(self, log: LogName, chunk: StoredChunk, trim_below: int) -> int:
        """Append a chunk and drop those with numbers below `trim_below`.

        Numbers increase. A chunk that the log already has is not added again: a call whose answer was lost can be
        repeated. Returns the number of chunks in the log.

        Raises:
            LogSuperseded: the log has, or had, a chunk with a higher number; nothing was changed. So a stopped process
                that resumes after the adoption of its replica drops no chunk of its successor.
        """
        ...

    def load(self, log: LogName) -> AsyncIterator[list[StoredChunk]]:
        """The chunks by number, in pages; none if there is no such log."""
        ...

    async def drop(self, log: LogName) -> None:
        """Delete a log, if there is one."""
        ...

    async def size_bytes(self, log: LogName) -> int:
        """Size of the chunks of a log, as far as the store can measure it."""
        ...

    async def put_record(self, replica: str, record: bytes) -> None:
        """Replace a replica's record, and extend the lifetime of the replica's data."""
        ...

    async def get_record(self, replica: str) -> bytes | None:
        """A replica's record; None if there is none."""
        ...

    async def records(self) -> list[tuple[str, bytes]]:
        """All (name, record) pairs, by name."""
        ...

    async def drop_record(self, replica: str) -> None:
        """Delete a replica's record, if there is one."""
        ...

    async def keep_alive(self, log: LogName) -> None:
        """Extend the lifetime of a log, in a store that expires data."""
        ...

    async def close(self) -> None:
        """Close connections and files. Idempotent."""
        ...


@runtime_checkable
class SharedStore(IndexStore, Protocol):
    """A store that several services can use: it also has a lease per live service, by address."""

    async def announce(self, service: str, lease_ms: int) -> None:
        """Set the lease of a live service, which renews it before it ends."""
        ...

    async def is_announced(self, service: str) -> bool:
        """True while the service has a lease."""
        ...


class BlockingStore(Protocol):
    """An IndexStore with blocking calls, called by one thread at a time. Its constructor opens it."""

    def append(self, log: LogName, chunk: StoredChunk, trim_below: int) -> int:
        """See IndexStore."""
        ...

    def load(self, log: LogName) -> Iterator[StoredChunk]:
        """See IndexStore."""
        ...

    def drop(self, log: LogName) -> None:
        """See IndexStore."""
        ...

    def size_bytes(self, log: LogName) -> int:
        """See IndexStore."""
        ...

    def put_record(self, replica: str, record: bytes) -> None:
        """See IndexStore."""
        ...

    def get_record(self, replica: str) -> bytes | None:
        """See IndexStore."""
        ...

    def records(self) -> Iterator[tuple[str, bytes]]:
        """See IndexStore."""
        ...

    def drop_record(self, replica: str) -> None:
        """See IndexStore."""
        ...

    def keep_alive(self, log: LogName) -> None:
        """Extend the lifetime of a log, in a store that expires data."""
        ...

    def close(self) -> None:
        """See IndexStore."""
        ...


@runtime_checkable
class BlockingSharedStore(BlockingStore, Protocol):
    """A SharedStore with blocking calls."""

    def announce(self, service: str, lease_ms: int) -> None:
        """See SharedStore."""
        ...

    def is_announced(self, service: str) -> bool:
        """See SharedStore."""
        ...
