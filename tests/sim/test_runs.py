"""The product keeps its rules under injected faults: some seeds of the simulation (see README.md)."""

from __future__ import annotations

import pytest

from kvplane_service.core.invariants import check_in_slices
from kvplane_service.replicas import cores, idle_check
from tests.sim.campaign import KEPT, campaign
from tests.sim.world import World, run

SEEDS = 60


@pytest.mark.timeout(300)
@pytest.mark.parametrize("base", range(1, SEEDS + 1, 20))
def test_seeds_break_no_rule(base):
    totals = campaign(range(base, base + 20))
    assert not totals.failed, "\n".join(
        f"make sim SEEDS=1 SEED_BASE={one.seed}: {one.findings[0]}" for one in totals.failed
    )
    assert totals.is_good, f"{totals}: too many runs show nothing"


@pytest.mark.parametrize("seed", KEPT)
def test_seeds_that_found_a_fault_break_no_rule(seed):
    assert run(seed).findings == [], KEPT[seed]


def test_run_has_its_minimum_size():
    outcome = run(2)
    assert outcome.steps >= 300
    assert outcome.services >= 2
    assert outcome.lives >= 3
    assert outcome.faults.total() >= 8
    assert len(outcome.faults) >= 4


def test_callers_of_every_fifth_seed_retain_prefixes():
    outcome = run(5)
    assert outcome.retained > 10
    assert outcome.findings == []


def test_equal_seeds_give_equal_runs():
    assert run(7).digest == run(7).digest != run(8).digest


def check_at_once(replica):
    """Do an idle check in one slice."""
    for _ in check_in_slices(replica):
        pass
    yield


@pytest.mark.parametrize("seed", [2, 7])
def test_runs_do_not_depend_on_the_core(monkeypatch, seed):
    """Idle checks read a compiled core's state in a thread, so they do so with every core. They sleep once, not after
    each piece of the index, where the Python core has no recovered key that is still packed. Only the order in which a
    life's keys are published at its beginning, at one time, is that of each core's index.
    """
    monkeypatch.setattr(idle_check, "check_in_slices", check_at_once)
    found = list[list[str]]()
    for choice in ("python", "auto"):
        monkeypatch.setenv(cores.VARIABLE, choice)
        world = World(seed, hangs=False, mirrors=False, tiers=False)
        world.run()
        found.append(sorted(f"{at_ns} {type(record).__name__} {record}" for at_ns, record in world.history.records))
    assert found[0] == found[1]


def test_campaign_in_two_processes_has_the_same_digest():
    assert campaign(range(1, 4), jobs=2).digest == campaign(range(1, 4)).digest
