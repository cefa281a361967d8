"""A campaign of services that share a table of owners: at no time do two of them have one replica.

Clocks differ in speed and origin. Processes stop, are killed and replaced at their address, and are cut off from the
table; answers are lost, late or refused, writes take effect after their caller gave up, and the table is deleted.

    python -m tests.store.granting --seeds 40
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from dataclasses import dataclass, field
from random import Random

from kvplane_service.store.errors import StoreDenied, StoreUnavailable
from kvplane_service.store.grants import Grants, Identity, NotGranted
from kvplane_service.store.interface import Stored
from kvplane_service.store.writer import Runtime
from tests.sim.loop import VirtualLoop

LEASE_MS = 900
TIMEOUT_S = 0.25
NAMES = ("a", "b", "c")
TICK_S = 0.005
FASTEST, SLOWEST = 1.1, 0.9  # of clocks, against true time


@dataclass
class WildTable:
    """A table with every fault that the contract permits. `compares` is False in a planted fault."""

    rng: Random
    compares: bool = True
    raw: bytes = b""
    version: str | None = None
    cut_off: set[str] = field(default_factory=set)
    delay_s: float = 0.02
    loss: float = 0.0
    count: int = 0

    def delete(self) -> None:
        self.raw, self.version = b"", None

    def set(self, version: str | None, raw: bytes) -> bool:
        if self.compares and version != self.version:
            return False
        self.count += 1
        self.raw, self.version = raw, str(self.count)
        return True


@dataclass
class Access:
    """The table as one service reaches it."""

    table: WildTable
    address: str

    async def read(self) -> Stored:
        await self._arrive()
        stored = Stored(self.table.raw, self.table.version)
        await self._answer()
        return stored

    async def replace(self, version: str | None, raw: bytes) -> bool:
        table = self.table
        if table.rng.random() < table.loss:  # it arrives when its caller has given up
            delay_s = table.rng.uniform(TIMEOUT_S, 2 * LEASE_MS / 1000)
            asyncio.get_running_loop().call_later(delay_s, table.set, version, raw)
            await self._give_up()
        await self._arrive()
        if table.rng.random() < table.loss / 2:
            return False  # a conflict with a change that was undone
        was_replaced = table.set(version, raw)
        await self._answer()
        return was_replaced

    async def _arrive(self) -> None:
        await asyncio.sleep(self.table.rng.random() * self.table.delay_s)
        if self.address in self.table.cut_off:
            await self._give_up()
        if self.table.rng.random() < self.table.loss / 4:
            raise StoreDenied("refused")

    async def _answer(self) -> None:
        if self.table.rng.random() < self.table.loss:
            await self._give_up()
        await asyncio.sleep(self.table.rng.random() * self.table.delay_s)

    async def _give_up(self) -> None:
        await asyncio.sleep(TIMEOUT_S)
        raise StoreUnavailable("no answer")


class Service:
    """One process: it renews, takes what it is asked for, and begins epochs."""

    def __init__(self, world: World, address: str, process: int) -> None:
        self.world, self.address, self.process = world, address, process
        rng = world.rng
        self.speed, self.origin_s, self.jump_s = rng.uniform(SLOWEST, FASTEST), rng.uniform(0, 1e6), 0.0
        self.is_stopped = asyncio.Event()
        self.wanted = set(rng.sample(NAMES, rng.randint(0, len(NAMES))))
        runtime = Runtime(self.clock_ns, self.sleep, asyncio.to_thread, rng.random)
        me = Identity(address, process, "index")
        self.grants = Grants(Access(world.table, address), me, LEASE_MS, runtime, lambda: rng.getrandbits(64) | 1)
        self.running = asyncio.Event()
        self.running.set()
        self.task = asyncio.create_task(self.main())

    def clock_ns(self) -> int:
        now_s = asyncio.get_running_loop().time()
        return int((self.origin_s + now_s * self.speed + self.jump_s) * 1e9)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self.speed)
        await self.running.wait()

    def has(self, name: str) -> bool:
        try:
            self.grants.check(name)
        except NotGranted:
            return False
        return True

    async def main(self) -> None:
        rng = self.world.rng
        while True:
            try:
                epochs = {name: self.world.begun[name] if self.has(name) else 0 for name in self.wanted}
                self.wanted -= set(await self.grants.renew(epochs))
            except (StoreUnavailable, StoreDenied):
                pass
            for _ in range(4):
                await self.sleep(LEASE_MS / 1000 / 12)
                name = rng.choice(NAMES)
                if rng.random() < 0.3:
                    await self.take(name)
                elif rng.random() < 0.1:
                    self.wanted.discard(name)
                elif self.has(name):
                    self.world.begin(self, name)

    async def take(self, name: str) -> None:
        try:
            if not await self.grants.take(name):
                self.wanted.add(name)
        except (NotGranted, StoreUnavailable, StoreDenied):
            pass


class World:
    """One run. `has_wall_clocks`: a planted fault, services measure leases by clocks that jump."""

    def __init__(self, seed: int, *, compares: bool = True, has_wall_clocks: bool = False) -> None:
        self.rng = Random(seed)
        self.table = WildTable(self.rng, compares)
        self.has_wall_clocks = has_wall_clocks
        self.services: dict[str, Service] = {}
        self.begun = dict.fromkeys(NAMES, 0)  # epoch that the stamp tables of the workers have
        self.owner = dict.fromkeys(NAMES, 0)
        self.faults = Counter[str]()
        self.failovers = self.refused = 0
        self.doubles: list[str] = []
        self._processes = 0

    def start(self, address: str) -> None:
        self._processes += 1
        self.services[address] = Service(self, address, self._processes)

    def begin(self, service: Service, name: str) -> None:
        """An epoch begins: above the grant, and above what the workers have shown if they have refused it."""
        epoch = service.grants.epoch_of(name) + 1
        if epoch <= self.begun[name]:
            self.refused += 1
            epoch = self.begun[name] + 1
        self.begun[name] = epoch

    async def run(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        for number in range(3):
            self.start(f"service-{number}")
        chaos = asyncio.create_task(self.chaos())
        while loop.time() < seconds:
            await asyncio.sleep(TICK_S)
            self.look()
        for task in (chaos, *(service.task for service in self.services.values())):
            assert task.cancelled() or not task.done(), task.exception()
            task.cancel()

    def look(self) -> None:
        for name in NAMES:
            having = [service for service in self.services.values() if service.has(name)]
            if len(having) > 1:
                self.doubles.append(f"{name} at {asyncio.get_running_loop().time():.3f} s")
            for service in having:
                self.failovers += self.owner[name] not in (0, service.process)
                self.owner[name] = service.process

    async def chaos(self) -> None:
        rng = self.rng
        kinds = (self.stop, self.kill, self.cut, self.lose, self.delete, self.slow)
        while True:
            await asyncio.sleep(rng.uniform(0.1, 0.9))
            if self.has_wall_clocks:
                rng.choice(list(self.services.values())).jump_s += rng.uniform(-3, 3)
            kind = rng.choice(kinds)
            self.faults[kind.__name__] += 1
            await kind(rng.choice(list(self.services)))

    async def stop(self, address: str) -> None:
        self.services[address].running.clear()
        await asyncio.sleep(self.rng.uniform(0, 3 * LEASE_MS / 1000))
        self.services[address].running.set()

    async def kill(self, address: str) -> None:
        self.services[address].task.cancel()
        await asyncio.sleep(self.rng.uniform(0, LEASE_MS / 500))
        self.start(address)

    async def cut(self, address: str) -> None:
        self.table.cut_off.add(address)
        await asyncio.sleep(self.rng.uniform(0, 3 * LEASE_MS / 1000))
        self.table.cut_off.discard(address)

    async def lose(self, address: str) -> None:
        del address
        self.table.loss = 0.4
        await asyncio.sleep(self.rng.uniform(0, 2))
        self.table.loss = 0.0

    async def delete(self, address: str) -> None:
        del address
        self.table.delete()

    async def slow(self, address: str) -> None:
        del address
        self.table.delay_s = self.rng.uniform(0.02, 0.24)
        await asyncio.sleep(self.rng.uniform(0, 2))
        self.table.delay_s = 0.02


def play(seed: int, seconds: float = 60.0, **faults: bool) -> World:
    """One run of a seed on a virtual clock."""
    world = World(seed, **faults)
    loop = VirtualLoop(Random(seed))
    try:
        loop.run_until_complete(world.run(seconds))
    finally:
        loop.close()
    return world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--base", type=int, default=1)
    arguments = parser.parse_args()
    failovers = doubles = refused = 0
    faults = Counter[str]()
    for seed in range(arguments.base, arguments.base + arguments.seeds):
        world = play(seed)
        failovers, doubles = failovers + world.failovers, doubles + len(world.doubles)
        refused += world.refused
        faults += world.faults
        if world.doubles:
            print(f"seed {seed}: two services have {world.doubles[0]}")
    print(f"{arguments.seeds} seeds: {failovers} failovers, {doubles} double grants, {faults}")
    print(f"{refused} epochs that the grant alone would have begun, and the workers refused")


if __name__ == "__main__":
    main()
