"""The engine's trace context, when the engine uses OpenTelemetry; the client does not depend on it, nor load it."""

from __future__ import annotations

import sys

from kvplane.base.trace import TraceContext


def current_traceparent() -> str:
    """W3C context of the span that is open where this is called; "" when there is none."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ""
    context = trace.get_current_span().get_span_context()
    return str(TraceContext(context.trace_id, context.span_id, int(context.trace_flags))) if context.is_valid else ""


def trace_metadata() -> tuple[tuple[str, str], ...] | None:
    """Metadata of a call that carries the context."""
    traceparent = current_traceparent()
    return (("traceparent", traceparent),) if traceparent else None
