"""A small stress in every mix; `python -m tests.engine` is the large one."""

from __future__ import annotations

from functools import cache

import pytest

from tests.engine.stress import MIXES, Mix, Report, run_mix

REQUESTS = 9
SEED = 1


@cache
def report_of(mix: Mix) -> Report:
    return run_mix(mix, REQUESTS, SEED)


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_stress_tokens_equal_the_dense_model(mix):
    report = report_of(mix)
    assert report.complaints == []
    assert report.requests == REQUESTS
    assert report.counts.completed == REQUESTS
    assert 0 < report.worst < 1e-9, "logits are compared, and sums have another order"


def test_stress_reaches_every_event():
    """The mixes reach the events that they are made for."""
    total = Report()
    for mix in MIXES:
        total.add(report_of(mix))
    counts = total.counts
    assert len(total.tokens) >= 50
    assert counts.hits > 10
    assert len(total.hit_lengths) >= 5
    assert counts.copies > 20
    assert total.evicted > 100
    assert counts.preempted > 5
    assert counts.deferred > 0
    assert counts.accepted_drafts > 20
    assert counts.rejected_drafts > 20
    assert counts.lost_steps > 2
    assert total.kept_keys
