"""Parts that hang instead of dying: a store, a stream, a worker; and clients that must be answered meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from random import Random
from typing import TYPE_CHECKING, Any

from kvplane import wire
from kvplane.aio.session import Session
from kvplane.base.errors import KvplaneError
from kvplane.base.session import OpenRequest
from kvplane.base.step import Part
from kvplane.sansio.retry import RetryPolicy
from kvplane.v1 import allocation_pb2 as pb
from tests.core.builders import full, replica_spec
from tests.sim import history
from tests.sim.chaos import NUM_FAULTS, Chaos
from tests.sim.rules import DEADLINES_S
from tests.sim.service import ADDRESSES, Service
from tests.sim.transport import SimTransport, call, owners_at

if TYPE_CHECKING:
    from tests.sim.world import World

_SPEC = replica_spec(full(), num_blocks=8)
_LOOK_S = 0.05
_GUESTS = 5
_ONCE = RetryPolicy(attempts=0)


class Bystander:
    """A client with replicas of its own on one service: registers, calls and sends steps, whatever hangs."""

    def __init__(self, world: World, address: str) -> None:
        self._world, self._address = world, address
        self._rng = Random(f"{world.seed} {address}")
        self._name = f"bystander/{address}"
        self._session: Session | None = None
        self._behind: Service | None = None  # the service that has the session
        self._starting: Service | None = None
        self._start_s = 0.0
        self._num_guests = 0
        self.process = world.processes.start(f"bystander of {address}")

    async def run(self) -> None:
        """Repeat all calls."""
        while True:
            pause_s = 0.1 + self._rng.random() * 0.4
            await asyncio.sleep(pause_s)
            service = self._world.services[self._address]
            if not service.serves:
                self._note_start(service, pause_s)
                continue
            if self._behind is not service or self._session is None or self._session.ended is not None:
                await self._begin(service)
                continue
            await self._ask_all(service)

    async def _ask_all(self, service: Service) -> None:
        guest = f"{self._name}/{self._num_guests % _GUESTS}"
        self._num_guests += 1
        await self._ask(service, "registration", lambda: self._register(guest))
        await self._ask(service, "unary call", lambda: self._describe(guest))
        await self._ask(service, "unary call", lambda: self._deregister(guest))
        await self._ask(service, "step", self._step)

    def _note_start(self, service: Service, seconds: float) -> None:
        """Record how long a running service has not started to serve."""
        if service is not self._starting:
            self._starting, self._start_s = service, 0.0
        process = service.process
        if process.alive and not process.paused and not service.has_served:
            self._start_s += seconds
            self._world.record(history.Asked(service.number, "start", self._start_s, True))

    async def _begin(self, service: Service) -> None:
        await self._ask(service, "registration", lambda: self._register(self._name))
        if self._session is not None:
            self._session.abort()
            self._session = None
        self._behind = service
        await self._ask(service, "new session", self._open)

    async def _ask(self, service: Service, what: str, act: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Record the duration of a call to a running service; a refusal is an answer."""
        asked, waited_s = asyncio.get_running_loop().create_task(act()), 0.0
        while not asked.done() and waited_s < 2 * DEADLINES_S[what]:
            await asyncio.wait([asked], timeout=_LOOK_S)
            if not service.serves or not service.is_current:
                asked.cancel()
                return
            waited_s += 0.0 if service.process.paused or asked.done() else _LOOK_S
        self._world.record(history.Asked(service.number, what, waited_s, asked.done()))
        if not asked.done():
            asked.cancel()
            return
        with contextlib.suppress(KvplaneError):
            asked.result()

    async def _call(self, name: str, request: Any) -> None:
        await call(self._world.network, owners_at(self._address), self._name, f"Allocation/{name}", request)

    async def _register(self, name: str) -> None:
        await self._call("RegisterReplica", pb.RegisterReplicaRequest(replica=name, spec=wire.encode_spec(_SPEC)))

    async def _describe(self, name: str) -> None:
        await self._call("DescribeReplica", pb.DescribeReplicaRequest(replica=name))

    async def _deregister(self, name: str) -> None:
        await self._call("DeregisterReplica", pb.DeregisterReplicaRequest(replica=name))

    async def _open(self) -> None:
        transport = SimTransport(self._world.network, owners_at(self._address), self._name)
        nonces = lambda: self._rng.getrandbits(64)  # noqa: E731
        session = Session(transport, OpenRequest(self._name, nonces()), retry=_ONCE, nonces=nonces)
        await session.open()
        self._session = session

    async def _step(self) -> None:
        assert self._session is not None
        if self._session.in_flight:
            await self._session.receive()
        else:
            await self._session.apply(Part())


def begin_bystanders(world: World) -> None:
    """Start one bystander per service."""
    for address in ADDRESSES:
        bystander = Bystander(world, address)
        bystander.process.spawn(bystander.run())


