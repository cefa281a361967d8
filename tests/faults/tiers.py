"""The kinds of faults of replicas with tiers (`--tiers`): what happens to the files of slots, and to jobs in flight."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from random import Random

from kvplane_worker.tiers.slots import ALIGNMENT_BYTES
from tests.faults.child import JOBS, ORDERS, RANKS, Trap
from tests.faults.cluster import LEASE_S, Cluster
from tests.faults.kinds import KINDS, Kind, kill_engine, kill_service, kill_worker, with_flipped_bits

SLOT_BYTES = 2 * ALIGNMENT_BYTES  # header and payload of these small blocks
SHARE_OF_SLOTS = 0.3


def slot_files(cluster: Cluster) -> list[Path]:
    return sorted(cluster.tier_disk.folder.glob("*.slots"))


def _slots(path: Path) -> range:
    return range(ALIGNMENT_BYTES, path.stat().st_size - SLOT_BYTES + 1, SLOT_BYTES)


def _read(path: Path, at: int) -> bytes:
    with path.open("rb") as file:
        file.seek(at)
        return file.read(SLOT_BYTES)


def _write(path: Path, at: int, raw: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def damage_slots(cluster: Cluster, rng: Random) -> None:
    """Flip bits in headers, payloads and padding, while workers read and write."""
    for path in slot_files(cluster):
        for at in rng.sample(_slots(path), int(SHARE_OF_SLOTS * len(_slots(path)))):
            _write(path, at, with_flipped_bits(_read(path, at), rng))


def swap_slots(cluster: Cluster, rng: Random) -> None:
    """Slots change places, also with those of another rank."""
    files = slot_files(cluster)
    for path in files:
        for at in rng.sample(_slots(path), int(SHARE_OF_SLOTS * len(_slots(path)))):
            other, there = rng.choice(files), rng.choice(_slots(path))
            mine, theirs = _read(path, at), _read(other, there)
            _write(path, at, theirs)
            _write(other, there, mine)


def truncate_slots(cluster: Cluster, rng: Random) -> None:
    for path in slot_files(cluster):
        os.truncate(path, rng.randrange(path.stat().st_size + 1))


def age_slots(cluster: Cluster, rng: Random) -> None:
    """Some slots have what they had before: writes since then are lost, without an error."""
    before = {path: [(at, _read(path, at)) for at in _slots(path)] for path in slot_files(cluster)}
    until_s = time.monotonic() + 2 * LEASE_S
    while not cluster.engines.is_done and time.monotonic() < until_s:
        cluster.engines.listen(0.1)
    for path, slots in before.items():
        for at, raw in rng.sample(slots, len(slots) // 2):
            _write(path, at, raw)


def fill_tier_disk(cluster: Cluster, _: Random) -> None:
    """The blocks of the files are given back, as thin volumes do, and another file takes them: writes fail (ENOSPC)."""
    for path in slot_files(cluster):
        size = path.stat().st_size - ALIGNMENT_BYTES
        hole = ("fallocate", "--punch-hole", "--offset", str(ALIGNMENT_BYTES), "--length", str(size), str(path))
        subprocess.run(hole, check=True)
    cluster.tier_disk.fill()


def hang_tier_disk(cluster: Cluster, _: Random) -> None:
    cluster.tier_disk.hang()


def slow_tier_disk(cluster: Cluster, rng: Random) -> None:
    cluster.tier_disk.hang(rng.uniform(0.05, 0.4))


def end_worker(cluster: Cluster, rng: Random, damaged: bool = False) -> None:
    """A worker leaves, so its engine ends; the next one has its disk, and an index of it, which may be damaged."""
    rank = rng.randrange(len(cluster.workers))
    worker, cluster.workers[rank] = cluster.workers[rank], None
    assert worker is not None
    cluster.engines.discard()
    os.kill(worker.pid, signal.SIGTERM)
    worker.wait()
    for index in cluster.tier_disk.folder.glob("*.index") if damaged else ():
        raw = index.read_bytes()
        cut = raw[: rng.randrange(len(raw) + 1)] if rng.random() < 0.5 else with_flipped_bits(raw, rng)
        index.write_bytes(cut)


def kill_engine_and_worker(cluster: Cluster, rng: Random) -> None:
    """No process maps the stamp table any more, so the next worker takes the disk over by what the table says."""
    kill_engine(cluster, rng)
    cluster.engines.discard()
    kill_worker(cluster, rng)


def lose_tier_disk(cluster: Cluster, rng: Random) -> None:
    """A worker's disk is replaced by an empty one, or by that of another rank."""
    end_worker(cluster, rng)
    mine, *others = rng.sample(slot_files(cluster), len(slot_files(cluster)))
    if rng.random() < 0.5:
        mine.unlink()
    else:
        for other in others[:1]:
            shutil.copy(other, mine)


def kill_service_and_worker(cluster: Cluster, rng: Random) -> None:
    kill_service(cluster, rng)
    kill_worker(cluster, rng)


_AT_JOBS = (ORDERS, RANKS, JOBS)


class AtJobs(Kind):
    """A kind whose trap is where the engine gives the jobs of a step to the movers."""

    def draw_trap(self, rng: Random) -> Trap | None:
        return Trap(rng.choice(_AT_JOBS), rng.randrange(8), signal.SIGKILL)


_OF_BOTH = ("service killed", "service stopped", "worker killed", "worker stopped", "worker stopped at a claim",
            "engine killed", "engine stopped", "link cut", "link held", "link's answers held", "redis killed",
            "redis forgets", "file of yesterday", "file damaged")  # fmt: skip
TIER_KINDS = (
    *(kind for kind in KINDS if kind.name in _OF_BOTH),
    AtJobs("engine killed at its jobs", kill_engine, trap=signal.SIGKILL),
    AtJobs("engine and worker killed", kill_engine_and_worker, trap=signal.SIGKILL, alone=True),
    Kind("service and worker killed", kill_service_and_worker, is_served=False),
    Kind("worker ended", end_worker, alone=True),
    Kind("worker ended, index damaged", partial(end_worker, damaged=True), alone=True),
    Kind("disk of a worker lost", lose_tier_disk, alone=True),
    Kind("slots damaged", damage_slots),
    Kind("slots swapped", swap_slots),
    Kind("slots truncated", truncate_slots),
    Kind("slots of before", age_slots),
    Kind("disk of the tier full", fill_tier_disk, own_disk=True, alone=True),
    Kind("disk of the tier hung", hang_tier_disk, hung_disk=True, alone=True),
    Kind("disk of the tier slow", slow_tier_disk, hung_disk=True, alone=True),
)
