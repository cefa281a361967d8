"""What attacks on a router cost its memory and another owner, and what they cost a server that does nothing.

    python -m tests.bench.attacks [--seconds N]     N seconds each (60); writes tests/bench/results/attacks.md
    python -m tests.bench.attacks --attack NAME     some of the attacks, without writing

A router follows a place of one owner and a place of another. The victim asks where a prompt of 64 tokens belongs; the
attacker is a process of its own: a hostile engine, or what its token permits. The null server has gRPC as the router
does, and follows the same publishers, but answers every call with nothing, and drops what is published.
"""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
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
from tests.bench.attacked import Served, tabulate
from tests.router.engine import BLOCK, DOMAIN
from tests.router.test_costs_of_payloads import PAYLOADS
from tests.store.servers import free_port

VICTIM = pb.ScoreRequest(model="m", prompt=pb.Prompt(token_ids=list(range(4 * BLOCK))))
BODY_BYTES = (32 << 20) - 4096
OWNERS = "victim: {replicas: ['victim/*']}\nattacker: {scopes: [read, events, report], replicas: ['attacker/*']}\n"
DONE = Counter[str]()  # by this attacker


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
        DONE["messages"] += 1
        time.sleep(pause_s)


def frames(target: Target) -> None:
    """An engine that publishes ten payloads a second, of each kind that costs much."""
    _publish(target, list(PAYLOADS.values()), 0.1)


def flood(target: Target) -> None:
    """An engine that publishes as much as it can."""
    event = {"type": "BlockStored", "block_hashes": [], "token_ids": bytes(MAX_MESSAGE_BYTES - 4096)}
    _publish(target, [msgspec.msgpack.encode([1.0, [event], 0])], 0.0)


def _follow(target: Target) -> None:
    """Let the router follow the attacker's place: it asks and hashes for no other."""
    threading.Thread(target=_publish, args=(target, [stored(range(4 * BLOCK))], 1.0), daemon=True).start()


def _repeated(target: Target, times: int, call: Callable[[RoutingStub, grpc.Channel], object]) -> None:
    """Make a call repeatedly, in threads."""

    def repeat() -> None:
        channel = target.channel()
        stub = RoutingStub(channel)
        while True:
            with suppress(grpc.RpcError):
                call(stub, channel)
                DONE["calls"] += 1

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
        DONE["questions"] += 1
        self.send_response(200)
        self.send_header("content-length", "60000")
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
    _follow(target)
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
    _follow(target)
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


@contextmanager
def started(attack: str, is_null: bool) -> Iterator[Served]:
    """A router, or the null server, whose victim's place has the prompt."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
    ports = [free_port() for _ in range(3)]
    good, evil = (f"tcp://127.0.0.1:{port}" for port in ports[:2])
    tokens = {name: new_token() for name in ("victim", "attacker")}
    with tempfile.TemporaryDirectory() as folder, closing(socket):
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(good)
        command = [sys.executable, "-m", "tests.bench.attacks", "--null", good, evil]
        if not is_null:
            command = _router(Path(folder), tokens, good, evil, ports[2])
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                address = process.stdout.readline().split()[-1]
                time.sleep(2)
                socket.send_multipart([b"", bytes(8), stored(VICTIM.prompt.token_ids)])
                victim = Target(address, tokens["victim"], good, 0)
                words = [attack, address, tokens["attacker"], evil, str(ports[2])]
                run = [sys.executable, "-m", "tests.bench.attacks", "--run", *words]
                with victim.channel() as channel:
                    stub = RoutingStub(channel)
                    call = partial(stub.Score, VICTIM, metadata=victim.metadata, timeout=60)
                    yield Served(process.pid, call, lambda seconds: [*run, str(seconds)])
            finally:
                process.kill()


def _router(folder: Path, tokens: Mapping[str, str], good: str, evil: str, port: int) -> list[str]:
    """The command of a router that follows the publishers."""
    (folder / "owners").write_text(OWNERS)
    (folder / "tokens").write_text("".join(f"{line_of(token, name)}\n" for name, token in tokens.items()))
    places = [
        {"name": "victim/0", "model": "m", "events": good},
        {"name": "attacker/0", "model": "n", "events": evil, "endpoint": f"http://127.0.0.1:{port}"},
    ]
    (folder / "places.yaml").write_text(json.dumps({"places": places, "router": {"warm_up_s": 1}}))
    settings = [f"auth_owners={folder / 'owners'}", f"auth_tokens={folder / 'tokens'}", "log_level=ERROR"]
    command = [sys.executable, "-m", "kvplane_tools", "router", str(folder / "places.yaml"), "--listen", "127.0.0.1:0"]
    return [*command, *(word for one in settings for word in ("--set", one))]


def stored(prompt: Sequence[int]) -> bytes:
    """The payload of an engine that has stored a prompt."""
    event = {
        "type": "BlockStored", "block_hashes": DOMAIN.keys(prompt), "parent_block_hash": None, "group_idx": 0,
        "token_ids": list(prompt), "block_size": BLOCK, "medium": "GPU", "kv_cache_spec_kind": "full_attention",
    }  # fmt: skip
    return msgspec.msgpack.encode([1.0, [event], 0])


def attack(words: Sequence[str]) -> None:
    """Make one attack for some seconds."""
    name, address, token, events, port, seconds = words
    target = Target(address, token, events, int(port))
    threading.Thread(target=ATTACKS[name], args=(target,), daemon=True).start()
    time.sleep(float(seconds))
    print(json.dumps(DONE), flush=True)
    os._exit(0)


def main() -> None:
    """Measure, or be one of the processes that this needs."""
    if sys.argv[1:2] == ["--null"]:
        asyncio.run(serve_nothing(sys.argv[2:]))
    elif sys.argv[1:2] == ["--run"]:
        attack(sys.argv[2:])
    else:
        said = {name: (one.__doc__ or "").splitlines()[0].rstrip(".") for name, one in ATTACKS.items()}
        tabulate(said, [partial(started, is_null=is_null) for is_null in (False, True)], "attacks.md", __doc__ or "")


if __name__ == "__main__":
    main()
