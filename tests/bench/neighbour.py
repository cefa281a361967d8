"""What an owner that uses its whole allowance costs another owner of the same service.

    python -m tests.bench.neighbour [--seconds N]     prints a table and writes tests/bench/results/neighbour.md
    python -m tests.bench.neighbour --load "..."      some of the loads, without writing

A noisy owner sends one kind of load as fast as it can, from a process of its own, and another owner looks up a prompt
of 64 tokens every 20 ms. Each load runs without a limit of bytes and with the default one, in turns; the first line is
without any load. The waits of the other owner are in CPU time of the service (all its threads) between call and answer,
which excludes other load of the machine, and in real time, which includes it. A hold is the CPU time of the service's
loop between two ticks of 2 ms.

The second table is of decode steps of 8 requests that the other owner's engine makes every 20 ms: how long a step takes
without what the service's loop waits for a CPU, the CPU time of the service between call and answer, which other load
the machine does not change, and how many times that of the first line both are.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

import kvplane
from kvplane import AdmitRow, End, FactRow, ModelSource, NewsRow, PeekRow, part_of
from kvplane.base.errors import KvplaneError
from kvplane.base.requests import Content
from kvplane.v1 import allocation_pb2 as pb
from kvplane.v1 import replica_pb2
from kvplane.v1.allocation_pb2_grpc import AllocationStub
from kvplane_plan.models.config_fields import MAX_LAYERS
from kvplane_service.auth.owners import OwnerLimits
from tests.bench.machine import machine_line
from tests.bench.peer.engine import Engine
from tests.bench.peer.models import MODELS
from tests.bench.ticking import noted, service
from tests.plan.test_planner_costs import config_of
from tests.service.guarded import Guard

RESULTS = Path(__file__).parent / "results"
MILLION, HASHES, CALLERS, ROUNDS, REQUESTS, LOG_STEPS = 1_000_000, 62_000, 8, 3, 8, 4096
LIMITS = {"none": None, "default": OwnerLimits().bytes_per_second}
OPTIONS = [("grpc.max_send_message_length", -1)]


# -- the noisy owner, in a process of its own


def steps(client: kvplane.Client, stub: AllocationStub) -> None:
    """A session that admits and ends a prompt of 900,000 tokens."""
    del stub
    tokens = list(range(900_000))
    with client.session("noisy/r") as session:
        while True:
            session.apply(part_of(NewsRow(0, tokens=tokens), AdmitRow(0)))
            session.apply(part_of(FactRow(0, end=End.FREE)))


def peeks(client: kvplane.Client, stub: AllocationStub) -> None:
    """A session that looks a waiting request of 900,000 tokens up 100 times per step, by messages of 500 bytes."""
    del stub
    tokens = list(range(900_000))
    with client.session("noisy/r") as session:
        session.apply(part_of(NewsRow(0, tokens=tokens), AdmitRow(0)))
        session.apply(part_of(FactRow(0, end=End.FREE), NewsRow(1, tokens=tokens)))
        while True:
            session.apply(part_of(*[PeekRow(1)] * 100))


def _repeat(stub: AllocationStub, request: pb.FindCacheHitRequest, callers: int) -> None:
    def repeat() -> None:
        while True:
            try:
                stub.FindCacheHit(request, metadata=metadata("noisy"))
            except grpc.RpcError:
                time.sleep(0.01)  # much less than the error asks for

    for _ in range(callers - 1):
        threading.Thread(target=repeat, daemon=True).start()
    repeat()


def hashes(client: kvplane.Client, stub: AllocationStub) -> None:
    """One caller that looks up 62,000 hashes."""
    del client
    content = pb.RequestContent(num_tokens=16 * HASHES, hashes=[os.urandom(32) for _ in range(HASHES)])
    _repeat(stub, pb.FindCacheHitRequest(replica="noisy/r", content=content, with_blocks=True), 1)


def tokens(client: kvplane.Client, stub: AllocationStub) -> None:
    """Eight callers that look up a million tokens each."""
    del client
    content = pb.RequestContent(token_ids=list(range(MILLION)))
    _repeat(stub, pb.FindCacheHitRequest(replica="noisy/r", content=content), CALLERS)


def short_tokens(client: kvplane.Client, stub: AllocationStub) -> None:
    """Eight callers that look up a million tokens of one byte each."""
    del client
    content = pb.RequestContent(token_ids=[1] * MILLION)
    _repeat(stub, pb.FindCacheHitRequest(replica="noisy/r", content=content), CALLERS)


def open_request(client: kvplane.Client, stub: AllocationStub) -> None:
    """Eight callers that look up an open request of 900,000 tokens, by messages of 20 bytes."""
    del client
    content = pb.RequestContent(token_ids=list(range(900_000)))
    header = pb.MutationHeader(replica="noisy/r")
    stub.AllocateSlots(
        pb.AllocateSlotsRequest(header=header, request_id="open", content=content), metadata=metadata("noisy")
    )
    _repeat(stub, pb.FindCacheHitRequest(replica="noisy/r", request_id="open", with_blocks=True), CALLERS)


def small(client: kvplane.Client, stub: AllocationStub) -> None:
    """Thirty-two callers that look up 64 tokens each."""
    del client
    content = pb.RequestContent(token_ids=list(range(64)))
    _repeat(stub, pb.FindCacheHitRequest(replica="noisy/r", content=content), 4 * CALLERS)


def pools(client: kvplane.Client, stub: AllocationStub) -> None:
    """A caller that registers a pool of 4 M blocks, and deregisters it."""
    del client
    model = replica_pb2.ModelSource(model="llama-3.1-8b", num_blocks=1 << 22)
    _register(stub, pb.RegisterReplicaRequest(replica="noisy/pool", model=model))


def configs(client: kvplane.Client, stub: AllocationStub) -> None:
    """A caller that registers a config.json of 4,096 layers of 64 formats."""
    del client
    _register(stub, pb.RegisterReplicaRequest(replica="noisy/model", model=config_of(MAX_LAYERS, 64, 1)))


def _register(stub: AllocationStub, request: pb.RegisterReplicaRequest) -> None:
    while True:
        try:
            stub.RegisterReplica(request, metadata=metadata("noisy"))
            stub.DeregisterReplica(pb.DeregisterReplicaRequest(replica=request.replica), metadata=metadata("noisy"))
        except grpc.RpcError:
            time.sleep(0.01)


def explains(client: kvplane.Client, stub: AllocationStub) -> None:
    """Eight callers that ask about a request of a full decision log."""
    del stub
    _explain(client, f"request-{LOG_STEPS // 2}")


def prompts(client: kvplane.Client, stub: AllocationStub) -> None:
    """Eight callers that ask about a prompt of 900,000 tokens, with a full decision log."""
    del stub
    _explain(client, Content(token_ids=list(range(900_000))))


def _explain(client: kvplane.Client, what: str | Content) -> None:
    def repeat() -> None:
        while True:
            try:
                client.explain("noisy/r", what)
            except KvplaneError:
                time.sleep(0.01)

    with client.session("noisy/r") as session:
        for step in range(LOG_STEPS):
            ended = [FactRow((step - 1) % 2, end=End.FREE)] if step else []
            news = NewsRow(step % 2, tokens=list(range(step, step + 512)), request_id=f"request-{step}")
            session.apply(part_of(*ended, news, AdmitRow(step % 2)))
        print("loading", flush=True)
        for _ in range(CALLERS - 1):
            threading.Thread(target=repeat, daemon=True).start()
        repeat()


LOADS: dict[str, Callable[[kvplane.Client, AllocationStub], None]] = {
    "steps of 900,000 tokens": steps,
    "steps of 100 look-ups of 900,000 tokens": peeks,
    "look-ups of 62,000 hashes": hashes,
    "8 callers with 1 M tokens": tokens,
    "8 callers with 1 M tokens of a byte": short_tokens,
    "8 callers with an open request": open_request,
    "32 callers with 64 tokens": small,
    "pools of 4 M blocks": pools,
    "configs of 4,096 layers": configs,
    "8 callers that explain a request": explains,
    "8 callers that explain a prompt": prompts,
}


def metadata(owner: str) -> tuple[tuple[str, str]]:
    """The credentials of an owner."""
    return (("authorization", f"Bearer token-{owner}"),)


def disturb(address: str, load: str) -> None:
    """Load the service until this process is ended."""
    with kvplane.connect(address, token="token-noisy") as client:
        model = ModelSource(model="llama-3.1-8b", num_blocks=70_000, max_model_len=MILLION)
        client.register_replica("noisy/r", model)
        if LOADS[load] not in (explains, prompts):  # which fill the log first
            print("loading", flush=True)
        LOADS[load](client, AllocationStub(grpc.insecure_channel(address, options=OPTIONS)))


# -- the other owner


@dataclass
class Waits:
    """What a look-up of the other owner waits, in ms of the service's CPU time and in real time; holds in ms."""

    cpu: list[float] = field(default_factory=list)
    real: list[float] = field(default_factory=list)
    holds: list[float] = field(default_factory=list)
    failed: int = 0
    steps: list[tuple[float, float]] = field(default_factory=list)


