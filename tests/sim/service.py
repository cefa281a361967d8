"""One life of a service process: the product's parts behind the simulated network."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvplane.base.errors import KvplaneError, Unavailable
from kvplane.base.stamp_table import agreed_stamps
from kvplane.base.step import EventKind
from kvplane.base.worker import WorkerInfo
from kvplane.v1 import allocation_pb2, plan_pb2
from kvplane_core.face import inspect
from kvplane_core.face.interface import BrokenInvariant
from kvplane_service.auth.visible import VisibleReplicas
from kvplane_service.config import Config
from kvplane_service.decisions import log as decisions
from kvplane_service.registry import Entry, Registration, Registry, UnknownReplica
from kvplane_service.replicas.events import Batch, Subscription
from kvplane_service.replicas.host import ReplicaHost, new_replica
from kvplane_service.replicas.host_state import ReplicaState
from kvplane_service.replicas.idle_check import IdleCheck, check_in_background
from kvplane_service.rpc.allocation import AllocationServicer
from kvplane_service.rpc.claims import CLAIM_TIMEOUT_S, ClaimedPages
from kvplane_service.rpc.methods import CallHooks, service_handler
from kvplane_service.rpc.session import SessionStreams
from kvplane_service.rpc.workers import WorkersServicer
from kvplane_service.store.keeper import Entropy, Keeper
from kvplane_service.store.offloaded import OffloadedShared
from kvplane_service.store.owners import OwnerUnknown, StoreOwners
from kvplane_service.store.ownership import Ownership
from kvplane_service.store.registration import unpack_record
from kvplane_service.store.writer import Runtime
from tests.core import compared
from tests.core.follower import Follower, WrongView
from tests.core.page_memory import WrongPage
from tests.core.specification import specification_of
from tests.sim import history, mirror_views
from tests.sim.evictions import Known
from tests.sim.mirror_rules import MAX_LAG_MS
from tests.sim.network import Server
from tests.sim.store import Access
from tests.sim.workers import Worker

if TYPE_CHECKING:
    from tests.sim.world import Site, World

ADDRESSES = ("one", "two")
LEASE_MS = 1500
IDLE_CHECK_MS = 40
_ANNOUNCING = 1 << 62  # a new life publishes its keys in pieces
OWNER_LEASE_MS = 900
GRACE_MS = 1500
_LAST_CALLS_S = 0.2
_EPOCH_MS = 1_700_000_000_000
CONFIG = Config(
    store="redis://everybody", lease_ms=LEASE_MS, worker_lease_ms=LEASE_MS, store_flush_ms=40, store_lag_ms=1000,
    store_lag_entries=200, decision_log_steps=8, owner_lease_ms=OWNER_LEASE_MS, drain_grace_ms=GRACE_MS,
    mirror_max_lag_ms=MAX_LAG_MS,
)  # fmt: skip


if os.environ.get("KVPLANE_COMPARED"):  # both cores decide, in each process of a campaign
    compared.in_services().__enter__()


class Service:
    """One service process, started by `main`; only the store survives it."""

    def __init__(self, world: World, nth: int, address: str) -> None:
        self.world, self.address = world, address
        self.process = world.processes.start(f"service {nth} at {address}")
        self.number = self.process.pid  # as ranks know it
        config = CONFIG.model_copy(update={"listen": address, "store_timeout_ms": world.store_timeout_ms})
        self.registry = Registry(config, world.loop.clock_ns)
        rng = world.rng
        self._access = Access(world.store, address, self._owned, self._wrote)
        runtime = Runtime(world.loop.clock_ns, asyncio.sleep, asyncio.to_thread, rng.random)
        entropy = Entropy(lambda: _EPOCH_MS + world.loop.clock_ns() // 1_000_000, lambda: rng.getrandbits(64) | 1)
        self.keeper = Keeper(self.registry, config, runtime, entropy)
        probe = partial(world.network.probe, place=address)
        owners = StoreOwners(self.keeper, config.owner_lease_ms, probe)
        self.ownership = Ownership(self.registry, config, self.keeper, runtime, owners)
        self.server = Server(world.network, address, self.process)
        self._is_draining = self._is_ending = self.has_served = False
        self._tasks: list[asyncio.Task[None]] = []
        self._seen: dict[str, Seen] = {}

    async def main(self) -> None:
        """From start to the end of the process."""
        self.registry.watch(self._entered)
        try:
            timeout_s = self.world.store_timeout_ms / 1000
            await self.keeper.start(OffloadedShared(lambda: self.world.store, self._access.offload, timeout_s))
        except KvplaneError:
            self.process.kill()  # the store is unavailable: the supervisor starts the service again
            return
        await self.ownership.beat()
        self._serve()
        background = (self._sweep(), self.ownership.keep(), self._check_idle(), self.keeper.supervise_loads())
        self._tasks = [self.process.spawn(work) for work in background]
        await self._register_all()
        await self.keeper.load()
        if not self._is_ending:
            self._tasks.append(self.process.spawn(self.keeper.write()))

    def _serve(self) -> None:
        visible = VisibleReplicas(self.registry, self.ownership.ensure_local)
        self.streams = SessionStreams(visible, self.ownership, self._claim)
        self.allocation = AllocationServicer(visible, self.streams, self.keeper, self.ownership)
        services = (
            (allocation_pb2.DESCRIPTOR.services_by_name["Allocation"], self.allocation),
            (plan_pb2.DESCRIPTOR.services_by_name["Workers"], WorkersServicer(visible)),
        )
        for descriptor, servicer in services:
            handler = service_handler(descriptor, servicer, CallHooks(visible.ensure_local))
            self.server.add_generic_rpc_handlers((handler,))
        self.server.listen()
        self.has_served = True

    def drain(self) -> None:
        """SIGTERM."""
        if not self._tasks:
            self.process.kill()  # it has not started to serve
        elif self.is_current and self.process.alive and not self._is_draining:
            self._is_draining = True
            self.process.spawn(self._drain())

    async def _drain(self) -> None:
        """As RpcServer.drain and the end of App."""
        self.streams.refuse_new()
        self.allocation.refuse_new()
        leaving = asyncio.create_task(self.ownership.leave(self.streams.replicas()))
        await self.streams.drain(GRACE_MS)
        await leaving
        await self.ownership.leave(())
        await self.server.stop(_LAST_CALLS_S)
        self._is_ending = True
        for task in self._tasks:
            task.cancel()
        await self.keeper.stop()
        self.process.kill()

    async def _claim(self, worker: WorkerInfo, epoch: int) -> ClaimedPages:
        """Claim a worker of this host; it may be dead, and the response may get lost."""
        network, site = self.world.network, self.world.sites[worker.address.split("/")[0].removeprefix("unix:")]
        await asyncio.sleep(network.draw_delay())
        here = site.workers[worker.rank]
        if self.address in site.remote:
            raise Unavailable("the worker is of another host")
        if here.process.pid != worker.pid or not here.process.alive:
            raise Unavailable("the worker does not answer")
        if site.spec.tiers and self.world.seed % 5 == 0 and self.world.rng.random() < 0.5:
            raise Unavailable("the worker is not reached")  # its movers still work for the engine before
        table = here.memory.table
        if here.process.paused:
            self._claim_late(here, epoch)
            await asyncio.sleep(CLAIM_TIMEOUT_S)
            raise Unavailable("the worker does not answer in time")
        if epoch > table.owner_epoch:
            self.world.record(history.Claimed((site.name, worker.rank, table.incarnation), epoch, 0, self.process.pid))
        pages = _begin_life(here, epoch)
        await asyncio.sleep(network.draw_delay())
        if self.world.rng.random() < network.weather.lose:
            raise Unavailable("the answer was lost")
        return pages

    def _claim_late(self, worker: Worker, epoch: int) -> None:
        """A paused worker may execute the claim when it continues, although no caller waits for it."""

        async def claim() -> None:
            table = worker.memory.table
            if self.world.rng.random() < 0.5 and epoch > table.owner_epoch:
                place = (worker.replica, worker.rank, table.incarnation)
                self.world.record(history.Claimed(place, epoch, 0, self.process.pid))
                _begin_life(worker, epoch)

        worker.process.spawn(claim())

    async def _register_all(self) -> None:
        """Register every replica, as an operator does, whatever the store has."""
        for site in self.world.sites.values():
            try:
                if site.name not in self.registry:
                    await self.ownership.ensure_local(site.name)
            except (UnknownReplica, OwnerUnknown):
                self._register(site)
                await self.keeper.flush(site.name)
            except KvplaneError:
                continue  # another service has it

    def _register(self, site: Site) -> None:
        registration = Registration(site.spec, history.RANKS, b"sim" if site.spec.tiers else b"", (site.plan,))
        if self.registry.find_equal(site.name, registration) is None:
            self.registry.add(site.name, registration, new_replica(site.spec))

    async def _sweep(self) -> None:
        """Check leases; no request's blocks may change."""
        while True:
            await asyncio.sleep(LEASE_MS / 4000)
            for entry in self.registry:
                before = _held(entry.host)
                entry.host.expire()
                if before != _held(entry.host):
                    self.world.record(history.Lapsed(entry.host.name, before, _held(entry.host)))
                if self._is_mirrored(entry.host.name):
                    mirror_views.view(self, self._seen[entry.host.name], is_message=False)

    async def _check_idle(self) -> None:
        """As App does; a finding is a failure of the run."""

        def report(name: str, error: BrokenInvariant) -> None:
            self.world.record(history.Broken(f"{name}, idle: {error.invariant}: {error}"))

        def checks() -> Iterator[IdleCheck]:
            return (entry.host.idle_check for entry in self.registry)

        await check_in_background(checks, IDLE_CHECK_MS, self.world.loop.clock_ns, asyncio.sleep, report)

    # -- what is seen of it ------------------------------------------------------------------------------------------

    @property
    def serves(self) -> bool:
        """Whether it takes calls."""
        listens = self.world.network.servers.get(self.address) is self.server
        return listens and self.process.alive and not self._is_draining

    @property
    def is_current(self) -> bool:
        """Whether this is the current service at its address, not a predecessor that is still running."""
        return self.world.services[self.address] is self

    def _owned(self) -> set[str]:
        """Replicas that this service may write: its own, and those that it is releasing."""
        return set(self.keeper._journals)

    def _wrote(self, replica: str, is_owned: bool, record: bytes) -> None:
        self.world.record(history.Wrote(self.number, replica, is_owned))
        seen = self._seen.get(replica)
        if record and seen is not None and seen.host.is_retired and unpack_record(record).released:
            site = self.world.sites[replica]
            # A late write: another service has begun a life without it, so these keys are not what the next one gets.
            if site.last_begun_by in (None, self.number):
                site.note_flushed(seen.shown(), seen.incarnation, self.world)

    def _entered(self, entry: Entry) -> None:
        host = entry.host
        if host.name not in self.world.sites:
            return  # a bystander's
        seen = self._seen[host.name] = Seen(host, self.world.loop.clock_ns())
        host.decisions.follow(partial(self._follow, host))
        seen.subscription = host.events.subscribe(None, lambda: None)
        if self._is_mirrored(host.name):
            mirror_views.watch(self, seen)

    def _is_mirrored(self, replica: str) -> bool:
        return replica in self.world.sites and self.world.sites[replica].is_mirrored

    def _follow(self, host: ReplicaHost, entry: decisions.Entry) -> None:
        if self._is_mirrored(host.name):
            mirror_views.follow(self, self._seen[host.name], entry)
        elif isinstance(entry, decisions.Life):
            self._began(host, entry)
        else:
            self._applied(host, entry)
        try:
            inspect.check(host.replica)
        except AssertionError as error:
            self.world.record(history.Broken(f"{host.name}: {error}"))
        self._look_at_pages(host)
        asyncio.get_running_loop().call_soon(self.read_events, self._seen[host.name])
        pool = specification_of(host.replica).coordinator.pool
        keyed = (block for block, key in enumerate(pool.key) if key is not None)
        published = (block for block in keyed if pool.key_step[block] <= pool.executed_through)
        self._seen[host.name].published = frozenset((block, pool.stamp[block]) for block in published)
        self._seen[host.name].known = Known.of(specification_of(host.replica))

    def _began(self, host: ReplicaHost, life: decisions.Life) -> None:
        site, seen = self.world.sites[host.name], self._seen[host.name]
        pool = specification_of(host.replica).coordinator.pool
        readings = site.readings_of(life.incarnation)
        shown = agreed_stamps(readings)
        size, busy = host.replica.spec.blocks_per_state, pool.busy

        def proven(blocks: frozenset[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
            return tuple(sorted((block, stamp) for block, stamp in blocks if shown[block] == stamp and is_whole(block)))

        def is_whole(block: int) -> bool:
            """With split pages, what a load may still write to the first block of a superblock may be a state."""
            return block % size == 0 or block - block % size not in busy

        knows_memory = life.incarnation == seen.incarnation and bool(life.stamp_table)
        due = proven(seen.published) if knows_memory else ()
        is_adopted = host.recovered is not None
        flushed = proven(site.flushed(life.incarnation, seen.entered_ns, self.world)) if is_adopted else ()
        flushed = flushed if life.stamp_table else ()  # a life for unary calls, such as a reset, keeps nothing
        seen.incarnation, seen.last_stored = life.incarnation, _ANNOUNCING
        kept = tuple((block, pool.stamp[block]) for block, key in enumerate(pool.key) if key)
        tables = tuple(tuple(reading.stamps) for reading in readings)
        named = self.number, host.name, life.epoch, host._life_nonce, seen.entered_ns
        self.world.record(history.Began(*named, kept, due, flushed, tables))

    def _applied(self, host: ReplicaHost, decision: decisions.Decision) -> None:
        step, result = decision.step, decision.result
        answer = history.fingerprint(result.parts)
        self.world.record(history.Applied(self.number, host.name, step.epoch, step.seq, step.part, answer))
        name, known = (self.number, step.epoch, step.seq), self._seen[host.name].known
        self.world.sites[host.name].evictions.decided(name, known, decision, specification_of(host.replica))
        stored = [event for events in decision.events for event in events if event.kind is EventKind.STORED]
        seen = self._seen[host.name]
        if stored or seen.last_stored == _ANNOUNCING:
            seen.last_stored = step.seq
        for event in stored:
            for digest, block in zip(event.hashes, event.blocks, strict=True):
                self.world.record(
                    history.Stored(self.number, host.name, step.epoch, step.seq, event.group, block, digest)
                )

    def read_events(self, seen: Seen) -> None:
        """A subscriber reads the events; between two messages its view equals the published keys."""
        host, subscription = seen.host, seen.subscription
        if host.is_retired or subscription is None or not self.process.alive:
            return
        batches = subscription.take()
        self._show(host, batches)
        try:
            seen.follower.read(batches)
            if not self._is_mirrored(host.name) or host.state is ReplicaState.LIVE:
                seen.follower.check(specification_of(host.replica), seen.last_stored)
        except WrongView as error:
            self.world.record(history.Misled(f"{host.name}, step {host.replica.seq} of epoch {host.epoch}: {error}"))

    def _show(self, host: ReplicaHost, batches: Iterable[Batch]) -> None:
        events = ((batch.epoch, one) for batch in batches for one in batch.events if not one.tier)
        stored = ((epoch, one) for epoch, one in events if one.kind is EventKind.STORED)
        for epoch, event in stored:
            for digest, block in zip(event.hashes, event.blocks, strict=True):
                self.world.record(history.Published(self.number, host.name, epoch, event.group, block, digest))

    def _look_at_pages(self, host: ReplicaHost) -> None:
        """Check every published page, unless the service's state is outdated: its worker died, or another service has
        the session, also under the same epoch; then no engine gets anything from this service.
        """
        site = self.world.sites[host.name]
        if site.is_mirrored:
            return  # the engine checks its own, and a service follows later
        owner = max(memory.table.owner_epoch for memory in site.memories)
        if not self.is_current or site.incarnation != self._seen[host.name].incarnation or owner > host.epoch:
            return
        if site.claimed_by.get(host.epoch, host._life_nonce) != host._life_nonce:
            return
        try:
            pages = [memory.pages for memory in site.memories]
            site.texts.check_keys(specification_of(host.replica), pages, site.invalid_blocks())
            for memory in site.memories:
                if memory.tiers is not None:
                    memory.tiers.check_keys(specification_of(host.replica), site.texts)
        except WrongPage as error:
            self.world.record(history.Wrong(f"{host.name}, step {host.replica.seq} of epoch {host.epoch}: {error}"))


@dataclass
class Seen:
    """State of a replica in one service, as observed.

    Attributes:
        entered_ns: when it was registered there, or adopted.
        incarnation: of the memory that the newest engine life named.
        published: published blocks, and their stamps.
        known: keys and jobs after the last step.
    """

    host: ReplicaHost
    entered_ns: int
    incarnation: int = 0
    published: frozenset[tuple[int, int]] = frozenset()
    known: Known = field(default_factory=Known)
    last_stored: int = 0  # newest step that registered a key
    age_ms: int = 0  # of the last steps of a mirrored engine when they were sent
    follower: Follower = field(default_factory=Follower)
    subscription: Subscription | None = None

    def shown(self) -> frozenset[tuple[int, int]]:
        """Blocks with published keys, and their stamps."""
        stamps = specification_of(self.host.replica).coordinator.pool.stamp
        return frozenset((one.block, stamps[one.block]) for one in self.follower.view if not one.tier)


def _held(host: ReplicaHost) -> str:
    """Blocks that requests hold."""
    replica = specification_of(host.replica)
    tables = [(slot, specification_of(replica).coordinator.tables(slot)) for slot in replica.requests.slots()]
    return str(tables + sorted(specification_of(replica).tracker.held.items()))


def _begin_life(worker: Worker, epoch: int) -> ClaimedPages:
    """As the worker's Claim."""
    table, tiers = worker.memory.table, worker.memory.tiers
    busy = () if tiers is None else tiers.movers.claim(epoch)
    if tiers is None:
        table.begin_life(epoch)
    return ClaimedPages(table.reading(), busy)
