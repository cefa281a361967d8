"""A replica with tiers in a registry, whose movers do each job at once, and what its workers report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvplane.base.groups import Medium, ReplicaSpec, TierKind, TierSpec
from kvplane.base.step import Cache, CacheEvent, End, EventKind, PartResult, RemoveReason, RowFlag
from kvplane.base.worker import TierUse, WorkerInfo
from kvplane.session.rows import AdmitRow, FactRow, NewsRow, RunRow, part_of
from kvplane_core.face import setup
from kvplane_service.config import Config
from kvplane_service.registry import Registration, Registry
from kvplane_service.telemetry.collector import ServiceCollector
from tests.core.follower import Follower
from tests.core.specification import specification_of
from tests.service.hosts import Engine, spec_of
from tests.service.monitoring import Pages, Series
from tests.service.test_workers import INFO, PLAN

HOST, DISK = TierSpec(TierKind.HOST, 30), TierSpec(TierKind.DISK, 60)
FILLS = 24  # prompts that do not fit the device


class Served:
    """The replica, an engine, and a follower of its events.

    Attributes:
        now_ns: a test moves it.
        events: all that were published.
        loads_fail, writes_fail: whether movers fail.
    """

    def __init__(self, *tiers: TierSpec, spec: ReplicaSpec | None = None) -> None:
        self.now_ns = 0
        self.registry = Registry(Config(), lambda: self.now_ns)
        given = spec or spec_of(21, tiers=tiers or (HOST, DISK))
        registration = Registration(given, namespace_digest=b"n" * 32, plans=(PLAN,))
        self.entry = self.registry.register("r", registration)
        self.host = self.entry.host
        self.engine = Engine(self.host, incarnation=5, disk_incarnation=50)
        self.follower = Follower()
        self.subscription = self.host.events.subscribe(0, lambda: None)
        self.events: list[CacheEvent] = []
        self.loads_fail = self.writes_fail = False
        self._loads: list[int] = []
        self._writes: list[int] = []

    def serve(self, fill: int, flags: RowFlag = RowFlag.NONE) -> list[int]:
        """One request of four blocks and a token from beginning to end; returns its tokens."""
        tokens = [fill] * 65
        result = self.step(NewsRow(0, tokens), AdmitRow(0, flags=flags))
        if result.admit_job and not self.loads_fail:
            self.step(RunRow(0))
        self.step(FactRow(0, end=End.FREE))
        return tokens

    def step(self, *rows: Any, **cache: Any) -> PartResult:
        part = part_of(*rows)
        ends: dict[bool, list[int]] = {False: [], True: []}
        ends[self.loads_fail] += self._loads
        ends[self.writes_fail] += self._writes
        part.cache = Cache(jobs_done=ends[False], jobs_failed=ends[True], **cache)
        (result,) = self.engine.step(part).parts
        orders = result.orders
        self._loads, self._writes = [*dict.fromkeys(orders.load_job)], [*orders.save_job, *orders.move_job]
        assert not any(event.tier for event in result.events)
        self.look()
        return result

    def look(self) -> None:
        batches = self.subscription.take()
        self.events += [event for batch in batches for event in batch.events]
        self.follower.read(batches)
        self.follower.check(specification_of(self.host.replica), self.engine.seq)

    def reopen(self, stamps: Any, incarnation: int = 5, disks: int = 50) -> None:
        self.engine = Engine(self.host, incarnation=incarnation, stamp_table=stamps, disk_incarnation=disks)
        self._loads, self._writes = [], []
        self.look()

    def report(self, *uses: TierUse) -> None:
        """What the worker of rank 0 says with a renewal."""
        self.entry.workers.register(WorkerInfo(INFO.rank, INFO.worker_id, INFO.address, INFO.pid, "cpu", tiers=uses))

    @property
    def stamps(self) -> list[int]:
        """What a memory shows that holds all that the core knows: of blocks, then of slots."""
        replica = specification_of(self.host.replica)
        slots = [tier.version.get(slot, 0) for tier in replica.tiers.each for slot in range(tier.num_slots)]
        return [*replica.coordinator.pool.stamp, *slots]

    def of(self, medium: Medium) -> list[tuple[EventKind, RemoveReason]]:
        return [(event.kind, event.reason) for event in self.events if event.tier is medium]


# -- over time ---------------------------------------------------------------------------------------------------------


def _pages(act: Callable[[Served, int], object], times: int = 40, served: Served | None = None) -> Series:
    """What the metrics show while something is done once between two pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "AHEAD_SHARE", 1)  # of these small pools, the whole
        served = served or Served()
        pages = Pages(ServiceCollector(served.registry))
        for number in range(times):
            pages.take()
            act(served, number)
    return pages.series()


def _ask(served: Served, number: int) -> None:
    for back in (0, 5, 8):
        served.serve((number - back) % FILLS, RowFlag.LOAD)


def busy_tiers() -> Series:
    """Blocks are saved, moved and loaded, and some are lost."""

    def act(served: Served, number: int) -> None:
        _ask(served, number)
        served.report(
            TierUse(TierKind.HOST, 4096, saved_bytes=number << 20, discarded_blocks=number),
            TierUse(TierKind.DISK, 4096, loaded_bytes=number << 20),
        )

    return _pages(act, 60)


def damaged_slots() -> Series:
    return _pages(lambda served, number: served.report(TierUse(TierKind.HOST, refused_blocks=number)))


def failing_disk() -> Series:
    use = TierUse(TierKind.DISK, failed_blocks=3, suspended=True)
    return _pages(lambda served, _: served.report(use))


def lost_saves() -> Series:
    def act(served: Served, number: int) -> None:
        served.writes_fail = True
        served.serve(number)

    return _pages(act)


def unread_peers() -> Series:
    def act(served: Served, number: int) -> None:
        served.report(TierUse(TierKind.PEERS, loaded_blocks=5 * number, discarded_blocks=number))

    return _pages(act)


def failing_loads() -> Series:
    def act(served: Served, number: int) -> None:
        served.loads_fail = True
        served.serve(number)
        served.serve(max(0, number - 6), RowFlag.LOAD)

    return _pages(act)
