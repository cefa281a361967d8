"""A store that does everything that a store may: lag, tear, forget, turn bits over, come back from an old backup."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from copy import deepcopy
from random import Random
from typing import Any

from kvplane_service.store.errors import StoreUnavailable
from kvplane_service.store.interface import LogName, StoredChunk
from kvplane_service.store.memory import MemoryStore


class WildStore(MemoryStore):
    """The in-memory twin under faults. Its content outlives the services.

    Attributes:
        away: it does not answer.
        loses_answers: chance that a call is done and fails all the same.
        tears: chance that a chunk is stored in part.
        delay_s: a call takes up to so long.
    """

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self._rng = rng
        self.away = False
        self.loses_answers = self.tears = 0.0
        self.delay_s = 0.005
        self._backup: tuple[dict[LogName, dict[int, bytes]], dict[str, bytes]] = ({}, {})

    async def offload(self, call: Callable[[], Any]) -> Any:
        """Runs a call of the store beside the loop: it takes a while before, and after."""
        await asyncio.sleep(self._rng.random() * self.delay_s)
        if self.away:
            await asyncio.sleep(2.0)  # the driver's patience
        outcome = call()
        await asyncio.sleep(self._rng.random() * self.delay_s)
        return outcome

    # -- calls -------------------------------------------------------------------------------------------------------

    def append(self, log: LogName, chunk: StoredChunk, trim_below: int) -> int:
        self._answer()
        if self._rng.random() < self.tears:
            chunk = StoredChunk(chunk.seq, chunk.raw[: self._rng.randrange(len(chunk.raw))])
        count = super().append(log, chunk, trim_below)
        self._lose_answer()
        return count

    def load(self, log: LogName) -> Iterator[StoredChunk]:
        self._answer()
        yield from super().load(log)

    def drop(self, log: LogName) -> None:
        self._answer()
        super().drop(log)

    def put_record(self, replica: str, record: bytes) -> None:
        self._answer()
        super().put_record(replica, record)
        self._lose_answer()

    def get_record(self, replica: str) -> bytes | None:
        self._answer()
        return super().get_record(replica)

    def records(self) -> Iterator[tuple[str, bytes]]:
        self._answer()
        yield from super().records()

    def _answer(self) -> None:
        if self.away:
            raise StoreUnavailable("the store does not answer")

    def _lose_answer(self) -> None:
        if self._rng.random() < self.loses_answers:
            raise StoreUnavailable("the answer was lost")

    # -- what happens to it ------------------------------------------------------------------------------------------

    def back_up(self) -> None:
        """Remember it as it is."""
        self._backup = deepcopy((self.logs, self.records_by_name))

    def restore(self) -> None:
        """It is what it was when it was backed up; empty when it never was."""
        self.logs, self.records_by_name = deepcopy(self._backup)

    def lose_tail(self) -> None:
        """The last chunks of each log are gone: they were never synced."""
        for chunks in self.logs.values():
            for seq in sorted(chunks)[len(chunks) - self._rng.randint(0, len(chunks)) :]:
                del chunks[seq]

    def flip_bits(self) -> None:
        """Turn a bit over in some chunks and records."""
        for chunks in self.logs.values():
            for seq in self._rng.sample(sorted(chunks), min(2, len(chunks))):
                chunks[seq] = self._flipped(chunks[seq])
        for name in self._rng.sample(sorted(self.records_by_name), min(1, len(self.records_by_name))):
            self.records_by_name[name] = self._flipped(self.records_by_name[name])

    def reorder(self) -> None:
        """Two chunks of each log lie under each other's numbers."""
        for chunks in self.logs.values():
            if len(chunks) > 1:
                one, other = self._rng.sample(sorted(chunks), 2)
                chunks[one], chunks[other] = chunks[other], chunks[one]

    def _flipped(self, raw: bytes) -> bytes:
        if not raw:
            return raw
        at = self._rng.randrange(len(raw))
        return raw[:at] + bytes([raw[at] ^ 1 << self._rng.randrange(8)]) + raw[at + 1 :]
