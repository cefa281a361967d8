"""Metrics: the answers of the port, and values that equal those of the allocator."""

from __future__ import annotations

import asyncio
import http.client
import re
import socket
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from kvplane.base.errors import InternalError, InvalidArgument, Unavailable
from kvplane.base.groups import ReplicaSpec
from kvplane.base.step import Admit, Budget, Cache, End, Facts, News, Part, Run
from kvplane_core.face import loader
from kvplane_core.face.state import export_state
from kvplane_core.spec.loading import load_state
from kvplane_service.config import Config
from kvplane_service.registry import Registration, Registry
from kvplane_service.rpc.encode import encode_summary
from kvplane_service.telemetry.collector import ServiceCollector
from kvplane_service.telemetry.http import MetricsServer
from tests.core.test_split import split_spec
from tests.service.guarded import replace
from tests.service.hosts import BLOCK, Engine, spec_of
from tests.service.rig import running, until

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


class Watched:
    """A replica "r", an engine, and the metrics of the registry."""

    def __init__(self, given: ReplicaSpec | None = None, **spec) -> None:
        self.now_ns = 0
        registry = Registry(Config(), lambda: self.now_ns)
        self.entry = registry.register("r", Registration(given or spec_of(**spec)))
        self.host = self.entry.host
        self.collector = ServiceCollector(registry)

    def value(self, name: str, **labels: str) -> float:
        for family in self.collector.collect():
            for sample in family.samples:
                if sample.name == name and {**sample.labels, "replica": "r"} == {**labels, "replica": "r"}:
                    return sample.value
        raise AssertionError(f"no {name} {labels}")


def prompt(slot: int, num_tokens: int, fill: int = 7) -> News:
    return News(slot=[slot], num_tokens=[num_tokens], tokens=[fill] * num_tokens)


@contextmanager
def serving(**fields):
    with running(Config(listen="127.0.0.1:0", metrics_listen="127.0.0.1:0", **fields)) as service:
        service.register()
        yield service, f"http://{service.app.metrics_address}"


def get(url: str, accept: str = "") -> tuple[str, str]:
    request = urllib.request.Request(url, headers={"Accept": accept} if accept else {})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


def test_metrics_are_valid_in_both_formats():
    with serving() as (service, url):
        service.open().step()
        text, kind = get(f"{url}/metrics")
        assert kind.startswith("text/plain")
        plain = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
        text, kind = get(f"{url}/metrics", OPENMETRICS)
        assert kind.startswith("application/openmetrics-text")
        families = list(openmetrics.text_string_to_metric_families(text))
        assert {sample.name for family in families for sample in family.samples} == plain
        assert all(name.startswith("kvplane_") for name in plain)


def test_an_exemplar_names_a_step_of_its_bucket():
    with serving() as (service, url):
        stream = service.open()
        for _ in range(3):
            stream.step()
        text, _ = get(f"{url}/metrics", OPENMETRICS)
        found = re.findall(r'kvplane_step_seconds_bucket\{le="([^"]+)",replica="r"\} \S+ # (\{.*?\}) (\S+)', text)
        assert found
        assert any('epoch="2"' in labels and 'seq="' in labels for _, labels, _ in found)
        assert all(float(value) <= float(bound) for bound, _, value in found)


def test_a_page_is_built_once_per_second_and_format():
    built: list[int] = []

    class Counted(ServiceCollector):
        def parts(self):
            built.append(1)
            return super().parts()

    async def scrapes():
        now_ns = 5
        server = MetricsServer(Counted(Registry(Config(), lambda: 0)), clock=lambda: now_ns)
        head, other = ["GET /metrics HTTP/1.1"], ["GET /metrics HTTP/1.1", f"Accept: {OPENMETRICS}"]
        pages = await asyncio.gather(*(server._response(head) for _ in range(10)))
        assert all(page == pages[0] for page in pages)
        assert len(built) == 1
        assert (await server._response(other))[1:] != pages[0][1:]
        now_ns += 999_999_999
        await server._response(head)
        await server._response([*other[:1], "accept: application/openmetrics-text; version=1.0.0; escaping=values"])
        assert len(built) == 2
        now_ns += 1
        await server._response(head)
        assert len(built) == 3

    asyncio.run(scrapes())


