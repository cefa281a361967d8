"""One run: replicas, workers, engines and services from a seed, with injected faults and a history."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from contextvars import Context
from copy import copy
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from kvplane.base.errors import KvplaneError
from kvplane.base.groups import AlignSpec, EvictionPolicy, GroupSpec, ReplicaSpec
from kvplane.base.stamp_table import StampReading
from kvplane.rank import RankGroup
from kvplane.sansio.owners import Owners
from kvplane_service.replicas.host import new_replica
from tests.core.builders import chunked, full, replica_spec, ring, state, window
from tests.core.page_requests import Texts, Transfer
from tests.core.save_rules import with_checkpoints, with_shares
from tests.core.test_page_contents import SPLIT_MIXES
from tests.core.tier_engine import small_pools
from tests.sim import history, rules
from tests.sim.chaos import Chaos
from tests.sim.engine import EngineLife
from tests.sim.evictions import Evictions
from tests.sim.hanging import HangingChaos, begin_bystanders
from tests.sim.loop import Process, VirtualLoop
from tests.sim.mirrored import MirrorChaos, MirroredLife
from tests.sim.network import Network, Server
from tests.sim.operators import Operator, has_operators
from tests.sim.service import ADDRESSES, Service
from tests.sim.store import WildStore
from tests.sim.tiers import SimTiers, TieredLife, draw_tiers
from tests.sim.transport import owners_at
from tests.sim.workers import Processes, RankMemory, Worker, plan_of

STEPS, MOST_STEPS = 300, 900  # a run without a hit across services continues until there is one
_SETTLED_S = 10.0  # after the last fault
_LAST_WORDS_S = 0.01  # tasks of killed processes end
LONGEST_S = 600.0  # of virtual time: a longer run is stuck

MIXES: tuple[tuple[Sequence[GroupSpec], dict[str, Any]], ...] = (
    ((window(6), full()), {"retention_interval": 0}),
    ((chunked(8), full(lookup_class=5)), {}),
    ((state(), full()), {"align": AlignSpec(4, 4096)}),
    ((state(8), full(8)), {"hash_block_size": 4, "partial_hits": True, "align": AlignSpec(8, 4096, stop_at_tail=True)}),
    ((window(5, 2), full(8), full(4, lookup_class=5)), {"hash_block_size": 2, "partial_hits": True}),
    (
        (full(), window(6), window(10, lookup_class=8), chunked(8), state(), ring()),
        {"retention_interval": 8, "eviction": EvictionPolicy.WINDOW_TAIL},
    ),
    ((full(), window(6, is_draft=True, drops_last_block=True)), {}),
    ((state(speculative_blocks=2), full(is_draft=True, drops_last_block=True)), {}),
)  # fmt: skip


class Site:
    """One replica: its registration, and the memory of its ranks.

    Attributes:
        remote: addresses of services that cannot reach its workers.
        is_alike: new memory has the stamps of the previous one.
        begun_by: which service began an epoch; of a mirrored replica, the process of its engine.
        last_begun_by: that of the last one; None before the first.
        claimed_by: by epoch, the engine life for which the ranks were claimed.
        is_mirrored: its engines decide themselves.
        retains: callers retain prefixes of its prompts.
    """

    retains = False

    def __init__(
        self, name: str, rng: Random, is_mirrored: bool = False, has_tiers: bool = False, has_split_pages: bool = False
    ) -> None:
        groups, changes = rng.choice([*SPLIT_MIXES.values()] if has_split_pages else MIXES)
        if has_tiers:
            changes = {**changes, "tiers": draw_tiers(rng)}
        blocks = rng.choice([20, 26] if has_tiers else [24, 32, 48]) * (2 if len(groups) > 3 else 1)
        self.name, self.is_mirrored = name, is_mirrored
        self.spec: ReplicaSpec = replica_spec(
            *groups, **{"num_blocks": blocks, "max_model_len": 64, "max_in_flight_tokens": 256, **changes}
        )
        if has_tiers:
            self.spec = with_checkpoints(self.spec, copy(rng))  # a copy: the rest of the run of a seed stays as it was
        self.usable = new_replica(self.spec).free_blocks
        self.most_drafts = 2 if any(group.is_draft or group.speculative_blocks for group in groups) else 0
        self.plan = plan_of(self.spec)
        self.texts = Texts(self.spec)
        self.evictions = Evictions(self.texts, history.RANKS)
        self.memories: list[RankMemory] = []
        self.workers: list[Worker] = []
        self.lives: list[EngineLife] = []
        self.begun_by: dict[int, int] = {}
        self.last_begun_by: int | None = None
        self.claimed_by: dict[int, int] = {}
        self.remote = set(rng.choice([(), (), ADDRESSES[:1], ADDRESSES[1:], ADDRESSES]))
        self.is_alike = rng.random() < 0.7
        self.is_finished = False
        self._flushed: Flushed | None = None
        self._movers: list[Transfer] = []

    @property
    def incarnation(self) -> int:
        return RankGroup([memory.table for memory in self.memories]).incarnation

    def note_flushed(self, shown: frozenset[tuple[int, int]], incarnation: int, world: World) -> None:
        """Record that a service has released the replica with these blocks and stamps of that memory in the store."""
        num_unread = world.store.num_unread[self.name]
        self._flushed = Flushed(shown, incarnation, world.loop.clock_ns(), num_unread)

    def flushed(self, incarnation: int, entered_ns: int, world: World) -> frozenset[tuple[int, int]]:
        """Keys in the store for a service that adopts the replica; returned once, to the next engine life. None if
        their log could not be read: that life begins without it.
        """
        flushed, self._flushed = self._flushed, None
        if flushed is None or flushed.at_ns > entered_ns or world.store.damages:
            return frozenset()
        if world.store.num_unread[self.name] != flushed.num_unread:
            return frozenset()
        return flushed.blocks if flushed.incarnation == incarnation else frozenset()

    def leave_mover(self, load: Transfer, world: World) -> None:
        """Keep a started transfer, which outlives its engine and continues to write."""
        if any(memory.pages in load.memories for memory in self.memories):
            self._movers.append(load)
            asyncio.get_running_loop().create_task(self._move(load, world.rng), context=Context())

    async def _move(self, load: Transfer, rng: Random) -> None:
        while not load.is_done:
            await asyncio.sleep(rng.random() * 0.3)
            load.write(rng.randint(1, 3))
        self._movers.remove(load)

    def loading_blocks(self) -> set[int]:
        """Blocks that loads from tiers may still write."""
        return set().union(*(one.tiers.blocks_of_loads() for one in self.memories if one.tiers is not None))

    def busy_blocks(self) -> tuple[int, ...]:
        """Blocks that transfers of earlier engine lives may still write."""
        return tuple(sorted(set[int]().union(*(load.blocks(self.spec) for load in self._movers))))

    def invalid_blocks(self) -> set[int]:
        """Blocks that have stamp 0 on some rank."""
        tables = [memory.table.read_all() for memory in self.memories]
        return {block for table in tables for block, stamp in enumerate(table) if not stamp}

    def readings_of(self, incarnation: int) -> list[StampReading]:
        """Tables by rank that engines know under this incarnation; the memory may be lost since."""
        lives = (life for life in reversed(self.lives) if life.incarnation == incarnation)
        named = next(lives, self.life)
        return [rank.memory.table.reading() for rank in named.ranks]

    @property
    def life(self) -> EngineLife:
        """The newest one."""
        return self.lives[-1]


@dataclass(frozen=True)
class Flushed:
    """Blocks with stamps that a service had stored when it released a replica."""

    blocks: frozenset[tuple[int, int]]
    incarnation: int
    at_ns: int
    num_unread: int


@dataclass(frozen=True)
class Outcome:
    """Result of a run."""

    seed: int
    steps: int
    faults: Counter[str]
    hits: int
    hits_across: int
    services: int
    lives: int
    findings: list[str]
    digest: str
    loaded: int = 0  # blocks from tiers
    retained: int = 0  # answers to calls that retained blocks

    @property
    def is_void(self) -> bool:
        """No hit across a restart, so the run proves nothing."""
        return not self.hits_across


class World:
    """All state of one run."""

    def __init__(self, seed: int, hangs: bool = False, mirrors: bool = False, tiers: bool = False) -> None:
        """`hangs`: parts hang, and bystanders measure how long they wait meanwhile; `mirrors`: the engine of one
        replica decides itself; `tiers`: replicas have tiers.
        """
        self.hangs = hangs
        self.store_timeout_ms = 500 if hangs else 2000  # runs are short
        self.seed, self.rng = seed, Random(seed)
        self.loop = VirtualLoop(self.rng)
        self.network = Network(self.loop, self.rng)
        self.store = WildStore(self.rng, self.loop.clock_ns)
        self.processes = Processes()
        self.history = history.History()
        splits = seed % 5 == 2 and not (mirrors or tiers)
        self.sites = {
            "a": Site("a", self.rng, has_tiers=tiers),
            "b": Site("b", self.rng, mirrors, tiers, splits),
        }
        for site in self.sites.values():
            site.retains = (seed % 5 == 0 or has_operators(seed)) and not site.is_mirrored
            if site.retains:
                site.spec = replace(site.spec, tiers=with_shares(site.spec.tiers, Random(seed)))
        self.chaos = HangingChaos(self) if hangs else MirrorChaos(self) if mirrors else Chaos(self)
        self.steps = self.num_services = self.num_loaded = self.num_retained = 0
        self.is_finishing = self._has_hit_across = False
        self.ends: Counter[str] = Counter()
        self.services: dict[str, Service] = {}  # service by address
        self.operators: list[Operator] = []

    # -- one run -----------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run until every replica has ended its requests, or a rule is broken."""
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._main())
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()
        return self._outcome()

    async def _main(self) -> None:
        for address in ADDRESSES:
            self.start_service(address)
        for site in self.sites.values():
            for rank in range(history.RANKS):
                self.start_worker(site, rank)
            self.start_life(site)
        if self.hangs:
            begin_bystanders(self)
        if has_operators(self.seed):
            self.operators = [Operator(self, site) for site in self.sites.values()]
        watch = asyncio.get_running_loop().create_task(self._supervise())
        while not self._is_over():  # noqa: ASYNC110 - all time is virtual
            await asyncio.sleep(0.05)
        await self._await_ownership()
        watch.cancel()
        self.chaos.stop()
        self.record(history.Waited(self.network.longest_answer_s))
        for process in self.processes:
            for bug in process.bugs:
                self.record(history.Broken(f"{process.name}: {type(bug).__name__}: {bug}"))
            process.kill()
        await asyncio.sleep(_LAST_WORDS_S)

    async def _await_ownership(self) -> None:
        """Wait until services agree on ownership."""
        if all(site.is_finished for site in self.sites.values()):
            await asyncio.sleep(_SETTLED_S)
            for site in self.sites.values():
                owners = [one.address for one in self.services.values() if site.name in one.registry]
                self.record(history.Owned(site.name, tuple(owners)))

    def _is_over(self) -> bool:
        if self.loop.time() > LONGEST_S:
            self.record(history.Broken(f"after {self.steps} steps nothing more happens"))
            return True
        wrong = any(isinstance(record, history.Wrong | history.Broken) for _, record in self.history.records[-50:])
        return wrong or any(one.bugs for one in self.processes) or all(one.is_finished for one in self.sites.values())

    async def _supervise(self) -> None:
        """Restart processes that have died."""
        while True:
            await asyncio.sleep(0.1 + self.rng.random() * 0.4)
            enough = STEPS if self._has_hit_across else MOST_STEPS
            if self.steps >= enough and self.chaos.is_done:
                self.chaos.heal()
                self.is_finishing = True
            elif self.steps >= STEPS and self.chaos.is_done:
                self.chaos.go_on(self.steps)
            for address, service in self.services.items():
                if not service.process.alive:
                    self.start_service(address)
            for site in self.sites.values():
                for rank, worker in enumerate(site.workers):
                    if not worker.process.alive:
                        self.start_worker(site, rank)
                if not site.life.process.alive and not site.is_finished:
                    self.start_life(site)

    def start_service(self, address: str) -> None:
        """Start the next service process at an address."""
        self.num_services += 1
        service = self.services[address] = Service(self, self.num_services, address)
        service.process.on_death.append(lambda: self.network.note_death(service.process))
        service.process.spawn(service.main())

    def draw_owners(self) -> Owners[str]:
        """The services in random order."""
        return owners_at(*self.rng.sample(ADDRESSES, len(ADDRESSES)))

    def start_life(self, site: Site) -> None:
        """Start the next life of a replica's engine."""
        kind = MirroredLife if site.is_mirrored else TieredLife if site.spec.tiers else EngineLife
        life = kind(self, site)
        life.process.on_death.append(lambda: self.network.note_death(life.process))
        site.lives.append(life)

    def start_worker(self, site: Site, rank: int) -> None:
        """Start the next worker of a rank: new memory, sometimes with the stamps of the previous one."""
        incarnation = self.rng.getrandbits(64) | 1
        is_alike = site.is_alike and rank < len(site.memories)
        stamps = site.memories[rank].table.read_all()[: site.spec.num_blocks] if is_alike else ()
        memory = RankMemory(site.spec, incarnation, self.processes, stamps)
        process = self.processes.start(f"{site.name} worker {rank}")
        if site.spec.tiers:
            memory.tiers = SimTiers(site.spec, memory.pages, memory.table, self)
            process.on_death.append(memory.tiers.end)
            before = site.memories[rank] if rank < len(site.memories) else None
            # An engine that still maps the old memory could change what it says; a crash of the host loses it.
            keeps_disk = before is not None and not before.writer.pid and self.rng.random() < 0.8
            if before is not None and is_alike:
                memory.tiers.resemble(before.tiers)
            if before is not None and keeps_disk:
                memory.tiers.take_over(before.tiers)
            process.spawn(memory.tiers.run())
        worker = Worker(site.name, rank, process, memory, site.plan.digest(), self.rng)
        site.memories[rank : rank + 1] = [memory]
        site.workers[rank : rank + 1] = [worker]
        process.spawn(worker.run(self.network, self.draw_owners()))

    # -- what others report ------------------------------------------------------------------------------------------

    def service_behind(self, server: Server | None) -> Service | None:
        """The service that answers at an address, if it is alive."""
        services = (one for one in self.services.values() if one.server is server and one.process.alive)
        return next(services, None)

    def record(self, record: history.Record) -> None:
        """Append a record to the history."""
        self.history.add(self.loop.clock_ns(), record)
        if isinstance(record, history.Began):
            site = self.sites[record.replica]
            site.begun_by[record.epoch] = site.last_begun_by = record.service
        elif isinstance(record, history.Hit):
            self._has_hit_across |= record.across

    def note_step(self) -> None:
        """Count a result that an engine received."""
        self.steps += 1
        self.chaos.at_step(self.steps)

    def note_end(self, life: EngineLife, error: KvplaneError) -> None:
        """Note the end of a life that faults explain."""
        self.ends[type(error).__name__] += 1

    def draw_linger_s(self) -> float:
        """Draw how long a process survives the death of its parent."""
        return self.rng.choice([0.0, 0.01, 0.2, 1.0]) * self.rng.random()

    def start_process(self, name: str) -> Process:
        return self.processes.start(name)

    def _outcome(self) -> Outcome:
        hits = list(self.history.of(history.Hit))
        faults = Counter(record.kind for record in self.history.of(history.Fault))
        return Outcome(
            self.seed,
            self.steps,
            faults,
            len(hits),
            sum(hit.across for hit in hits),
            self.num_services,
            sum(len(site.lives) for site in self.sites.values()),
            rules.findings(self.history),
            self.history.digest(),
            self.num_loaded,
            self.num_retained,
        )


def run(seed: int, hangs: bool = False, mirrors: bool = False, tiers: bool = False) -> Outcome:
    """One run of the simulation."""
    with small_pools() if tiers else nullcontext():
        return World(seed, hangs, mirrors, tiers).run()
