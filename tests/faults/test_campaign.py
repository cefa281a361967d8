"""A dozen random faults on real processes. `make faults` does more of them."""

from __future__ import annotations

import pytest

from tests.faults.campaign import run_campaign
from tests.store.servers import require_redis

FAULTS = 12


@pytest.mark.timeout(300)
def test_no_token_differs_and_everything_comes_back():
    require_redis()
    report = run_campaign(FAULTS, seed=20, say=print)
    assert not report.finding, report.finding
    assert report.is_good, report.line
    assert report.faults.total() >= FAULTS
