"""The kinds of faults. Each strikes and returns; `Cluster.repair` restarts what is dead or stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from kvplane.base.errors import OtherWriter
from kvplane.v1 import allocation_pb2 as pb
from tests.client.proxy import CuttingProxy
from tests.faults.child import POINTS, Trap
from tests.faults.cluster import LEASE_S, LIMIT_S, Cluster, ServiceRefused, is_stopped
from tests.store.servers import wait_until

Strike = Callable[[Cluster, Random], None]
TRAP_LIMIT_S = 2 * LEASE_S
SQLITE, REDIS = ("sqlite",), ("redis",)


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        strike: the function that causes the fault.
        stores: stores with which the fault is possible.
        trap: signal of a trap that the engine gets with its work; None = none.
        own_disk: needs a disk that can be filled and made read-only.
        hung_disk: needs a disk whose writes can be blocked. A process that writes there cannot exit.
        alone: no other fault at the same time: it waits for events that others may delay.
        is_served: the service still answers clients that do not depend on the broken part.
        forgetful: the service may have lost the replica afterwards: the engine gets NotFound, and is restarted.
    """

    name: str
    strike: Strike
    stores: tuple[str, ...] = SQLITE + REDIS
    trap: signal.Signals | None = None
    own_disk: bool = False
    hung_disk: bool = False
    alone: bool = False
    is_served: bool = True
    forgetful: bool = False

    def fits(self, cluster: Cluster) -> bool:
        disk = (cluster.disk.is_own or not self.own_disk) and (cluster.disk.can_hang or not self.hung_disk)
        return cluster.plan.store in self.stores and disk

    def draw_trap(self, rng: Random) -> Trap | None:
        return Trap(rng.choice(POINTS), rng.randrange(12), self.trap) if self.trap else None


# -- processes ---------------------------------------------------------------------------------------------------------


def kill_service(cluster: Cluster, _: Random) -> None:
    cluster.service.kill()


def stop_service(cluster: Cluster, _: Random) -> None:
    if cluster.service.is_alive:
        os.kill(cluster.pids()["service"], signal.SIGSTOP)


def kill_worker(cluster: Cluster, rng: Random) -> None:
    """The worker's memory is lost; the engine that maps it gets no notice."""
    rank = rng.randrange(len(cluster.workers))
    worker, cluster.workers[rank] = cluster.workers[rank], None
    if worker is not None:
        worker.kill()


def stop_worker(cluster: Cluster, rng: Random) -> None:
    worker = cluster.workers[rng.randrange(len(cluster.workers))]
    if worker is not None:
        os.kill(worker.pid, signal.SIGSTOP)


def stop_worker_at_a_claim(cluster: Cluster, rng: Random) -> None:
    """A service starts while a worker is stopped: the reopened session is not claimed there."""
    stop_worker(cluster, rng)
    cluster.service.kill()
    cluster.start_service()


def wait_for_trap(cluster: Cluster) -> bool:
    """Wait until the engine has killed or stopped itself, or missed its trap. Returns whether it runs."""
    engines, until_s = cluster.engines, time.monotonic() + TRAP_LIMIT_S
    while not engines.is_done and time.monotonic() < until_s:
        if engines.process is None:
            return False
        if is_stopped(engines.process.pid):
            return True
        engines.listen(0.01)
    return engines.process is not None


def kill_engine(cluster: Cluster, _: Random) -> None:
    if wait_for_trap(cluster):
        cluster.engines.discard()


def stop_engine(cluster: Cluster, rng: Random) -> None:
    """Stop the engine beyond its lease, while another engine attaches: it gets the pages only after the first exited.

    Then the stopped engine continues and writes, or is killed while it is stopped.
    """
    wait_for_trap(cluster)
    process = cluster.engines.process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    lapsed = pb.REPLICA_STATE_LAPSED
    wait_until(lambda: cluster.describe().state == lapsed, "the lease of a stopped engine ends", LIMIT_S)
    rival = cluster.start_engine()
    received = rival.receive()
    rival.kill()
    assert isinstance(received, OtherWriter), f"another engine got the pages of a stopped one: {received}"
    if rng.random() < 0.5:
        cluster.engines.discard()


# -- links -------------------------------------------------------------------------------------------------------------


