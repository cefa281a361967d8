"""CPU time of a service per step of 16 engines with 256 requests each, whose client sends bytes that were made before.

    python -m tests.bench.replayed [--engines 16] [--steps 64] [--rounds 5]

prints a table and writes it to tests/bench/results/replayed.md. A service on the compiled core, one whose engines use
its session socket, one on the Python core and a bare gRPC echo (`tests.bench.echo`) take turns in one run; each engine
has one step outstanding. CPU time is that of the whole process of the service, all threads, as the kernel counts it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

import grpc.aio
import uvloop

import kvplane
from kvplane.base.session import OpenRequest
from kvplane.base.step import Admit, Part, Step, StepResult
from kvplane.session.options import draw_nonce
from kvplane.v1.ttrpc_pb2 import TtrpcRequest
from kvplane.wire.stream import SESSION, open_message, opened_of, serialized, step_message, taken
from kvplane.wire.ttrpc import DATA, HEADER, REMOTE_OPEN, REQUEST, frame
from tests.bench.cores import BLOCK, ONE, REQUESTS, TOKENS, decode, news, spec
from tests.bench.echo import METHOD
from tests.bench.echo import SERVE as SERVE_ECHO
from tests.bench.machine import machine_line
from tests.bench.peer.places import SERVE

RESULT = Path(__file__).parent / "results" / "replayed.md"
COMPILED, PYTHON, ECHO, SOCKET = "compiled core", "Python core", "echo", "compiled core, session socket"
SESSIONS = ".sessions"  # of an address: its session socket
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def messages(epoch: int, steps: int) -> list[bytes]:
    """The bytes of an admission of all requests, and of decode steps."""
    lengths = [TOKENS + slot % BLOCK for slot in range(REQUESTS)]
    slots = list(range(REQUESTS))
    made = [step_message(Step(epoch, 1, [Part(news=news(slots, lengths), admit=Admit(slots))]), 1 << 24)]
    for seq in range(2, steps + 2):
        lengths = [length + 1 for length in lengths]
        made.append(step_message(Step(epoch, seq, [decode(lengths)], executed_through=seq - 1), 1 << 24))
    return made


def cpu_s(process: subprocess.Popen[str]) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


class SocketStream:
    """A stream to a session socket, with the methods of one of gRPC."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        _, service, method = SESSION.split("/")
        request = TtrpcRequest(service=service, method=method).SerializeToString()
        writer.write(frame(REQUEST, request, REMOTE_OPEN))

    async def write(self, raw: bytes) -> None:
        self._writer.write(frame(DATA, raw))

    async def read(self) -> bytes:
        length, *_ = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        return await self._reader.readexactly(length)


Stream: TypeAlias = grpc.aio.StreamStreamCall[bytes, bytes] | SocketStream


async def received(stream: Stream) -> bytes:
    """The next message. Raises grpc.RpcError if the stream has failed."""
    raw = await stream.read()
    assert isinstance(raw, bytes), "the server has ended the stream"
    return raw


