"""The trace context of the unary call under way, for the step that it becomes."""

from __future__ import annotations

from contextvars import ContextVar

UNTRACED = "-"  # of a call that is not traced: neither is its step, whatever the ratio
CURRENT: ContextVar[str] = ContextVar("kvplane_traceparent", default="")
