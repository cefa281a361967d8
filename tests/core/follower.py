"""A subscriber that reads every batch of a replica's events, and what its view must be.

    whenever nothing is in flight       the view is what the core publishes: every (block, domain, group, digest)
    before that                         nothing is in the view that is not published, and so nothing that has gone

`Followed` puts a follower behind a bare core, with the publication of the service in between; elsewhere a `Follower`
reads a subscription.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvplane.base.groups import Medium
from kvplane.base.step import CacheEvent, EventKind, Step, StepResult
from kvplane_service.core.cache_events import runs_of
from kvplane_service.core.replica import Replica
from kvplane_service.decisions.packed_log import LogBudget
from kvplane_service.replicas.events import Batch, EventLog, PublicationHold


class Shown(NamedTuple):
    """One entry of a view: a key, and a block or a slot of a tier that has it."""

    block: int
    domain: str
    group: int
    digest: bytes
    tier: Medium = Medium.DEVICE


class WrongView(AssertionError):
    """The view of a follower has a key that is not published, or lacks one that is."""


class Follower:
    """The keys that one subscriber of the events has. Attributes: `view`, and whether it is `withdrawn` by a lapse."""

    def __init__(self) -> None:
        self.view: set[Shown] = set()
        self.withdrawn = False
        self._seq = 0

    def read(self, batches: Iterable[Batch]) -> None:
        """Take batches as the contract says. Raises WrongView for an event that cannot be."""
        for batch in batches:
            if self._seq and batch.seq != self._seq + 1 and not batch.gap:
                raise WrongView(f"batch {batch.seq} after {self._seq}")
            self._seq = batch.seq
            if batch.gap:
                self.view.clear()
            self.withdrawn = batch.withdrawn or (self.withdrawn and not batch.restored)
            for event in batch.events:
                self._take(event)

    def _take(self, event: CacheEvent) -> None:
        if event.kind is EventKind.CLEARED:
            self.view.clear()
            return
        named = set(entries(event))
        if event.kind is EventKind.STORED:
            self.view |= named
        elif named <= self.view:
            self.view -= named
        else:
            raise WrongView(f"removed and never shown: {named - self.view}")

    def check(self, replica: Replica, last_seq: int) -> None:
        """Raise WrongView unless the view is right; `last_seq` is the last step that was applied.

        What a step stores is shown by the step that says it was executed, so the newest step counts as in flight.
        """
        published = set(_published(replica))
        if not self.view <= published:
            raise WrongView(f"shown, and not published: {sorted(self.view - published)[:4]}")
        if replica.executed_through >= last_seq and self.view != published:
            raise WrongView(f"published, and not shown: {sorted(published - self.view)[:4]}")


class Followed:
    """The publication of a service behind a core that is driven by itself, and a follower of it."""

    def __init__(self, replica: Replica) -> None:
        """The follower begins with what the replica publishes."""
        self.follower = Follower()
        self.follower.view = set(_published(replica))
        self._replica = replica
        self._hold = PublicationHold()
        self._log = EventLog(1 << 20, LogBudget(1 << 40), max_subscribers=1)
        self._subscription = self._log.subscribe(None, lambda: None)
        self._last_stored = 0

    def begin(self, epoch: int) -> None:
        """A new engine life began in the core."""
        self._last_stored = 0
        shown = self._hold.begin_life(runs_of(self._replica.take_events()))
        self._publish(epoch, [*shown, *self._replica.tiers.take_events()])

    def step(self, step: Step, result: StepResult) -> None:
        """A step was applied."""
        runs = [run for part in result.parts for run in runs_of(part.events)]
        if any(run.kind is EventKind.STORED for run in runs):
            self._last_stored = step.seq
        of_tiers = [event for part in result.parts for event in part.tier_events]
        self._publish(step.epoch, [*self._hold.step(step.seq, step.executed_through, runs), *of_tiers])

    def _publish(self, epoch: int, events: Iterable[CacheEvent]) -> None:
        self._log.publish(epoch, events)
        self.follower.read(self._subscription.take())
        self.follower.check(self._replica, self._last_stored)


def entries(event: CacheEvent) -> Iterator[Shown]:
    """The entries that a STORED or REMOVED event names."""
    for digest, block in zip(event.hashes, event.blocks, strict=True):
        yield Shown(block, event.domain, event.group, digest, event.tier)


def _published(replica: Replica) -> Iterator[Shown]:
    pool = replica.reference().coordinator.pool
    for block in range(pool.num_blocks):
        key = pool.key_of(block)
        if key is None or pool.key_step[block] > pool.executed_through:
            continue
        for one in (key, *pool.more_keys.get(block, ())):
            yield Shown(block, *one)
    for tier in replica.tiers.each:
        for key, slot in tier.in_order():
            yield Shown(slot, *key, tier.medium)
