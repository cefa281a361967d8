"""What a store of published entries must be able to do, and nothing more.

The hot path never waits for a store. A store may lose, repeat or reorder what it is given: what it gives back is
checked, record by record, and proven by the page memory. So there are no transactions over calls, no locks, and no
reads while the service runs.

    IndexStore      what a service calls: awaited, each call with a deadline of the driver
    BlockingStore   the same with calls that block: a file, a twin in memory. `offloaded` makes an IndexStore of one
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class LogName:
    """Names the log of one replica on one life of its page memory.

    Attributes:
        replica: its name.
        namespace: 16 bytes, digest of everything that makes entries incompatible.
        incarnation: of the page memory, u64.
    """

    replica: str
    namespace: bytes
    incarnation: int

    def __str__(self) -> str:
        return f"{self.replica} {self.namespace.hex()} {self.incarnation:016x}"


class StoredChunk(NamedTuple):
    """A chunk and the number under which it lies."""

    seq: int
    raw: bytes


class IndexStore(Protocol):
    """Logs of chunks, and one record per replica.

    Every method raises a StoreError of `errors.STORE_ERRORS` and changes nothing then, as far as the store can tell.
    """

    async def open(self) -> None:
        """Connect, and see whether the store can be used; before anything else, and again after it failed."""
        ...

    async def append(self, log: LogName, chunk: StoredChunk, trim_below: int) -> int:
        """Add a chunk behind the others and drop those with lower numbers than `trim_below`.

        Numbers rise. A chunk that is there already is not added again, so that a call whose answer was lost can be
        repeated. Returns how many chunks the log has now.

        Raises:
            LogSuperseded: the log has, or had, a chunk with a higher number; nothing changes. So a process that was
                stopped, and continues after another one took over its replica, drops no chunk of its successor.
        """
        ...

    def load(self, log: LogName) -> AsyncIterator[list[StoredChunk]]:
        """The chunks by number, some at a time; none when there is no such log."""
        ...

    async def drop(self, log: LogName) -> None:
        """Forget a log, if there is one."""
        ...

    async def size_bytes(self, log: LogName) -> int:
        """What the chunks of a log take, as far as the store can tell."""
        ...

    async def put_record(self, replica: str, record: bytes) -> None:
        """Keep a replica's record in place of the one before, and keep what belongs to the replica alive."""
        ...

    async def get_record(self, replica: str) -> bytes | None:
        """A replica's record."""
        ...

    async def records(self) -> list[tuple[str, bytes]]:
        """All records, by name."""
        ...

    async def drop_record(self, replica: str) -> None:
        """Forget a replica's record, if there is one."""
        ...

    async def keep_alive(self, log: LogName) -> None:
        """A store that forgets in time keeps this log for another while."""
        ...

    async def close(self) -> None:
        """Let go of connections and files. Idempotent."""
        ...


@runtime_checkable
class SharedStore(IndexStore, Protocol):
    """A store that several services can have: it also keeps which of them live, each under its address."""

    async def announce(self, service: str, lease_ms: int) -> None:
        """The service lives, and says so again before the lease ends."""
        ...

    async def is_announced(self, service: str) -> bool:
        """Whether a lease of the service has not ended."""
        ...


class BlockingStore(Protocol):
    """An IndexStore whose calls block; one thread at a time calls it. It is open when it is there."""

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
        """A store that forgets in time keeps this log for another while."""
        ...

    def close(self) -> None:
        """See IndexStore."""
        ...


@runtime_checkable
class BlockingSharedStore(BlockingStore, Protocol):
    """A SharedStore whose calls block."""

    def announce(self, service: str, lease_ms: int) -> None:
        """See SharedStore."""
        ...

    def is_announced(self, service: str) -> bool:
        """See SharedStore."""
        ...