def some_links(cluster: Cluster, rng: Random) -> list[CuttingProxy]:
    """Cut links to the service: of the engine, of the workers, or both."""
    links = [cluster.to_service, cluster.from_workers]
    return rng.sample(links, rng.randrange(1, len(links) + 1))


def cut_link(cluster: Cluster, rng: Random) -> None:
    for link in some_links(cluster, rng):
        link.cut()


def delay_link(cluster: Cluster, rng: Random) -> None:
    for link in some_links(cluster, rng):
        link.delay(rng.uniform(0.005, 0.1))


def hold_link(cluster: Cluster, rng: Random) -> None:
    """Block the link in both directions; sent data arrives late, or never."""
    for link in some_links(cluster, rng):
        link.hold(True)
        if rng.random() < 0.5:
            link.cut()


def mute_link(cluster: Cluster, rng: Random) -> None:
    """Requests arrive and are executed; responses arrive late, or never."""
    for link in some_links(cluster, rng):
        link.mute(True)
    time.sleep(rng.uniform(0, 0.2))
    if rng.random() < 0.5:
        cut_link(cluster, rng)


def cut_store(cluster: Cluster, _: Random) -> None:
    assert cluster.to_redis is not None
    cluster.to_redis.cut()


def delay_store(cluster: Cluster, rng: Random) -> None:
    assert cluster.to_redis is not None
    cluster.to_redis.delay(rng.uniform(0.01, 0.7))


def hold_store(cluster: Cluster, _: Random) -> None:
    assert cluster.to_redis is not None
    cluster.to_redis.hold(True)


# -- Redis -------------------------------------------------------------------------------------------------------------


def kill_redis(cluster: Cluster, _: Random) -> None:
    """Redis has no persistence: it restarts empty."""
    assert cluster.redis is not None
    cluster.redis.kill()


def stop_redis(cluster: Cluster, _: Random) -> None:
    assert cluster.redis is not None
    assert cluster.redis.process is not None
    os.kill(cluster.redis.process.pid, signal.SIGSTOP)


def start_without_redis(cluster: Cluster, rng: Random) -> None:
    """A service starts while its store does not answer."""
    stop_redis(cluster, rng)
    cluster.service.kill()
    cluster.start_service()


def refuse_in_redis(cluster: Cluster, rng: Random) -> None:
    """Redis refuses every call with BUSY; a service often starts meanwhile."""
    cluster.keep_redis_busy()
    if rng.random() < 0.5:
        cluster.service.kill()
        cluster.start_service()


def block_log_in_redis(cluster: Cluster, _: Random) -> None:
    """A service starts while the log of one replica cannot be read; those of the others are read."""
    cluster.wait_until_stored()
    cluster.service.kill()
    cluster.block_log()
    cluster.start_service()


def fill_redis(cluster: Cluster, _: Random) -> None:
    assert cluster.redis is not None
    with cluster.redis.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 1)


def damage_redis(cluster: Cluster, rng: Random) -> None:
    """Some chunks are lost, repeated, swapped or corrupted while no service runs."""
    assert cluster.redis is not None
    cluster.service.kill()
    with cluster.redis.client() as client:
        for key in client.keys("*:log"):
            chunks = [fields[b"c"] for _, fields in client.xrange(key)]
            client.delete(key)
            for number, chunk in enumerate(shuffled(chunks, rng), 1):
                client.xadd(key, {b"c": with_flipped_bits(chunk, rng) if rng.random() < 0.2 else chunk}, f"{number}-0")


def shuffled(chunks: list[bytes], rng: Random) -> list[bytes]:
    kept = [chunk for chunk in chunks for _ in range(rng.choice((0, 1, 1, 1, 1, 2)))]
    if rng.random() < 0.3:
        rng.shuffle(kept)
    return kept


def forget_in_redis(cluster: Cluster, rng: Random) -> None:
    """Delete the chunks, or everything, while the service runs."""
    assert cluster.redis is not None
    with cluster.redis.client() as client:
        if rng.random() < 0.5:
            client.flushall()
        else:
            client.delete(*client.keys("*:log"))


# -- the file ----------------------------------------------------------------------------------------------------------


def fill_disk(cluster: Cluster, _: Random) -> None:
    cluster.disk.fill()


