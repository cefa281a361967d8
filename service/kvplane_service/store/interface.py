"""The interface of a store of published cache keys (hashes of blocks that all ranks have computed).

No step waits for a store. A store may lose, repeat or reorder records without harm: each record that is read back is
verified by a checksum, and each entry by the stamp of its page. So the interface needs no transactions over several
calls and no locks, and nothing is read while the service runs.

    IndexStore      what a service calls: awaited, and each call has a timeout
    BlockingStore   the same with blocking calls: a file, or the in-memory store. `Offloaded` adapts it to an IndexStore
    OwnerTable      which service owns each replica, apart from the index (`grants`)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

MAX_SEQ = 1 << 62  # chunks with this number or a higher one were not written by kvplane
ALIVE = b"alive"  # what a lease holds unless its service gives something else; never empty


@dataclass(frozen=True, slots=True)
class LogName:
    """Identifies the log of one replica on one incarnation of its page memory.

    Attributes:
        replica: name of the replica.
        namespace: 16 bytes, a digest of those settings of the registration that must be equal for stored entries to be
            usable.
        incarnation: random number of the page memory's allocation, u64.
    """

    replica: str
    namespace: bytes
    incarnation: int

    def __str__(self) -> str:
        return f"{self.replica} {self.namespace.hex()} {self.incarnation:016x}"


class StoredChunk(NamedTuple):
    """A serialized chunk, and the chunk's number in its log."""

    seq: int
    raw: bytes


class IndexStore(Protocol):
    """A store of logs and of one record per replica. A log is a sequence of chunks; a chunk is a batch of
    entries, which are states of blocks.

    Every method raises errors of `errors.STORE_ERRORS`; then nothing was changed, as far as the store can detect.
    """

    async def open(self) -> None:
        """Connect, and check that the store can be used. Called before any other method, and again after a failure."""

    async def append(self, log: LogName, chunk: StoredChunk, trim_below: int) -> int:
        """Append a chunk, drop the chunks with numbers below `trim_below`, and return the number of chunks in the log.

        Chunk numbers increase. A chunk that the log already has is not added again, so that a call whose answer was
        lost can be repeated.

        Raises:
            LogSuperseded: the log has, or had, a chunk with a higher number; nothing was changed. So a stopped process
                that resumes after another service adopted its replica cannot drop chunks of that service.
        """

    def load(self, log: LogName) -> AsyncIterator[list[StoredChunk]]:
        """Yield the chunks of a log, ordered by number, in several lists; nothing if there is no such log."""

    async def drop(self, log: LogName) -> None:
        """Delete a log if it exists."""

    async def size_bytes(self, log: LogName) -> int:
        """Return the size of the chunks of a log in bytes, as far as the store can measure it."""

    async def put_record(self, replica: str, record: bytes) -> None:
        """Replace the record of a replica, and extend the lifetime of the replica's data."""

    async def get_record(self, replica: str) -> bytes | None:
        """Return the record of a replica, None if there is none."""

    async def records(self) -> list[tuple[str, bytes]]:
        """Return all pairs of replica name and record, ordered by name."""

    async def drop_record(self, replica: str) -> None:
        """Delete the record of a replica if it exists."""

    async def keep_alive(self, log: LogName) -> None:
        """Extend the lifetime of a log, in a store whose data expire."""

    async def close(self) -> None:
        """Close connections and files. May be called repeatedly."""


@runtime_checkable
class SharedStore(IndexStore, Protocol):
    """A store that several services can use: it also has a lease for each live service, by the service's address."""

    async def announce(self, service: str, lease_ms: int, lease: bytes = ALIVE) -> None:
        """Record that a service is alive for the next `lease_ms` milliseconds, and the bytes `lease`; it calls this
        again before they end.
        """

    async def lease(self, service: str) -> bytes | None:
        """Return the bytes of the lease of the service at this address; None if it has none, or its lease has ended."""


class Stored(NamedTuple):
    """What a table of owners has: bytes and their version. A version of None: there is no table."""

    raw: bytes
    version: str | None


class OwnerTable(Protocol):
    """Where the services that share an index agree which of them owns each replica: one small document, replaced by
    compare-and-set. Apart from the index, which is large and may be lost.

    Every method raises errors of `errors.STORE_ERRORS`; then `replace` may have taken effect, or take effect later.
    """

    async def read(self) -> Stored:
        """Return the newest document: one that an earlier answer has shown, or a later one."""

    async def replace(self, version: str | None, raw: bytes) -> bool:
        """Replace the document if it has this version, or create it if there is none and `version` is None. Returns
        False, and changes nothing, if it has another one.
        """


@runtime_checkable
class OwnerStore(Protocol):
    """A store of an index that has a table of owners too. The methods are those of OwnerTable."""

    async def read_owners(self) -> Stored:
        """See OwnerTable.read."""

    async def replace_owners(self, version: str | None, raw: bytes) -> bool:
        """See OwnerTable.replace."""


class BlockingStore(Protocol):
    """An IndexStore with blocking calls, called by one thread at a time. Its constructor opens it."""

    def append(self, log: LogName, chunk: StoredChunk, trim_below: int) -> int:
        """Append a chunk to a log, and drop old chunks (see IndexStore.append)."""

    def load(self, log: LogName) -> Iterator[StoredChunk]:
        """Yield the chunks of a log, ordered by number (see IndexStore.load)."""

    def drop(self, log: LogName) -> None:
        """Delete a log (see IndexStore.drop)."""

    def size_bytes(self, log: LogName) -> int:
        """Return the size of a log in bytes (see IndexStore.size_bytes)."""

    def put_record(self, replica: str, record: bytes) -> None:
        """Replace the record of a replica (see IndexStore.put_record)."""

    def get_record(self, replica: str) -> bytes | None:
        """Return the record of a replica, or None (see IndexStore.get_record)."""

    def records(self) -> Iterator[tuple[str, bytes]]:
        """Yield all pairs of name and record (see IndexStore.records)."""

    def drop_record(self, replica: str) -> None:
        """Delete the record of a replica (see IndexStore.drop_record)."""

    def keep_alive(self, log: LogName) -> None:
        """Extend the lifetime of a log (see IndexStore.keep_alive)."""

    def close(self) -> None:
        """Close connections and files (see IndexStore.close)."""


@runtime_checkable
class BlockingSharedStore(BlockingStore, Protocol):
    """A SharedStore with blocking calls."""

    def announce(self, service: str, lease_ms: int, lease: bytes = ALIVE) -> None:
        """Record that a service is alive (see SharedStore.announce)."""

    def lease(self, service: str) -> bytes | None:
        """Return the lease of a service (see SharedStore.lease)."""