def look_up(stub: AllocationStub, pid: int, seconds: float, waits: Waits) -> None:
    """Look up a prompt every 20 ms."""
    content = pb.RequestContent(token_ids=list(range(64)))
    request, ends = pb.FindCacheHitRequest(replica="quiet/r", content=content), time.monotonic() + seconds
    while time.monotonic() < ends:
        began, cpu = time.perf_counter(), cpu_ms(pid)
        try:
            stub.FindCacheHit(request, metadata=metadata("quiet"), timeout=60)
        except grpc.RpcError:
            waits.failed += 1
        waits.cpu.append(cpu_ms(pid) - cpu)
        waits.real.append(1000 * (time.perf_counter() - began))
        time.sleep(0.02)


def cpu_ms(pid: int) -> float:
    """CPU time of all threads of a process, also of those that have ended: those of gRPC end when they are idle."""
    return time.clock_gettime_ns(~pid << 3 | 2) / 1e6  # the clock's number as clock_getcpuclockid(3) makes it


def make_steps(address: str, pid: int, seconds: float) -> list[tuple[float, float]]:
    """Milliseconds of decode steps, one every 20 ms: without what the service's loop waited for a CPU, and CPU time."""
    model, ends, took = MODELS[0], time.monotonic() + seconds, list[tuple[float, float]]()
    with kvplane.connect(address, token="token-quiet") as client:
        client.register_replica("quiet/steps", model.spec(model.shape.decode_blocks(REQUESTS, int(60 * seconds))))
        with client.session("quiet/steps") as session:
            engine = Engine(session, model.shape)
            engine.admit(REQUESTS)
            while time.monotonic() < ends:
                before, cpu = cpu_wait_ns(pid), cpu_ms(pid)
                ns = engine.decode()
                took.append(((ns - cpu_wait_ns(pid) + before) / 1e6, cpu_ms(pid) - cpu))
                time.sleep(0.02)
    return took


