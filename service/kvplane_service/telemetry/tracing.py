"""Trace allocations with OpenTelemetry: one span per step, and one span per admission in the trace of its request.

Configured by the standard variables: on if OTEL_EXPORTER_OTLP_ENDPOINT (or ..._TRACES_ENDPOINT) is set or
OTEL_TRACES_EXPORTER is "otlp". Spans are built from the decision log, so they contain neither hashes nor tokens.
docs/tracing.md describes the attributes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, TraceFlags, set_span_in_context
from opentelemetry.util.types import AttributeValue

from kvplane.base.step import AdmitStatus, EventKind, Part, PartResult
from kvplane.base.trace import is_sampled, parse_traceparent
from kvplane_core.face.cache_events import runs_of
from kvplane_service.decisions.log import Decision, Entry
from kvplane_service.telemetry.ops import pack
from kvplane_service.telemetry.sampling import Sampling

_log = logging.getLogger(__name__)

_UNTOUCHED = (AdmitStatus.NOT_REACHED, AdmitStatus.NOT_WAITING)


class Tracing:
    """The OpenTelemetry tracer of this process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Configure tracing from the environment; the exporter reads its own variables. Raises InvalidArgument for an
        unknown sampler.
        """
        self.sampling = Sampling.of(environment)
        # Failed deliveries are logged once, below; the library would log every batch.
        logging.getLogger("opentelemetry.exporter.otlp.proto.grpc").setLevel(logging.CRITICAL)
        resource = Resource.create({"service.name": environment.get("OTEL_SERVICE_NAME") or "kvplane"})
        self._provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(LoggingExporter(OTLPSpanExporter())))
        self.tracer = self._provider.get_tracer("kvplane", version("kvplane"))

    def follower(self, replica: str) -> Callable[[Entry], None]:
        """Return a function that traces the entries of this replica's decision log, one per call."""
        return StepTracer(self, replica).add

    def flush(self) -> None:
        """Send pending spans to the collector; blocks."""
        self._provider.force_flush()

    def shutdown(self) -> None:
        """Send pending spans and shut down; blocks at most for the exporter's timeout."""
        self._provider.shutdown()


class LoggingExporter(SpanExporter):
    """An exporter that logs the first failed delivery and the recovery, and no failures in between."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self._fails = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export the spans with the inner exporter (see SpanExporter.export)."""
        result = self._inner.export(spans)
        fails = result is not SpanExportResult.SUCCESS
        if fails and not self._fails:
            _log.warning("the trace collector is unreachable: traces are dropped until it recovers")
        elif self._fails and not fails:
            _log.info("the trace collector is reachable again")
        self._fails = fails
        return result

    def shutdown(self) -> None:
        """Shut down the inner exporter."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Flush the inner exporter, for at most `timeout_millis` milliseconds."""
        return self._inner.force_flush(timeout_millis)


class StepTracer:
    """Traces the decisions of one replica."""

    def __init__(self, tracing: Tracing, replica: str) -> None:
        self._takes = tracing.sampling.takes
        self._tracer = tracing.tracer
        self._replica = replica
        self._requests: dict[int, str] = {}  # sampled contexts by slot

    def add(self, entry: Entry) -> None:
        """Create the spans of one entry (applied step) of the decision log, if the entry is sampled."""
        if not isinstance(entry, Decision):
            self._requests.clear()
            return
        for part in entry.step.parts:
            if part.news.slot:
                self._note_requests(part)
        if self._takes(entry.step.traceparent):
            self._trace_step(entry)
        if self._requests:
            self._trace_admissions(entry)

    def _note_requests(self, part: Part) -> None:
        for slot in part.news.slot:
            self._requests.pop(slot, None)
        for slot, traceparent in zip(part.news.slot, part.news.traceparent, strict=False):
            if is_sampled(traceparent):
                self._requests[slot] = traceparent

    def _trace_step(self, decision: Decision) -> None:
        end_ns = time.time_ns()
        span = self._tracer.start_span(
            "kvcache.step",
            context=context_of(decision.step.traceparent),
            kind=SpanKind.INTERNAL,
            attributes=self._attributes(decision),
            links=[Link(context) for context in self._contexts_of(decision)],
            start_time=end_ns - decision.took_ns,
        )
        span.end(end_ns)

    def _attributes(self, decision: Decision) -> dict[str, AttributeValue]:
        step, parts = decision.step, decision.result.parts
        runs = [run for of_part in decision.events for run in runs_of(of_part)]
        ops = pack(decision)
        return {
            "kvcache.replica": self._replica,
            "kvcache.epoch": step.epoch,
            "kvcache.seq": step.seq,
            "kvcache.part": step.part,
            "kvcache.granted_tokens": sum(sum(part.granted) + sum(part.admit_granted) for part in parts),
            "kvcache.hit_tokens": sum(map(_hit_tokens, parts)),
            "kvcache.new_blocks": sum(len(part.new_blocks.ids) for part in parts),
            "kvcache.free_blocks": parts[-1].free_blocks,
            "kvcache.preempted_requests": sum(len(part.preempted) for part in parts),
            "kvcache.stored_keys": sum(len(run.hashes) for run in runs if run.kind is EventKind.STORED),
            "kvcache.removed_keys": sum(len(run.hashes) for run in runs if run.kind is EventKind.REMOVED),
            **({"kvcache.ops": ops} if ops else {"kvcache.ops_left_out": True}),
        }

    def _contexts_of(self, decision: Decision) -> list[SpanContext]:
        """Return the trace contexts of the sampled requests that this step tries to admit."""
        slots = (slot for part in decision.step.parts for slot in part.admit.slot)
        contexts = (_span_context(self._requests.get(slot, "")) for slot in slots)
        return [context for context in contexts if context is not None]

    def _trace_admissions(self, decision: Decision) -> None:
        for part, result in zip(decision.step.parts, decision.result.parts, strict=True):
            for row, slot in enumerate(part.admit.slot):
                context = context_of(self._requests.get(slot, ""))
                if context is not None and result.admit_status[row] not in _UNTOUCHED:
                    self._trace_admission(decision, result, row, context)

    def _trace_admission(self, decision: Decision, result: PartResult, row: int, context: Context) -> None:
        end_ns = time.time_ns()
        attributes: dict[str, AttributeValue] = {
            "kvcache.replica": self._replica,
            "kvcache.epoch": decision.step.epoch,
            "kvcache.seq": decision.step.seq,
            "kvcache.admission.status": AdmitStatus(result.admit_status[row]).name.lower(),
            "kvcache.hit_tokens": result.admit_hit[row],
            "kvcache.granted_tokens": result.admit_granted[row],
        }
        start_ns = end_ns - decision.took_ns
        span = self._tracer.start_span("kvcache.admit", context=context, attributes=attributes, start_time=start_ns)
        span.end(end_ns)


def _hit_tokens(result: PartResult) -> int:
    pairs = zip(result.admit_hit, result.admit_status, strict=True)
    return sum(hit for hit, status in pairs if status == AdmitStatus.GRANTED)


def _span_context(traceparent: str) -> SpanContext | None:
    known = parse_traceparent(traceparent)
    return None if known is None else SpanContext(known.trace_id, known.span_id, True, TraceFlags(known.flags))


def context_of(traceparent: str) -> Context | None:
    """Return the parent context for a span, None if `traceparent` is malformed."""
    context = _span_context(traceparent)
    return None if context is None else set_span_in_context(NonRecordingSpan(context), Context())
