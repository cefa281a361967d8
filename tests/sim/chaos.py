"""Injected faults of a run, and when they happen, counted in steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextvars import Context
from random import Random
from typing import TYPE_CHECKING, Any

from tests.sim import history
from tests.sim.loop import Process
from tests.sim.network import Weather
from tests.sim.service import ADDRESSES, OWNER_LEASE_MS, Service

if TYPE_CHECKING:
    from tests.sim.world import Site, World

NUM_FAULTS = 9  # in addition to two deaths of a service and a drain
FIRST_STEP, LAST_STEP = 30, 280
MOST_AWAITS = 40


class Chaos:
    """A plan of faults, drawn from the seed; each fault ends by itself or by `heal`."""

    def __init__(self, world: World) -> None:
        self._world, self._rng = world, world.rng
        self._running: set[asyncio.Task[None]] = set()
        plan = [(self._rng.randint(FIRST_STEP, LAST_STEP), kind) for kind in self._draw_kinds()]
        plan += [(self._rng.randint(*when), "service dies") for when in ((80, 140), (170, 230))]
        plan.append((self._rng.randint(FIRST_STEP, LAST_STEP), "service drains"))
        own = Random(16000048 + world.seed)  # further faults leave the other seeds as they are
        if own.random() < 0.3:
            plan.append((own.randint(FIRST_STEP, LAST_STEP), "store is emptied for a while"))
        self._plan = sorted(plan, reverse=True)

    def _kinds(self) -> dict[str, Callable[[Any], Iterator[float]]]:
        return KINDS

    def _draw_kinds(self) -> list[str]:
        kinds = self._rng.sample(sorted(KINDS), 4)
        return kinds + self._rng.choices(sorted(KINDS), k=NUM_FAULTS - len(kinds))

    @property
    def is_done(self) -> bool:
        """No fault is planned or active."""
        return not self._plan and not self._running

    def at_step(self, step: int) -> None:
        """Inject the faults that are due."""
        while self._plan and self._plan[-1][0] <= step:
            _, kind = self._plan.pop()
            self._world.record(history.Fault(kind))
            task = asyncio.get_running_loop().create_task(self._happen(kind), context=Context())  # in no process
            self._running.add(task)
            task.add_done_callback(self._ended)

    def go_on(self, step: int) -> None:
        """Plan one more death of a service, a few steps later."""
        self._plan.append((step + 40, "service dies"))

    def heal(self) -> None:
        """End all active faults and plan no further ones."""
        self._world.network.weather = Weather()
        store = self._world.store
        store.cut_off.clear()
        store.away, store.loses_answers, store.tears, store.delay_s = False, 0.0, 0.0, 0.005
        for process in self._world.processes:
            process.resume()
            process.crash_in = -1

    def stop(self) -> None:
        """End the run."""
        for task in self._running:
            task.cancel()

    async def _happen(self, kind: str) -> None:
        lasts = self._kinds()[kind](self)
        for seconds in lasts:
            await asyncio.sleep(seconds)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.result()

    # -- processes ---------------------------------------------------------------------------------------------------

    def _crash(self, process: Process) -> None:
        """Kill the process at one of its next awaits."""
        process.crash_in = self._rng.randrange(MOST_AWAITS)

    def _site(self) -> Site:
        return self._rng.choice(list(self._world.sites.values()))

    def _service(self) -> Service:
        """The service that has the session of some engine, if any does."""
        behind = self._world.service_behind(self._site().life.server)
        return behind or self._rng.choice(list(self._world.services.values()))

    def service_dies(self) -> Iterator[float]:
        self._crash(self._service().process)
        yield 0.1

    def service_drains(self) -> Iterator[float]:
        """SIGTERM; its successor starts when it has exited."""
        self._service().drain()
        yield self._rng.uniform(0.5, 3.0)

    def service_stands_still(self) -> Iterator[float]:
        """Pause a service until it has lost all leases; sometimes a successor starts meanwhile."""
        service = self._service()
        process = service.process
        process.pause()
        yield self._rng.uniform(0.1, 3.0)
        if self._rng.random() < 0.4:
            for stream in [one for one in self._world.network.streams if one.server.process is process]:
                stream.cut(client_s=self._rng.random(), server_s=self._rng.random() * 3)
            self._world.start_service(service.address)
            yield self._rng.uniform(0.5, 3.0)
        process.resume()
        yield 1.0
        if not service.is_current:
            process.kill()

    def engine_dies(self) -> Iterator[float]:
        site = self._site()
        self._crash(site.life.process)
        if site.spec.tiers and self._world.seed % 10 == 0:
            self._crash_services()  # of the same host: only the workers know the loads of this engine
        yield 0.1

    def engine_stands_still(self) -> Iterator[float]:
        """Pause an engine beyond its lease; sometimes the next life starts meanwhile."""
        site = self._site()
        before = site.life
        before.process.pause()
        for rank in before.ranks:
            if self._rng.random() < 0.5:
                rank.process.pause()
        yield self._rng.uniform(0.2, 3.0)
        if self._rng.random() < 0.6 and site.life is before and not site.is_finished:
            self._world.start_life(site)
            yield self._rng.uniform(0.2, 2.0)
        for process in (before.process, *(rank.process for rank in before.ranks)):
            process.resume()
        yield 1.0
        if before is not site.life:
            before.process.kill()

    def rank_dies(self) -> Iterator[float]:
        self._crash(self._rng.choice(self._site().life.ranks).process)
        yield 0.1

    def rank_dies_in_its_orders(self) -> Iterator[float]:
        self._rng.choice(self._site().life.ranks).mover.die_in = self._rng.randrange(6)
        yield 0.3

    def rank_stands_still(self) -> Iterator[float]:
        process = self._rng.choice(self._site().life.ranks).process
        process.pause()
        yield self._rng.uniform(0.1, 2.5)
        process.resume()

    def worker_dies(self) -> Iterator[float]:
        """Kill a worker; its memory is lost."""
        self._lose_memory(self._site())
        yield 0.1

    def _lose_memory(self, site: Site) -> None:
        """Lose the memory of one rank: stamps no longer agree; the other rank's table still has its owner epoch."""
        rank = self._rng.randrange(history.RANKS)
        site.life.ranks[rank].process.kill()
        site.workers[rank].process.kill()

    # -- network -----------------------------------------------------------------------------------------------------

    def streams_break(self) -> Iterator[float]:
        for stream in list(self._world.network.streams):
            if self._rng.random() < 0.7:
                stream.cut(client_s=self._rng.random() * 0.1, server_s=self._rng.choice([0.0, 0.05, 1.0]))
        yield 0.5

    def partition(self) -> Iterator[float]:
        weather = self._world.network.weather
        address = self._rng.choice(ADDRESSES)
        others = [other for other in ADDRESSES if other != address]
        cut = frozenset((address, self._rng.choice(["a", "b", "host", *others])))
        weather.cut_off.add(cut)
        yield self._rng.uniform(0.1, 4.0)
        if self._rng.random() < 0.5:
            for stream in [one for one in self._world.network.streams if one.ends == cut]:
                stream.cut(server_s=self._rng.random())
        weather.cut_off.discard(cut)

    def bad_weather(self) -> Iterator[float]:
        weather = self._world.network.weather
        weather.lose, weather.repeat, weather.jitter_s = 0.2, 0.3, 0.1
        yield self._rng.uniform(0.3, 2.0)
        weather.lose, weather.repeat, weather.jitter_s = 0.0, 0.0, Weather.jitter_s

    # -- ownership ---------------------------------------------------------------------------------------------------

    def service_is_cut_off_from_the_store(self) -> Iterator[float]:
        """Partition a service from the store, often beyond its lease, so that others may adopt its replicas."""
        address = self._service().address
        self._world.store.cut_off.add(address)
        yield self._rng.uniform(0.5, 6 * OWNER_LEASE_MS / 1000)
        self._world.store.cut_off.discard(address)

    def leases_are_forgotten(self) -> Iterator[float]:
        """Drop all leases in the store, while engines try another service."""
        self._world.store.forget_leases()
        yield from self._look_elsewhere()

    def record_names_another_owner(self) -> Iterator[float]:
        """Change the owner in a record, as a delayed old write does."""
        for site in self._world.sites.values():
            self._world.store.change_owner(site.name, self._rng.choice(ADDRESSES))
        yield from self._look_elsewhere()

    def _look_elsewhere(self) -> Iterator[float]:
        """Break all streams to a service, and make it unreachable for a while."""
        address = self._service().address
        cuts = [frozenset((address, place)) for place in ("a", "b", "host")]
        self._world.network.weather.cut_off.update(cuts)
        for stream in [one for one in self._world.network.streams if address in one.ends]:
            stream.cut(server_s=self._rng.random() * 3)
        yield self._rng.uniform(0.1, 2.0)
        self._world.network.weather.cut_off.difference_update(cuts)

    # -- store -------------------------------------------------------------------------------------------------------

    def store_is_away(self) -> Iterator[float]:
        self._world.store.away = True
        yield self._rng.uniform(0.3, 6.0)
        self._world.store.away = False

    def store_answers_late(self) -> Iterator[float]:
        store = self._world.store
        store.delay_s, store.loses_answers = self._rng.uniform(0.2, 1.5), 0.4
        yield self._rng.uniform(1.0, 4.0)
        store.delay_s, store.loses_answers = 0.005, 0.0

    def store_tears(self) -> Iterator[float]:
        self._world.store.tears = 0.4
        yield self._rng.uniform(0.5, 2.0)
        self._world.store.tears = 0.0

    def store_loses_its_tail(self) -> Iterator[float]:
        return self._damage(self._world.store.lose_tail)

    def store_turns_bits_over(self) -> Iterator[float]:
        return self._damage(self._world.store.flip_bits)

    def store_is_shuffled(self) -> Iterator[float]:
        return self._damage(self._world.store.reorder)

    def store_comes_back_old(self) -> Iterator[float]:
        """Restore the store from an older backup, which may be empty."""
        if self._rng.random() < 0.8:
            self._world.store.back_up()
            yield self._rng.uniform(0.2, 2.0)
        yield from self._damage(self._world.store.restore)

    def store_is_emptied_for_a_while(self) -> Iterator[float]:
        """An empty server answers instead of the store, then the first one is back. Memory may be lost too."""
        for site in self._world.sites.values():
            if self._rng.random() < 0.6:
                site.is_alike = False  # no stamp that all ranks show then says which epochs began
                self._lose_memory(site)
        self._empty_store()
        yield self._rng.uniform(0.5, 3.0)
        yield from self._damage(self._world.store.restore)

    def everything_is_new_for_a_while(self) -> Iterator[float]:
        """Service, engine, store and worker host of a replica are new. The first store is back soon after."""
        site = self._site()
        before, steps = site.life, self._rng.randint(1, 10)
        for process in (*(worker.process for worker in site.workers), *(rank.process for rank in before.ranks)):
            process.kill()
        self._empty_store()
        for _ in range(200):
            yield 0.02
            if site.life is not before and site.life.steps >= steps:
                break
        self._world.store.restore()
        self._crash_services()

    def _crash_services(self) -> None:
        for service in self._world.services.values():
            self._crash(service.process)

    def _empty_store(self) -> None:
        store = self._world.store
        store.back_up()
        store.empty()
        self._crash_services()

    def _damage(self, act: Callable[[], None]) -> Iterator[float]:
        """Damage the store, which only a starting service notices."""
        act()
        if self._rng.random() < 0.7:
            self._crash(self._service().process)
        yield 0.1


KINDS: dict[str, Callable[[Chaos], Iterator[float]]] = {
    act.__name__.replace("_", " "): act
    for act in (
        Chaos.service_dies,
        Chaos.service_stands_still,
        Chaos.service_drains,
        Chaos.engine_dies,
        Chaos.engine_stands_still,
        Chaos.rank_dies,
        Chaos.rank_dies_in_its_orders,
        Chaos.rank_stands_still,
        Chaos.worker_dies,
        Chaos.streams_break,
        Chaos.partition,
        Chaos.bad_weather,
        Chaos.service_is_cut_off_from_the_store,
        Chaos.leases_are_forgotten,
        Chaos.record_names_another_owner,
        Chaos.store_is_away,
        Chaos.store_answers_late,
        Chaos.store_tears,
        Chaos.store_loses_its_tail,
        Chaos.store_turns_bits_over,
        Chaos.store_is_shuffled,
        Chaos.store_comes_back_old,
        Chaos.store_is_emptied_for_a_while,
        Chaos.everything_is_new_for_a_while,
    )
}
