"""Workers and engines that are killed leak no files, memory or leases, and block no other process."""

from __future__ import annotations

from pathlib import Path

from kvplane.v1 import plan_pb2
from kvplane_worker.attach import attached_pid
from tests.service.rig import until
from tests.worker.rig import World, open_files

KILLS = 25  # of workers, and of engines


def descriptors_of(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_killed_engines_leak_nothing(here: World):
    worker, address = here.worker()
    (info,) = here.shown()

    def life() -> tuple[int, int]:
        """One engine attaches, opens a session, serves a request, and is killed."""
        engine = here.engine()
        incarnation, _ = engine.do("attach", address)
        assert incarnation == info.incarnation
        opened = engine.do("open", here.service.address, "r")
        engine.do("serve", 0, list(range(40)))
        engine.kill()
        return opened

    life()
    assert attached_pid(address) == 0
    before = here.shared_files(), open_files(), descriptors_of(worker.pid), len(here.shown())
    epochs = [life() for _ in range(KILLS)]
    assert attached_pid(address) == 0
    assert [epoch for epoch, _ in epochs] == list(range(3, 3 + KILLS))
    assert all(kept for _, kept in epochs)
    until(lambda: here.service.state() == "LAPSED")  # the lease of the last engine ended with its stream
    assert (here.shared_files(), len(here.shown())) == (before[0], before[3])
    until(lambda: open_files() <= before[1])
    until(lambda: descriptors_of(worker.pid) <= before[2])


def test_killed_workers_leak_nothing(here: World):
    def life() -> plan_pb2.WorkerInfo:
        """Kill a worker, then the engine that maps its pages."""
        worker, address = here.worker()
        engine = here.engine()
        engine.do("attach", address)
        engine.do("fill", 0, 0, 1, 7)
        (info,) = here.shown()
        worker.kill()
        assert engine.do("look", 0, 0, 1) == {7}  # the mapping outlives the worker
        engine.kill()
        return info

    assert here.shared_files() == set()
    life()
    before = here.shared_files(), open_files()
    incarnations = {life().incarnation for _ in range(KILLS)}
    assert len(incarnations) == KILLS
    worker, _ = here.worker()
    # This worker removed the files of the last one: equally many files, all of them new.
    assert len(here.shared_files()) == len(before[0]) == 3
    assert not here.shared_files() & before[0]
    assert [info.pid for info in here.shown()] == [worker.pid]
    worker.terminate()
    assert worker.wait() == 0
    assert here.shared_files() == set()
    until(lambda: open_files() <= before[1])
