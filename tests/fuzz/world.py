"""The fuzzer's target: the handlers of service and worker in this process, without sockets, and their invariants.

An input is a program, [u8 operation][u16 length, little-endian][bytes]...: a call of METHODS with these bytes as
its request; a message of a session (adjacent ones are one stream); an authorization header; or a call of a worker.
It runs on a new world: replica "r" with a running and a waiting request, which the caller may use, another owner's
replica "v", and a worker with pages.

Every program must satisfy:
- no call ends with INTERNAL or UNKNOWN, nor with an exception that is not a refusal;
- a refusal, and a call that only reads, leave the digest of "r" as it was;
- a request that names "v" is refused, and the digest of "v" is unchanged;
- no header but the caller's own is accepted;
- what `tests.fuzz.worker` lists.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
from google.rpc import code_pb2

from kvplane.base.errors import PermissionDenied, Unauthenticated
from kvplane.v1 import allocation_pb2 as pb
from kvplane.wire.spec import decode_spec
from kvplane_core.face.inspect import check
from kvplane_core.face.state import digest
from kvplane_service.auth.gate import ANONYMOUS, CALL, Gate
from kvplane_service.auth.identity import Identities, Proof
from kvplane_service.auth.scopes import METHODS as RULES
from kvplane_service.auth.scopes import Scope
from kvplane_service.registry import Registration, Registry
from kvplane_service.rpc.about import About
from kvplane_service.rpc.server import CallFilters, RpcServer
from kvplane_service.runtime.executors import Executor
from kvplane_service.store.keeper import Entropy, Keeper
from kvplane_service.store.owners import StoreOwners
from kvplane_service.store.ownership import Ownership, is_gone
from kvplane_service.store.writer import Runtime
from tests.fuzz import worker
from tests.service.guarded import Guard
from tests.service.rig import SPEC
from tests.service.test_fuzz import PROMPT, STATES

METHODS = sorted(name for name in RULES if name.startswith("kvplane.") and name != "kvplane.v1.Allocation/Session")
SESSION, HEADER, ON_STATES, WORKER = len(METHODS), len(METHODS) + 1, len(METHODS) + 2, len(METHODS) + 3
KINDS = WORKER + len(worker.METHODS)  # of operations
MAX_OPERATIONS = 12
BUGS = (code_pb2.INTERNAL, code_pb2.UNKNOWN)
READS = {name for name, rule in RULES.items() if rule.scope in (Scope.READ, Scope.EVENTS)} | {
    "kvplane.v1.Admin/Snapshot",
    "kvplane.v1.Admin/Record",
}
TOKEN = "token-rival"
_TURNS = 50  # of the event loop, for a stream that has no end of its own


class Ended(BaseException):
    """A call was ended with a status; passes handlers as gRPC's own exception does."""


@dataclass
class Context:
    """The part of a gRPC context that handlers use."""

    reads: list[bytes] = field(default_factory=list)
    writes: list[bytes] = field(default_factory=list)
    code: int = 0
    on_message: Any = None  # called with each message that is written

    async def abort_with_status(self, status: Any) -> None:
        """End the call."""
        self.code = status.code.value[0]
        raise Ended

    async def write(self, raw: bytes) -> None:
        """An answer of a stream."""
        self.writes.append(raw)
        if self.on_message is not None:
            self.on_message(raw)

    async def read(self) -> object:
        """The next message of the client."""
        return self.reads.pop(0) if self.reads else grpc.aio.EOF

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata that identify the caller."""
        return (("authorization", f"Bearer {TOKEN}"),)

    def auth_context(self) -> dict[str, list[bytes]]:
        """TLS properties: none."""
        return {}

    def peer(self) -> str:
        """Its address."""
        return "fuzz"


class Grounds:
    """State that all worlds share: the files of authorized callers, the event loop, and a server without replicas."""

    def __init__(self, folder: Path) -> None:
        caller = {
            "replicas": ["r", "s"],
            "domains": ["", "d"],
            "scopes": [one.value for one in Scope],
            "limits": {"bytes_per_second": None},  # the clock begins again with each program
        }
        guard = Guard(folder, {"rival": caller, "acme": {"replicas": ["v"]}})
        config = guard.config(audit_log="", max_blocks=5000, max_total_blocks=20_000, max_message_bytes=1 << 20)
        self.worker = worker.FuzzedWorker(folder)
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.identities = Identities(config)
        self.clock = _Clock()
        self.registry = Registry(config, self.clock)
        runtime = Runtime(self.clock, asyncio.sleep, Executor("replicas that come back"), random.Random(1).random)
        keeper = Keeper(self.registry, config, runtime, Entropy(lambda: 0, lambda: 1))
        ownership = Ownership(self.registry, config, keeper, runtime, StoreOwners(keeper, 1, is_gone))
        filters = CallFilters(Gate(self.identities, None, self.clock))
        self.handlers = _Handlers()
        with _served_by(self.handlers):
            RpcServer(self.registry, config, About(), keeper, ownership, filters)

    def clear(self) -> None:
        """Remove all replicas, and reset the worker and the clock."""
        self.worker.reset()
        for entry in self.registry:
            self.registry.remove(entry.host.name)
        self.clock.now_ns = 0


class World:
    """The service at the start of a program."""

    def __init__(self, grounds: Grounds, on_states: bool) -> None:
        self.grounds = grounds
        self.registry, self.handlers = grounds.registry, grounds.handlers
        grounds.clear()
        self._prepare(on_states)

    def _prepare(self, on_states: bool) -> None:
        spec = STATES if on_states else SPEC
        victim = Registration(decode_spec(SPEC), registered_by="acme")
        self.registry.register("v", victim)
        self.registry.register("r", Registration(decode_spec(spec), registered_by="rival"))
        for name, tokens in (("a", PROMPT), ("b", list(range(1000, 1900)))):
            request = pb.AllocateSlotsRequest(
                header={"replica": "r", "more": name == "a"}, request_id=name, content={"token_ids": tokens}
            )
            assert self.call("kvplane.v1.Allocation/AllocateSlots", request.SerializeToString()) == 0
        commit = pb.CommitBlocksRequest(header={"replica": "r"})
        assert self.call("kvplane.v1.Allocation/CommitBlocks", commit.SerializeToString()) == 0
        self.victim = self.digest("v")

    def digest(self, name: str = "r") -> str:
        """Digest of a replica's state; "" when it is not registered."""
        return digest(self.registry.get(name).host.replica) if name in self.registry else ""

    def call(self, method: str, raw: bytes) -> int:
        """Status code of a call."""
        context = Context([raw])
        handler = self.handlers.find(method)
        if handler.stream_unary is not None:
            self._run(handler.stream_unary(None, context))
        else:
            self._run(handler.stream_stream(None, context), turns=_TURNS)
        return context.code

    def stream(self, messages: list[bytes]) -> int:
        """Status code of a session with these messages; every refusal in it must leave the digest."""
        before = self.digest()

        def record(raw: bytes) -> None:
            nonlocal before
            answer, after = pb.SessionResponse.FromString(raw), self.digest()
            assert answer.WhichOneof("kind") != "error" or after == before, f"a refusal changed the state: {answer}"
            before = after

        context = Context(list(messages), on_message=record)
        self._run(self.handlers.find("kvplane.v1.Allocation/Session").stream_stream(None, context))
        return context.code

    def _run(self, work: Any, turns: int = 0) -> None:
        loop = self.grounds.loop

        async def run() -> None:
            task = asyncio.create_task(_until_ended(work))
            for _ in range(turns):
                if not task.done():
                    await asyncio.sleep(0)
            if turns and not task.done():
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

        loop.run_until_complete(run())