def test_a_scrape_needs_the_token_of_the_file(tmp_path):
    path = tmp_path / "token"
    path.write_text("first-metrics-token\n")

    def scrape(url: str, authorization: str = "") -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
        headers = {"Authorization": authorization} if authorization else {}
        connection.request("GET", "/metrics", headers=headers)
        return connection.getresponse()

    def status(url: str, authorization: str) -> int:
        with scrape(url, authorization) as answer:
            return answer.status

    with serving(metrics_token_file=str(path)) as (_, url):
        for wrong in ("", "Bearer", "Bearer first-metrics-toke", "Basic first-metrics-token", "Bearer \xff"):
            with scrape(url, wrong) as answer:
                assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
                assert b"kvplane_" not in answer.read()
        assert status(url, "Bearer first-metrics-token") == 200
        replace(path, "second-metrics-token")
        assert status(url, "bearer second-metrics-token") == 200
        assert status(url, "Bearer first-metrics-token") == 401
        replace(path, "short")
        assert status(url, "Bearer second-metrics-token") == 200, "the old content stays in use"


@pytest.mark.parametrize("content", ["", "short", "two tokens-of-some-length", "one-of-two-tokens\nthe-other-of-them"])
def test_a_file_without_one_token_is_refused_by_name(content, tmp_path):
    (tmp_path / "token").write_text(content)
    config = Config(listen="127.0.0.1:0", metrics_listen="127.0.0.1:0", metrics_token_file=str(tmp_path / "token"))
    with pytest.raises(InvalidArgument, match="one token") as caught, running(config):
        pass
    assert caught.value.field == "metrics_token_file"
    assert "openssl rand" in caught.value.remedy


def test_metrics_port_refuses_unknown_paths_and_methods():
    with serving() as (_, url):
        for path, method, status in (("/nothing", "GET", 404), ("/metrics", "POST", 405)):
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(urllib.request.Request(url + path, method=method), timeout=20)
            assert caught.value.code == status
            caught.value.close()


def test_metrics_port_refuses_a_request_with_a_head_above_the_limit():
    with serving() as (service, _):
        host, port = service.app.metrics_address.split(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 40_000)
            assert connection.recv(100).startswith(b"HTTP/1.1 431")


def test_a_service_that_stops_closes_the_connections_of_its_metrics_port():
    with running(Config(listen="127.0.0.1:0", metrics_listen="127.0.0.1:0")) as service:
        host, _, port = service.app.metrics_address.rpartition(":")
        answered, waiting = (socket.create_connection((host, int(port))) for _ in range(2))
        answered.sendall(b"GET /unknown HTTP/1.1\r\n\r\n")
        assert answered.recv(1000)
        waiting.sendall(b"GET /metrics HTTP/1.1\r\n")
    for one in (answered, waiting):
        one.settimeout(10)
        while one.recv(1000):
            pass
        one.close()
    assert not asyncio.all_tasks(service.loop)


def test_metrics_port_in_use_is_refused_by_name():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = Config(listen="127.0.0.1:0", metrics_listen=address)
        with pytest.raises(Unavailable, match=f"metrics on {address}.*in use") as caught, running(config):
            pass
    assert caught.value.field == "metrics_listen"


def test_metric_blocks_by_state_equals_the_pool():
    world = Watched(num_blocks=21)
    engine = Engine(world.host)
    engine.step(Part(news=prompt(0, 40), admit=Admit(slot=[0])))
    assert [world.value("kvplane_blocks", state=state) for state in ("held", "cached", "empty")] == [3, 0, 17]
    engine.step(Part(facts=Facts(slot=[0], end=[End.FREE])))
    assert [world.value("kvplane_blocks", state=state) for state in ("held", "cached", "empty")] == [0, 2, 18]
    Engine(world.host, busy_blocks=(3, 4))
    assert [world.value("kvplane_blocks", state=state) for state in ("held", "busy", "empty")] == [0, 2, 18]


