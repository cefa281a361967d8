"""Spans of calls, steps and admissions, as an OTLP collector receives them."""

from __future__ import annotations

import logging
import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

from kvplane import AdmitRow, FactRow, NewsRow, RunRow, connect, part_of
from kvplane.base.errors import InvalidArgument
from kvplane.base.requests import Allocate, Content
from kvplane.base.sections import Prefetch, Retain
from kvplane.base.step import Part, PartResult, Step, StepResult
from kvplane.base.trace import TraceContext, current_traceparent, is_sampled, parse_traceparent
from kvplane_service.config import Config
from kvplane_service.decisions.log import Decision
from kvplane_service.telemetry.ops import MAX_PACKED_CHARS, pack, unpack
from kvplane_service.telemetry.sampling import Sampling, is_asked_for
from tests.service.collector import Collector, collecting
from tests.service.hosts import HostWorld
from tests.service.rig import Service, running, until
from tests.service.test_decisions import decisions_of, drive

CANARY = 987_654_321
DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "tracing.md").read_text()
TRACE = TraceContext(0xABC, 0xDEF, 1)
ENGINE = TracerProvider(sampler=ALWAYS_ON).get_tracer("engine")
UNRECORDED = TracerProvider(sampler=ALWAYS_OFF).get_tracer("engine")


@contextmanager
def traced(monkeypatch: pytest.MonkeyPatch, ratio: str = "0", **config) -> Iterator[tuple[Service, Collector]]:
    """A service that sends its spans to a collector; all have arrived at the end of the block."""
    with collecting() as (collector, address):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{address}")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "the-service")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", ratio)
        with running(Config(listen="127.0.0.1:0", **config)) as service:
            service.register()
            yield service, collector


def flush(service: Service) -> None:
    assert service.app._tracing is not None
    service.app._tracing.flush()


def test_a_step_is_a_span_of_the_engine_s_trace(monkeypatch):
    with traced(monkeypatch) as (service, collector), connect(service.address) as client:
        with client.session("r") as session:
            with ENGINE.start_as_current_span("engine step") as span:
                session.apply(part_of(NewsRow(0, tokens=[CANARY] * 40), AdmitRow(0)))
                here = span.get_span_context()
            session.apply(Part())  # of no trace
            with UNRECORDED.start_as_current_span("engine step"):
                session.apply(Part())
        flush(service)
    (step,) = collector.named("kvcache.step")
    assert (step.trace_id, step.parent_id) == (f"{here.trace_id:032x}", f"{here.span_id:016x}")
    assert step.resource["service.name"] == "the-service"
    expected = {"kvcache.replica": "r", "kvcache.seq": 1, "kvcache.granted_tokens": 40, "kvcache.hit_tokens": 0}
    assert expected.items() <= step.attributes.items()
    assert step.attributes["kvcache.stored_keys"] == 4
    assert step.attributes["kvcache.new_blocks"] == 6
    asked, decided = unpack(step.attributes["kvcache.ops"])
    assert asked.parts[0].news.num_tokens == [40]
    assert decided.parts[0].admit_granted == [40]


def test_an_admission_is_a_span_of_its_request_s_trace(monkeypatch):
    with traced(monkeypatch) as (service, collector), connect(service.address) as client:
        with client.session("r") as session:
            news = NewsRow(0, tokens=[1] * 40, traceparent=str(TRACE))
            session.apply(part_of(news, NewsRow(1, tokens=[1] * 40), AdmitRow(0), AdmitRow(1)))
            session.apply(part_of(FactRow(0, tokens=[5]), RunRow(0)))
            session.apply(part_of(NewsRow(2, tokens=[1] * 40, traceparent=str(TRACE._replace(flags=0))), AdmitRow(2)))
        flush(service)
    (admission,) = collector.spans
    assert admission.name == "kvcache.admit"
    assert (admission.trace_id, admission.parent_id) == (f"{0xABC:032x}", f"{0xDEF:016x}")
    assert admission.attributes["kvcache.admission.status"] == "granted"
    assert admission.attributes["kvcache.granted_tokens"] == 40


def test_a_traced_step_links_to_the_requests_that_it_admits(monkeypatch):
    with traced(monkeypatch) as (service, collector), connect(service.address) as client:
        with client.session("r") as session, ENGINE.start_as_current_span("engine step"):
            session.apply(part_of(NewsRow(0, tokens=[1] * 40, traceparent=str(TRACE)), AdmitRow(0)))
        flush(service)
    assert collector.named("kvcache.step")[0].links == (f"{0xDEF:016x}",)


