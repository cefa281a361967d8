"""What attackers cost: memory of a service, and the waits of an owner that looks up a prompt.

    python -m tests.bench.service_attacks [--seconds N]     N seconds each (60); writes results/service_attacks.md
    python -m tests.bench.service_attacks --attack KIND     some of the attacks, without writing

Each attack (`tests.service.auth.attacks`) comes from a process of its own, against a service of two owners and against
a null server: gRPC's, with the same options, whose handlers end each call with a wrong token unread, and do nothing
else. Both accept messages of at most `PART_BYTES`.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc

import kvplane
from kvplane import ModelSource
from kvplane.v1 import allocation_pb2 as pb
from kvplane_service.config import Config
from kvplane_service.rpc.server import server_options
from tests.bench.attacked import Served, tabulate
from tests.bench.ticking import service
from tests.service.auth.attacks import ATTACKS, OF_OWNERS, PARTIAL_SESSIONS
from tests.service.guarded import Guard

PART_BYTES = 4 << 20
METHOD = "/kvplane.v1.Allocation/FindCacheHit"
VICTIM, ATTACKER = "token-rival", "token-acme"


async def serve_nothing() -> None:
    """The null server: prints its address, and runs until it is ended."""

    async def call(_: object, context: Any) -> None:
        if f"Bearer {VICTIM}" not in dict(context.invocation_metadata()).values():
            if f"Bearer {ATTACKER}" in dict(context.invocation_metadata()).values():
                while await context.read() is not grpc.aio.EOF:
                    await context.write(b"")
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "")
        await context.read()
        await context.write(b"")

    class All(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            del details
            return grpc.stream_stream_rpc_method_handler(call)

    server = grpc.aio.server(options=server_options(Config(max_message_bytes=PART_BYTES)))
    server.add_generic_rpc_handlers((All(),))
    sys.stdout.write(f"on 127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}\n")
    sys.stdout.flush()
    await server.start()
    await server.wait_for_termination()


@contextmanager
def null_server() -> Iterator[tuple[str, int]]:
    """Address and process of a null server."""
    command = [sys.executable, "-m", "tests.bench.service_attacks", "--null"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1], process.pid
        finally:
            process.kill()


@contextmanager
def guarded_service() -> Iterator[tuple[str, int]]:
    """Address and process of a service with the replicas of both owners."""
    model = ModelSource(model="llama-3.1-8b", num_blocks=2100, max_model_len=1008)
    with tempfile.TemporaryDirectory() as folder:
        config = Guard(Path(folder)).config()
        given = (f"auth_owners={config.auth_owners}", f"auth_tokens={config.auth_tokens}")
        settings = [flag for one in (*given, f"max_message_bytes={PART_BYTES}") for flag in ("--set", one)]
        with service(*settings) as (address, process, _):
            with kvplane.connect(address, token=VICTIM) as client:
                client.register_replica("rival/r", model)
            with kvplane.connect(address, token=ATTACKER) as client:
                for number in range(PARTIAL_SESSIONS):
                    client.register_replica(f"acme/{number}", model)
            yield address, process.pid


@contextmanager
def served(attack: str, is_null: bool) -> Iterator[Served]:
    """A service or the null server, and how one attack is made on it."""
    content = pb.RequestContent(token_ids=list(range(64)))
    request = pb.FindCacheHitRequest(replica="rival/r", content=content).SerializeToString()
    token = [ATTACKER, str(PART_BYTES)] if attack in OF_OWNERS else []
    with (null_server if is_null else guarded_service)() as (address, pid), grpc.insecure_channel(address) as channel:
        ask: Any = channel.unary_unary(METHOD)
        call = partial(ask, request, metadata=(("authorization", f"Bearer {VICTIM}"),), timeout=60)
        run = [sys.executable, "-m", "tests.service.auth.attacks", attack, address]
        yield Served(pid, call, lambda seconds: [*run, str(seconds), *token])


def main() -> None:
    """Run the attacks, and write the table, or serve nothing."""
    if sys.argv[1:2] == ["--null"]:
        asyncio.run(serve_nothing())
        return
    os.environ["GRPC_VERBOSITY"] = "NONE"  # of the servers, as the command line has it
    said = {kind: " ".join((one.__doc__ or "").split()).rstrip(".") for kind, one in {**ATTACKS, **OF_OWNERS}.items()}
    tabulate(said, [partial(served, is_null=is_null) for is_null in (False, True)], "service_attacks.md", __doc__ or "")


if __name__ == "__main__":
    main()
