"""Workloads: public serving traces, streamed, and a built-in one from a seed. All yield `TraceRequest`."""

from kvplane_service.workloads.chat import ChatShape, chat_workload
from kvplane_service.workloads.lines import MalformedTrace
from kvplane_service.workloads.requests import TraceRequest
from kvplane_service.workloads.tokens import Span, TokenSource
from kvplane_service.workloads.trace_file import TraceFile, TraceKind

__all__ = [
    "ChatShape",
    "MalformedTrace",
    "Span",
    "TokenSource",
    "TraceFile",
    "TraceKind",
    "TraceRequest",
    "chat_workload",
]
