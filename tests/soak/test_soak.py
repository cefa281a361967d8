"""The soak test detects growth, and a short one completes."""

from __future__ import annotations

import json

import pytest

from tests.soak.__main__ import soak, unexpected
from tests.soak.verdict import ALLOWED, MIB, verdict_of


def samples(**growth: float) -> list[str]:
    """Samples of a hundred seconds of a steady service, in which columns grow by the given amounts per minute."""
    steady = {"rss": 100.0 * MIB, "descriptors": 30, "threads": 12, "tasks": 20, "objects": 10**6}
    noise = (0, 3, -2, 1, -1, 2)
    return [
        json.dumps(
            {
                "at_s": at,
                "held_ms": 5.0,
                **{name: value + noise[at % 6] + growth.get(name, 0) * at / 60 for name, value in steady.items()},
            }
        )
        for at in range(100)
    ]


def test_steady_counters_are_no_leak():
    assert verdict_of(samples()).leaks == []


@pytest.mark.parametrize("name", ALLOWED)
def test_growing_counter_is_named(name):
    (leak,) = verdict_of(samples(**{name: 2 * ALLOWED[name] + 1})).leaks
    assert leak.startswith(f"{name}: +")


def test_short_soak_completes(tmp_path):
    """Too short for slopes: every kind of client is served, none hangs, and the service exits cleanly."""
    verdict, load = soak(8, "sqlite", tmp_path)
    assert verdict.samples >= 5
    assert unexpected(load) == {}
    assert len(load.done) == 9
