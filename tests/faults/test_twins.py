"""The proof of the proof: each rule, taken out, is missed where its fault is staged; with it nothing is wrong."""

from __future__ import annotations

import pytest

from tests.faults.campaign import one_thread
from tests.faults.scenarios import SCENARIOS, play
from tests.twins import TWINS

FAULTS = 3  # at most, until a twin is caught


@pytest.fixture(autouse=True)
def one_thread_of_torch():
    with one_thread():
        yield


def test_the_scenarios_are_of_twins_that_there_are():
    assert len(SCENARIOS) >= 10
    assert {scenario.twin for scenario in SCENARIOS} <= set(TWINS)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.twin)
def test_the_product_stands_what_is_staged(scenario):
    assert play(scenario, "")[1] == ""


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.twin)
def test_the_twin_is_caught(scenario):
    faults, caught = play(scenario, scenario.twin)
    assert caught
    assert faults <= FAULTS
