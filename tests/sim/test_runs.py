"""The product keeps its rules under injected faults: some seeds of the simulation (see README.md)."""

from __future__ import annotations

import pytest

from kvplane_core.face import loader
from kvplane_core.spec.replica import Replica
from tests.service.hosts import spec_of
from tests.sim.campaign import KEPT, campaign
from tests.sim.world import World, run

# Those of `make test`, then those of `make test-nightly`.
SEEDS = (range(1, 4), range(4, 11), *(range(base, base + 10) for base in range(11, 61, 10)))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "seeds", [SEEDS[0], *(pytest.param(seeds, marks=pytest.mark.nightly) for seeds in SEEDS[1:])], ids=str
)
def test_seeds_break_no_rule(seeds):
    totals = campaign(seeds)
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


def at_once(check_in_slices):
    """The check, in one slice."""

    def check(core):
        for _ in check_in_slices(core):
            pass
        yield

    return check


@pytest.mark.parametrize("seed", [2, 7])
def test_runs_do_not_depend_on_the_core(monkeypatch, seed):
    """Idle checks do not sleep between slices, of which each core has a number of its own. Only the order in which a
    life's keys are published at its beginning, at one time, is that of each core's index.
    """
    for core in {Replica, type(loader.new_replica(spec_of()))}:
        monkeypatch.setattr(core, "check_in_slices", at_once(vars(core)["check_in_slices"]))
    found = list[list[str]]()
    for choice in ("python", "auto"):
        monkeypatch.setenv(loader.VARIABLE, choice)
        world = World(seed, hangs=False, mirrors=False, tiers=False)
        world.run()
        found.append(sorted(f"{at_ns} {type(record).__name__} {record}" for at_ns, record in world.history.records))
    assert found[0] == found[1]


def test_campaign_in_two_processes_has_the_same_digest():
    assert campaign(range(1, 4), jobs=2).digest == campaign(range(1, 4)).digest
