"""Each scenario catches its twin, and finds nothing in the product."""

from __future__ import annotations

import pytest

from tests.faults.campaign import one_thread
from tests.faults.scenarios import SCENARIOS, play
from tests.twins import TWINS

FAULTS = 3  # most attempts until a twin is caught


@pytest.fixture(autouse=True)
def one_thread_of_torch():
    with one_thread():
        yield


def test_scenarios_name_existing_twins():
    assert len(SCENARIOS) >= 10
    assert {scenario.twin for scenario in SCENARIOS} <= set(TWINS)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.twin)
def test_product_passes_the_scenario(scenario):
    assert play(scenario, "")[1] == ""


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.twin)
def test_scenario_catches_its_twin(scenario):
    faults, caught = play(scenario, scenario.twin)
    assert caught
    assert faults <= FAULTS
