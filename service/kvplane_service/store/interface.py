"""What a store of published entries must be able to do, and nothing more.

Calls block, and are made beside the event loop by one thread at a time: the drivers that block are the simplest and
the best tested ones, and the hot path never waits for any of them. A store may lose, repeat or reorder what it is
given: what it gives back is checked, record by record, and proven by the page memory. So there are no transactions
over calls, no locks, and no reads while the service runs.
"""

from __future__ import annotations

from collections.abc import Iterator
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

    def append(self, log: LogName, chunk: StoredChunk, trim_below: int) -> int:
        """Add a chunk behind the others and drop those with lower numbers than `trim_below`.

        Numbers rise. A chunk that is there already is not added again, so that a call whose answer was lost can be
        repeated. Returns how many chunks the log has now.
        """
        ...

    def load(self, log: LogName) -> Iterator[StoredChunk]:
        """The chunks by number; none when there is no such log."""
        ...

    def drop(self, log: LogName) -> None:
        """Forget a log, if there is one."""
        ...

    def size_bytes(self, log: LogName) -> int:
        """What the chunks of a log take, as far as the store can tell."""
        ...

    def put_record(self, replica: str, record: bytes) -> None:
        """Keep a replica's record in place of the one before, and keep what belongs to the replica alive."""
        ...

    def get_record(self, replica: str) -> bytes | None:
        """A replica's record."""
        ...

    def records(self) -> Iterator[tuple[str, bytes]]:
        """All records, by name."""
        ...

    def drop_record(self, replica: str) -> None:
        """Forget a replica's record, if there is one."""
        ...

    def keep_alive(self, log: LogName) -> None:
        """A store that forgets in time keeps this log for another while."""
        ...

    def close(self) -> None:
        """Let go of connections and files. Idempotent."""
        ...


@runtime_checkable
class SharedStore(IndexStore, Protocol):
    """A store that several services can have: it also keeps which of them live, each under its address."""

    def announce(self, service: str, lease_ms: int) -> None:
        """The service lives, and says so again before the lease ends."""
        ...

    def is_announced(self, service: str) -> bool:
        """Whether a lease of the service has not ended."""
        ...
