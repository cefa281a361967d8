"""Workloads: public serving traces, read line by line, and a built-in workload from a seed. All yield
`TraceRequest`.
"""

from kvplane_replay.workloads.chat import ChatShape, chat_workload
from kvplane_replay.workloads.lines import MalformedTrace
from kvplane_replay.workloads.requests import Span, TokenSource, TraceRequest
from kvplane_replay.workloads.traces import TraceFile, TraceKind

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
