"""The engine with tiers equals the dense model, whatever its movers do.

`python -m tests.engine.tiers` is the large run.
"""

from __future__ import annotations

from functools import cache

import pytest

from kvplane.base.groups import GroupKind
from tests.engine.stress import Report
from tests.engine.tiers import BORNE, DISKS, EDGES, FAULTS, KINDS, MIXES, Loads, of, run

REQUESTS = 40
SEED = 1


def count_of(name: str) -> int:
    """Requests of a mix: twice as many where few hits are loaded, and when a copy ends decides which."""
    return 2 * REQUESTS if name in {mix.name for mix in EDGES} else REQUESTS


@cache
def report_of(name: str) -> tuple[Report, Loads]:
    return run(of(name), count_of(name), SEED)


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_tokens_with_a_host_tier_equal_the_dense_model(mix):
    report, loads = report_of(mix.name)
    assert report.complaints == []
    assert report.requests == report.counts.completed == count_of(mix.name)
    assert loads.jobs == report.counts.loads > 0


def test_hits_are_loaded_from_the_disk_too_and_from_both_tiers_at_once():
    loads = [report_of(mix.name)[1].of_tiers for mix in DISKS]
    assert sum(one[frozenset({1})] + one[frozenset({0, 1})] for one in loads[:3]) > 0
    assert sum(one[frozenset({0, 1})] for one in loads) > 0
    assert loads[3].total() > 0


def test_most_hits_are_loaded_and_from_every_kind_of_group():
    counts, kinds = Report().counts, set[GroupKind]()
    for mix in KINDS:
        report, loads = report_of(mix.name)
        counts.hit_tokens += report.counts.hit_tokens
        counts.loaded_tokens += report.counts.loaded_tokens
        kinds.update(*loads.of_kinds)
    assert counts.loaded_tokens > 0.6 * counts.hit_tokens
    others = {GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL, GroupKind.MAMBA, GroupKind.MLA}
    assert kinds == {GroupKind.FULL_ATTENTION, *others}


@pytest.mark.parametrize("fault", BORNE, ids=lambda fault: fault.name)
def test_tokens_equal_the_dense_model_with_bad_movers(fault):
    report, _ = run(of(fault.mix), REQUESTS, SEED, fault)
    assert report.complaints == []
    assert report.counts.completed + report.counts.aborted >= REQUESTS
    if "aborts" in fault.name:
        assert report.counts.aborted > 0
        assert report.counts.preempted > 0, "no load of a block that lost its key failed"
    if "slot" in fault.name or "write" in fault.name:
        assert report.counts.preempted > 0, "no load failed"
    if "never" in fault.name:
        assert report.counts.loads_given_up > 0


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_planted_fault_of_tiers_is_caught(fault):
    """Some faults show only if a copy is written at a certain time, so several seeds are tried."""
    assert any(run(of(fault.mix), REQUESTS, seed, fault)[0].complaints for seed in range(SEED, SEED + 30))
