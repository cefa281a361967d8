"""Scenarios: short sequences in which the core once differed from the reference, or in which a rule shows itself.

Each was found by `python -m tests.conformance.live`, shrunk there, and is named after what it is about.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.replay import replay_file

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.jsonl.gz"))


def test_scenario_files_exist():
    assert SCENARIOS


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_scenario_replays_equal(path):
    assert replay_file(path).values > 0