def test_a_call_span_follows_the_conventions_and_has_a_step_span(monkeypatch):
    with traced(monkeypatch) as (service, collector), connect(service.address) as client:
        with ENGINE.start_as_current_span("engine") as span:
            client.allocate_slots("r", Allocate("a", Content(token_ids=[CANARY] * 20)))
            here = span.get_span_context()
        client.describe_replica("r")
        flush(service)
    (call,) = collector.named("kvplane.v1.Allocation/AllocateSlots")
    assert (call.trace_id, call.parent_id) == (f"{here.trace_id:032x}", f"{here.span_id:016x}")
    assert call.attributes == {
        "rpc.system.name": "grpc",
        "rpc.method": "kvplane.v1.Allocation/AllocateSlots",
        "rpc.response.status_code": "OK",
    }
    (step,) = collector.named("kvcache.step")
    assert (step.trace_id, step.parent_id) == (call.trace_id, call.span_id)
    assert len(collector.spans) == 2


def test_a_refused_call_span_has_its_code(monkeypatch):
    with traced(monkeypatch, ratio="1") as (service, collector):
        with pytest.raises(grpc.RpcError):
            service.describe("unknown")
        flush(service)
    (call,) = collector.named("kvplane.v1.Allocation/DescribeReplica")
    assert call.attributes["rpc.response.status_code"] == "NOT_FOUND"
    assert "error.type" not in call.attributes
    assert call.parent_id == ""


def test_calls_without_a_trace_context_are_sampled_by_ratio(monkeypatch):
    with traced(monkeypatch, ratio="0.25") as (service, collector):
        stream = service.open()
        for _ in range(20):
            stream.step()
        flush(service)
    assert len(collector.named("kvcache.step")) == 5


def test_spans_contain_no_tokens_of_requests(monkeypatch, caplog):
    """Neither in spans, nor metrics, logs, events, or the log of decisions; only where it was asked for."""
    caplog.set_level(logging.DEBUG)
    with traced(monkeypatch, ratio="1", metrics_listen="127.0.0.1:0") as (service, collector):
        with connect(service.address) as client:
            client.allocate_slots("r", Allocate("a", Content(token_ids=[CANARY] * 40)))
            client.free("r", "a")
            with client.session("r", with_events=True) as session:
                session.apply(part_of(NewsRow(0, tokens=[CANARY] * 40, traceparent=str(TRACE)), AdmitRow(0)))
                result = session.apply(part_of(FactRow(0, tokens=[CANARY]), RunRow(0)))
                packed = [pack(one) for one in decisions_of_service(service)]
        flush(service)
        metrics = urllib.request.urlopen(f"http://{service.app.metrics_address}/metrics", timeout=20).read()
        kept = service.in_loop(lambda: repr(list(service.app.registry.get("r").host.decisions)))
    assert len(packed) >= 4
    ops = [repr(unpack(text)) for text in packed]
    places = [repr(collector.spans), metrics.decode(), caplog.text, repr(result), kept, *ops]
    assert all(len(place) > 0 for place in places[:2])
    assert not [place for place in places if str(CANARY) in place]
    raw = CANARY.to_bytes(4, "little")
    assert raw not in collector.raw


def decisions_of_service(service: Service):
    log = service.in_loop(lambda: list(service.app.registry.get("r").host.decisions))
    return [entry for entry in log if isinstance(entry, Decision)]


def test_an_unreachable_collector_is_logged_once(monkeypatch, caplog):
    with collecting() as (_, address):
        pass
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{address}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    with running() as service:
        service.register()
        stream = service.open()
        for _ in range(3):
            assert stream.step().WhichOneof("kind") == "result"
            flush(service)
        warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len([message for message in warnings if "the trace collector is unreachable" in message]) == 1
        with collecting(address):

            def arrives() -> bool:
                stream.step()
                flush(service)
                return any("collector is reachable again" in record.getMessage() for record in caplog.records)

            caplog.set_level(logging.INFO)
            until(arrives)


def test_tracing_is_off_by_default(monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    with running() as service:
        assert service.app._tracing is None


@pytest.mark.parametrize(
    ("environment", "asked"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_otel_variables_turn_tracing_on(environment, asked):
    assert is_asked_for(environment) is asked


@pytest.mark.parametrize(
    "environment",
    [
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
        {"OTEL_TRACES_SAMPLER": "sometimes"},
        {"OTEL_TRACES_SAMPLER_ARG": "2"},
    ],
    ids=lambda environment: list(environment)[-1],
)
def test_an_invalid_otel_variable_is_refused_by_name(environment):
    check = Sampling.of if "SAMPLER" in list(environment)[-1] else is_asked_for
    with pytest.raises(InvalidArgument) as caught:
        check(environment)
    assert caught.value.field == list(environment)[-1]
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("environment", "sampled", "unsampled", "none"),
    [
        ({}, 100, 0, 1),
        ({"OTEL_TRACES_SAMPLER": "always_on"}, 100, 100, 100),
        ({"OTEL_TRACES_SAMPLER": "always_off"}, 0, 0, 0),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_on"}, 100, 0, 100),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.5"}, 50, 50, 50),
    ],
)
def test_sampling_follows_parent_and_ratio(environment, sampled, unsampled, none):
    takes = Sampling.of(environment).takes
    given = (str(TRACE), str(TRACE._replace(flags=0)), "")
    assert [sum(takes(traceparent) for _ in range(100)) for traceparent in given] == [sampled, unsampled, none]


