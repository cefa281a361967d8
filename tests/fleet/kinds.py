"""The kinds of faults of a fleet."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from tests.faults.child import ORDERS, Trap
from tests.faults.cluster import LIMIT_S, is_stopped
from tests.fleet.clocks import HOUR_S
from tests.fleet.load import Load
from tests.fleet.network import CLIENTS, INDEX, TABLE, Lost, Namespaces, Peer
from tests.fleet.processes import Fleet, Replica, Service, pause


class Scene:
    """The fleet, its load and the random choices of one campaign."""

    def __init__(self, fleet: Fleet, load: Load, rng: Random) -> None:
        self.fleet, self.load, self.rng = fleet, load, rng
        self.trapped = fleet.replicas[0]  # whose engine stops itself, with a kind that sets a trap
        self.complaints = list[str]()

    def service(self) -> Service:
        return self.rng.choice(self.fleet.services)

    def replica(self) -> Replica:
        return self.rng.choice(self.fleet.replicas)

    def last(self, leases: float) -> None:
        """Let a fault last."""
        self.load.listen(leases * self.fleet.shape.lease_ms / 1000)

    def knock(self, service: Service, times: int = 2) -> None:
        """Let rivals ask a service."""
        for replica in self.rng.sample(self.fleet.replicas, min(times, len(self.fleet.replicas))):
            self.fleet.knock(service, replica.name)

    def knock_at_once(self, services: Sequence[Service]) -> list[str]:
        """Let rivals ask these services at the same time, each for every replica. Returns what was granted."""
        granted = list[str]()

        def ask(service: Service, replica: str) -> None:
            if not self.fleet.knock(service, replica):
                granted.append(f"{replica} at {service.front}")

        asked = [(service, replica.name) for service in services for replica in self.fleet.replicas]
        rivals = [threading.Thread(target=ask, args=each) for each in asked]
        for act in (*(one.start for one in rivals), *(one.join for one in rivals)):
            act()
        return granted

    def grants_nothing(self, service: Service) -> None:
        """A service that has not reached the table of owners for a lease begins no epoch."""
        for granted in self.knock_at_once([service]):
            self.complaints.append(f"{granted} was granted without the table of owners, a lease after it was cut")


def kill_service(scene: Scene) -> None:
    """A service is killed, and starts again after its lease, or at once."""
    one = scene.service()
    one.kill()
    scene.last(scene.rng.choice([0, 1.5]))
    one.start()
    scene.knock(one)


def drain_service(scene: Scene) -> None:
    """A service ends as Kubernetes ends it, and starts again: it hands its replicas over, and no engine may end."""
    one = scene.service()
    one.end_well(partial(scene.load.listen, 0.1))
    scene.last(scene.rng.choice([0, 1.5]))
    one.start()


def ask_at_once(scene: Scene) -> None:
    """A service is killed, and rivals ask all others at once for each replica, while its lease ends."""
    dead, *living = scene.rng.sample(scene.fleet.services, len(scene.fleet.services))
    dead.kill()
    for _ in range(3):
        scene.last(0.5)
        scene.knock_at_once(living)
    dead.start()


def stop_service(scene: Scene) -> None:
    """A service is stopped until others have its replicas, and continues."""
    one = scene.service()
    one.stop(True)
    scene.last(scene.rng.uniform(0.5, 2.5))
    one.stop(False)
    scene.knock(one)


def kill_engine(scene: Scene) -> None:
    """An engine is killed."""
    scene.replica().engines.discard()
    scene.last(0.2)


def stop_engine(scene: Scene) -> None:
    """An engine is stopped, and continues; a rival asks meanwhile."""
    one = scene.replica().engines.process
    if one is not None:
        pause(one)
        scene.knock(scene.service(), 1)
        scene.last(scene.rng.uniform(0.2, 1.5))


def stop_engine_in_a_step(scene: Scene) -> None:
    """An engine stops before it carries out what a step orders; a rival begins a life; the engine continues."""
    one = scene.trapped.engines.process
    waits_s = 0.0
    while one is not None and not is_stopped(one.pid) and waits_s < LIMIT_S:
        scene.load.listen(0.1)
        waits_s += 0.1
    for service in scene.fleet.services:  # one of them has the replica
        scene.fleet.knock(service, scene.trapped.name)


def kill_worker(scene: Scene) -> None:
    """A worker is killed with its pages; its engine has to end too."""
    scene.replica().kill_worker()
    scene.last(0.2)


def stop_worker(scene: Scene) -> None:
    """A worker is stopped, and continues."""
    one = scene.replica().worker
    assert one is not None
    pause(one)
    scene.last(scene.rng.uniform(0.2, 1.5))


def cut_table(scene: Scene) -> None:
    """A service cannot reach the table of owners, and everything else, for longer than its lease."""
    one, network = scene.service(), scene.fleet.network
    network.cut(one.name, TABLE, Lost.ALL)
    scene.last(scene.rng.uniform(1.1, 2.5))
    scene.grants_nothing(one)
    network.restore()
    scene.knock(one)


def get_grant_back(scene: Scene) -> None:
    """A service is cut off from the table while an idle engine's session stays with it; another one begins an epoch of
    the replica, and is drained; the worker ends, which knew that epoch; the first one gets its grant back.
    """
    one, network, load = scene.trapped, scene.fleet.network, scene.load
    load.rest(one)
    first = scene.fleet.owner_of(one.name)
    others = [service for service in scene.fleet.services if service is not first]
    network.cut(first.name, TABLE, Lost.ALL)
    granted: Service | None = None
    for _ in range(8):
        scene.last(0.5)
        granted = granted or next((each for each in others if not scene.fleet.knock(each, one.name)), None)
    if granted is not None:
        granted.end_well(partial(load.listen, 0.1))
    one.kill_worker_alone()
    network.restore()
    scene.last(2.5)
    scene.fleet.knock(first, one.name)
    one.engines.discard()


def cut_index(scene: Scene) -> None:
    """A service cannot reach the index."""
    _cut(scene, INDEX, Lost.ALL)


def cut_clients(scene: Scene) -> None:
    """Engines and workers cannot reach a service."""
    _cut(scene, CLIENTS, Lost.ALL)


def cut_one_way(scene: Scene) -> None:
    """What a service is sent by one side is lost, or what it answers, or what it asks, or what it is answered."""
    _cut(scene, scene.rng.choice([INDEX, TABLE, CLIENTS]), scene.rng.choice([Lost.REQUESTS, Lost.ANSWERS]))


def _cut(scene: Scene, peer: Peer, lost: Lost) -> None:
    one, network = scene.service(), scene.fleet.network
    network.cut(one.name, peer, lost)
    scene.last(scene.rng.uniform(0.5, 2.5))
    if peer != CLIENTS:
        scene.knock(one)
    network.restore()
    scene.knock(one)


def slow_service(scene: Scene) -> None:
    """All links of a service are slow."""
    one = scene.service()
    scene.fleet.network.slow(one.name)
    scene.last(scene.rng.uniform(0.5, 2.5))
    scene.knock(one)


def cut_replica(scene: Scene) -> None:
    """A worker and its engine reach no service."""
    network = scene.fleet.network
    assert isinstance(network, Namespaces)
    one = scene.replica()
    network.cut_off(one.name, [service.name for service in scene.fleet.services])
    scene.last(scene.rng.uniform(0.5, 2.5))
    for service in scene.fleet.services:
        scene.fleet.knock(service, one.name)


def jump_clock(scene: Scene) -> None:
    """The wall clock of a service jumps by an hour while leases run, which no engine notices; then back, with a
    worker dead, and all services are asked at once.
    """
    one, ahead_s, ended = scene.service(), scene.rng.choice([-HOUR_S, HOUR_S]), scene.load.num_ended
    one.clock.set(ahead_s)
    scene.last(1.5)
    if scene.load.num_ended > ended:
        scene.complaints.append(f"an engine ended when the clock of a service jumped by {ahead_s} s")
    scene.replica().kill_worker()
    one.clock.set(-ahead_s)
    for _ in range(2):
        scene.last(0.4)
        scene.knock_at_once(scene.fleet.services)


def jump_back_without_table(scene: Scene) -> None:
    """A service reaches no table, and its wall clock says that its leases have just begun."""
    one, network = scene.service(), scene.fleet.network
    network.cut(one.name, TABLE, Lost.ALL)
    one.clock.set(-HOUR_S)
    scene.last(scene.rng.uniform(1.1, 1.5))
    scene.grants_nothing(one)


def restart_with_another_time(scene: Scene) -> None:
    """A service is killed, and starts with a wall clock that is an hour ahead or late; others read what it writes."""
    one = scene.service()
    one.clock.set(scene.rng.choice([-HOUR_S, HOUR_S]))
    one.kill()
    one.start()
    scene.last(1.5)
    scene.knock(one)
    one.kill()


def kill_router(scene: Scene) -> None:
    """A router is killed, and starts again with nothing."""
    if scene.fleet.routers is not None:
        scene.rng.choice(scene.fleet.routers.both).kill()
        scene.last(0.5)


def stop_router(scene: Scene) -> None:
    """A router is stopped, and continues."""
    if scene.fleet.routers is not None:
        scene.rng.choice(scene.fleet.routers.both).stop(True)
        scene.last(scene.rng.uniform(0.5, 2.5))


def cut_router(scene: Scene) -> None:
    """A router reaches no service, while one of these is killed."""
    network, one = scene.fleet.network, scene.service()
    assert isinstance(network, Namespaces)
    if scene.fleet.routers is not None:
        router = scene.rng.choice(scene.fleet.routers.both)
        network.cut_off(router.name, [service.name for service in scene.fleet.services])
        one.kill()
        scene.last(scene.rng.uniform(0.5, 2.5))
        one.start()


def stop_table(scene: Scene) -> None:
    """The server of the table answers nothing, or refuses."""
    scene.fleet.table.stop(True)
    scene.last(scene.rng.uniform(1.1, 1.5))
    scene.grants_nothing(scene.service())
    scene.fleet.table.stop(False)


def lose_table(scene: Scene) -> None:
    """The table is lost (a failover without the latest writes, a deleted Lease, a killed etcd), and the pages of a
    replica too: only the table keeps its epochs apart when all services are asked at once.
    """
    scene.replica().kill_worker()
    scene.fleet.table.lose()
    scene.knock_at_once(scene.fleet.services)
    scene.last(1.5)


def lose_table_and_services(scene: Scene) -> None:
    """All services and a worker are killed, and the table is deleted: its epochs are in the index and at workers."""
    scene.replica().kill_worker()
    for one in scene.fleet.services:
        one.kill()
    scene.fleet.table.forget()
    for one in scene.fleet.services:
        one.start()
    scene.last(0.5)
    scene.knock_at_once(scene.fleet.services)


def fail_over_index(scene: Scene) -> None:
    """The primary of the index is killed before it replicates."""
    scene.fleet.index.fail_over()
    scene.last(0.5)


Fault = Callable[[Scene], None]
FAULTS: Sequence[Fault] = (
    *(
        kill_service,
        drain_service,
        stop_service,
        ask_at_once,
        kill_engine,
        stop_engine,
        stop_engine_in_a_step,
        kill_worker,
        stop_worker,
        cut_table,
        get_grant_back,
        cut_index,
        cut_clients,
        cut_one_way,
        slow_service,
        cut_replica,
    ),
    *(kill_router, stop_router, cut_router),
    *(jump_clock, jump_back_without_table, restart_with_another_time),
    *(stop_table, lose_table, lose_table_and_services, fail_over_index),
)

# Before these, the engine of one replica gets a trap with its requests.
TRAPS: dict[Fault, Trap] = {stop_engine_in_a_step: Trap(ORDERS, 2, signal.SIGSTOP)}
# These need hosts that can be cut off alone.
OF_HOSTS = (cut_replica, cut_router)
# These need routers.
OF_ROUTERS = (kill_router, stop_router, cut_router)
# These need wall clocks that jump.
OF_CLOCKS = (jump_clock, jump_back_without_table, restart_with_another_time)
# No engine may end with these: what it asks is answered by another service, or later.
HARMLESS = (drain_service,)
