"""One life of a service process: the product's parts behind the simulated network."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from kvplane.base.errors import KvplaneError, Unavailable
from kvplane.base.stamp_table import StampReading, agreed_stamps
from kvplane.base.step import EventKind
from kvplane.base.worker import WorkerInfo
from kvplane.v1 import allocation_pb2, plan_pb2
from kvplane_service import decisions
from kvplane_service.auth.visible import VisibleReplicas
from kvplane_service.config import Config
from kvplane_service.contents import ContentHasher
from kvplane_service.core import inspect
from kvplane_service.host import ReplicaHost, new_replica
from kvplane_service.registry import Entry, Registration, Registry
from kvplane_service.rpc.allocation import AllocationServicer
from kvplane_service.rpc.methods import Around, service_handler
from kvplane_service.rpc.session import SessionStreams
from kvplane_service.rpc.workers import WorkersServicer
from kvplane_service.store.keeper import Chance, Keeper
from kvplane_service.store.ownership import Durable, Ownership
from kvplane_service.store.writer import Surroundings
from tests.core.page_memory import WrongPage
from tests.sim import history
from tests.sim.network import Server

if TYPE_CHECKING:
    from tests.sim.world import World

ADDRESS = "service"
LEASE_MS = 1500
_EPOCH_MS = 1_700_000_000_000
CONFIG = Config(
    store="memory", lease_ms=LEASE_MS, worker_lease_ms=LEASE_MS, store_flush_ms=40, store_lag_ms=1000,
    store_lag_entries=200, decision_log_steps=8,
)  # fmt: skip


class Service:
    """Started by `main` in a process of its own; nothing survives it but the store."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.process = world.processes.start(f"service {number}")
        self.registry = Registry(CONFIG, world.loop.clock_ns)
        rng = world.rng
        around = Surroundings(world.loop.clock_ns, asyncio.sleep, world.store.offload, rng.random)
        chance = Chance(lambda: _EPOCH_MS + world.loop.clock_ns() // 1_000_000, lambda: rng.getrandbits(64) | 1)
        self.keeper = Keeper(self.registry, CONFIG, around, chance)
        self.ownership = Ownership(self.registry, CONFIG, self.keeper, around, _nobody_is_known_to_be_gone)
        self._published: dict[str, frozenset[tuple[int, int]]] = {}

    async def main(self) -> None:
        """From start to the end of the process."""
        self.registry.watch(self._entered)
        try:
            await self.keeper.start(self.world.store)
        except KvplaneError:
            self.process.kill()  # the store is away: whoever started it starts it again
            return
        await self.ownership.beat()
        self._serve()
        self.process.spawn(self._sweep())
        self.process.spawn(self.ownership.keep())
        await self._register_all()
        await self.keeper.load()
        await self.keeper.write()

    def _serve(self) -> None:
        server = Server(self.world.network, ADDRESS, self.process)
        visible = VisibleReplicas(self.registry, self.ownership.bring)
        streams = SessionStreams(visible, self.ownership, self._claim)
        durable = Durable(self.keeper, self.ownership)
        services = (
            (
                allocation_pb2.DESCRIPTOR.services_by_name["Allocation"],
                AllocationServicer(visible, streams, ContentHasher(CONFIG), durable),
            ),
            (plan_pb2.DESCRIPTOR.services_by_name["Workers"], WorkersServicer(visible)),
        )
        for descriptor, servicer in services:
            server.add_generic_rpc_handlers((service_handler(descriptor, servicer, Around(visible.bring)),))
        server.listen()

    async def _claim(self, worker: WorkerInfo, epoch: int) -> StampReading:
        """Reach a worker of this host: it may be dead, and the answer may get lost."""
        network, site = self.world.network, self.world.sites[worker.address.split("/")[0].removeprefix("unix:")]
        await asyncio.sleep(network.draw_delay())
        here = site.workers[worker.rank]
        if here.process.pid != worker.pid or not here.process.alive or here.process.paused:
            raise Unavailable("the worker does not answer")
        table = here.memory.table
        if epoch > table.owner_epoch:
            self.world.tell(history.Claimed((site.name, worker.rank, table.incarnation), epoch, 0))
        table.claim(epoch)
        reading = table.reading()
        await asyncio.sleep(network.draw_delay())
        if self.world.rng.random() < network.weather.lose:
            raise Unavailable("the answer was lost")
        return reading

    async def _register_all(self) -> None:
        """What an operator does: every replica is registered, whatever the store knew."""
        for site in self.world.sites.values():
            registration = Registration(site.spec, history.RANKS, b"", (site.plan,))
            if self.registry.find_equal(site.name, registration) is None:
                self.registry.add(site.name, registration, new_replica(site.spec))
                await self.keeper.settle(site.name)

    async def _sweep(self) -> None:
        """Look at leases; nobody's blocks may change by it."""
        while True:
            await asyncio.sleep(LEASE_MS / 4000)
            for entry in self.registry:
                before = _held(entry.host)
                entry.host.expire()
                if before != _held(entry.host):
                    self.world.tell(history.Lapsed(entry.host.name, before, _held(entry.host)))

    # -- what is seen of it ------------------------------------------------------------------------------------------

    @property
    def is_current(self) -> bool:
        """Whether this is the service that engines reach, not one that should have died."""
        return self.world.service is self

    def _entered(self, entry: Entry) -> None:
        entry.host.decisions.follow(partial(self._follow, entry.host))
        subscription = entry.host.events.subscribe(None, lambda: self._show(entry.host, subscription.take()))

    def _follow(self, host: ReplicaHost, entry: decisions.Entry) -> None:
        if isinstance(entry, decisions.Life):
            self._began(host, entry)
        else:
            self._applied(host, entry)
        try:
            inspect.check(host.replica)
        except AssertionError as error:
            self.world.tell(history.Broken(f"{host.name}: {error}"))
        if self.is_current:
            self._look_at_pages(host)
        pool = host.replica.coordinator.pool
        keyed = (block for block, key in enumerate(pool.key) if key is not None)
        published = (block for block in keyed if pool.key_step[block] <= pool.executed_through)
        self._published[host.name] = frozenset((block, pool.stamp[block]) for block in published)

    def _began(self, host: ReplicaHost, life: decisions.Life) -> None:
        site, pool = self.world.sites[host.name], host.replica.coordinator.pool
        readings = site.readings_of(life.incarnation)
        shown, due = agreed_stamps(readings), self._published.get(host.name, frozenset())
        if life.incarnation != site.known_incarnation or not life.stamp_table:
            due = frozenset()
        site.known_incarnation = life.incarnation
        kept = tuple((block, pool.stamp[block]) for block, key in enumerate(pool.key) if key)
        due = frozenset((block, stamp) for block, stamp in due if shown[block] == stamp)
        tables = tuple(reading.stamps for reading in readings)
        self.world.tell(history.Began(self.number, host.name, life.epoch, kept, tuple(sorted(due)), tables))

    def _applied(self, host: ReplicaHost, decision: decisions.Decision) -> None:
        step, result = decision.step, decision.result
        answer = history.fingerprint(result.parts)
        self.world.tell(history.Applied(self.number, host.name, step.epoch, step.seq, step.part, answer))
        for event in (event for events in decision.events for event in events if event.kind is EventKind.STORED):
            for digest, block in zip(event.hashes, event.blocks, strict=True):
                self.world.tell(
                    history.Stored(self.number, host.name, step.epoch, step.seq, event.group, block, digest)
                )

    def _show(self, host: ReplicaHost, batches) -> None:
        for event in (event for batch in batches for event in batch.events if event.kind is EventKind.STORED):
            for digest, block in zip(event.hashes, event.blocks, strict=True):
                self.world.tell(history.Published(self.number, host.name, host.epoch, event.group, block, digest))

    def _look_at_pages(self, host: ReplicaHost) -> None:
        site = self.world.sites[host.name]
        if site.incarnation != site.known_incarnation:
            return  # a worker died: the engine will find out, and nobody is given what this service still believes
        try:
            site.texts.check_keys(host.replica, [memory.pages for memory in site.memories])
        except WrongPage as error:
            self.world.tell(history.Wrong(f"{host.name}, step {host.replica.seq} of epoch {host.epoch}: {error}"))


async def _nobody_is_known_to_be_gone(_: str) -> bool:
    return False


def _held(host: ReplicaHost) -> str:
    """Which blocks requests hold."""
    coordinator, slots = host.replica.coordinator, host.replica.requests.slots()
    return str([(slot, coordinator.tables(slot)) for slot in slots] + sorted(host.replica.ledger.held.items()))
