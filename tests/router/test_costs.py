"""Fitted costs approach what was measured, and stay within bounds whatever is measured."""

from __future__ import annotations

from random import Random

import pytest

from kvplane_fleet.costs import EngineCosts, Prior


def truth(tokens, cached):
    return 0.03 + tokens / 4000 + tokens * (cached + tokens / 2) / 2e8


def measured(costs, number, rng, noise=0.1):
    for _ in range(number):
        tokens, cached = rng.randrange(1, 20_000), rng.choice([0, rng.randrange(30_000)])
        costs.take_prefill(tokens, cached, truth(tokens, cached) * rng.uniform(1 - noise, 1 + noise))


def test_a_fit_approaches_the_engine_from_a_prior_that_is_five_times_too_fast():
    costs, rng = EngineCosts(Prior(prefill_tokens_per_s=20_000)), Random(1)
    assert costs.prefill_s(8000, 0) < 0.3 * truth(8000, 0)
    measured(costs, 60, rng)
    for tokens, cached in [(8000, 0), (1000, 0), (2000, 20_000), (16_000, 4000)]:
        assert costs.prefill_s(tokens, cached) == pytest.approx(truth(tokens, cached), rel=0.15)
    assert costs.prefill_tokens_per_s == pytest.approx(1000 / truth(1000, 0), rel=0.2)
    assert costs.samples == 60


def test_a_fit_follows_an_engine_that_becomes_slower():
    costs, rng = EngineCosts(Prior()), Random(2)
    measured(costs, 300, rng)
    for _ in range(600):
        tokens = rng.randrange(1, 20_000)
        costs.take_prefill(tokens, 0, 3 * truth(tokens, 0))
    assert costs.prefill_s(8000, 0) == pytest.approx(3 * truth(8000, 0), rel=0.2)


@pytest.mark.parametrize("seed", range(20))
def test_predictions_are_positive_and_bounded_whatever_is_measured(seed):
    costs, rng = EngineCosts(Prior()), Random(seed)
    for _ in range(300):
        tokens, cached = rng.choice([1, 7, 10_000_000]), rng.choice([0, 10_000_000])
        costs.take_prefill(tokens, cached, rng.choice([0.0, 1e-9, 1.0, 1e9, -1.0, float("inf"), float("nan")]))
        costs.take_decode(rng.choice([0, 1, 1000]), rng.choice([0.0, 1.0, 1e6]), rng.choice([0.0, 1e9, float("nan")]))
        for tokens, cached in [(1, 0), (1000, 0), (10_000_000, 10_000_000)]:
            assert 0 < costs.prefill_s(tokens, cached) < 1e9
        assert 0 <= costs.row_s() < 100


def test_one_stopped_process_does_not_spoil_the_fit():
    costs, rng = EngineCosts(Prior()), Random(3)
    measured(costs, 200, rng)
    costs.take_prefill(100, 0, 60.0)
    measured(costs, 10, rng)
    assert costs.prefill_s(8000, 0) == pytest.approx(truth(8000, 0), rel=0.3)
