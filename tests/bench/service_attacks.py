"""What attackers cost: memory of a service, and the waits of an owner that looks up a prompt every 20 ms.

    python -m tests.bench.service_attacks [--seconds N]     writes tests/bench/results/service_attacks.md
    python -m tests.bench.service_attacks --attack KIND     some of the attacks, without writing

Each attack (`tests.service.auth.attacks`) runs for 60 seconds from a process of its own, against a service of two
owners and against a null server: gRPC's, with the same options, whose handlers end each call with a wrong token unread,
and do nothing else. Memory is the peak above that before the attack. Both accept messages of at most `PART_BYTES`.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

import kvplane
from kvplane import ModelSource
from kvplane.v1 import allocation_pb2 as pb
from kvplane_service.config import Config
from kvplane_service.rpc.server import server_options
from tests.bench.machine import machine_line
from tests.bench.ticking import service
from tests.service.auth.attacks import ATTACKS, OF_OWNERS, PARTIAL_SESSIONS
from tests.service.guarded import Guard

RESULTS = Path(__file__).parent / "results"
PART_BYTES = 4 << 20
METHOD = "/kvplane.v1.Allocation/FindCacheHit"
VICTIM, ATTACKER = "token-rival", "token-acme"
QUIET_S = 5.0


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


def memory_mb(pid: int, name: str) -> int:
    """VmRSS or VmHWM of a process."""
    found = re.search(rf"{name}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) >> 10


class Victim(threading.Thread):
    """Looks up a prompt every 20 ms; `take` returns the 99th percentile in ms since the last one, and failures."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._channel = grpc.insecure_channel(address)
        self._waits, self._failed, self._is_over = list[float](), 0, False

    def run(self) -> None:
        content = pb.RequestContent(token_ids=list(range(64)))
        request = pb.FindCacheHitRequest(replica="rival/r", content=content).SerializeToString()
        ask: Any = self._channel.unary_unary(METHOD)
        while not self._is_over:
            began_s = time.perf_counter()
            try:
                ask(request, metadata=(("authorization", f"Bearer {VICTIM}"),), timeout=60)
            except grpc.RpcError:
                self._failed += 1
            self._waits.append(1000 * (time.perf_counter() - began_s))
            time.sleep(0.02)

    def take(self) -> tuple[float, int]:
        waits, self._waits = sorted(self._waits), []
        failed, self._failed = self._failed, 0
        return (waits[int(len(waits) * 0.99)] if waits else float("nan")), failed

    def end(self) -> None:
        self._is_over = True
        self.join()
        self._channel.close()


def attacked(kind: str, address: str, pid: int, seconds: float) -> tuple[int, float, float, int]:
    """Memory in MB above that before; the victim's 99th percentile before and under the attack; its failed calls."""
    victim = Victim(address)
    victim.start()
    time.sleep(1)
    victim.take()
    time.sleep(QUIET_S)
    quiet, _ = victim.take()
    before = memory_mb(pid, "VmRSS")
    token = [ATTACKER, str(PART_BYTES)] if kind in OF_OWNERS else []
    command = [sys.executable, "-m", "tests.service.auth.attacks", kind, address, str(seconds), *token]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    under, failed = victim.take()
    victim.end()
    return memory_mb(pid, "VmHWM") - before, quiet, under, failed


def main() -> None:
    """Run the attacks, and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--attack", action="append", choices=[*ATTACKS, *OF_OWNERS], help="one attack (all)")
    parser.add_argument("--null", action="store_true")
    given = parser.parse_args()
    if given.null:
        asyncio.run(serve_nothing())
        return
    lines = [
        "| attack | service: MB above quiet | p99 ms quiet | p99 ms attacked | failed | null server: MB | p99 ms quiet "
        "| p99 ms attacked | failed |",
        "|---" * 9 + "|",
    ]
    for kind in given.attack or [*ATTACKS, *OF_OWNERS]:
        cells = [kind.replace("_", " ")]
        for target in (guarded_service, null_server):
            with target() as (address, pid):
                memory, quiet, under, failed = attacked(kind, address, pid, given.seconds)
            cells += [str(memory), f"{quiet:.1f}", f"{under:.1f}", str(failed)]
        lines.append(f"| {' | '.join(cells)} |")
    table = "\n".join(lines)
    text = f"{__doc__}\n{machine_line()}; {given.seconds:g} seconds each\n\n{table}\n"
    if not given.attack:
        (RESULTS / "service_attacks.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
