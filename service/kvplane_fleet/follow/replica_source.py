"""Follows a replica of a kvplane service by the service's own event stream, which states groups and hashes exactly.

The client continues a broken stream after the last batch, and at another service if the replica moved. A stream that
lost batches begins with a gap and the entries of the replica. Digests in the stream are compared with what is known; if
they differ, the entries are learned again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from kvplane import aio, wire
from kvplane.base.errors import KvplaneError
from kvplane.base.events import EventBatch, GroupDigest, domain_mask
from kvplane.base.groups import ReplicaSpec
from kvplane.base.step import CacheEvent, EventKind
from kvplane.rpc.access import PLAIN, Access
from kvplane_fleet.slices import Sliced
from kvplane_fleet.wire.events import WHOLE_KEY_BYTES, Batch, Cleared, Event, GroupFormat, Removed, Stored, Tier

RETRY_S = 1.0
DIGEST_PERIOD_S = 60

_log = logging.getLogger(__name__)


class ReplicaSink(Protocol):
    """What takes the batches of a replica."""

    withdrawn: bool

    def use(self, spec: ReplicaSpec, namespace: bytes = b"") -> None:
        """Take note of the replica's groups and hashes, and of the replicas whose host tiers it may read."""

    def applying_batch(self, batch: Batch) -> Sliced[None]:
        """Apply the next batch."""

    def clear(self, life_ended: bool) -> None:
        """Forget all entries."""

    def agrees(self, digests: Sequence[GroupDigest]) -> bool:
        """Compare the entries with digests of the replica's."""


class ReplicaSource:
    """Follows one replica until its task is cancelled.

    Attributes:
        is_connected: whether the service answers.
        partial: the entries are not all read yet.
        digest_period_s: seconds between two comparisons of the entries.
        seq: number of the last batch.
        error: why the replica cannot be followed now; None while it is.
    """

    def __init__(self, services: str, replica: str, sink: ReplicaSink, access: Access = PLAIN) -> None:
        """`access`: TLS and token of the calls."""
        self._services, self._replica, self._sink, self._access = services, replica, sink, access
        self.error: KvplaneError | None = None
        self.is_connected = self.partial = False
        self.seq, self.digest_period_s = 0, DIGEST_PERIOD_S
        self._is_doubted = False
        self._forms: dict[int, GroupFormat] = {}
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Follow the replica; while it does not exist, or no service answers, try again."""
        access = self._access
        async with aio.connect(self._services, tls=access.tls, token=access.token) as client:
            while True:
                try:
                    await self._follow(client)
                except KvplaneError as error:
                    if self.error is None or self.error.reason != error.reason:  # once, not at each try
                        _log.warning("%s at %s cannot be followed: %s", self._replica, self._services, error)
                    self.is_connected, self.error = False, error
                    self._sink.clear(life_ended=True)
                    await asyncio.sleep(RETRY_S)

    def learn_again(self) -> None:
        """Follow the replica from the beginning at its next batch: its hits contradict the entries."""
        self._is_doubted = True

    async def wait_until(self, seq: int) -> None:
        """Wait until the batch with a number is applied; batch 0 is applied once the service answers."""
        while not self.is_connected or self.seq < seq:
            self._changed.clear()
            await self._changed.wait()

    async def _follow(self, client: aio.Client) -> None:
        await self._describe(client)
        self.error = None
        self.is_connected, self.seq, self.partial, self._is_doubted = True, 0, False, False
        self._changed.set()
        stream = client.subscribe(self._replica, after_seq=0, entries=True, digest_period_s=self.digest_period_s)
        async for batch in stream:
            for _ in self._taking(batch):
                await asyncio.sleep(0)
            if batch.gap:
                await self._describe(client)  # another service may have the replica, where it has other peers
            self._changed.set()
            if self._is_doubted:
                self._sink.clear(life_ended=True)
                return

    async def _describe(self, client: aio.Client) -> None:
        described = await client.describe_replica(self._replica)
        self._use(wire.decode_spec(described.spec), described.peer_namespace)

    def _use(self, spec: ReplicaSpec, namespace: bytes) -> None:
        self._forms = {
            number: GroupFormat(group.kind.value, group.block_size, group.window)
            for number, group in enumerate(spec.groups)
        }
        self._sink.use(spec, namespace)

    def _taking(self, batch: EventBatch) -> Sliced[None]:
        if batch.gap:
            self._sink.clear(life_ended=False)
        if batch.gap or batch.withdrawn or batch.restored:
            self._sink.withdrawn = batch.withdrawn
        # Batches of the entries have no number; the one behind them has.
        self.partial = batch.seq == 0 or (self.partial and self.seq > 0) or batch.gap
        self.seq = batch.seq
        if batch.events:
            yield from self._sink.applying_batch(Batch(0.0, [self._event(one) for one in batch.events]))
        if batch.digests and not self.partial and not self._sink.withdrawn:
            self._is_doubted = self._is_doubted or not self._sink.agrees(batch.digests)

    def _event(self, event: CacheEvent) -> Event:
        if event.kind is EventKind.CLEARED:
            return Cleared()
        mask = domain_mask(event.domain)
        keys = [int.from_bytes(digest[-WHOLE_KEY_BYTES:], "big") ^ mask for digest in event.hashes]
        tier = Tier[event.tier.name]
        if event.kind is EventKind.REMOVED:
            return Removed(event.group, tier, keys, WHOLE_KEY_BYTES)
        return Stored(event.group, tier, keys, self._forms[event.group], key_bytes=WHOLE_KEY_BYTES)


__all__ = ["ReplicaSink", "ReplicaSource"]
