"""A subscriber that reads every batch of a replica's events, and what its view must be.

    whenever nothing is in flight       the view is what the core publishes: every (block, domain, group, digest)
    before that                         nothing is in the view that is not published, and so nothing that has gone

`Followed` puts a follower behind a bare core, with the service's own publication in between (`publish_step`), which is
judged too: what the view must be is read from the core. Elsewhere a `Follower` reads a subscription.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvplane.base.events import domain_mask
from kvplane.base.groups import Medium
from kvplane.base.step import CacheEvent, EventKind, Step, StepResult
from kvplane_core.face.cache_events import runs_of
from kvplane_core.spec.replica import Replica
from kvplane_service.decisions.packed_log import LogBudget
from kvplane_service.replicas.events import Batch, EventLog, PublicationHold
from kvplane_service.replicas.published import EntriesDigest, EntriesScan
from tests.core.specification import specification_of

SCANNED_AT_ONCE = 3  # blocks of a slice


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
        self._scan = self._new_scan()

    def begin(self, epoch: int) -> None:
        """A new engine life began in the core."""
        self._last_stored = 0
        shown = self._hold.begin_life(runs_of(self._replica.take_events()))
        self._publish(epoch, [*shown, *self._replica.tiers.take_events()])

    def step(self, step: Step, result: StepResult) -> None:
        """A step was applied."""
        events = [part.events for part in result.parts]
        if any(run.kind is EventKind.STORED for of_part in events for run in runs_of(of_part)):
            self._last_stored = step.seq
        self._log.publish_step(self._hold, step, events, [part.tier_events for part in result.parts])
        self._take()

    def _publish(self, epoch: int, events: Iterable[CacheEvent]) -> None:
        self._log.publish(epoch, events)
        self._take()

    def _take(self) -> None:
        batches = self._subscription.take()
        self.follower.read(batches)
        self.follower.check(self._replica, self._last_stored)
        for batch in batches:
            self._take_scanned(self._scan.follow(runs_of(batch.events)))
        self._take_scanned(self._scan.read())
        if self._scan.has_ended:
            self._check_scanned()
            self._scan = self._new_scan()

    # What a subscriber reads that begins now: counts of keys, as a router has them.

    def _new_scan(self) -> EntriesScan:
        self._scanned, self._digest = Counter[tuple[object, ...]](), EntriesDigest(len(self._replica.spec.groups))
        return EntriesScan(self._replica, self._hold, SCANNED_AT_ONCE)

    def _take_scanned(self, events: Sequence[CacheEvent]) -> None:
        self._digest.take(events)
        for event in events:
            keys = [(event.domain, event.group, digest, event.tier) for digest in event.hashes]
            if event.kind is EventKind.CLEARED:
                self._scanned.clear()
            elif event.kind is EventKind.STORED:
                self._scanned.update(keys)
            else:
                self._scanned.subtract(keys)
                if min(self._scanned[key] for key in keys) < 0:
                    raise WrongView("removed and never read")

    def _check_scanned(self) -> None:
        shown = Counter[tuple[object, ...]](one[1:] for one in self.follower.view)
        if +self._scanned != shown:
            raise WrongView(f"entries as they were read differ from those shown by {self._scanned - shown}")
        sums = [0] * len(self._replica.spec.groups)
        for one in self.follower.view:
            if one.tier is Medium.DEVICE:
                sums[one.group] += int.from_bytes(one.digest[-16:], "big") ^ domain_mask(one.domain)
        if [one.sum for one in self._digest.digests()] != [each % (1 << 128) for each in sums]:
            raise WrongView("the digest is not that of the entries shown")


def entries(event: CacheEvent) -> Iterator[Shown]:
    """The entries that a STORED or REMOVED event names."""
    for digest, block in zip(event.hashes, event.blocks, strict=True):
        yield Shown(block, event.domain, event.group, digest, event.tier)


def _published(replica: Replica) -> Iterator[Shown]:
    pool = specification_of(replica).coordinator.pool
    for block in range(pool.num_blocks):
        key = pool.key_of(block)
        if key is None or pool.key_step[block] > pool.executed_through:
            continue
        for one in (key, *pool.more_keys.get(block, ())):
            yield Shown(block, *one)
    for tier in replica.tiers.each:
        for key, slot in tier.in_order():
            yield Shown(slot, *key, tier.medium)
