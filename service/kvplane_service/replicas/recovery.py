"""What is known of a replica whose engine has not come back since the service was started."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from kvplane.base.errors import Unavailable
from kvplane.base.stamps import MAX_EPOCH
from kvplane_service.core.columns import are_equal
from kvplane_service.core.entries import Entries
from kvplane_service.core.regained import Regained
from kvplane_service.core.replica import Replica
from kvplane_service.runtime.executors import Offload

UNSTORED_EPOCHS = 16  # may have begun while the store was behind


@dataclass(frozen=True, slots=True)
class _Proof:
    """What a memory proves that shows these stamps."""

    shown: Sequence[int]
    regained: Regained


@dataclass(slots=True)
class Recovering:
    """Entries that wait for a page memory that proves them.

    Attributes:
        epoch: the highest that is known to have begun.
        incarnation: life of the page memory that the entries belong to.
        loading: the store is still being read.
        entries: what was read so far; the newest first once `loading` is over.
        rows: of them.
        refused: chunks that were not used, by reason.
        recovered: rows that the memory proved; None before it was asked.
    """

    epoch: int
    incarnation: int
    loading: bool = True
    entries: list[Entries] = field(default_factory=list)
    rows: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    recovered: int | None = None
    _proof: _Proof | None = None
    _proving: asyncio.Future[None] | None = None

    def check_loaded(self, name: str) -> None:
        """Raise Unavailable while the store is being read."""
        if self.loading:
            raise Unavailable(
                f"{name} is recovering: {self.rows} entries have been read from the store",
                field="replica",
                remedy="try again in a moment",
            )

    def belongs_to(self, incarnation: int) -> bool:
        """Whether the entries can be true of this page memory; who does not name it has the same one."""
        return incarnation in (0, self.incarnation)

    def epoch_above(self, replica: Replica, shown: Sequence[int]) -> int:
        """An epoch in which no stamp was given: none that was stored, that the memory shows, or that began unseen."""
        return max(self.epoch, self._proof_of(replica, shown).regained.epoch) + 1 + UNSTORED_EPOCHS

    def observe_epoch(self, epoch: int) -> None:
        """An engine says that this epoch had begun. One that nobody can have had is not believed."""
        if epoch < MAX_EPOCH // 2:
            self.epoch = max(self.epoch, epoch)

    async def prove_ahead(self, replica: Replica, shown: Sequence[int], offload: Offload) -> None:
        """Find out beside the event loop what this memory proves, for an `epoch_above` and a `prove` that follow.

        One memory at a time. Work that was begun goes on when its caller leaves, and serves the next one.
        """
        while self.recovered is None and not (self._proof is not None and are_equal(self._proof.shown, shown)):
            if self._proving is None or self._proving.done():
                self._proving = asyncio.ensure_future(self._prove(replica, shown, offload))
                self._proving.add_done_callback(_look_at)
            await asyncio.shield(self._proving)

    async def _prove(self, replica: Replica, shown: Sequence[int], offload: Offload) -> None:
        regained = await offload(partial(replica.regain, [shown], self.entries))
        if self.recovered is None:
            self._proof = _Proof(shown, regained)

    def prove(self, replica: Replica, shown: Sequence[int], incarnation: int) -> None:
        """Give the replica what this memory proves, before its first engine life; the entries are forgotten."""
        if not self.belongs_to(incarnation):
            self.entries, self._proof = [], None
        outcome = replica.restore(self._proof_of(replica, shown).regained)
        self.entries, self._proof = [], None
        self.recovered = outcome.kept

    def _proof_of(self, replica: Replica, shown: Sequence[int]) -> _Proof:
        proof = self._proof
        if proof is None or not are_equal(proof.shown, shown):
            self._proof = proof = _Proof(shown, replica.regain([shown], self.entries))
        return proof


def _look_at(work: asyncio.Future[None]) -> None:
    """Who waits for it raises what it raised; nobody may."""
    if not work.cancelled():
        work.exception()
