"""`python -m tests.vllm.outages [MODE ...] [--pages worker] [--seconds N]`: kills the service, the kvplane worker and
the engine of a `vllm serve` under load, and prints what its clients saw.

Modes are mirror and remote. Six clients ask all the time; each answer must have the tokens of stock vLLM. In turn:

- the service is killed, away for N seconds (6) and started again;
- it is stopped and continued, as a machine that hangs; meanwhile the prefix cache is reset;
- with `--pages worker` the engine is killed and started again on its pages, and then the worker is killed;
- without, the engine is killed and started again.

Exit 1 if an answer is wrong; if one is missing, except those of a killed engine; if in mode mirror one waits for the
service; or if in mode remote /ready does not say why nothing is scheduled. Needs `make vllm-env`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.vllm import environment, processes
from tests.vllm.served import LENGTH, PREFIXES, Load, Vllm, answers, prompts, until

BLOCKS = "40"
WITHOUT_SERVICE_S = 3.0  # the longest answer of a mirrored engine, whose clients compete for two cores
READY_S = 30.0
RESET_S = 3.0


def start(folder: Path, mode: str, service: processes.Service | None, worker: Path | None, life: int) -> Vllm:
    """Start an engine; mode "stock" needs nothing else."""
    options = ["--num-gpu-blocks-override", BLOCKS]
    if service is not None:
        given = {"mode": mode, "address": service.address, "replica": "r"}
        given |= {"pages": "worker", "worker": str(worker)} if worker else {}
        given |= {"step_timeout": "2"} if mode == "remote" else {}
        options += ["--scheduler-cls", "kvplane_vllm.Scheduler", "--middleware", "kvplane_vllm.Ready"]
        options += ["--additional-config", json.dumps({"kvplane": given})]
        options += ["--worker-cls", "kvplane_vllm.Worker", "--no-async-scheduling"] if worker else []
    made = Vllm(folder / f"{mode}-{life}.log", "llama", *options, VLLM_SERVER_DEV_MODE="1")
    try:
        made.wait_until_ready()
    except BaseException:
        made.kill()
        raise
    return made


def stock_answers(folder: Path) -> list[list[int]]:
    """Return what stock vLLM answers."""
    stock = start(folder, "stock", None, None, 1)
    try:
        return answers(stock)
    finally:
        stock.kill()


class Outages:
    """One engine in one mode, and what happened to it.

    Attributes:
        found: figures, by name.
        problems: what must not be.
    """

    def __init__(self, folder: Path, mode: str, right: list[list[int]], *, has_worker: bool, seconds: float) -> None:
        self._folder, self._mode, self._right, self._seconds = folder, mode, right, seconds
        self._has_worker, self._is_remote = has_worker, mode == "remote"
        self.found: dict[str, Any] = {"mode": mode, "pages": "worker" if has_worker else "own"}
        self.problems: list[str] = []

    def run(self) -> dict[str, Any]:
        """Play all outages; returns the figures."""
        with ExitStack() as stack:
            store = f"sqlite:{self._folder}/store.db"
            settings = {"store": store, "store_flush_ms": 10} if self._has_worker else {}
            service = stack.enter_context(processes.Service(**settings))
            worker = stack.enter_context(processes.Worker(self._folder / "w")) if self._has_worker else None
            lent = worker.folder if worker else None
            engine = start(self._folder, self._mode, service, lent, 1)
            stack.callback(engine.kill)
            with self._load(engine) as load:
                load.wait_for(20, 0.0)
                self._service_killed(engine, load, service)
                self._service_stopped(engine, load, service)
            self._check(load, "service")
            with self._load(engine) as load:
                load.wait_for(20, 0.0)
                self._engine_killed(engine)
            engine = start(self._folder, self._mode, service, lent, 2)
            stack.callback(engine.kill)
            self._check_kept(engine)
            with self._load(engine) as load:
                load.wait_for(20, 0.0)
                if worker is not None:
                    worker.kill()
                    load.wait_for(50, time.monotonic())
            self._check(load, "next engine")
        return self.found | {"problems": self.problems}

    @contextmanager
    def _load(self, engine: Vllm) -> Iterator[Load]:
        with Load(engine, self._right) as load:
            yield load
        self.found["answers"] = self.found.get("answers", 0) + sum(one.is_right for one in load.answers)

    def _require(self, is_so: bool, problem: str) -> None:
        if not is_so:
            self.problems.append(problem)

    def _check(self, load: Load, during: str) -> None:
        bad = [one for one in load.answers if not one.is_right]
        self._require(not bad, f"{during}: {len(bad)} of {len(load.answers)} answers, {bad[:2]}")
        if not self._is_remote:
            slowest = max(one.ended - one.began for one in load.answers)
            self.found[f"slowest answer, {during}"] = f"{slowest:.2f} s"
            self._require(slowest < WITHOUT_SERVICE_S, f"{during}: an answer took {slowest:.1f} s")

    def _service_killed(self, engine: Vllm, load: Load, service: processes.Service) -> None:
        service.kill()
        killed = time.monotonic()
        if self._is_remote:
            until(lambda: engine.ask("/ready")[0] == 503, READY_S, lambda: engine.log[-2000:])
            self.found["/ready without the service"] = engine.ask("/ready")[1]
            self._require(service.address in str(self.found["/ready without the service"]), "/ready does not say why")
        time.sleep(self._seconds)
        count = len(load.since(killed + 1))
        self.found["answers without the service"] = count
        self._require((count == 0) == self._is_remote, f"{count} answers without the service")
        self._require(engine.ask("/health")[0] == 200, "/health without the service")
        service.start()
        started = time.monotonic()
        first = load.wait_for(20, started)
        self.found["first answer of a restarted service"] = f"{first - started:.1f} s"
        until(lambda: engine.ask("/ready")[0] == 200, READY_S, lambda: engine.log[-2000:])

    def _service_stopped(self, engine: Vllm, load: Load, service: processes.Service) -> None:
        service.pause(self._seconds)
        began = time.monotonic()
        status, _ = engine.ask("/reset_prefix_cache", {})
        took = time.monotonic() - began
        self.found["reset while the service is stopped"] = f"{took:.1f} s"
        self._require(status == 200 and took < RESET_S, f"a reset: {status} after {took:.1f} s")
        time.sleep(self._seconds)
        load.wait_for(20, time.monotonic())

    def _check_kept(self, engine: Vllm) -> None:
        """Ask once for each beginning that the prompts share: only the pages of a worker have them already."""
        found = [engine.complete(prompt) for prompt in prompts()[:: len(prompts()) // PREFIXES]]
        cached = sum(one for _, _, one in found)
        self.found["tokens that the next engine hits at once"] = f"{cached} of {PREFIXES * LENGTH}"
        self._require((cached > 0) == self._has_worker, f"the next engine hits {cached} tokens")

    def _engine_killed(self, engine: Vllm) -> None:
        engines = engine.engines()
        self._require(len(engines) == 1, f"{len(engines)} processes are an engine")
        for pid in engines:
            os.kill(pid, signal.SIGKILL)
        engine.process.wait(60)  # vLLM ends the API server


def main() -> int:
    """Print a line of figures for each mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="*", default=["mirror", "remote"], metavar="MODE")
    parser.add_argument("--pages", choices=["own", "worker"], default="own")
    parser.add_argument("--seconds", type=float, default=6.0)
    given = parser.parse_args()
    environment.set_up()
    problems = 0
    with TemporaryDirectory() as name:
        right = stock_answers(Path(name))
        for mode in given.modes:
            folder = Path(name) / mode
            folder.mkdir()
            one = Outages(folder, mode, right, has_worker=given.pages == "worker", seconds=given.seconds)
            found = one.run()
            problems += len(found["problems"])
            print("\n".join(f"{name}: {value}" for name, value in found.items()), end="\n\n", flush=True)
    print(f"{problems} problems")
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main())
