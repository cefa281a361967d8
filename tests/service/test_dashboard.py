"""The dashboard and the alerts, run by a real Prometheus on the metrics of real runs."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import yaml
from prometheus_client import Metric

from kvplane.base.groups import GroupKind, GroupSpec
from kvplane.base.step import Admit, Cache, End, Facts, News, Part, Run
from kvplane_fleet.decisions import Event
from kvplane_fleet.router.metrics import RouterCollector
from kvplane_service.config import Config
from kvplane_service.registry import Registration, Registry
from kvplane_service.store.errors import StoreUnavailable
from kvplane_service.telemetry.collector import ServiceCollector
from kvplane_service.telemetry.holds import Holds
from tests.core.specification import specification_of
from tests.router.fleets import Scene, tokens
from tests.service import tiered
from tests.service.hosts import Engine, spec_of
from tests.service.monitoring import (
    FILES,
    INTERVAL_S,
    ROOT,
    START_S,
    Pages,
    Series,
    backfill,
    demo,
    prometheus,
    promtool,
)
from tests.service.rig import running, until
from tests.store.test_writer import Away, Bench

DASHBOARD = json.loads((FILES / "dashboard.json").read_text())
ALERTS = [rule for group in yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
EXPRESSIONS = {
    (panel["title"], target["refId"]): target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]
}
Alert = dict[str, Any]
SMALL = {"sliding": 90, "mamba": 60}
AMPLE = {"sliding": 4096, "mamba": 2048}


@pytest.fixture(scope="module")
def small_pools() -> Series:
    return demo(SMALL).series()


class Routed:
    """A router whose claims are partly wrong, and whose engines repeat removals."""

    def __init__(self) -> None:
        self.scene, self._next = Scene("a", "b"), 0
        self._collector = RouterCollector(self.scene.fleet, self.scene.decisions, {"a": {"equal": 3, "unexplained": 1}})

    def collect(self) -> Iterator[Metric]:
        for part in self._collector.parts():
            yield from part

    def act(self) -> None:
        self._next += 1
        prompt = tokens(self._next, 4)
        place, name = self.scene.book(prompt)
        self.scene.stores(place, prompt)
        self.scene.removes("a", tokens(0, 1))
        self.scene.decisions.ended(name, Event(self.scene.clock(), cached=self._next % 2))


@pytest.fixture(scope="module")
def routed(small_pools) -> Series:
    routed = Routed()
    pages = Pages(routed)
    for _ in next(iter(small_pools.values())):
        routed.act()
        pages.take()
    return pages.series()


@pytest.fixture(scope="module")
def server(small_pools, routed, tmp_path_factory):
    """Prometheus on the metrics of a demo run whose pools are a little too small, of tiers, and of a router."""
    folder = tmp_path_factory.mktemp("prometheus")
    of_tiers = {name: values for name, values in tiered.busy_tiers().items() if "_tier_" in name}
    waiting = {name: values for name, values in queue().items() if "waiting" in name}
    with prometheus(folder, backfill({**small_pools, **of_tiers, **routed, **waiting}, folder)) as server:
        yield server


def filled_in(expression: str) -> str:
    """As Grafana sends it."""
    return expression.replace("$__rate_interval", "1m").replace("$replica", ".*")


@pytest.mark.parametrize("panel", EXPRESSIONS, ids=lambda panel: f"{panel[0]} {panel[1]}")
def test_dashboard_panel_shows_samples(server, small_pools, panel):
    end = START_S + INTERVAL_S * len(next(iter(small_pools.values())))
    expression = filled_in(EXPRESSIONS[panel])
    result = server.get("query_range", query=expression, start=START_S, end=end, step=INTERVAL_S)
    values = [float(value) for series in result for _, value in series["values"]]
    assert [value for value in values if value == value], expression


def test_dashboard_panels_query_only_existing_metrics(small_pools, routed):
    emitted = {name.partition("{")[0] for name in (*small_pools, *routed)} | emitted_metrics()
    asked = {name for text in EXPRESSIONS.values() for name in re.findall(r"kvplane_\w+", text)}
    asked |= {name for rule in ALERTS for name in re.findall(r"kvplane_\w+", rule["expr"])}
    assert asked <= emitted


def test_prometheus_scrapes_a_service_until_it_ends(tmp_path):
    with running(Config(listen="127.0.0.1:0", metrics_listen="127.0.0.1:0")) as service:
        service.register()
        service.open().step()
        jobs = [{"job_name": "kvplane", "static_configs": [{"targets": [service.app.metrics_address]}]}]
        config = {"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}
        with prometheus(tmp_path, tmp_path / "data", yaml.safe_dump(config)) as server:
            until(lambda: bool(server.get("query", query="kvplane_steps_total == 1")))
            exemplars = server.get("query_exemplars", query="kvplane_step_seconds_bucket", start=0, end=4e9)
            assert any(one["labels"]["seq"] == "1" for series in exemplars for one in series["exemplars"])
            (rule,) = [rule for rule in ALERTS if rule["alert"] == "KvplaneDown"]
            assert server.get("query", query=rule["expr"]) == []
            asyncio.run_coroutine_threadsafe(service.app.stop(), service.loop).result(20)
            until(lambda: bool(server.get("query", query=rule["expr"])))


# ---- alerts


class Scenario:
    """A replica "r" of six blocks, its engine, and what its metrics show."""

    def __init__(self, *groups: GroupSpec) -> None:
        self.now_ns = 0
        self.tick_ns = 0
        self._registry = Registry(Config(), self._clock)
        spec = spec_of(num_blocks=6)
        spec = replace(spec, groups=groups or spec.groups)
        self.host = self._registry.register("r", Registration(spec)).host
        self.holds = Holds()
        self.pages = Pages(ServiceCollector(self._registry, holds=self.holds))
        self.engine = Engine(self.host)

    def _clock(self) -> int:
        self.now_ns += self.tick_ns
        return self.now_ns

    def repeat(self, act: Callable[[int], object], times: int = 40) -> Series:
        """Do it once between two pages."""
        for number in range(times):
            self.pages.take()
            act(number)
        return self.pages.series()

    def serve(self, slot: int, tokens: int, fill: int) -> None:
        """Admit a request."""
        self.engine.step(
            Part(
                news=News(slot=[slot], num_tokens=[tokens], tokens=[fill] * tokens),
                admit=Admit(slot=[slot]),
            )
        )

    def free(self, slot: int) -> None:
        self.engine.step(Part(facts=Facts(slot=[slot], end=[End.FREE])))


def down() -> Series:
    """What Prometheus itself records when no target answers, see test_prometheus_scrapes_a_service."""
    return {'up{job="kvplane"}': [1.0] * 5 + [0.0] * 35}


def silent_engine() -> Series:
    scenario = Scenario()

    def pass_time(_: int) -> None:
        scenario.now_ns += INTERVAL_S * 10**9
        scenario.host.expire()

    return scenario.repeat(pass_time)


def queue() -> Series:
    """Waiting requests, as an engine reports them."""
    scenario = Scenario()
    return scenario.repeat(lambda number: scenario.host.heartbeat(scenario.engine.nonce, number))


def many_replicas() -> Series:
    scenario = Scenario()
    scenario._registry.max_replicas = 1
    return scenario.repeat(lambda _: None)


def full_pool() -> Series:
    scenario = Scenario()
    scenario.serve(0, 80, 1)

    def ask(number: int) -> None:
        scenario.serve(1, 20, number)
        scenario.free(1)

    return scenario.repeat(ask)


def preemptions() -> Series:
    scenario = Scenario()

    def crowd_out(number: int) -> None:
        scenario.serve(0, 40, number)
        scenario.serve(1, 30, 100 + number)
        scenario.engine.step(Part(facts=Facts(slot=[0], appended=[9], tokens=[1] * 9), run=Run(slot=[0, 1])))
        scenario.free(0)
        scenario.free(1)

    return scenario.repeat(crowd_out)


def too_long() -> Series:
    scenario = Scenario()

    def ask(number: int) -> None:
        scenario.serve(0, 200, number)
        scenario.free(0)

    return scenario.repeat(ask)


def young_evictions() -> Series:
    scenario = Scenario()

    def churn(number: int) -> None:
        scenario.serve(0, 80, number)
        scenario.free(0)

    return scenario.repeat(churn)


def failed_steps() -> Series:
    scenario = Scenario()

    def fail(number: int) -> None:
        scenario.serve(0, 40, number)
        engine = scenario.engine
        engine.step(Part(cache=Cache(failed_steps=[engine.seq])), executed_through=engine.seq - 1)
        scenario.free(0)

    return scenario.repeat(fail)


def rejected_drafts() -> Series:
    scenario = Scenario(GroupSpec(GroupKind.SLIDING_WINDOW, 16, window=16))

    def reject(number: int) -> None:
        """More than was drafted: the window before it is gone."""
        scenario.serve(0, 60, number)
        scenario.engine.step(Part(facts=Facts(slot=[0], appended=[1], tokens=[1]), run=Run(slot=[0])))
        scenario.engine.step(Part(facts=Facts(slot=[0], computed=[3])))
        scenario.free(0)

    return scenario.repeat(reject)


def slow_steps() -> Series:
    scenario = Scenario()
    scenario.tick_ns = 8_000_000
    return scenario.repeat(lambda _: scenario.engine.step())


def held_loop() -> Series:
    scenario = Scenario()
    return scenario.repeat(lambda _: scenario.holds.add(0.3))


def restarts() -> Series:
    scenario = Scenario()
    return scenario.repeat(lambda _: Engine(scenario.host))


def store_away() -> Series:
    store = Away()
    bench = Bench(store)
    store.error = StoreUnavailable("no answer")
    registry = Registry(Config(), lambda: 0)
    registry.register("r", Registration(spec_of()))
    pages = Pages(ServiceCollector(registry, lambda _: bench.report))
    for number in range(40):
        bench.serve(f"{number:04d}x")
        assert not bench.write()
        bench.engine.now_ns += INTERVAL_S * 10**9
        pages.take()
    return pages.series()


def wrong_hits() -> Series:
    scenario = Scenario()

    def check(number: int) -> None:
        scenario.engine.step(Part(cache=Cache(hits_checked=1, evicted=[1], mismatched=[1] if number == 20 else [])))

    return scenario.repeat(check)


def broken_state() -> Series:
    """A reference without a holder, found by the check of an idle replica."""
    scenario = Scenario()
    broken = specification_of(scenario.host.replica)
    broken.coordinator.pool.references[5] += 1
    scenario.host.replica.adopt(broken)

    def check(number: int) -> None:
        if number == 20:
            asyncio.run(scenario.host.idle_check.run(lambda _: asyncio.sleep(0)))

    return scenario.repeat(check)


def lost_peer_service() -> Series:
    return {
        f'kvplane_peer_service_followed{{service="{address}"}}': [followed] * 60
        for address, followed in (("far:7070", 0.0), ("near:7070", 1.0))
    }


def wrong_claims() -> Series:
    wrong = 'kvplane_router_wrong_tokens_total{place="r",cause="unexplained"}'
    return {
        wrong: [2.0 * at for at in range(60)],
        'kvplane_router_prompt_tokens_total{place="r"}': [64.0 * at for at in range(60)],
    }


def contradicted() -> Series:
    return {'kvplane_router_faults_total{place="r",fault="entries_differ"}': [float(at) for at in range(60)]}


def partial_place() -> Series:
    return {'kvplane_router_place_state{place="r",state="partial"}': [1.0] * 60}


def unproven_place() -> Series:
    return {'kvplane_router_place_state{place="r",state="unproven"}': [1.0] * 60}


def moved_adapter() -> Series:
    return {'kvplane_router_faults_total{place="r",fault="adapter_differs"}': [float(at > 40) for at in range(60)]}


SCENARIOS: dict[str, Callable[[], Series]] = {
    "KvplaneDown": down,
    "KvplaneReplicaLapsed": silent_engine,
    "KvplaneReplicasNearLimit": many_replicas,
    "KvplanePoolExhausted": full_pool,
    "KvplanePreempting": preemptions,
    "KvplaneRequestNeverFits": too_long,
    "KvplaneEvictsYoungKeys": young_evictions,
    "KvplaneStepsTakenBack": failed_steps,
    "KvplaneRequestsWentBack": rejected_drafts,
    "KvplaneSlowSteps": slow_steps,
    "KvplaneEngineRestarts": restarts,
    "KvplaneStateBroken": broken_state,
    "KvplaneWrongHit": wrong_hits,
    "KvplaneStoreBehind": store_away,
    "KvplaneLoopHeld": held_loop,
    "KvplaneTierDamaged": tiered.damaged_slots,
    "KvplaneTierSuspended": tiered.failing_disk,
    "KvplaneTierSavesLost": tiered.lost_saves,
    "KvplaneTierLoadsFail": tiered.failing_loads,
    "KvplanePeersUnread": tiered.unread_peers,
    "KvplanePeerServiceLost": lost_peer_service,
    "KvplaneRouterClaimsWrong": wrong_claims,
    "KvplaneRouterEntriesDiffer": contradicted,
    "KvplaneRouterHashesUnproven": unproven_place,
    "KvplaneRouterAdapterMoved": moved_adapter,
    "KvplaneRouterPlaceLost": partial_place,
}


def test_dashboard_shows_the_lag_of_an_unavailable_store(tmp_path):
    series = store_away()
    with prometheus(tmp_path, backfill(series, tmp_path)) as server:
        shown = {
            panel: largest(server, filled_in(expression), START_S + INTERVAL_S * 39)
            for panel, expression in EXPRESSIONS.items()
            if "kvplane_store_" in expression
        }
    assert shown[("Store lag", "A")] == INTERVAL_S * 40
    assert shown[("Changes that wait for the store", "A")] == 41  # an entry of each prompt, and the record
    assert shown[("Changes that wait for the store", "B")] > 0
    assert len(shown) == 3


def largest(server, expression: str, end_s: int) -> float:
    result = server.get("query_range", query=expression, start=START_S, end=end_s, step=INTERVAL_S)
    return max(float(value) for series in result for _, value in series["values"])


def test_every_alert_has_a_scenario():
    assert set(SCENARIOS) == {rule["alert"] for rule in ALERTS}


def fires(tmp_path, series: Series, expected: Mapping[str, list[Alert]]) -> str:
    """Let promtool say whether at the end exactly these alerts fire, by name."""
    length = max(map(len, series.values()))
    test = {
        "rule_files": [str(FILES / "alerts.yaml")],
        "evaluation_interval": f"{INTERVAL_S}s",
        "tests": [
            {
                "interval": f"{INTERVAL_S}s",
                "input_series": [
                    {"series": name, "values": " ".join("_" if value is None else repr(value) for value in values)}
                    for name, values in series.items()
                ],
                "alert_rule_test": [
                    {"eval_time": f"{(length - 1) * INTERVAL_S}s", "alertname": name, "exp_alerts": alerts}
                    for name, alerts in expected.items()
                ],
            }
        ],
    }
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump(test))
    return promtool("test", "rules", file)


def expected_alert(rule: Alert) -> Alert:
    """As it fires for the scenario's replica."""
    labels = {"severity": rule["labels"]["severity"]}
    if "by (replica" in rule["expr"]:
        labels["replica"] = "r"
    if "by (place" in rule["expr"]:
        labels["place"] = "r"
    if "by (service" in rule["expr"]:
        labels["service"] = "far:7070"
    if "by (replica, rank, tier)" in rule["expr"]:
        labels |= {"rank": "0", "tier": "disk" if rule["alert"] == "KvplaneTierSuspended" else "host"}
    if rule["alert"] == "KvplaneDown":
        labels["job"] = "kvplane"
    annotations = dict(rule["annotations"])
    for label, value in labels.items():
        annotations = {name: text.replace(f"{{{{ $labels.{label} }}}}", value) for name, text in annotations.items()}
    return {"exp_labels": labels, "exp_annotations": annotations}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_alert_fires_in_its_scenario(rule, tmp_path):
    fires(tmp_path, SCENARIOS[rule["alert"]](), {rule["alert"]: [expected_alert(rule)]})


def test_no_alert_fires_for_a_healthy_service(tmp_path):
    series: Series = {**demo(AMPLE).series(), 'up{job="kvplane"}': [1.0] * 60}
    fires(tmp_path, series, {rule["alert"]: [] for rule in ALERTS})


# ---- documents


def test_documents_name_existing_metrics_and_the_reference_names_all():
    assert documented_metrics("reference/metrics.md") == emitted_metrics()
    counterparts = documented_metrics("metrics.md")
    assert len(counterparts) >= 10
    assert counterparts < emitted_metrics()


def documented_metrics(page: str) -> set[str]:
    text = (ROOT / "docs" / page).read_text()
    return set(re.findall(r"^\| `(kvplane_\w+)", text, flags=re.MULTILINE))


def emitted_metrics() -> set[str]:
    families = ServiceCollector(Registry(Config(), lambda: 0)).collect()
    return {family.name + ("_total" if family.type == "counter" else "") for family in families}


def test_every_alert_has_a_runbook():
    text = (ROOT / "docs" / "operating.md").read_text()
    assert set(re.findall(r"^### (Kvplane\w+)$", text, flags=re.MULTILINE)) == {rule["alert"] for rule in ALERTS}
