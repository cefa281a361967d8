"""The W3C trace context of the unary call that is being served; the step of the call inherits it."""

from __future__ import annotations

from contextvars import ContextVar

UNTRACED = "-"  # the call is not traced, and neither is its step, whatever the sampling ratio
CURRENT: ContextVar[str] = ContextVar("kvplane_traceparent", default="")