def cpu_wait_ns(pid: int) -> int:
    """How long a process's first thread, which runs the service's loop, was ready and had no CPU."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])


def measure(load: str, limit: int | None, seconds: float, waits: Waits) -> None:
    """One round of one load; "" for none."""
    with guarded_service(limit) as (address, process, path), grpc.insecure_channel(address) as channel:
        stub = AllocationStub(channel)
        with kvplane.connect(address, token="token-quiet") as client:
            client.register_replica("quiet/r", ModelSource(model="llama-3.1-8b", num_blocks=2100))
        with disturbing(address, load):
            noted(process, path)
            look_up(stub, process.pid, seconds, waits)
            waits.steps += make_steps(address, process.pid, seconds)
            waits.holds += [ns / 1e6 for ns in noted(process, path)["ticks"]]


@contextmanager
def guarded_service(limit: int | None) -> Iterator[tuple[str, subprocess.Popen[str], Path]]:
    """A service with the two owners."""
    with tempfile.TemporaryDirectory() as folder:
        guard = Guard(Path(folder), {"noisy": {"limits": {"bytes_per_second": limit}}, "quiet": {}})
        flags = ["--config", str(Path(folder) / "config.yaml")]
        lines = [f"auth_owners: {guard.owners_file}", f"auth_tokens: {guard.tokens_file}"]
        (Path(folder) / "config.yaml").write_text("\n".join(lines))
        with service(*flags) as served:
            yield served


@contextmanager
def disturbing(address: str, load: str) -> Iterator[None]:
    """The noisy owner's process, after its load has begun."""
    if not load:
        yield
        return
    command = [sys.executable, "-m", "tests.bench.neighbour", "--disturb", address, load]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "loading\n"
            time.sleep(1)
            yield
        finally:
            process.kill()


def row(load: str, limit: str, waits: Waits) -> str:
    """A line of the table."""

    def spread(values: list[float]) -> str:
        p99 = sorted(values)[int(len(values) * 0.99)]
        return f"{statistics.median(values):.1f} | {p99:.1f} | {max(values):.1f}"

    holds = f"{sorted(waits.holds)[int(len(waits.holds) * 0.99)]:.1f} | {max(waits.holds):.1f}"
    return f"| {load or 'none'} | {limit} | {spread(waits.cpu)} | {spread(waits.real)} | {holds} | {waits.failed} |"


def step_row(load: str, limit: str, waits: Waits, quiet: Waits) -> str:
    """A line of the second table."""
    cells = [f"{load or 'none'} | {limit}"]
    for measured, alone in zip(zip(*waits.steps, strict=True), zip(*quiet.steps, strict=True), strict=True):
        for share in (0.5, 0.9, 0.99):
            ms, of_none = (sorted(each)[int(len(each) * share)] for each in (measured, alone))
            cells.append(f"{ms:.2f}, {ms / of_none:.2f}x")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure all loads in turns, and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--disturb", nargs=2)
    parser.add_argument("--load", action="append", choices=LOADS, help="one load (all); may be repeated")
    given = parser.parse_args()
    if given.disturb:
        disturb(*given.disturb)
        return
    loads = given.load or list(LOADS)
    cases = {("", "default"): Waits(), **{(load, limit): Waits() for load in loads for limit in LIMITS}}
    for _ in range(ROUNDS):
        for (load, limit), waits in cases.items():
            measure(load, LIMITS[limit], given.seconds, waits)
    head = (
        "| load of the noisy owner | its limit of bytes | CPU ms: median | p99 | longest | real ms: median | p99 "
        "| longest | hold ms: p99 | longest | failed |\n|---" + "|---" * 10 + "|"
    )
    table = "\n".join([head, *(row(load, limit, waits) for (load, limit), waits in cases.items())])
    names = "| load | its limit of bytes | ms: median | p90 | p99 | CPU ms: median | p90 | p99 |"
    steps = [names, "|---" * 8 + "|"]
    steps += [step_row(load, limit, waits, cases["", "default"]) for (load, limit), waits in cases.items()]
    table += "\n\n" + "\n".join(steps)
    text = f"{__doc__}\n{machine_line()}; default limit {LIMITS['default']:,} bytes per second\n\n{table}\n"
    if not given.load:
        (RESULTS / "neighbour.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
