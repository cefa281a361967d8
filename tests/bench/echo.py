"""A decode step over a Unix socket, compared with a bare gRPC echo of its bytes.

    python -m tests.bench.echo

Writes results/echo.md. The echo is a stream to a service of its own, on uvloop, that answers each message with bytes of
the length of the step's answer and does nothing else; the client sends from a queue and reads on the caller's thread.
The step in process is the same engine with the core on its thread: the work of engine, client and core without a wire.
All three are measured in turn, each after the same pause; the figures are medians.

The second table is of steps and echoes that are sent ahead, as `tests.bench.peer` measures them: what gRPC alone costs
an engine's thread. There a thread reads the answers of the echo as they arrive.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager, suppress
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
from tests.bench.peer.engine import AheadStep, Engine, sent_ahead
from tests.bench.peer.models import MODELS, Model
from tests.bench.peer.places import places
from tests.bench.peer.plan import IN_PROCESS, UNIX
from tests.bench.peer.work import Clock

RESULT = Path(__file__).parent / "results" / "echo.md"
REQUESTS, STEPS, PAUSE_S, GOAL = (1, 8, 32, 256), 120, 0.002, 1.6
AHEAD_STEPS, GPU_S = 8, 0.02
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
        self._taken: SimpleQueue[bytes] | None = None

    def exchange(self, sent: int, received: int) -> int:
        """Send a message and wait for its answer, of these lengths; returns nanoseconds."""
        message = received.to_bytes(4, "little") + bytes(sent - 4)
        begin = time.perf_counter_ns()
        self._requests.put(message)
        answer = next(self._answers)
        took = time.perf_counter_ns() - begin
        assert len(answer) == received
        return took

    def ahead(self, clock: Clock, sent: int, received: int) -> AheadStep:
        """Exchange a message sent ahead. The stream can only do this from then on."""
        if self._taken is None:
            self._taken = SimpleQueue()
            threading.Thread(target=_read, args=(self._answers, self._taken), daemon=True).start()
        message = received.to_bytes(4, "little") + bytes(sent - 4)
        return sent_ahead(clock, GPU_S, lambda: self._requests.put(message), self._taken.get, len)

    def close(self) -> None:
        """End the stream."""
        self._requests.put(None)


def _read(answers: Iterator[bytes], taken: SimpleQueue[bytes]) -> None:
    with suppress(grpc.RpcError):
        for answer in answers:
            taken.put(answer)


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


def measure_ahead(model: Model, requests: int, turns: int, stream: Echo, engine: Engine) -> list[str]:
    """A row of the second table."""
    sent, received = sizes_of(engine)
    steps, echoes = list[AheadStep](), list[AheadStep]()
    for _ in range(turns):
        steps += engine.decode_ahead(AHEAD_STEPS, GPU_S)
        echoes += [stream.ahead(engine.clock, sent, received) for _ in range(AHEAD_STEPS)]
    row, us = [model.name, str(requests)], dict[str, list[float]]()
    for name in ("blocked", "delayed", "cpu"):
        us[name] = [statistics.median(getattr(one, name) for one in each) / 1000 for each in (steps, echoes)]
        row.append(" / ".join(f"{one:.0f}" for one in us[name]))
    whole, of_echo = (us["blocked"][side] + us["delayed"][side] for side in (0, 1))
    return [*row, f"{whole / of_echo:.2f}", f"{us['cpu'][0] / us['cpu'][1]:.2f}"]


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each row and side ({STEPS})")
    steps = parser.parse_args().steps
    rows, ahead = list[list[str]](), list[list[str]]()
    with echo() as stream, echo() as stream_ahead, places() as found:
        for model in MODELS:
            for requests in REQUESTS:
                blocks = model.shape.decode_blocks(requests, 3 * steps)
                engines = {}
                for name in (UNIX, IN_PROCESS):
                    engines[name] = Engine(found[name].session(model.spec(blocks)), model.shape)
                    engines[name].admit(requests)
                rows.append(measure(model, requests, steps, stream, engines))
                turns = steps // 2 // AHEAD_STEPS
                ahead.append(measure_ahead(model, requests, turns, stream_ahead, engines[UNIX]))
                for name, engine in engines.items():
                    engine.session.close()
                    found[name].forget()
    names = ["model", "requests", "bytes sent / received", "step, us", "echo, us", "in process, us"]
    text = f"# A step over gRPC and a bare echo\n\n{machine_line()}; `python -m tests.bench.echo`\n\n"
    text += "The ratio is that of the step to the sum of echo and step in process.\n\n"
    text += _table([*names, f"ratio (≤ {GOAL})"], rows)
    text += "\n## Sent ahead\n\nOf step / echo, in us: the engine's thread before and after the GPU's work; what other"
    text += (
        "\nPython work waited for the lock; CPU time of the engine's process. Ratios of the first two together, and of"
    )
    text += " CPU time.\n\n"
    names = ["model", "requests", "thread", "delay", "process CPU", "ratio", "ratio of CPU"]
    text += _table(names, ahead)
    RESULT.write_text(text, encoding="utf-8")
    print(text)


def _table(names: list[str], rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in [names, ["---"] * len(names), *rows])


if __name__ == "__main__":
    main()
