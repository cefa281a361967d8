"""The in-memory store: its data end with the process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from kvplane_service.store.errors import LogSuperseded
from kvplane_service.store.interface import LogName, StoredChunk


class MemoryStore:
    """Implements BlockingSharedStore. `logs` and `records_by_name` are public, for a simulation to damage."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """`clock`: nanoseconds."""
        self.logs: dict[LogName, dict[int, bytes]] = {}
        self.records_by_name: dict[str, bytes] = {}
        self._clock = clock
        self._leases: dict[str, int] = {}

    def append(self, log: LogName, chunk: StoredChunk, trim_below: int) -> int:
        """See IndexStore."""
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
        """See IndexStore."""
        yield from [StoredChunk(seq, raw) for seq, raw in sorted(self.logs.get(log, {}).items())]

    def drop(self, log: LogName) -> None:
        """See IndexStore."""
        self.logs.pop(log, None)

    def size_bytes(self, log: LogName) -> int:
        """See IndexStore."""
        return sum(map(len, self.logs.get(log, {}).values()))

    def put_record(self, replica: str, record: bytes) -> None:
        """See IndexStore."""
        self.records_by_name[replica] = record

    def get_record(self, replica: str) -> bytes | None:
        """See IndexStore."""
        return self.records_by_name.get(replica)

    def records(self) -> Iterator[tuple[str, bytes]]:
        """See IndexStore."""
        yield from sorted(self.records_by_name.items())

    def drop_record(self, replica: str) -> None:
        """See IndexStore."""
        self.records_by_name.pop(replica, None)

    def keep_alive(self, log: LogName) -> None:
        """See IndexStore; nothing expires."""
        del log

    def announce(self, service: str, lease_ms: int) -> None:
        """See SharedStore."""
        self._leases[service] = self._clock() + lease_ms * 1_000_000

    def is_announced(self, service: str) -> bool:
        """See SharedStore."""
        return self._clock() < self._leases.get(service, 0)

    def close(self) -> None:
        """See IndexStore."""
