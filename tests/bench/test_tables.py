"""The published tables: their arithmetic, equal tables of equal runs, and steps that stand for several."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvplane_fleet.policies import Policy
from kvplane_fleet.wire.events import Tier
from tests.bench.tables import engine, fleet, page, product, published, users
from tests.bench.tables.fleet import Load, published_fleet
from tests.bench.tables.model import FITTED, StepCost
from tests.bench.tables.product import Added, ProductRouter, product_fleet
from tests.bench.tables.published import BASELINE, BASELINE_ALL, OFFLOADED, OFFLOADED_ALL, Unit, drained_s
from tests.bench.tables.runs import SEED_COLUMN, SEEDS, Run, capacity_ratio, key_of, least_drain_s, stages_of


@pytest.mark.parametrize(("rows", "summary"), [(BASELINE, BASELINE_ALL), (OFFLOADED, OFFLOADED_ALL)])
def test_unit_explains_every_published_row(rows, summary):
    """A stage takes as long as its arrivals and its last answers; with generated tokens it would be shorter."""
    unit = Unit.of(summary)
    for rate, row in rows.items():
        seconds = drained_s(rate, row, unit)
        assert seconds == pytest.approx(published.STAGE_S + row.latency_p90_s, rel=0.25)
    generated = unit._replace(counted=unit.generated)
    assert drained_s(5, rows[5], generated) < 0.75 * published.STAGE_S
    assert summary.generated == pytest.approx(published.OUTPUT, rel=0.03)


def test_capacity_of_hybrid_allocator_is_as_published():
    assert round(capacity_ratio(16_384), 2) == published.CAPACITY_RATIO
    assert round(capacity_ratio(8192), 2) != published.CAPACITY_RATIO


def test_loads_read_half_of_the_bytes():
    for whole, needed in page.loads().values():
        assert 1.9 < whole / needed < 2


@pytest.mark.parametrize("column", ["both", "with peers", "+ retained"])
def test_equal_runs_have_equal_tables(column):
    first, second = (
        [{**one, "cpu_s": 0} for one in stages_of(Run(column, (10, 40), parts=8, stage_s=6.0))] for _ in range(2)
    )
    assert first == second
    assert 0 < first[1]["hit"] < 1
    assert first[1]["throughput"] > first[0]["throughput"]


def test_every_request_gets_its_tokens():
    served = published_fleet("both", FITTED, engines=2)
    stage = served.run(Load(1, 20), 3, 5)
    assert stage.generated == published.OUTPUT * len(stage.latency_s)
    assert len(stage.first_token_s) == len(stage.latency_s) == sum(one.completed for one in served.engines)
    assert min(stage.first_token_s) >= StepCost(FITTED).prefill_s(fleet.SYSTEM, fleet.QUESTION)


def test_steps_that_stand_for_several_change_little(monkeypatch):
    rows = []
    for together in (1, engine.TOGETHER):
        monkeypatch.setattr(engine, "TOGETHER", together)
        served = published_fleet("offloaded", FITTED, engines=1)
        rows.append((served.run(Load(3, 10), 1, 20).row, served.steps))
    (alone, steps), (grouped, fewer) = rows
    assert fewer < steps / 2
    assert grouped.throughput == pytest.approx(alone.throughput, rel=0.03)
    assert grouped.latency_s == pytest.approx(alone.latency_s, rel=0.05)


def test_host_tier_answers_what_the_device_evicted():
    small = replace(FITTED, pool_bytes=FITTED.pool_bytes / 2)
    hits = dict[str, int]()
    for column in ("baseline", "offloaded"):
        served = published_fleet(column, small, engines=1)
        hits[column] = served.run(Load(5, 5), 1, 30).hit
    assert hits["offloaded"] > 1.2 * hits["baseline"]


def test_router_knows_what_device_and_host_have():
    """Every first token confirms a claim, also of what only the host has."""
    small = replace(FITTED, pool_bytes=FITTED.pool_bytes / 2)
    served = product_fleet(Added(Policy.WEIGHTS), small, engines=2)
    stage = served.run(Load(5, 8), 2, 20)
    assert isinstance(served._router, ProductRouter)
    decisions = served._router._router._decisions
    places = [followed.place for followed in decisions.followed.values()]
    assert all(place.has(Tier.HOST) for place in places)
    truths = [decisions.work_of(place.settings.name).truth for place in places]
    assert stage.hit > 0.5 * stage.prompt
    assert sum(one.claimed for one in truths) > 0.9 * stage.hit
    assert not any(one.differences["unexplained"] for one in truths)


def test_engines_load_what_their_peers_have():
    hits = [
        product_fleet(Added(Policy.ROUND_ROBIN, peers=peers), FITTED, engines=3).run(Load(5, 8), 2, 15).hit
        for peers in (False, True)
    ]
    assert hits[1] > 1.2 * hits[0]


def test_prompts_that_share_what_runs_need_not_wait():
    times = [
        product_fleet(Added(Policy.COST, passed_by), FITTED, engines=1).run(Load(5, 15), 4, 30).row.ttft_s
        for passed_by in (0, 64)
    ]
    assert times[1] < 0.8 * times[0]


def test_hybrid_cache_serves_more_users(monkeypatch):
    monkeypatch.setattr(users, "LEVELS", (200, 250, 300))
    falls = [users.fall(users.sweep(users.Cache("GPU", hybrid))) for hybrid in (False, True)]
    assert falls == [1, None]


def test_retained_prefixes_are_retained_in_pool_and_tier():
    served = product_fleet(product.COLUMNS["+ retained"], FITTED, engines=1)
    served.run(Load(1, 3), 1, 5)
    assert sum(served.engines[0].publishing.replica.retained_counts) > 0


def test_page_has_the_recorded_results():
    results = json.loads(page.JSON.read_text())
    text = (page.DOCS / "published.md").read_text()
    assert page.filled(text, results) == text


def test_published_throughputs_are_predicted_as_the_readme_states():
    predicted = json.loads(page.JSON.read_text())["fleet"]
    errors = [
        stage["throughput"] / page.PUBLISHED[column][stage["rate"]] - 1
        for column, stages in predicted.items()
        for stage in stages
    ]
    assert f"predicts {len(errors)} published throughputs" in (page.DOCS.parent / "README.md").read_text()
    assert max(map(abs, errors)) <= page.MOST_ERROR


def test_gains_and_their_bound_are_as_the_readme_states():
    results = json.loads(page.JSON.read_text())
    found, readme = {**results["beyond"], **results["seeds"]}, (page.DOCS.parent / "README.md").read_text()
    runs = [[key_of(Run(name, seed=one)) for name in (SEED_COLUMN, "both")] for one in (1, *SEEDS)]
    for rate in page.GOAL_RATES:
        gains = [page.gain(found, mine, other, rate) for mine, other in runs]
        assert f"at {rate} requests per second {min(gains):.2f} to {max(gains):.2f} times" in readme.replace("\n", " ")


def test_least_drain_is_that_of_a_single_request_at_low_rates():
    cost = StepCost(FITTED)
    alone_s = published.OUTPUT * (cost.weights_s(1) + cost.contexts_s([fleet.SYSTEM + fleet.QUESTION + 128]))
    assert least_drain_s(FITTED, 0.01) == pytest.approx(alone_s)
    assert least_drain_s(FITTED, 80) > least_drain_s(FITTED, 60) > alone_s
