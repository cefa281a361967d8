"""Holds the stored keys of a replica, after a start of the service, until the engine reconnects and the keys are
verified.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from kvplane.base.errors import Unavailable
from kvplane.base.groups import ReplicaSpec
from kvplane.base.session import OpenRequest
from kvplane.base.stamps import MAX_EPOCH
from kvplane_core.face.columns import are_equal
from kvplane_core.face.entries import Entries
from kvplane_core.face.interface import ReplicaCore
from kvplane_core.face.recovery import RecoveredState
from kvplane_service.replicas.stamps import Contents, shown_of
from kvplane_service.runtime.executors import Offload

UNSTORED_EPOCHS = 16  # epochs that may have begun without being stored yet
UNCLAIMED_EPOCHS = 4096  # epochs of the store that may have begun without claiming the page memory


@dataclass(frozen=True, slots=True)
class _Proof:
    """The result of verifying the entries against `shown`, the stamps of a page memory."""

    shown: Sequence[int]
    state: RecoveredState


@dataclass(slots=True)
class Recovering:
    """Entries of a store that wait until the stamps of a page memory verify them.

    Attributes:
        epoch: the highest epoch that has begun, according to the store.
        contents: incarnations of the page memory and of the disks that the entries belong to.
        loading: whether the store is still being read.
        entries: the entries read so far; the newest first once `loading` is False.
        rows: number of stored rows that were read.
        refused: number of stored chunks that were not used, by reason.
        failed: why reading the store was given up before all entries were read; "" if it was not given up.
        recovered: number of verified rows; None before verification.
    """

    epoch: int
    contents: Contents
    loading: bool = True
    entries: list[Entries] = field(default_factory=list)
    rows: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failed: str = ""
    recovered: int | None = None
    _observed: int = 0
    _proof: _Proof | None = None
    _proving: asyncio.Future[None] | None = None

    def check_loaded(self, name: str) -> None:
        """Raise Unavailable while the store is being read, and also after reading the store has failed permanently."""
        if self.failed:
            raise Unavailable(
                f"{name} cannot recover: reading its entries from the store failed: {self.failed}",
                field="replica",
                remedy="report it, with the log of the service; the next service reads the store again",
            )
        if self.loading:
            raise Unavailable(
                f"{name} is recovering: {self.rows} entries have been read from the store",
                field="replica",
                remedy="retry until the store is read",
            )

    def fail(self, why: str) -> None:
        """Record that the entries will not be read, and why. After that no session can open the replica."""
        self.loading, self.failed = False, why

    def shown_by(self, request: OpenRequest, spec: ReplicaSpec) -> Sequence[int]:
        """Return the stamps of an engine that can verify the entries."""
        return shown_of(request.stamp_table, spec, Contents.named_by(request), self.contents)

    def epoch_above(self, replica: ReplicaCore, shown: Sequence[int], owner: int) -> int:
        """Return an epoch in which no stamp was issued.

        It is above `owner`, the epoch that owns the page memory, the epochs of the stamps in the memory, and those in
        the store, with room for epochs that began but were not stored. What the store states counts up to
        UNCLAIMED_EPOCHS above the memory: otherwise one forged row would use up all epochs.
        """
        state = self._proof_of(replica, shown).state
        memory = max(owner, state.epoch, self._observed)
        stored = min(max(self.epoch, state.stored_epoch), memory + UNCLAIMED_EPOCHS)
        return max(memory, stored) + 1 + UNSTORED_EPOCHS

    def observe_epoch(self, epoch: int) -> None:
        """Record an epoch that an engine reports as begun; epochs above half of MAX_EPOCH are ignored."""
        if epoch < MAX_EPOCH // 2:
            self._observed = max(self._observed, epoch)

    async def prove_ahead(self, replica: ReplicaCore, shown: Sequence[int], offload: Offload) -> None:
        """Verify the entries on a thread, so that a following `epoch_above` and `prove` are fast.

        Only one page memory is verified at a time. If the caller is cancelled, the work continues, and the next caller
        uses its result.
        """
        while self.recovered is None and not (self._proof is not None and are_equal(self._proof.shown, shown)):
            if self._proving is None or self._proving.done():
                self._proving = asyncio.ensure_future(self._prove(replica, shown, offload))
                self._proving.add_done_callback(_look_at)
            await asyncio.shield(self._proving)

    async def _prove(self, replica: ReplicaCore, shown: Sequence[int], offload: Offload) -> None:
        state = await offload(partial(replica.verify_entries, [shown], self.entries))
        if self.recovered is None:
            self._proof = _Proof(shown, state)

    def prove(self, replica: ReplicaCore, shown: Sequence[int]) -> None:
        """Install the entries that these stamps verify, and drop the others; call it before the first engine life."""
        outcome = replica.install_recovered(self._proof_of(replica, shown).state)
        self.entries, self._proof = [], None
        self.recovered = outcome.kept

    def _proof_of(self, replica: ReplicaCore, shown: Sequence[int]) -> _Proof:
        proof = self._proof
        if proof is None or not are_equal(proof.shown, shown):
            self._proof = proof = _Proof(shown, replica.verify_entries([shown], self.entries))
        return proof


def _look_at(work: asyncio.Future[None]) -> None:
    """Retrieve the exception of a task, so that asyncio does not log it when no caller waits for the task any more."""
    if not work.cancelled():
        work.exception()
