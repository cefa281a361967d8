"""A short soak of peers: too short for slopes."""

from __future__ import annotations

from tests.peers.soak import soak


def test_a_short_soak_completes(monkeypatch):
    monkeypatch.setattr("tests.peers.soak.STRIKE_SHARE", 0.5)
    verdict, outcomes = soak(0.2, 1)
    assert verdict.last["registrations"] > 0
    for outcome in outcomes:
        assert outcome.is_good, (outcome.line(), outcome.wrong, outcome.leaks)
        assert outcome.loads > 0