class Side:
    """A server, with a stream per engine."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        self.name = name
        self.cpu_us, self.per_s = list[float](), list[float]()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
        assert self.process.stdout is not None
        next(line for line in self.process.stdout if "serving on " in line or line == "ready\n")

    async def open(self, address: str, engines: int) -> int:
        """Open the streams; returns the epoch of all."""
        self._channel = grpc.aio.insecure_channel(address)
        await self._channel.channel_ready()
        method = self._channel.stream_stream(METHOD if self.name == ECHO else SESSION, lambda raw: raw, lambda raw: raw)
        self.streams = list[Stream]()
        for _ in range(engines):
            if self.name == SOCKET:
                path = address.removeprefix("unix:") + SESSIONS
                self.streams.append(SocketStream(*await asyncio.open_unix_connection(path)))
            else:
                self.streams.append(method())
        if self.name == ECHO:
            return 0
        with kvplane.connect(address) as client:
            for engine in range(engines):
                client.register_replica(f"r{engine}", spec(ONE))
        epochs = set()
        for engine, stream in enumerate(self.streams):
            await stream.write(serialized(open_message(OpenRequest(f"r{engine}", draw_nonce()))))
            epochs.add(opened_of(taken(await received(stream))).epoch)
        (epoch,) = epochs
        return epoch

    async def replay(self, made: list[bytes], sizes: list[int]) -> None:
        """Send the messages on each stream, each after the answer to the one before; notes times per step."""
        if self.name == ECHO:  # which reads there how many bytes to answer with
            made = [size.to_bytes(4, "little") + raw[4:] for raw, size in zip(made, sizes, strict=True)]

        async def one(stream: Stream) -> None:
            for at, raw in enumerate(made):
                await stream.write(raw)
                answer = await received(stream)
                sizes[at] = len(answer)
            assert self.name == ECHO or isinstance(taken(answer), StepResult)

        cpu, began = cpu_s(self.process), time.perf_counter()
        await asyncio.gather(*map(one, self.streams))
        count = len(made) * len(self.streams)
        self.per_s.append(count / (time.perf_counter() - began))
        self.cpu_us.append((cpu_s(self.process) - cpu) / count * 1e6)


async def measure(sides: list[Side], addresses: list[str], given: argparse.Namespace) -> int:
    """Play the rounds; returns the bytes of a step's answer."""
    epochs = [await side.open(address, given.engines) for side, address in zip(sides, addresses, strict=True)]
    made = messages(epochs[0], given.steps * (given.rounds + 1))
    assert epochs[0] == epochs[1]
    sizes = [0] * len(made)
    for begin in [0, *range(1, len(made), given.steps)]:
        end = begin + given.steps if begin else 1
        for side in sides:
            of_these = sizes[begin:end]
            await side.replay(made[begin:end], of_these)
            sizes[begin:end] = of_these
    for side in sides:  # without the admission and a round to warm up
        del side.cpu_us[:2], side.per_s[:2]
    return round(statistics.median(sizes[1:]))


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--steps", type=int, default=64, help="of each engine in a round")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        sides, addresses = list[Side](), list[str]()
        for name in (COMPILED, PYTHON, ECHO, SOCKET):
            addresses.append(f"unix:{folder / str(len(sides))}")
            serve = ["serve", "--listen", addresses[-1], "--set", "log_level=ERROR"]
            if name == SOCKET:
                serve += ["--set", f"session_socket={addresses[-1].removeprefix('unix:')}{SESSIONS}"]
            arguments = [SERVE_ECHO, addresses[-1]] if name == ECHO else [SERVE, *serve]
            sides.append(
                Side(
                    name, [sys.executable, "-c", *arguments], {"KVPLANE_CORE": "python" if name == PYTHON else "native"}
                )
            )
            stack.callback(sides[-1].process.terminate)
        size = uvloop.run(measure(sides, addresses, given))
    cpu = {side.name: statistics.median(side.cpu_us) for side in sides}
    per_s = {side.name: statistics.median(side.per_s) for side in sides}
    command = f"--engines {given.engines} --steps {given.steps} --rounds {given.rounds}"
    lines = [
        "# Steps of prepared bytes", "", f"{machine_line()}; `python -m tests.bench.replayed {command}`", "",
        f"{given.engines} engines of {REQUESTS} requests; an answer has {size:,} bytes.", "",
        "| server | CPU per step, us | / Python core | steps/s | / echo |", "|---|---|---|---|---|",
        *(
            f"| {name} | {cpu[name]:,.0f} | {cpu[name] / cpu[PYTHON]:.2f} | {per_s[name]:,.0f} "
            f"| {per_s[name] / per_s[ECHO]:.2f} |"
            for name in cpu
        ),
        "", "Goals: compiled / Python core at most 0.25 of CPU time; at least 0.5 of the echo's steps per second.",
    ]  # fmt: skip
    text = "\n".join(lines) + "\n"
    print(text)
    RESULT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
