"""Trace context of the unary call that is being served; its step inherits it."""

from __future__ import annotations

from contextvars import ContextVar

UNTRACED = "-"  # the call is not traced, and neither is its step, whatever the sampling ratio
CURRENT: ContextVar[str] = ContextVar("kvplane_traceparent", default="")
