"""Where the time of a remote admission of 6,144 tokens goes, with a bare echo of its bytes and vLLM's manager.

    python -m tests.bench.admission [--rounds N]     prints a table and writes tests/bench/results/admission.md

An admission as `tests.bench.peer` measures it, over a Unix socket: a miss, then a full hit, in turn with the same in
process, the echo of a message and an answer of their lengths (`tests.bench.echo`), and vLLM's manager. The parts of the
service run one after the other; what is left of `Session.apply` is the way of the bytes, and waiting. Medians, in us of
a clock.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import kvplane
from kvplane import wire
from kvplane.base.groups import HashAlgorithm
from kvplane.wire import stream
from tests.bench.echo import echo
from tests.bench.machine import machine_line
from tests.bench.peer.engine import Engine
from tests.bench.peer.models import MODELS, Model
from tests.bench.peer.places import InProcess
from tests.bench.peer.plan import DEFAULT_HASH
from tests.bench.peer.sides import ReferenceSide
from tests.bench.peer.work import ADMISSION_SLOTS
from tests.conformance.live.peer import Peer

RESULT = Path(__file__).parent / "results" / "admission.md"
TOKENS, ROUNDS, GOAL = 6144, 15, 0.8
SERVE = "import sys; from tests.bench.admission import serve; serve(sys.argv.pop(1))"
Times = dict[str, list[float]]  # us by part


def timed(owner: Any, name: str, times: Times, part: str) -> None:
    """Note how long each call of a function takes."""
    function = getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        begin = time.perf_counter_ns()
        try:
            return function(*given, **named)
        finally:
            times[part].append((time.perf_counter_ns() - begin) / 1000)

    setattr(owner, name, call)


def serve(path: str) -> None:
    """`kvplane serve` that writes the times of its parts on SIGUSR1."""
    from kvplane_service.cli import main
    from kvplane_service.replicas import applying
    from kvplane_service.rpc import session

    times: Times = defaultdict(list)
    timed(session, "_understand", times, "service: parse, decode, fingerprint")
    timed(applying, "effort", times, "service: estimate the effort")
    timed(applying.Applying, "apply", times, "service: apply and publish")
    timed(applying.Applying, "_publish", times, "service: of that, publish")
    timed(wire, "encode_result", times, "service: encode")

    def note(*_: object) -> None:
        Path(path).write_text(json.dumps(times))
        times.clear()

    signal.signal(signal.SIGUSR1, note)
    main()


@contextmanager
def service(folder: Path) -> Iterator[tuple[str, Callable[[], Times]]]:
    """A service with timers: its address, and what returns their times since the last call."""
    path = folder / "times.json"
    command = [sys.executable, "-c", SERVE, str(path), "serve", "--listen", f"unix:{folder / 'service.sock'}"]
    process = subprocess.Popen([*command, "--set", "log_level=WARNING"], stdout=subprocess.PIPE, text=True)

    def noted() -> Times:
        path.unlink(missing_ok=True)
        process.send_signal(signal.SIGUSR1)
        while not path.exists() or not path.read_text().endswith("}"):
            time.sleep(0.001)
        found: Times = json.loads(path.read_text())
        return found

    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "serving on " in line)
        yield line.split("serving on ")[1].strip(), noted
    finally:
        process.terminate()
        process.wait(30)


class Bench:
    """The sides, and the times of the engine's parts of the admission that runs."""

    def __init__(self, stack: ExitStack) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        address, self.noted = stack.enter_context(service(folder))
        self.client = stack.enter_context(kvplane.connect(address))
        self.echo = stack.enter_context(echo())
        self.reference = ReferenceSide(stack.enter_context(Peer("tests.bench.peer.reference")))
        self.mine: Times = defaultdict(list)
        self.lengths = [0, 0]
        timed(stream, "step_message", self.mine, "engine: encode")
        timed(stream, "taken", self.mine, "engine: decode, on gRPC's thread")
        self._measure(stream, "step_message", 0)
        self._measure(stream, "taken", 1)

    def _measure(self, owner: Any, name: str, at: int) -> None:
        function = getattr(owner, name)

        def call(*given: Any) -> Any:
            found = function(*given)
            length = len(found if at == 0 else given[0])
            self.lengths[at] = self.lengths[at] or length
            return found

        setattr(owner, name, call)

    def model(self, model: Model, rounds: int) -> dict[str, Times]:
        """All times of a model, by "miss" and "hit"."""
        blocks, place = model.shape.admission_blocks(TOKENS), InProcess()
        self.client.register_replica(model.name, model.spec(blocks))
        remote = Engine(self.client.session(model.name), model.shape)
        local = Engine(place.session(model.spec(blocks)), model.shape)
        self.reference.open(model, blocks)
        found: dict[str, Times] = {"miss": defaultdict(list), "hit": defaultdict(list)}
        for seed in range(-1 - ADMISSION_SLOTS, rounds):
            if seed == 0:
                gc.collect()
                gc.freeze()
            for kind, times in found.items():
                hits = self._admit(seed, remote, local, times if seed >= 0 else defaultdict(list))
                assert len({*hits}) == 1, f"{model.name}, {kind}: the sides hit {hits}"
        remote.session.close()
        local.session.close()
        gc.unfreeze()
        return found

    def _admit(self, seed: int, remote: Engine, local: Engine, times: Times) -> list[int]:
        algorithm = HashAlgorithm.KVPLANE
        admissions = {
            "vLLM": self.reference.admit(seed, TOKENS, DEFAULT_HASH),
            "in process": local.measure_admission(seed, TOKENS, algorithm),
        }
        self.noted()
        self.mine.clear()
        self.lengths[:] = 0, 0
        admissions["Unix socket"] = remote.measure_admission(seed, TOKENS, algorithm)
        for side, (took, _) in admissions.items():
            times[side].append(took / 1000)
        for part, each in {**self.mine, **self.noted()}.items():
            times[part].append(each[0])  # the steps behind it compute the rest and end the request
        times["bare echo"].append(self.echo.exchange(*self.lengths) / 1000)
        return [hit for _, hit in admissions.values()]


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"admissions of a kind ({ROUNDS})")
    rounds = parser.parse_args().rounds
    columns: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        bench = Bench(stack)
        for model in MODELS:
            for kind, times in bench.model(model, rounds).items():
                columns[f"{model.name}, {kind}"] = {part: statistics.median(each) for part, each in times.items()}
    parts = list(dict.fromkeys(part for column in columns.values() for part in column))
    lines = [["us", *columns], ["---"] * (1 + len(columns))]
    lines += [[part, *(f"{column.get(part, 0):.0f}" for column in columns.values())] for part in parts]
    for name in ("Unix socket", "bare echo"):
        ratios = [column[name] / column["vLLM"] for column in columns.values()]
        lines.append([f"{name} / vLLM (goal {GOAL})", *(f"{ratio:.2f}" for ratio in ratios)])
    text = f"{__doc__}\n{machine_line()}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)
    RESULT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
