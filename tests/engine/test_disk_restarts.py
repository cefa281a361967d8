"""A disk tier in real processes: workers, service and engine end, and the next ones load what it kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvplane.base.errors import Unavailable
from kvplane.base.groups import TierKind, TierSpec
from kvplane_worker.attach import describe
from kvplane_worker.lending.rundir import STATE
from tests.engine import child
from tests.engine.reference.config import MIXED
from tests.engine.test_processes import POOL, count_wrong, register, serve_all
from tests.service.rig import until
from tests.worker import children
from tests.worker.rig import World, world

TIERS = (TierSpec(TierKind.DISK, 900),)
SAVED, ROUNDS = 200, 12  # blocks; rounds of all prompts
SENT = [([(seed + at) % 251 for at in range(150)], 3) for seed in range(0, 240, 20)]


class Life:
    """Workers of all ranks, and an engine on them."""

    def __init__(self, here: World) -> None:
        started = [here.worker(rank) for rank in range(MIXED.num_ranks)]
        self.workers, self.addresses = [one for one, _ in started], [address for _, address in started]
        self.engine = here.start(child.engine, here.service.address, "r", self.addresses)
        self.engine.receive()

    def serve(self, until: Callable[[Life], bool]) -> None:
        """Serve the prompts until the workers have done something: when depends on the machine."""
        for _ in range(ROUNDS):
            assert count_wrong(SENT, serve_all(self.engine, SENT)) == 0
            if until(self):
                return
        raise AssertionError(f"not within {ROUNDS} rounds")

    @property
    def saved(self) -> int:
        return min(describe(address).tiers[0].saved_blocks for address in self.addresses)

    @property
    def loaded(self) -> int:
        return min(describe(address).tiers[0].loaded_blocks for address in self.addresses)

    @property
    def refused(self) -> int:
        return sum(tier.refused_blocks for address in self.addresses for tier in describe(address).tiers)

    def end(self, *, leave: bool) -> None:
        self.engine.kill()
        for worker in self.workers:
            if leave:
                worker.terminate()
                assert worker.wait() == 0
            else:
                worker.kill()


def loads_first(life: Life) -> None:
    """Its first requests hit what only the disk can have."""
    assert count_wrong(SENT, serve_all(life.engine, SENT)) == 0
    assert life.loaded > 0
    assert life.refused == 0


@pytest.mark.parametrize("leave", [True, False], ids=["left", "killed"])
def test_the_next_worker_offers_what_the_disk_kept(tmp_path: Path, leave: bool):
    with world(tmp_path) as here:
        register(here, replace(POOL, tiers=TIERS))
        life = Life(here)
        life.serve(lambda one: one.saved > SAVED)
        life.end(leave=leave)
        after = Life(here)
        loads_first(after)
        after.serve(lambda one: one.loaded > 20)


def test_a_worker_that_does_not_come_up_leaves_the_disk_to_the_one_after_it(tmp_path: Path):
    """The service is down when a killed worker is started again: it gives up, is stopped, or is killed in its turn."""
    with world(tmp_path, worker_lease_ms=2000) as here:
        register(here, replace(POOL, tiers=TIERS))
        life = Life(here)
        life.serve(lambda one: one.saved > SAVED)
        life.end(leave=False)
        for rank in range(MIXED.num_ranks):
            options = replace(here.options(rank), service=f"unix:{tmp_path}/absent")
            for end in (None, "terminate", "kill"):
                child = here.start(children.worker, replace(options, wait=end is not None))
                if end is None:
                    assert isinstance(child.receive(), Unavailable)
                else:
                    wait_until_used(options.run_dir, child.pid)
                    getattr(child, end)()
                if not child.ended:
                    child.wait()
        until(lambda: not here.shown())  # the lease of the first one has ended
        loads_first(Life(here))
        assert not [name for name in here.shared_files() if name.endswith("-left")]


def wait_until_used(path: Path | None, pid: int) -> None:
    """Wait until this process is the worker of a directory."""
    assert path is not None
    state = path / STATE
    until(lambda: state.exists() and json.loads(state.read_text())["pid"] == pid)


def test_the_next_service_knows_what_the_disk_kept(tmp_path: Path):
    """A store has the keys of its slots; the workers are new, too."""
    store = {"store": f"sqlite:{tmp_path / 'entries.db'}", "store_flush_ms": 10}
    with world(tmp_path, **store) as here:
        register(here, replace(POOL, tiers=TIERS))
        life = Life(here)
        life.serve(lambda one: one.saved > SAVED)
        life.end(leave=True)
    with world(tmp_path, **store) as here:
        loads_first(Life(here))


def test_without_a_store_the_next_service_hits_nothing_of_it(tmp_path: Path):
    """The slots belong to a registration that no service knows any more."""
    with world(tmp_path) as here:
        register(here, replace(POOL, tiers=TIERS))
        life = Life(here)
        life.serve(lambda one: one.saved > SAVED)
        life.end(leave=True)
    with world(tmp_path) as here:
        register(here, replace(POOL, tiers=TIERS))
        life = Life(here)
        assert count_wrong(SENT, serve_all(life.engine, SENT)) == 0
        assert life.loaded == 0


def test_one_rank_that_lost_its_disk_takes_all_hits_with_it(tmp_path: Path):
    with world(tmp_path) as here:
        register(here, replace(POOL, tiers=TIERS))
        life = Life(here)
        life.serve(lambda one: one.saved > SAVED)
        life.end(leave=True)
        files = sorted((tmp_path / "disk").glob("*.slots"))
        assert len(files) == MIXED.num_ranks
        files[0].unlink()
        after = Life(here)
        assert count_wrong(SENT, serve_all(after.engine, SENT)) == 0
        assert after.loaded == 0


def test_an_engine_that_maps_the_pages_still_keeps_the_disk_from_the_next_worker(tmp_path: Path):
    """It could still evict keys, in a table that the next worker does not see."""
    with world(tmp_path) as here:
        register(here, replace(POOL, tiers=TIERS))
        life = Life(here)
        life.serve(lambda one: one.saved > SAVED)
        for worker in life.workers:
            worker.kill()
        after = Life(here)
        assert count_wrong(SENT, serve_all(after.engine, SENT)) == 0
        assert after.loaded == 0
        life.engine.kill()
