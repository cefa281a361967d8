"""W3C trace contexts in steps and requests, "00-<trace id>-<span id>-<flags>", and that of the engine, if it uses
OpenTelemetry: the client neither requires nor imports that.

See https://www.w3.org/TR/trace-context/, version 00. A malformed context is ignored, as the standard requires.
"""

from __future__ import annotations

import re
import sys
from typing import NamedTuple

SAMPLED = 1
_LENGTH = 55
_ODD = frozenset("13579bdf")
_FORM = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class TraceContext(NamedTuple):
    """A trace context: the trace, the caller's span, and the flags, of which SAMPLED means that the trace is
    recorded.
    """

    trace_id: int
    span_id: int
    flags: int

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.flags:02x}"


def is_sampled(traceparent: str) -> bool:
    """Return whether the trace is recorded. The function reads only the flags, so that it is cheap enough for every
    step.
    """
    return len(traceparent) == _LENGTH and traceparent[-1] in _ODD


def parse_traceparent(traceparent: str) -> TraceContext | None:
    """Return the trace context; None if it is missing or malformed."""
    found = _FORM.fullmatch(traceparent)
    if found is None:
        return None
    trace_id, span_id, flags = (int(text, 16) for text in found.groups())
    return TraceContext(trace_id, span_id, flags) if trace_id and span_id else None


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
