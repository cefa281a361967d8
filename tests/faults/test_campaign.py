"""Some random faults on real processes. `make faults` does more of them."""

from __future__ import annotations

import pytest

from tests.faults.campaign import run_campaign
from tests.faults.cluster import TIERED
from tests.store.servers import redis_command

FAULTS = 12
SEEDS = (20, 21, 22)  # if every restart came at an idle moment, no hit after one was seen: run another campaign


@pytest.mark.timeout(600)
def test_campaign_tokens_are_equal_and_everything_recovers():
    redis_command()
    hits = 0
    for seed in SEEDS:
        report = run_campaign(FAULTS, seed, say=print)
        assert not report.finding, report.finding
        assert (report.differing, report.leaks) == (0, 0), report.line
        assert report.faults.total() >= FAULTS
        hits += report.hits_after_restart
        if hits:
            return
    raise AssertionError(f"no request had a hit after a restart: {report.line}")


@pytest.mark.timeout(600)
def test_campaign_with_tiers():
    redis_command()
    report = run_campaign(FAULTS // 2, SEEDS[0], print, TIERED)
    assert not report.finding, report.finding
    assert (report.differing, report.leaks) == (0, 0), report.line
    assert report.loaded, "no hit was loaded"