def test_malformed_trace_contexts_are_ignored():
    good = str(TRACE)
    assert parse_traceparent(good) == TRACE
    for bad in ("", good[:-1], good.upper(), "01" + good[2:], good.replace("abc", "000"), good + "-00", "x" * 54 + "1"):
        assert parse_traceparent(bad) is None
    assert is_sampled(good)
    assert not is_sampled(good[:-1] + "2")


def test_client_spans_continue_the_engine_s_trace():
    assert current_traceparent() == ""
    with trace.use_span(trace.NonRecordingSpan(trace.SpanContext(0xABC, 0xDEF, True, trace.TraceFlags(1)))):
        assert current_traceparent() == str(TRACE)


def test_span_operations_unpack_to_the_decision():
    world = HostWorld()
    drive(world)
    for decision in decisions_of(world):
        step, result = unpack(pack(decision))
        assert [part.granted for part in result.parts] == [part.granted for part in decision.result.parts]
        assert [part.new_blocks for part in result.parts] == [part.new_blocks for part in decision.result.parts]
        assert [part.run for part in step.parts] == [part.run for part in decision.step.parts]
        assert [part.news.slot for part in step.parts] == [part.news.slot for part in decision.step.parts]
        assert not any(part.orders.stamp for part in result.parts)


def test_span_operations_of_a_prefetch_and_a_retained_prefix_unpack():
    part = Part(
        prefetch=Prefetch([5], [1], bytes(32), ["d"], [9]), retain=Retain([1], bytes(32), ["d"], ["o"], [1], [9])
    )
    decision = Decision(Step(1, 1, [part]), StepResult(1, 0, [PartResult()]), ((),), 0, 0)
    assert unpack(pack(decision))[0].parts == [part]


def test_span_omits_operations_above_the_size_limit():
    world = HostWorld(Config(max_rows_per_step=100_000))
    engine = world.open()
    lengths = Random(1).choices(range(1, 500), k=9000)
    rows = [NewsRow(slot, num_tokens=each, request_id=f"{each**9}{slot}") for slot, each in enumerate(lengths)]
    engine.step(part_of(*rows))
    (decision,) = decisions_of(world)
    assert pack(decision) == ""
    assert MAX_PACKED_CHARS == 32768


@pytest.mark.parametrize("text", ["", "!", "AAAA", "eJwDAAAAAAE="])
def test_unpacking_other_text_is_refused(text):
    with pytest.raises(InvalidArgument, match=r"the text is not a packed step|needs at least one"):
        unpack(text)


def test_traceparent_column_has_one_value_per_row_or_is_empty():
    with running() as service:
        service.register()
        stream = service.open()
        error = stream.refused({"news": {"slot": bytes(8), "num_tokens": b"\1\0\0\0" * 2, "traceparent": ["x"]}})
        assert error.field == "parts[0].news.traceparent"


def test_every_span_attribute_is_documented(monkeypatch):
    with traced(monkeypatch, ratio="1") as (service, collector), connect(service.address) as client:
        client.allocate_slots("r", Allocate("a", Content(token_ids=[1] * 20)))
        client.free("r", "a")
        with client.session("r") as session:
            session.apply(part_of(NewsRow(0, tokens=[1] * 40, traceparent=str(TRACE)), AdmitRow(0)))
        flush(service)
    emitted = {name for span in collector.spans for name in (span.name, *span.attributes) if "/" not in name}
    documented = set(re.findall(r"`((?:kvcache|rpc)\.[a-z_.]+)`", DOCUMENT))
    assert emitted <= documented
    assert documented - emitted == {"kvcache.ops_left_out"}


def test_metric_exemplar_has_the_trace_id_of_its_step(monkeypatch):
    with traced(monkeypatch, metrics_listen="127.0.0.1:0") as (service, _), connect(service.address) as client:
        with client.session("r") as session, ENGINE.start_as_current_span("engine step") as span:
            session.apply(Part())
        request = urllib.request.Request(f"http://{service.app.metrics_address}/metrics")
        request.add_header("Accept", "application/openmetrics-text; version=1.0.0")
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert f'trace_id="{span.get_span_context().trace_id:032x}"' in answer.read().decode()
