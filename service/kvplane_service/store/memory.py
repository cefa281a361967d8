"""A store in memory: its data end with the process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from kvplane_service.store.errors import LogSuperseded
from kvplane_service.store.interface import ALIVE, LogName, StoredChunk


class MemoryStore:
    """A BlockingSharedStore in memory. `logs` and `records_by_name` are public so that a simulation can damage them."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """`clock` is a function that returns the monotonic time in nanoseconds."""
        self.logs: dict[LogName, dict[int, bytes]] = {}
        self.records_by_name: dict[str, bytes] = {}
        self._clock = clock
        self._leases: dict[str, tuple[int, bytes]] = {}

    def append(self, log: LogName, chunk: StoredChunk, trim_below: int) -> int:
        """Append a chunk to a log, and drop old chunks (see IndexStore.append)."""
        chunks = self.logs.setdefault(log, {})
        newest = max(chunks, default=-1)
        if newest > chunk.seq:
            raise LogSuperseded(newest)
        if newest < chunk.seq:
            chunks[chunk.seq] = chunk.raw
        for seq in [seq for seq in chunks if seq < trim_below]:
            del chunks[seq]
        return len(chunks)

    def load(self, log: LogName) -> Iterator[StoredChunk]:
        """Yield the chunks of a log, ordered by number (see IndexStore.load)."""
        yield from [StoredChunk(seq, raw) for seq, raw in sorted(self.logs.get(log, {}).items())]

    def drop(self, log: LogName) -> None:
        """Delete a log (see IndexStore.drop)."""
        self.logs.pop(log, None)

    def size_bytes(self, log: LogName) -> int:
        """Return the size of a log in bytes (see IndexStore.size_bytes)."""
        return sum(map(len, self.logs.get(log, {}).values()))

    def put_record(self, replica: str, record: bytes) -> None:
        """Replace the record of a replica (see IndexStore.put_record)."""
        self.records_by_name[replica] = record

    def get_record(self, replica: str) -> bytes | None:
        """Return the record of a replica, or None (see IndexStore.get_record)."""
        return self.records_by_name.get(replica)

    def records(self) -> Iterator[tuple[str, bytes]]:
        """Yield all pairs of name and record (see IndexStore.records)."""
        yield from sorted(self.records_by_name.items())

    def drop_record(self, replica: str) -> None:
        """Delete the record of a replica (see IndexStore.drop_record)."""
        self.records_by_name.pop(replica, None)

    def keep_alive(self, log: LogName) -> None:
        """Do nothing: data in memory do not expire (see IndexStore.keep_alive)."""

    def announce(self, service: str, lease_ms: int, lease: bytes = ALIVE) -> None:
        """Record that a service is alive (see SharedStore.announce)."""
        self._leases[service] = self._clock() + lease_ms * 1_000_000, lease

    def lease(self, service: str) -> bytes | None:
        """Return the lease of a service (see SharedStore.lease)."""
        ends_ns, lease = self._leases.get(service, (0, b""))
        return lease if self._clock() < ends_ns else None

    def close(self) -> None:
        """Do nothing: there is no connection to close (see IndexStore.close)."""
