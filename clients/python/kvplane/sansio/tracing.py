"""The engine's trace context, if the engine uses OpenTelemetry. The client neither requires nor imports
OpenTelemetry.
"""

from __future__ import annotations

import sys

from kvplane.base.trace import TraceContext


def current_traceparent() -> str:
    """Return the W3C traceparent of the caller's current span; "" if there is none."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ""
    context = trace.get_current_span().get_span_context()
    return str(TraceContext(context.trace_id, context.span_id, int(context.trace_flags))) if context.is_valid else ""


def trace_metadata() -> tuple[tuple[str, str], ...] | None:
    """Return the gRPC metadata with the caller's trace context; None if there is no current span."""
    traceparent = current_traceparent()
    return (("traceparent", traceparent),) if traceparent else None
