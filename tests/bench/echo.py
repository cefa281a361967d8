"""A synchronous decode step over a Unix socket, compared with a bare gRPC echo of its bytes and the step in process.

    python -m tests.bench.echo

Writes results/echo.md. The echo is a stream to a service of its own, on uvloop, that answers each message with bytes of
the length of the step's answer and does nothing else; the client sends from a queue and reads on the caller's thread.
The step in process is the same engine with the core on its thread: the work of engine, client and core without a wire.
All three are measured in turn, each after the same pause; the figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

import grpc
import grpc.aio
import uvloop

from kvplane.base.step import Part, Step, StepResult
from kvplane.wire.result import encode_result
from kvplane.wire.step import encode_step
from tests.bench.machine import machine_line
from tests.bench.peer.engine import Engine
from tests.bench.peer.models import MODELS, Model
from tests.bench.peer.places import places
from tests.bench.peer.plan import IN_PROCESS, UNIX

RESULT = Path(__file__).parent / "results" / "echo.md"
REQUESTS, STEPS, PAUSE_S, GOAL = (1, 8, 32, 256), 120, 0.002, 1.6
METHOD = "/bench.Echo/Echo"
SERVE = "import sys; from tests.bench.echo import serve; serve(sys.argv[1])"


async def _answer(requests: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
    """Answer each message, whose first four bytes are the length of its answer."""
    async for message in requests:
        yield bytes(int.from_bytes(message[:4], "little"))


def serve(address: str) -> None:
    """Serve the echo until the process is ended."""

    async def run() -> None:
        server = grpc.aio.server()
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(_answer)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", {"Echo": handler}),))
        server.add_insecure_port(address)
        await server.start()
        print("ready", flush=True)
        await server.wait_for_termination()

    uvloop.run(run())


def _as_it_is(message: bytes) -> bytes:
    return message


class Echo:
    """A stream to the echo."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        method = channel.stream_stream(METHOD, _as_it_is, _as_it_is)
        self._answers: Iterator[bytes] = method(iter(self._requests.get, None))

    def exchange(self, sent: int, received: int) -> int:
        """Send a message and wait for its answer, of these lengths; returns nanoseconds."""
        message = received.to_bytes(4, "little") + bytes(sent - 4)
        begin = time.perf_counter_ns()
        self._requests.put(message)
        answer = next(self._answers)
        took = time.perf_counter_ns() - begin
        assert len(answer) == received
        return took

    def close(self) -> None:
        """End the stream."""
        self._requests.put(None)


@contextmanager
def echo() -> Iterator[Echo]:
    """A stream to an echo in its own process."""
    with ExitStack() as stack:
        address = f"unix:{Path(stack.enter_context(TemporaryDirectory())) / 'echo.sock'}"
        command = [sys.executable, "-c", SERVE, address]
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(process.terminate)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        stream = Echo(stack.enter_context(grpc.insecure_channel(address)))
        stack.callback(stream.close)
        yield stream


def sizes_of(engine: Engine) -> tuple[int, int]:
    """The bytes of a decode step of this engine and of its answer. Makes a step."""
    session = engine.session
    part = engine._part(engine._sample(), extra=0)
    result = session.apply(part)
    engine._take(part, result.parts[0])
    sent = encode_step(Step(session.epoch, result.seq, [Part(facts=part.facts, run=part.run)])).ByteSize()
    return sent, encode_result(StepResult(result.seq, 0, result.parts)).ByteSize()


def measure(model: Model, requests: int, steps: int, stream: Echo, engines: dict[str, Engine]) -> list[str]:
    """A row of the table."""
    sent, received = max(sizes_of(engine) for engine in engines.values())
    took: dict[str, list[int]] = {"echo": [], **{name: [] for name in engines}}
    for _ in range(steps):
        time.sleep(PAUSE_S)
        took["echo"].append(stream.exchange(sent, received))
        for name, engine in engines.items():
            time.sleep(PAUSE_S)
            took[name].append(engine.decode())
    us = {name: statistics.median(each) / 1000 for name, each in took.items()}
    ratio = us[UNIX] / (us["echo"] + us[IN_PROCESS])
    shown = f"{ratio:.2f}" if ratio <= GOAL else f"**{ratio:.2f}**"
    figures = [f"{us[name]:.0f}" for name in (UNIX, "echo", IN_PROCESS)]
    return [model.name, str(requests), f"{sent} / {received}", *figures, shown]


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each row and side ({STEPS})")
    steps = parser.parse_args().steps
    rows = []
    with echo() as stream, places() as found:
        for model in MODELS:
            for requests in REQUESTS:
                blocks = model.shape.decode_blocks(requests, 2 * steps)
                engines = {}
                for name in (UNIX, IN_PROCESS):
                    engines[name] = Engine(found[name].session(model.spec(blocks)), model.shape)
                    engines[name].admit(requests)
                rows.append(measure(model, requests, steps, stream, engines))
                for name, engine in engines.items():
                    engine.session.close()
                    found[name].forget()
    names = ["model", "requests", "bytes sent / received", "step, us", "echo, us", "in process, us"]
    names.append(f"ratio (≤ {GOAL})")
    table = [names, ["---"] * len(names), *rows]
    text = f"# A step over gRPC and a bare echo\n\n{machine_line()}; `python -m tests.bench.echo`\n\n"
    text += "The ratio is that of the step to the sum of echo and step in process.\n\n"
    text += "".join(f"| {' | '.join(row)} |\n" for row in table)
    RESULT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
