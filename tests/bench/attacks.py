"""What attacks on a router cost its memory and another owner, and what they cost a server that does nothing.

    python -m tests.bench.attacks [--seconds N]     N seconds each (60); writes tests/bench/results/attacks.md
    python -m tests.bench.attacks --attack NAME     some of the attacks, without writing

A router follows a place of one owner and a place of another. The victim asks where a prompt of 64 tokens belongs every
20 ms; the attacker is a process of its own: a hostile engine, or what its token permits. Memory is the most that is
resident, above that before the attack. The null server has gRPC as the router does, and follows the same publishers,
but answers every call with nothing, and drops what is published: what the machine, gRPC and ZeroMQ cost by themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import http.server
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import msgspec
import zmq
import zmq.asyncio

from kvplane.v1 import front_ends_pb2 as fe
from kvplane.v1 import routing_pb2 as pb
from kvplane.v1.routing_pb2_grpc import RoutingStub
from kvplane_fleet.follow.zmq_source import MAX_MESSAGE_BYTES, RECEIVE_QUEUE
from kvplane_service.auth.tokens import line_of, new_token
from tests.bench.machine import machine_line
from tests.router.engine import BLOCK, DOMAIN
from tests.router.test_costs_of_payloads import PAYLOADS
from tests.store.servers import free_port

RESULTS = Path(__file__).parent / "results"
MOST_MB, MOST_MS, TIMES = (
    200,
    50.0,
    5,
)  # the goals: memory above quiet; p99, or this many times that of the quiet router
VICTIM = pb.ScoreRequest(model="m", prompt=pb.Prompt(token_ids=list(range(4 * BLOCK))))
BODY_BYTES = (32 << 20) - 4096
OWNERS = "victim: {replicas: ['victim/*']}\nattacker: {scopes: [read, events, report], replicas: ['attacker/*']}\n"


@dataclass(frozen=True, slots=True)
class Target:
    """What an attacker attacks, and with what it does."""

    address: str
    token: str
    events: str
    http_port: int

    def channel(self) -> grpc.Channel:
        """A connection of its own."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        return grpc.insecure_channel(self.address, options)

    @property
    def metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """The credentials."""
        return (("authorization", f"Bearer {self.token}"),)


# -- attackers, each in a process of its own


def _publish(target: Target, payloads: Sequence[bytes], pause_s: float) -> None:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
    socket.setsockopt(zmq.SNDHWM, 1000)
    socket.bind(target.events)
    for sequence in range(1 << 40):
        socket.send_multipart([b"", sequence.to_bytes(8, "big"), payloads[sequence % len(payloads)]])
        time.sleep(pause_s)


def frames(target: Target) -> None:
    """An engine that publishes ten payloads a second, of each kind that costs much."""
    _publish(target, list(PAYLOADS.values()), 0.1)


def flood(target: Target) -> None:
    """An engine that publishes as much as it can."""
    event = {"type": "BlockStored", "block_hashes": [], "token_ids": bytes(MAX_MESSAGE_BYTES - 4096)}
    _publish(target, [msgspec.msgpack.encode([1.0, [event], 0])], 0.0)