# -- what hangs --------------------------------------------------------------------------------------------------------


class HangingChaos(Chaos):
    """About half of the faults of a run are parts that hang, and later process what they received."""

    def _kinds(self) -> dict[str, Callable[[Any], Iterator[float]]]:
        return {**super()._kinds(), **HANGING}

    def _draw_kinds(self) -> list[str]:
        kinds = self._rng.sample(sorted(HANGING), 4)
        return kinds + self._rng.choices(sorted(self._kinds()), k=NUM_FAULTS - len(kinds))

    def heal(self) -> None:
        """See Chaos."""
        super().heal()
        store = self._world.store
        for faults in (store.hanging, store.unreadable, store.busy):
            faults.clear()
        for stream in self._world.network.streams:
            stream.held.clear()

    def store_hangs(self) -> Iterator[float]:
        """The store does not answer one service, or all; then it processes every call that it received."""
        addresses = set(ADDRESSES) if self._rng.random() < 0.5 else {self._service().address}
        yield from self._hang_store(addresses, self._rng.uniform(0.5, 16.0))

    def service_begins_while_its_store_hangs(self) -> Iterator[float]:
        service = self._service()
        self._crash(service.process)
        yield from self._hang_store({service.address}, self._rng.uniform(2.0, 8.0))

    def service_drains_while_its_store_hangs(self) -> Iterator[float]:
        service = self._service()
        for seconds in self._hang_store({service.address}, self._rng.uniform(1.0, 6.0)):
            service.drain()
            yield seconds

    def service_drains_when_it_continues(self) -> Iterator[float]:
        """A service stands still until another one has its replicas; it continues with a SIGTERM, and with changes that
        it has not stored.
        """
        service = self._service()
        service.process.pause()
        cuts = [frozenset((service.address, place)) for place in ("a", "b", "host")]
        self._world.network.weather.cut_off.update(cuts)
        for stream in [one for one in self._world.network.streams if one.server is service.server]:
            stream.cut(client_s=self._rng.random() * 0.3)
        yield self._rng.uniform(1.5, 4.0)
        self._world.network.weather.cut_off.difference_update(cuts)
        service.process.resume()
        service.drain()
        yield 1.0

    def _hang_store(self, addresses: set[str], seconds: float) -> Iterator[float]:
        self._world.store.hanging.update(addresses)
        yield seconds
        self._world.store.hanging.subtract(addresses)

    def one_log_is_unreadable(self) -> Iterator[float]:
        """A service begins while the log of one replica cannot be read; the others are read."""
        store, name = self._world.store, self._site().name
        self._crash(self._service().process)
        store.unreadable[name] += 1
        yield self._rng.uniform(1.0, 8.0)
        store.unreadable[name] -= 1

    def calls_of_the_store_are_refused(self) -> Iterator[float]:
        """Too many calls wait for the store of a service, which often begins: its executor refuses some of them."""
        service = self._service()
        if self._rng.random() < 0.5:
            self._crash(service.process)
        self._world.store.busy[service.address] += 1
        yield self._rng.uniform(0.5, 6.0)
        self._world.store.busy[service.address] -= 1

    def service_reads_no_messages(self) -> Iterator[float]:
        """The service reads no messages of a session; the stream stays open, and other calls are answered."""
        return self._hold("reads")

    def answers_of_a_service_are_stuck(self) -> Iterator[float]:
        """The engine's answers are stuck: steps are applied, and their results wait."""
        return self._hold("writes")

    def _hold(self, what: str) -> Iterator[float]:
        process = self._site().life.process
        streams = [one for one in self._world.network.streams if one.client is process]
        for stream in streams:
            stream.held.add(what)
        yield self._rng.uniform(0.3, 6.0)
        for stream in streams:
            stream.held.discard(what)

    def worker_stands_still(self) -> Iterator[float]:
        """Pause a worker, often while an engine life begins, which claims it."""
        site = self._site()
        process = self._rng.choice(site.workers).process
        process.pause()
        if self._rng.random() < 0.7:
            self._crash(self._rng.choice([site.life.process, self._service().process]))
        yield self._rng.uniform(0.3, 5.0)
        process.resume()


HANGING: dict[str, Callable[[HangingChaos], Iterator[float]]] = {
    act.__name__.replace("_", " "): act
    for act in (
        HangingChaos.store_hangs,
        HangingChaos.service_begins_while_its_store_hangs,
        HangingChaos.service_drains_while_its_store_hangs,
        HangingChaos.service_drains_when_it_continues,
        HangingChaos.one_log_is_unreadable,
        HangingChaos.calls_of_the_store_are_refused,
        HangingChaos.service_reads_no_messages,
        HangingChaos.answers_of_a_service_are_stuck,
        HangingChaos.worker_stands_still,
    )
}
