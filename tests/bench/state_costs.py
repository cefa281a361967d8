"""What a call of a few bytes costs by the state that it reads.

    python -m tests.bench.state_costs     prints a table and writes tests/bench/results/state_costs.md

Each call is made on a service whose replica has ten requests, and on one whose replica has a million blocks with keys,
16,000 requests, 2,000 of them admitted by one step, and a decision log of long steps. A hold is the CPU time of the
service's loop between two ticks of 2 ms, the longest one of a call; CPU is that of all threads of the service. Medians
of three calls.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc

import kvplane
from kvplane import AdmitRow, End, FactRow, ModelSource, NewsRow, part_of
from kvplane.v1 import admin_pb2, events_pb2
from kvplane.v1 import allocation_pb2 as pb
from kvplane.v1.admin_pb2_grpc import AdminStub
from kvplane.v1.allocation_pb2_grpc import AllocationStub
from kvplane.v1.events_pb2_grpc import EventsStub
from tests.bench.machine import machine_line
from tests.bench.neighbour import cpu_ms
from tests.bench.ticking import noted, service

RESULTS = Path(__file__).parent / "results" / "state_costs.md"
BLOCKS, LONG, TIMES = 1 << 20, 880_000, 3
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


@dataclass(frozen=True)
class Shape:
    """What a replica has: prompts of a million tokens that were computed, requests, and those that run."""

    prompts: int
    requests: int
    running: int


SMALL, FULL = Shape(0, 10, 5), Shape(18, 16_000, 2_000)
Call = Callable[[], object]


def fill(session: Any, shape: Shape) -> None:
    """Give the replica its requests and keys."""
    for number in range(shape.prompts):
        tokens = [number + 1] * 16 + list(range(LONG))
        session.apply(part_of(NewsRow(0, tokens=tokens, request_id=f"long-{number}"), AdmitRow(0)))
        session.apply(part_of(FactRow(0, end=End.FREE)))
    slots = range(1, 1 + shape.requests)
    news = [NewsRow(slot, tokens=[slot % 1000] * 20, request_id=f"request-{slot}") for slot in slots]
    for start in range(0, len(news), 2000):
        session.apply(part_of(*news[start : start + 2000]))
    session.apply(part_of(*map(AdmitRow, slots[: shape.running])))


def calls_of(channel: grpc.Channel, shape: Shape) -> Iterator[tuple[str, Call]]:
    """Yield each call with its name."""
    blocks, admin, events = AllocationStub(channel), AdminStub(channel), EventsStub(channel)
    describe, ask = partial(pb.DescribeReplicaRequest, replica="r"), partial(admin_pb2.ExplainRequest, replica="r")
    last, some = f"request-{shape.requests}", pb.RequestContent(token_ids=[1] * 20)
    find = partial(pb.FindCacheHitRequest, replica="r")
    snapshot = partial(admin_pb2.SnapshotRequest, replica="r")
    subscribed = events_pb2.SubscribeRequest(replica="r", entries=True, after_seq=0)
    yield "ListReplicas", lambda: blocks.ListReplicas(pb.ListReplicasRequest())
    yield "Status", lambda: admin.Status(admin_pb2.StatusRequest())
    yield "DescribeReplica", lambda: blocks.DescribeReplica(describe())
    yield "DescribeReplica, map of 4,096 cells", lambda: blocks.DescribeReplica(describe(map_cells=4096))
    yield "FindCacheHit of 20 tokens", lambda: blocks.FindCacheHit(find(content=some))
    yield "FindCacheHit of a request", lambda: blocks.FindCacheHit(find(request_id=last))
    yield "FindCacheHit of no request", lambda: blocks.FindCacheHit(find(request_id="none"))
    yield "ListRequests of 1,000", lambda: admin.ListRequests(admin_pb2.ListRequestsRequest(replica="r", limit=1000))
    yield "Snapshot, summary", lambda: admin.Snapshot(snapshot(summary=True))
    yield "Snapshot", lambda: admin.Snapshot(snapshot())
    yield "Explain a request", lambda: admin.Explain(ask(request_id="request-3"))
    yield "Explain no request", lambda: admin.Explain(ask(request_id="none"))
    yield "Explain a block", lambda: admin.Explain(ask(block=7))
    yield "Explain 20 tokens", lambda: admin.Explain(ask(content=some))
    yield "Record, first message", lambda: _first(admin.Record(admin_pb2.RecordRequest(replica="r")), 2)
    from_now = admin_pb2.RecordRequest(replica="r", from_now=True)
    yield "Record from now, first messages", lambda: _first(admin.Record(from_now), 2)
    yield "Subscribe, first entries", lambda: _first(events.Subscribe(subscribed, timeout=1), 1)


def _first(stream: Any, count: int) -> None:
    for _ in zip(
        range(count), stream, strict=False
    ):  # or until the call's timeout, with the error that the caller takes
        pass
    stream.cancel()


@contextmanager
def serving(shape: Shape) -> Iterator[tuple[subprocess.Popen[str], Path, grpc.Channel]]:
    """A service with the replica, whose engine stays."""
    model = ModelSource(model="llama-3.1-8b", num_blocks=BLOCKS, max_model_len=1_000_000)
    with (
        service() as (address, process, path),
        grpc.insecure_channel(address, options=OPTIONS) as channel,
        kvplane.connect(address) as client,
    ):
        client.register_replica("r", model)
        with client.session("r") as session:
            fill(session, shape)
            yield process, path, channel


def measure(shape: Shape) -> dict[str, tuple[float, float]]:
    """The hold and the CPU time of each call, in ms."""
    found = dict[str, tuple[float, float]]()
    with serving(shape) as (process, path, channel):
        for name, call in calls_of(channel, shape):
            took = [_measure(process, path, call) for _ in range(TIMES)]
            hold, cpu = (statistics.median(values) for values in zip(*took, strict=True))
            found[name] = hold, cpu
    return found


def _measure(process: subprocess.Popen[str], path: Path, call: Call) -> tuple[float, float]:
    noted(process, path)
    before = cpu_ms(process.pid)
    with suppress(grpc.RpcError):  # nothing of that name
        call()
    cpu = cpu_ms(process.pid) - before
    time.sleep(0.05)  # what is freed after the answer holds the loop too
    return max(noted(process, path)["ticks"]) / 1e6, cpu


def main() -> None:
    """Measure, print and write."""
    small, full = measure(SMALL), measure(FULL)
    lines = ["| call | hold ms: small | full | CPU ms: small | full |", "|---" * 5 + "|"]
    for name in small:
        holds, cpus = zip(small[name], full[name], strict=True)
        lines.append(f"| {name} | {holds[0]:.1f} | {holds[1]:.1f} | {cpus[0]:.1f} | {cpus[1]:.1f} |")
    text = f"{__doc__}\n{machine_line()}\n\n" + "\n".join(lines) + "\n"
    RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