def _repeated(target: Target, times: int, call: Callable[[RoutingStub, grpc.Channel], object]) -> None:
    """Make a call repeatedly, in threads."""

    def repeat() -> None:
        channel = target.channel()
        stub = RoutingStub(channel)
        while True:
            with suppress(grpc.RpcError):
                call(stub, channel)

    threads = [threading.Thread(target=repeat) for _ in range(times)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()


def _process(target: Target, channel: grpc.Channel, body: bytes) -> None:
    """Send an HTTP request through the endpoint picker, and wait for its answer."""
    ended = threading.Event()

    def parts() -> Iterator[fe.ProcessRequest]:
        yield fe.ProcessRequest(request_headers=fe.HttpHeaders())
        for at in range(0, len(body), 60 << 10):
            part = fe.HttpBody(body=body[at : at + (60 << 10)], end_of_stream=at + (60 << 10) >= len(body))
            yield fe.ProcessRequest(request_body=part)
        ended.wait(5)

    method = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
    call = channel.stream_stream(method, fe.ProcessRequest.SerializeToString, fe.ProcessResponse.FromString)
    try:
        next(iter(call(parts(), metadata=target.metadata, timeout=60)), None)
    finally:
        ended.set()


def bodies(target: Target) -> None:
    """End users who send bodies of 32 MB: of small objects, and of token ids."""
    objects = b'{"model":"n","messages":[' + b"{}," * (BODY_BYTES // 3) + b"{}]}"
    ids = b'{"model":"n","prompt":[' + b"1," * (BODY_BYTES // 2) + b"1]}"
    threads = [
        threading.Thread(target=_repeated, args=(target, 4, lambda _, to, body=body: _process(target, to, body)))
        for body in (objects, ids)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()


class _Drips(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "1000000")
        self.end_headers()
        with suppress(OSError):
            while True:
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.5)

    def log_message(self, *_: object) -> None:
        pass


def slow(target: Target) -> None:
    """An engine whose answers to /tokenize drip, asked for 32 texts at a time."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", target.http_port), _Drips)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    body = b'{"model":"n","prompt":"a text"}'
    _repeated(target, 32, lambda _, channel: _process(target, channel, body))


def owners(target: Target) -> None:
    """An owner that books without end, and watches the index without reading."""
    stub = RoutingStub(target.channel())
    kept = [stub.WatchIndex(pb.WatchIndexRequest(), metadata=target.metadata) for _ in range(20)]
    request = pb.ScoreRequest(model="n", prompt=pb.Prompt(token_ids=list(range(64))), book=True)
    _repeated(target, 8, lambda stub, _: stub.Score(request, metadata=target.metadata, timeout=10))
    del kept


def prompts(target: Target) -> None:
    """An owner that scores prompts of a million tokens of one byte each."""
    request = pb.ScoreRequest(model="n", prompt=pb.Prompt(token_ids=[1] * 1_000_000))
    _repeated(target, 8, lambda stub, _: stub.Score(request, metadata=target.metadata, timeout=10))


def reports(target: Target) -> None:
    """An owner that reports other cached tokens than its place has, of each prompt that it books."""
    request = pb.ScoreRequest(model="n", prompt=pb.Prompt(token_ids=list(range(64))), book=True)

    def report(stub: RoutingStub, _: grpc.Channel) -> None:
        name = stub.Score(request, metadata=target.metadata, timeout=10).decision_id
        false = pb.ReportRequest(decision_id=name, stage=pb.REPORT_STAGE_ENDED, cached_tokens=48)
        stub.Report(false, metadata=target.metadata, timeout=10)

    _repeated(target, 8, report)


ATTACKS = {one.__name__: one for one in (frames, flood, bodies, slow, owners, prompts, reports)}


# -- the server that does nothing


async def serve_nothing(events: Sequence[str]) -> None:
    """Answer every call with an empty message once its messages are read, and drop what is published."""

    async def answer(messages: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        received: object = b""
        while received is not grpc.aio.EOF:
            received = await context.read()
        await context.write(b"")

    class Anything(grpc.GenericRpcHandler):
        def service(self, _: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
            return grpc.stream_stream_rpc_method_handler(answer)

    async def drop(address: str, context: zmq.asyncio.Context) -> None:
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.subscribe(b"")
        socket.connect(address)
        while True:
            await socket.recv_multipart()

    server, context = grpc.aio.server(), zmq.asyncio.Context()
    server.add_generic_rpc_handlers([Anything()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"kvplane: routing on 127.0.0.1:{port}", flush=True)
    await asyncio.gather(*(drop(one, context) for one in events))


# -- measuring


@dataclass(frozen=True, slots=True)
class Figures:
    """Waits of the victim in ms, and resident MB, before and under an attack; and whether it was still served."""

    quiet: Sequence[float]
    attacked: Sequence[float]
    quiet_mb: float
    most_mb: float
    failed: int

    @property
    def above_mb(self) -> float:
        """Memory above that of the quiet server."""
        return self.most_mb - self.quiet_mb

    @property
    def holds(self) -> bool:
        """Whether the goals are met."""
        return self.above_mb <= MOST_MB and p99(self.attacked) <= max(TIMES * p99(self.quiet), MOST_MS)


def p99(values: Sequence[float]) -> float:
    """The 99th percentile."""
    return sorted(values)[int(0.99 * (len(values) - 1))]


class Server:
    """A router, or the null server, and the publisher of the victim's place."""

    def __init__(self, folder: Path, is_null: bool) -> None:
        ports = [free_port() for _ in range(3)]
        self.good, evil = (f"tcp://127.0.0.1:{port}" for port in ports[:2])
        tokens = {name: new_token() for name in ("victim", "attacker")}
        (folder / "owners").write_text(OWNERS)
        (folder / "tokens").write_text("".join(f"{line_of(token, name)}\n" for name, token in tokens.items()))
        endpoint = f"http://127.0.0.1:{ports[2]}"
        places = [
            {"name": "victim/0", "model": "m", "events": self.good},
            {"name": "attacker/0", "model": "n", "events": evil, "endpoint": endpoint},
        ]
        (folder / "places.yaml").write_text(json.dumps({"places": places, "router": {"warm_up_s": 1}}))
        command = [sys.executable, "-m", "kvplane_tools", "router", str(folder / "places.yaml")]
        command += ["--listen", "127.0.0.1:0", "--set", f"auth_owners={folder / 'owners'}"]
        command += ["--set", f"auth_tokens={folder / 'tokens'}", "--set", "log_level=ERROR"]
        if is_null:
            command = [sys.executable, "-m", "tests.bench.attacks", "--null", self.good, evil]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        address = self.process.stdout.readline().split()[-1]
        self.victim = Target(address, tokens["victim"], self.good, 0)
        self.target = Target(address, tokens["attacker"], evil, ports[2])

    def resident_mb(self, what: str = "VmRSS") -> float:
        """Resident memory now, or with VmHWM at most."""
        found = re.search(rf"{what}:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())
        return int(found[1]) / 1024 if found else 0.0


@contextmanager
def started(is_null: bool) -> Iterator[Server]:
    """A server whose victim's place has the prompt."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), is_null)
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        socket.bind(server.good)
        time.sleep(2)
        prompt = list(VICTIM.prompt.token_ids)
        event = {
            "type": "BlockStored", "block_hashes": DOMAIN.keys(prompt), "parent_block_hash": None, "group_idx": 0,
            "token_ids": prompt, "block_size": BLOCK, "medium": "GPU", "kv_cache_spec_kind": "full_attention",
        }  # fmt: skip
        socket.send_multipart([b"", bytes(8), msgspec.msgpack.encode([1.0, [event], 0])])
        try:
            yield server
        finally:
            server.process.kill()
            server.process.wait()
            socket.close(linger=0)


def waits(server: Server, seconds: float) -> tuple[list[float], int]:
    """Let the victim call for some seconds; returns its waits in ms, and how many calls failed."""
    found, failed, end = list[float](), 0, time.monotonic() + seconds
    with server.victim.channel() as channel:
        stub = RoutingStub(channel)
        while time.monotonic() < end:
            began = time.perf_counter()
            try:
                stub.Score(VICTIM, metadata=server.victim.metadata, timeout=60)
            except grpc.RpcError:
                failed += 1
            found.append(1000 * (time.perf_counter() - began))
            time.sleep(0.02)
    return found, failed


def measure(attack: str, seconds: float, is_null: bool) -> Figures:
    """One attack on one server."""
    with started(is_null) as server:
        quiet, _ = waits(server, 4)
        quiet_mb, target = server.resident_mb(), server.target
        words = [attack, target.address, target.token, target.events, str(target.http_port)]
        attacker = subprocess.Popen([sys.executable, "-m", "tests.bench.attacks", "--run", *words])
        try:
            time.sleep(2)
            attacked, failed = waits(server, seconds)
            return Figures(quiet, attacked, quiet_mb, server.resident_mb("VmHWM"), failed)
        finally:
            attacker.kill()
            attacker.wait()


def row(attack: str, router: Figures, null: Figures) -> str:
    """A line of the table."""
    said = (ATTACKS[attack].__doc__ or "").splitlines()[0].rstrip(".")
    router_ms = f"{p99(router.quiet):.1f} | {p99(router.attacked):.1f}"
    null_ms = f"{null.above_mb:.0f} | {p99(null.quiet):.1f} | {p99(null.attacked):.1f}"
    verdict = "yes" if router.holds else "no"
    return f"| {attack} | {said} | {router.above_mb:.0f} | {router_ms} | {router.failed} | {null_ms} | {verdict} |"


def main() -> None:
    """Measure, or be one of the processes that this needs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--attack", action="append", choices=ATTACKS, help="one attack (all); may be repeated")
    parser.add_argument("--run", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--null", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.null:
        asyncio.run(serve_nothing(given.null))
    elif given.run:
        attack, *words = given.run
        ATTACKS[attack](Target(words[0], words[1], words[2], int(words[3])))
        os._exit(0)
    else:
        head = (
            "| attack | | router: MB above quiet | p99 ms: quiet | attacked | failed | null server: MB above quiet "
            "| p99 ms: quiet | attacked | goal |"
        )
        lines = [head, "|---" * 10 + "|"]
        for attack in given.attack or ATTACKS:
            lines.append(row(attack, *(measure(attack, given.seconds, is_null) for is_null in (False, True))))
            print(lines[-1], flush=True)
        goal = f"Goal: at most {MOST_MB} MB, and a p99 of at most {MOST_MS:.0f} ms or {TIMES} times the quiet one."
        text = f"{__doc__}\n{machine_line()}; {given.seconds:g} s each. {goal}\n\n" + "\n".join(lines) + "\n"
        if not given.attack:
            (RESULTS / "attacks.md").write_text(text)
        print(text)


if __name__ == "__main__":
    main()
