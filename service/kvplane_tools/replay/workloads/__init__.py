"""Workloads: public serving traces, read line by line, and two built-in workloads from a seed. All yield
`TraceRequest`.
"""

from kvplane_tools.replay.workloads.chat import ChatShape as ChatShape
from kvplane_tools.replay.workloads.chat import chat_workload as chat_workload
from kvplane_tools.replay.workloads.documents import DocumentShape as DocumentShape
from kvplane_tools.replay.workloads.documents import document_workload as document_workload
from kvplane_tools.replay.workloads.lines import MalformedTrace as MalformedTrace
from kvplane_tools.replay.workloads.requests import Span as Span
from kvplane_tools.replay.workloads.requests import TokenSource as TokenSource
from kvplane_tools.replay.workloads.requests import TraceRequest as TraceRequest
from kvplane_tools.replay.workloads.traces import TraceFile as TraceFile
from kvplane_tools.replay.workloads.traces import TraceKind as TraceKind