def forbid_writes(cluster: Cluster, _: Random) -> None:
    """The disk becomes read-only: a service must refuse it with a named error, and change nothing."""
    cluster.service.kill()
    cluster.disk.allow_writes(False)
    with pytest.raises(ServiceRefused, match=r"kvplane: store: .*read-only"):
        cluster.service.start()


def hang_disk(cluster: Cluster, _: Random) -> None:
    """Writes do not return."""
    cluster.disk.hang()


def start_on_a_hung_disk(cluster: Cluster, _: Random) -> None:
    """A service starts while it cannot open its file."""
    cluster.service.kill()
    cluster.disk.hang()
    cluster.start_service()


def slow_disk(cluster: Cluster, rng: Random) -> None:
    """Delay each write."""
    cluster.disk.hang(rng.uniform(0.05, 0.4))


def lock_file(cluster: Cluster, _: Random) -> None:
    cluster.lock_store()


def truncate_file(cluster: Cluster, rng: Random) -> None:
    cluster.service.kill()
    for path in some_files(cluster, rng):
        os.truncate(path, rng.randrange(path.stat().st_size + 1))


def flip_bits(cluster: Cluster, rng: Random) -> None:
    cluster.service.kill()
    for path in some_files(cluster, rng):
        path.write_bytes(with_flipped_bits(path.read_bytes(), rng))


def some_files(cluster: Cluster, rng: Random) -> list[Path]:
    """Corrupt the database, its write-ahead log, or both."""
    files = [path for path in cluster.store_files() if not path.name.endswith("-shm") and path.stat().st_size]
    return rng.sample(files, rng.randrange(1, len(files) + 1)) if files else []


def with_flipped_bits(raw: bytes, rng: Random) -> bytes:
    """Flip bits, most of them close together, as in a bad sector."""
    changed = bytearray(raw)
    for _ in range(rng.choice((1, 3, 20)) if raw else 0):
        changed[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def restore_file(cluster: Cluster, rng: Random) -> None:
    """Replace the store by an older copy: entries are missing, and others are no longer true."""
    cluster.service.kill()
    if cluster.copies:
        cluster.restore_store(rng.choice(cluster.copies))


KINDS = (
    Kind("service killed", kill_service, is_served=False),
    Kind("service stopped", stop_service, is_served=False),
    Kind("worker killed", kill_worker),
    Kind("worker stopped", stop_worker),
    Kind("worker stopped at a claim", stop_worker_at_a_claim, alone=True),
    Kind("engine killed", kill_engine, trap=signal.SIGKILL),
    Kind("engine stopped", stop_engine, trap=signal.SIGSTOP, alone=True),
    Kind("link cut", cut_link),
    Kind("link slow", delay_link),
    Kind("link held", hold_link),
    Kind("link's answers held", mute_link),
    Kind("store's link cut", cut_store, REDIS),
    Kind("store's link slow", delay_store, REDIS),
    Kind("store's link held", hold_store, REDIS),
    Kind("redis killed", kill_redis, REDIS, forgetful=True),
    Kind("redis stopped", stop_redis, REDIS),
    Kind("service begun without redis", start_without_redis, REDIS, alone=True, forgetful=True),
    Kind("redis busy", refuse_in_redis, REDIS, alone=True, forgetful=True),
    Kind("one log unreadable", block_log_in_redis, REDIS, alone=True),
    Kind("redis full", fill_redis, REDIS, alone=True),
    Kind("redis damaged", damage_redis, REDIS, alone=True, is_served=False, forgetful=True),
    Kind("redis forgets", forget_in_redis, REDIS, alone=True, forgetful=True),
    Kind("disk full", fill_disk, SQLITE, own_disk=True),
    Kind("disk read-only", forbid_writes, SQLITE, own_disk=True, alone=True, is_served=False),
    Kind("disk hung", hang_disk, SQLITE, hung_disk=True, alone=True),
    Kind("service begun on a hung disk", start_on_a_hung_disk, SQLITE, hung_disk=True, alone=True, forgetful=True),
    Kind("disk slow", slow_disk, SQLITE, hung_disk=True, alone=True),
    Kind("file locked", lock_file, SQLITE, alone=True),
    Kind("file truncated", truncate_file, SQLITE, is_served=False, forgetful=True),
    Kind("file damaged", flip_bits, SQLITE, is_served=False, forgetful=True),
    Kind("file of yesterday", restore_file, SQLITE, is_served=False, forgetful=True),
)
