"""Some random faults on real processes. `make faults` does more of them."""

from __future__ import annotations

import pytest

from tests.faults.campaign import FURTHER, Report, run_campaign
from tests.faults.cluster import TIERED
from tests.store.servers import redis_command

FAULTS, SEED = 12, 20


@pytest.mark.timeout(600)
def test_campaign_tokens_are_equal_and_everything_recovers():
    redis_command()
    report = run_campaign(FAULTS, SEED, say=print)
    assert not report.complaints, report.line
    assert report.faults.total() >= FAULTS


@pytest.mark.timeout(600)
def test_campaign_with_tiers():
    redis_command()
    report = run_campaign(FAULTS // 2, SEED, print, TIERED)
    assert not report.complaints, report.line


def test_campaign_says_what_it_could_not_have_found():
    """A link that was cut restarts no process, so such a campaign cannot find a wrong hit after a restart."""
    report = Report(asked=1, tiers=True)
    report.faults["link cut"] = 1
    report.loaded, report.answers.slowest_s = 17, {"link cut": {"step": 0.1}}
    assert not report.is_over, "more faults may show a hit"
    report.faults["link cut"] = 1 + FURTHER
    assert report.is_over
    (complaint,) = report.complaints
    assert complaint.startswith(f"no request had a hit after a restart in {1 + FURTHER} faults: run more")
    report.only = ["link cut"]
    assert not report.complaints, "these alone were asked for"
    report.only = ()
    report.hits_after_restart = 96
    assert not report.complaints
    report.loaded = 0
    assert report.complaints[0].startswith("no block was loaded from a tier")
    report.finding = "3 tokens differ"
    assert report.complaints == ["3 tokens differ"]


def test_campaign_says_that_its_processes_do_not_start(monkeypatch):
    def fails(*_):
        raise AssertionError("process 7 sent nothing within 120 s")

    monkeypatch.setattr("tests.faults.campaign.running", fails)
    report = run_campaign(3, SEED, print)
    assert report.complaints == ["the processes with sqlite did not start or end: process 7 sent nothing within 120 s"]