async def _until_ended(work: Any) -> None:
    with contextlib.suppress(Ended):
        await work


class _Clock:
    """Counts calls: the same program sees the same times."""

    now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 1000
        return self.now_ns


class _Handlers:
    """Takes the handlers that a server is given."""

    def __init__(self) -> None:
        self._handlers: list[Any] = []
        self._found: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: tuple[Any, ...]) -> None:
        """See grpc.aio.Server."""
        self._handlers += handlers

    def add_registered_method_handlers(self, *_: object) -> None:
        """See grpc.aio.Server."""

    def find(self, method: str) -> Any:
        """The handler of a method."""
        if method not in self._found:
            details = SimpleNamespace(method=f"/{method}", invocation_metadata=())
            answers = (one.service(details) for one in self._handlers)
            self._found[method] = next(answer for answer in answers if answer is not None)
        return self._found[method]


@contextlib.contextmanager
def _served_by(handlers: _Handlers) -> Iterator[None]:
    """A server that is made meanwhile has no sockets and gives its handlers to `handlers`."""
    made, grpc.aio.server = grpc.aio.server, lambda *_, **__: handlers  # type: ignore[assignment]
    try:
        yield
    finally:
        grpc.aio.server = made


def decode(data: bytes) -> list[tuple[int, bytes]]:
    """The operations of a program, at most MAX_OPERATIONS; a truncated operation has fewer bytes."""
    found: list[tuple[int, bytes]] = []
    at = 0
    while at < len(data) and len(found) < MAX_OPERATIONS:
        size = int.from_bytes(data[at + 1 : at + 3], "little")
        found.append((data[at] % KINDS, data[at + 3 : at + 3 + size]))
        at += 3 + size
    return found


def encode(operations: list[tuple[int, bytes]]) -> bytes:
    """The bytes of a program."""
    return b"".join(bytes([kind]) + len(raw).to_bytes(2, "little") + raw for kind, raw in operations)


def run(grounds: Grounds, data: bytes) -> None:
    """Run a program; AssertionError when an invariant is violated."""
    CALL.set(ANONYMOUS)
    operations = decode(data)
    world = World(grounds, any(kind == ON_STATES for kind, _ in operations))
    for kind, group in groupby(operations, key=lambda operation: operation[0]):
        payloads = [raw for _, raw in group]
        if kind == SESSION:
            assert world.stream(payloads) not in BUGS, "a session broke"
        elif kind == HEADER:
            for raw in payloads:
                _check_header(grounds, raw)
        elif kind >= WORKER:
            for raw in payloads:
                grounds.worker.check(worker.METHODS[kind - WORKER], raw)
        elif kind < SESSION:
            for raw in payloads:
                _check_call(world, METHODS[kind], raw)
        assert world.digest("v") == world.victim, "another owner's replica changed"
    for entry in world.registry:
        check(entry.host.replica)


def _check_call(world: World, method: str, raw: bytes) -> None:
    before = world.digest()
    code = world.call(method, raw)
    assert code not in BUGS, f"{method} broke"
    if code or method in READS:
        assert world.digest() == before, f"{method} ended with {code} and changed the state"


def _check_header(grounds: Grounds, raw: bytes) -> None:
    header = raw.decode("latin-1")
    try:
        identity = grounds.identities.identify(Proof((header,), ()))
    except (Unauthenticated, PermissionDenied):
        return
    assert header.partition(" ")[2].strip() in (TOKEN, "token-acme"), "an unauthenticated caller was let in"
    assert identity.owner.name in ("rival", "acme")


def new_grounds() -> Grounds:
    """Grounds in a new folder."""
    return Grounds(Path(tempfile.mkdtemp(prefix="kvplane-fuzz-")))