def test_metric_blocks_names_those_that_no_state_can_take():
    world = Watched(split_spec(6))
    states = ("held", "cached", "empty", "slack")
    assert [world.value("kvplane_blocks", state=state) for state in states] == [0, 0, 20, 0]
    engine = Engine(world.host)
    engine.step(Part(news=prompt(0, 10), admit=Admit(slot=[0]), budget=Budget(8)))
    assert [world.value("kvplane_blocks", state=state) for state in states] == [8, 0, 12, 0]
    engine.step(Part(run=Run([0]), budget=Budget(8)))
    assert [world.value("kvplane_blocks", state=state) for state in states] == [13, 0, 4, 3]


def test_metrics_of_keys_and_blocks_by_group_kind():
    world = Watched(num_blocks=21)
    engine = Engine(world.host)
    engine.step(Part(news=prompt(0, 40), admit=Admit(slot=[0])))
    assert world.value("kvplane_keys", group_kind="full_attention") == 2
    assert world.value("kvplane_allocated_blocks_total", group_kind="full_attention") == 3


def test_metrics_of_hits_by_group_kind():
    world = Watched()
    engine = Engine(world.host)
    engine.step(Part(news=prompt(0, 40), admit=Admit(slot=[0])))
    engine.step(Part(news=prompt(1, 40), admit=Admit(slot=[1])))
    assert world.value("kvplane_prefix_queried_tokens_total") == 80
    assert world.value("kvplane_prefix_hit_tokens_total") == 2 * BLOCK
    assert world.value("kvplane_group_queried_tokens_total", group_kind="full_attention") == 80
    assert world.value("kvplane_group_hit_tokens_total", group_kind="full_attention") == 2 * BLOCK
    assert world.value("kvplane_granted_tokens_total") == 40 + 8
    assert world.value("kvplane_running_requests") == 2
    assert world.value("kvplane_admitted_requests_total") == 2


def test_metrics_of_evictions_by_reason_and_age():
    world = Watched(num_blocks=6)
    engine = Engine(world.host)
    engine.step(Part(news=prompt(0, 40), admit=Admit(slot=[0])))
    engine.step(Part(facts=Facts(slot=[0], end=[End.FREE])))
    for _ in range(5):
        engine.step()
    engine.step(Part(news=prompt(0, 80, fill=9), admit=Admit(slot=[0])))
    assert world.value("kvplane_removed_keys_total", reason="evicted") == 2
    assert world.value("kvplane_evicted_idle_steps_bucket", le="3.0") == 0  # last used in step 1, evicted in step 8
    assert world.value("kvplane_evicted_idle_steps_bucket", le="7.0") == 2
    engine.step(Part(cache=Cache(evicted=[1, 2])))
    assert world.value("kvplane_removed_keys_total", reason="dropped") == 2


def test_metrics_of_refusals_by_reason():
    world = Watched(num_blocks=6)
    engine = Engine(world.host)
    engine.step(Part(news=prompt(0, 40), admit=Admit(slot=[0])))
    engine.step(Part(news=prompt(1, 60, fill=9), admit=Admit(slot=[1])))
    engine.step(Part(news=prompt(2, 100, fill=9), admit=Admit(slot=[2])))
    engine.step(Part(admit=Admit(slot=[1], expected_hit=[16])))
    reasons = ("out_of_blocks", "never_fits", "deferred", "stale_hit", "no_room")
    assert [world.value("kvplane_refusals_total", reason=reason) for reason in reasons] == [1, 1, 0, 1, 0]


