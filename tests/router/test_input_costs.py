"""Costs of each input of a router, in short; `python -m tests.router.input_costs` fuzzes longer."""

from __future__ import annotations

import pytest

from tests.router.input_costs import INPUTS, fuzz

NUMBER = {"places.yaml": 8}


@pytest.mark.parametrize("name", INPUTS)
def test_an_input_costs_no_more_than_its_length_allows(name):
    number, _, _ = fuzz(name, 1, 3.0, NUMBER.get(name, 100))
    assert number


@pytest.mark.parametrize("name", INPUTS)
def test_a_cost_above_what_is_allowed_is_a_finding(name, monkeypatch):
    monkeypatch.setattr("tests.router.input_costs.FIXED_S", -1.0)
    with pytest.raises(AssertionError, match="us per kB"):
        fuzz(name, 1, 3.0, 1)
