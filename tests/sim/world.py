"""One run: a seed makes a world of replicas, workers, engines and services, lets chaos loose on it, keeps history."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

from kvplane.base.errors import KvplaneError
from kvplane.base.groups import AlignSpec, GroupSpec, ReplicaSpec
from kvplane.base.stamp_table import StampReading
from kvplane.rank import RankGroup
from tests.core.builders import chunked, full, replica_spec, ring, state, window
from tests.core.page_engine import Texts
from tests.sim import history
from tests.sim.chaos import Chaos
from tests.sim.engine import EngineLife
from tests.sim.loop import Process, VirtualLoop
from tests.sim.network import Network
from tests.sim.service import ADDRESS, Service
from tests.sim.store import WildStore
from tests.sim.workers import Processes, RankMemory, Worker, plan_of

STEPS = 300
LONGEST_S = 600.0  # of virtual time: a run that takes longer is stuck

MIXES: tuple[tuple[tuple[GroupSpec, ...], dict[str, Any]], ...] = (
    ((window(6), full()), {"retention_interval": 0}),
    ((chunked(8), full(lookup_class=5)), {}),
    ((state(), full()), {"align": AlignSpec(4, 4096)}),
    ((state(8), full(8)), {"hash_block_size": 4, "partial_hits": True, "align": AlignSpec(8, 4096, stop_at_tail=True)}),
    ((window(5, 2), full(8), full(4, lookup_class=5)), {"hash_block_size": 2, "partial_hits": True}),
    ((full(), window(6), window(10, lookup_class=8), chunked(8), state(), ring()), {"retention_interval": 8}),
    ((full(), window(6, is_draft=True, drops_last_block=True)), {}),
    ((state(speculative_blocks=2), full(is_draft=True, drops_last_block=True)), {}),
)  # fmt: skip


class Site:
    """One replica: its registration, and the memory of its ranks.

    Attributes:
        begun_by: which service began an epoch.
        known_incarnation: that the newest life of an engine has named.
    """

    def __init__(self, name: str, rng: Random) -> None:
        groups, changes = rng.choice(MIXES)
        blocks = rng.choice([24, 32, 48]) * (2 if len(groups) > 3 else 1)
        self.name = name
        self.spec: ReplicaSpec = replica_spec(
            *groups, num_blocks=blocks, max_model_len=64, max_in_flight_tokens=256, **changes
        )
        self.most_drafts = 2 if any(group.is_draft for group in groups) else 0
        self.plan = plan_of(self.spec)
        self.texts = Texts(self.spec)
        self.memories: list[RankMemory] = []
        self.workers: list[Worker] = []
        self.lives: list[EngineLife] = []
        self.begun_by: dict[int, int] = {}
        self.known_incarnation = 0
        self.is_finished = False

    @property
    def incarnation(self) -> int:
        return RankGroup([memory.table for memory in self.memories]).incarnation

    def readings_of(self, incarnation: int) -> list[StampReading]:
        """What the memory says that engines call so, by rank; it may have gone since."""
        lives = (life for life in reversed(self.lives) if life.incarnation == incarnation)
        named = next(lives, self.life)
        return [rank.memory.table.reading() for rank in named.ranks]

    @property
    def life(self) -> EngineLife:
        """The newest one."""
        return self.lives[-1]


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    seed: int
    steps: int
    faults: Counter[str]
    hits: int
    hits_across: int
    services: int
    lives: int
    findings: list[str]
    digest: str

    @property
    def is_void(self) -> bool:
        """No hit across a restart: it has shown nothing."""
        return not self.hits_across


class World:
    """Everything of one run."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, Random(seed)
        self.loop = VirtualLoop(self.rng)
        self.network = Network(self.loop, self.rng)
        self.store = WildStore(self.rng)
        self.processes = Processes()
        self.history = history.History()
        self.sites = {name: Site(name, self.rng) for name in ("a", "b")}
        self.chaos = Chaos(self)
        self.steps = self.services = 0
        self.is_finishing = False
        self.ends: Counter[str] = Counter()
        self.service: Service

    # -- one run -----------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Until every replica has ended its requests, or something is wrong."""
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._main())
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()
        return self._outcome()

    async def _main(self) -> None:
        self.start_service()
        for site in self.sites.values():
            for rank in range(history.RANKS):
                self.start_worker(site, rank)
            self.start_life(site)
        watch = asyncio.get_running_loop().create_task(self._supervise())
        while not self._is_over():  # noqa: ASYNC110 - all time is virtual
            await asyncio.sleep(0.05)
        watch.cancel()
        self.chaos.stop()
        self.tell(history.Waited(self.network.longest_answer_s))
        for process in self.processes:
            for bug in process.bugs:
                self.tell(history.Broken(f"{process.name}: {type(bug).__name__}: {bug}"))
            process.kill()

    def _is_over(self) -> bool:
        if self.loop.time() > LONGEST_S:
            self.tell(history.Broken(f"after {self.steps} steps nothing more happens"))
            return True
        wrong = any(isinstance(record, history.Wrong | history.Broken) for _, record in self.history.records[-50:])
        return wrong or any(one.bugs for one in self.processes) or all(one.is_finished for one in self.sites.values())

    async def _supervise(self) -> None:
        """Start again what has died."""
        while True:
            await asyncio.sleep(0.1 + self.rng.random() * 0.4)
            if self.steps >= STEPS and self.chaos.is_done:
                self.chaos.heal()
                self.is_finishing = True
            if not self.service.process.alive:
                self.start_service()
            for site in self.sites.values():
                for rank, worker in enumerate(site.workers):
                    if not worker.process.alive:
                        self.start_worker(site, rank)
                if not site.life.process.alive and not site.is_finished:
                    self.start_life(site)

    def start_service(self) -> None:
        """The next life of the service, at the same address, whatever became of the one before."""
        self.services += 1
        service = self.service = Service(self, self.services)
        service.process.on_death.append(lambda: self.network.note_death(service.process))
        service.process.spawn(service.main())

    def start_life(self, site: Site) -> None:
        """The next life of a replica's engine."""
        life = EngineLife(self, site)
        life.process.on_death.append(lambda: self.network.note_death(life.process))
        site.lives.append(life)

    def start_worker(self, site: Site, rank: int) -> None:
        """The next worker of a rank: new memory."""
        memory = RankMemory(site.spec, self.rng.getrandbits(64) | 1, self.processes)
        process = self.processes.start(f"{site.name} worker {rank}")
        worker = Worker(site.name, rank, process, memory, site.plan.digest(), self.rng)
        site.memories[rank : rank + 1] = [memory]
        site.workers[rank : rank + 1] = [worker]
        process.spawn(worker.run(self.network, ADDRESS))

    # -- what others tell --------------------------------------------------------------------------------------------

    def tell(self, record: history.Record) -> None:
        """Into history."""
        self.history.add(self.loop.clock_ns(), record)
        if isinstance(record, history.Began):
            self.sites[record.replica].begun_by[record.epoch] = record.service

    def note_step(self) -> None:
        """An engine got an answer."""
        self.steps += 1
        self.chaos.at_step(self.steps)

    def note_end(self, life: EngineLife, error: KvplaneError) -> None:
        """A life ended by itself, in a way that faults explain."""
        self.ends[type(error).__name__] += 1

    def draw_linger_s(self) -> float:
        """How long a process survives the death of its parent."""
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
            self.services,
            sum(len(site.lives) for site in self.sites.values()),
            self.history.findings(),
            self.history.digest(),
        )


def run(seed: int) -> Outcome:
    """One run of the simulation."""
    return World(seed).run()