def test_metrics_of_preemptions_by_reason():
    world = Watched(num_blocks=6)
    engine = Engine(world.host)
    engine.step(Part(news=prompt(0, 40), admit=Admit(slot=[0])), Part(news=prompt(1, 30, 9), admit=Admit(slot=[1])))
    engine.step(Part(facts=Facts(slot=[0], appended=[9], tokens=[1] * 9), run=Run(slot=[0, 1])))
    assert world.value("kvplane_preemptions_total", reason="out_of_blocks") == 1
    engine.step(Part(facts=Facts(slot=[0], end=[End.PREEMPTED])))
    assert world.value("kvplane_preemptions_total", reason="engine") == 1
    engine.step(Part(news=prompt(2, 40, 5), admit=Admit(slot=[2])))
    engine.step(Part(cache=Cache(failed_steps=[4])), executed_through=3)
    assert world.value("kvplane_preemptions_total", reason="taken_back") == 1
    assert world.value("kvplane_removed_keys_total", reason="withdrawn") == 2
    assert world.value("kvplane_preemptions_total", reason="went_back") == 0


def test_metrics_of_leases_and_lapses():
    world = Watched()
    with pytest.raises(AssertionError):
        world.value("kvplane_lease_left_seconds")
    engine = Engine(world.host)
    assert world.value("kvplane_lease_left_seconds") == 10
    assert world.value("kvplane_replicas", state="live") == 1
    world.now_ns = 11 * 10**9
    world.host.expire()
    assert world.value("kvplane_lease_left_seconds") == 0
    assert world.value("kvplane_replicas", state="lapsed") == 1
    assert world.value("kvplane_lapses_total") == 1
    engine.step()
    assert world.value("kvplane_lives_total") == 1
    assert world.value("kvplane_decisions") == 2


def test_metrics_of_a_canary_count_hits_and_wrong_blocks():
    watched = Watched()
    engine = Engine(watched.host)
    engine.step(Part(news=prompt(0, 2 * BLOCK + 1), admit=Admit([0])))
    engine.step(Part(cache=Cache(hits_checked=3)))
    engine.step(Part(cache=Cache(hits_checked=1, evicted=[1, 2], mismatched=[2])))
    assert watched.value("kvplane_canary_checks_total") == 4
    assert watched.value("kvplane_canary_mismatches_total") == 1


def test_metrics_name_the_core():
    watched = Watched()
    core = loader.core_of(watched.host.replica)
    assert watched.value("kvplane_core_info", core=core) == 1


def test_a_deregistered_replica_leaves_no_series():
    with serving() as (service, url):
        assert 'replica="r"' in get(f"{url}/metrics")[0]
        service.in_loop(lambda: service.app.registry.remove("r"))
        until(lambda: 'replica="r"' not in get(f"{url}/metrics")[0])  # the first page is kept for a second


def test_the_values_of_a_replica_whose_core_has_failed_are_still_read():
    """Its other calls are refused until it is registered again; the values of other replicas do not end with it."""
    watched = Watched(partial_hits=False)
    engine = Engine(watched.host)
    engine.step(Part(news=prompt(0, 2 * BLOCK), admit=Admit([0])))
    inside = load_state(watched.host.replica.spec, export_state(watched.host.replica))
    inside.coordinator.pool.references[inside.coordinator.tables(0)[0][0]] = 0
    watched.host.replica.adopt(inside)
    with pytest.raises(AssertionError, match="without"):
        engine.step(Part(facts=Facts([0], end=[int(End.FREE)])))
    with pytest.raises(InternalError, match="an earlier step broke") as caught:
        engine.step(Part())
    assert "register the replica again" in caught.value.remedy
    assert watched.value("kvplane_admitted_requests_total") == 1
    assert encode_summary(watched.entry).free_blocks == watched.host.replica.free_blocks


def test_the_owner_of_a_replica_is_a_label_and_no_family_is_there_twice():
    registry = Registry(Config(), lambda: 0)
    registry.register("acme/r", Registration(spec_of(), registered_by="acme"))
    registry.register("free", Registration(spec_of()))
    families = list(ServiceCollector(registry).collect())
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    (owners,) = [family for family in families if family.name == "kvplane_replica_info"]
    shown = {(one.labels["replica"], one.labels["owner"]): one.value for one in owners.samples}
    assert shown == {("acme/r", "acme"): 1, ("free", ""): 1}
