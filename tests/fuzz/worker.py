"""The worker's part of the fuzzer's target: kvplane.v1.Worker in this process, without a socket, and its invariants.

- no call ends with INTERNAL or UNKNOWN, nor with an exception that is not a refusal;
- a call without the token is refused;
- a refusal, and a call that only reads, leave pages, staging buffer and stamp table as they were, and lend nothing;
- a transfer writes either pages or staging buffer, and no stamps;
- the owner epoch never decreases.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn

import grpc
import torch
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import code_pb2

from kvplane.v1 import worker_pb2 as pb
from kvplane_worker.lending.rundir import RunDir
from kvplane_worker.lending.writer import ProcessName
from kvplane_worker.rpc.server import service_handler
from kvplane_worker.rpc.servicer import WorkerServicer
from tests.worker.test_fuzz import TOKEN, bytes_of, serve_rank

SERVICE = pb.DESCRIPTOR.services_by_name["Worker"]
METHODS = sorted(SERVICE.methods_by_name)
BUGS = (code_pb2.INTERNAL, code_pb2.UNKNOWN)
READS = ("Describe", "Checksum")


class Ended(BaseException):
    """A call was ended with a status; passes handlers as gRPC's own exception does."""


class Context:
    """The part of a gRPC context that the worker's handlers use."""

    code = 0

    def peer(self) -> str:
        """What gRPC shows of the caller."""
        return "fuzz"

    def set_trailing_metadata(self, _: object) -> None:
        """See grpc.ServicerContext."""

    def abort(self, code: grpc.StatusCode, _: str) -> NoReturn:
        """See grpc.ServicerContext."""
        self.code = code.value[0]
        raise Ended


class FuzzedWorker:
    """A worker with its handlers, which each program gets as it was at first."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        served = serve_rank(RunDir(folder / "worker"))
        self.holdings = served.holdings
        self.servicer = WorkerServicer(served)
        self._handlers: Any = service_handler(SERVICE, self.servicer, lambda _: ProcessName.of(os.getpid()))
        self._first = bytes_of(self.holdings)

    def reset(self) -> None:
        """Restore what the worker holds, and end the loan of its pages."""
        self.servicer.close()
        memory, staging, stamps = (bytearray(part) for part in self._first)
        self.holdings.buffers.memory.copy_(torch.frombuffer(memory, dtype=torch.uint8))
        self.holdings.staging.copy_(torch.frombuffer(staging, dtype=torch.uint8))
        self.holdings.stamps._bytes[: len(stamps)] = stamps

    def check(self, method: str, raw: bytes) -> int:
        """Call a method, and return its status code; AssertionError when an invariant is violated."""
        before, epoch, pid = bytes_of(self.holdings), self.holdings.stamps.owner_epoch, self.servicer.attached_pid
        code = self._call(method, raw)
        after = bytes_of(self.holdings)
        assert code not in BUGS, f"Worker/{method} broke"
        assert code or token_of(method, raw) == TOKEN, f"Worker/{method} needs no token"
        if code or method in READS:
            assert after == before, f"Worker/{method} ended with {code} and changed the memory"
            assert self.servicer.attached_pid == pid, f"Worker/{method} ended with {code} and lent the pages"
        if method == "Transfer":
            assert after[2] == before[2], "a transfer changed the stamp table"
            assert after[0] == before[0] or after[1] == before[1], "a transfer wrote pages and staging buffer"
        assert self.holdings.stamps.owner_epoch >= epoch, "the owner epoch decreased"
        return code

    def _call(self, method: str, raw: bytes) -> int:
        handler = self._handlers.service(_Details(f"/{SERVICE.full_name}/{method}"))
        context = Context()
        try:
            handler.unary_unary(raw, context)
        except Ended:
            assert context.code
        return context.code


class _Details:
    """What gRPC gives to find a handler."""

    invocation_metadata = ()

    def __init__(self, method: str) -> None:
        self.method = method


def request_of(method: str) -> Message:
    """A request of the method."""
    return GetMessageClass(SERVICE.methods_by_name[method].input_type)()


def token_of(method: str, raw: bytes) -> str:
    """The token in a request; "" if it cannot be read."""
    request: Any = request_of(method)
    try:
        request.ParseFromString(raw)
    except DecodeError:
        return ""
    return str(request.token)
