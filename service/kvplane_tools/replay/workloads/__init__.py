"""Workloads: public serving traces, read line by line, and two built-in workloads from a seed. All yield
`TraceRequest`.
"""

from kvplane_tools.replay.workloads.chat import ChatShape, chat_workload
from kvplane_tools.replay.workloads.documents import DocumentShape, document_workload
from kvplane_tools.replay.workloads.lines import MalformedTrace
from kvplane_tools.replay.workloads.requests import Span, TokenSource, TraceRequest
from kvplane_tools.replay.workloads.traces import TraceFile, TraceKind

__all__ = [
    "ChatShape",
    "DocumentShape",
    "MalformedTrace",
    "Span",
    "TokenSource",
    "TraceFile",
    "TraceKind",
    "TraceRequest",
    "chat_workload",
    "document_workload",
]
