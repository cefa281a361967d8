"""What an attack costs a server and its victim, and what it costs a server that does nothing, in turns.

Each attack is made on both servers in turns of some seconds, so that other load of the machine meets both. The victim
calls every 20 ms, and again 10 ms after a call that failed. Its waits for an answer are in real ms, and in ms of the
server's CPU time (all its threads) between call and answer, which other load does not change. Memory is the most that
is resident, above that before the attack.

The goal is met if memory is at most 200 MB above quiet, or that of the null server, and the 99th percentile of the real
waits is at most 50 ms, 5 times that of the quiet server, or 1.5 times that of the null server under the same attack:
what gRPC and the machine take by themselves, and what a refusal costs above that. It is met "by CPU time" if the waits
in CPU time meet it, and only the real ones, which other load lengthens, do not.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from tests.bench.machine import machine_line

RESULTS = Path(__file__).parent / "results"
MOST_MB, MOST_MS, TIMES, TIMES_NULL = 200, 50.0, 5, 1.5
ROUNDS, QUIET_S, BEGUN_S, PERIOD_S, RETRY_S = 4, 1.0, 1.5, 0.02, 0.01
HEAD = (
    "| attack | done | MB above quiet | p99 ms: quiet | attacked | CPU ms p99: quiet | attacked | retried "
    "| null server: done | MB | p99 ms: quiet | attacked | CPU ms p99 | retried | goal |"
)


@dataclass(frozen=True, slots=True)
class Served:
    """A server that runs.

    Attributes:
        call: makes a call of the victim. Raises RpcError.
        attack: the command that attacks it for some seconds, and prints what it has done, by names of JSON.
    """

    pid: int
    call: Callable[[], object]
    attack: Callable[[float], Sequence[str]]


@dataclass(slots=True)
class Waits:
    """What the victim waited for answers, and how many of its calls it made again."""

    real_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    retried: int = 0

    def take(self, served: Served, until: Callable[[], bool]) -> None:
        """Call until it is over."""
        while not until():
            began, cpu = time.perf_counter(), cpu_ms(served.pid)
            while True:
                try:
                    served.call()
                    break
                except grpc.RpcError:
                    self.retried += 1
                    time.sleep(RETRY_S)
            self.cpu_ms.append(cpu_ms(served.pid) - cpu)
            self.real_ms.append(1000 * (time.perf_counter() - began))
            time.sleep(PERIOD_S)


@dataclass(slots=True)
class Figures:
    """One server under one attack."""

    served: Served
    quiet: Waits = field(default_factory=Waits)
    attacked: Waits = field(default_factory=Waits)
    quiet_mb: int = 0
    done: list[str] = field(default_factory=list)

    @property
    def above_mb(self) -> int:
        """The most memory, above that before."""
        return memory_mb(self.served.pid, "VmHWM") - self.quiet_mb

    def measure_quiet(self) -> None:
        """Let the victim call alone."""
        end = time.monotonic() + QUIET_S
        self.quiet.take(self.served, lambda: time.monotonic() > end)
        self.quiet_mb = max(self.quiet_mb, memory_mb(self.served.pid, "VmRSS"))

    def measure(self, seconds: float) -> None:
        """Let the victim call while an attacker does its best."""
        attacker = subprocess.Popen(self.served.attack(seconds), stdout=subprocess.PIPE, text=True)
        time.sleep(BEGUN_S)
        self.attacked.take(self.served, lambda: attacker.poll() is not None)
        assert attacker.stdout is not None
        self.done.append(attacker.communicate()[0].strip())


def cpu_ms(pid: int) -> float:
    """CPU time of all threads of a process, also of those that have ended: those of gRPC end when they are idle."""
    return time.clock_gettime_ns(~pid << 3 | 2) / 1e6  # the clock's number as clock_getcpuclockid(3) makes it


def memory_mb(pid: int, name: str) -> int:
    """VmRSS or VmHWM of a process."""
    found = re.search(rf"{name}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) >> 10


def p99(values: Sequence[float]) -> float:
    """The 99th percentile."""
    return sorted(values)[int(0.99 * (len(values) - 1))]


def met(server: Figures, null: Figures) -> str:
    """Whether the server meets the goal."""
    if server.above_mb > max(MOST_MB, null.above_mb):
        return "no"
    for word, what in (("yes", "real_ms"), ("by CPU time", "cpu_ms")):
        quiet, attacked, at_null = (p99(getattr(one, what)) for one in (server.quiet, server.attacked, null.attacked))
        if attacked <= max(MOST_MS, TIMES * quiet, TIMES_NULL * at_null):
            return word
    return "no"


def row(attack: str, server: Figures, null: Figures) -> str:
    """A line of the table."""
    cells = [attack, sum_of(server.done), str(server.above_mb)]
    cells += [f"{p99(each):.1f}" for each in (server.quiet.real_ms, server.attacked.real_ms)]
    cells += [f"{p99(each):.1f}" for each in (server.quiet.cpu_ms, server.attacked.cpu_ms)]
    cells += [str(server.attacked.retried), sum_of(null.done), str(null.above_mb)]
    cells += [f"{p99(each):.1f}" for each in (null.quiet.real_ms, null.attacked.real_ms, null.attacked.cpu_ms)]
    cells += [str(null.attacked.retried), met(server, null)]
    return f"| {' | '.join(cells)} |"


def sum_of(done: Iterable[str]) -> str:
    """What an attacker has done in all turns."""
    total = sum((Counter(json.loads(one)) for one in done), Counter[str]())
    return ", ".join(f"{count:,} {name}" for name, count in sorted(total.items()))


def measured(starts: Sequence[Callable[[str], AbstractContextManager[Served]]], attack: str, seconds: float) -> str:
    """The line of one attack; `starts` begin the server and the null server."""
    with starts[0](attack) as server, starts[1](attack) as null:
        both = Figures(server), Figures(null)
        for _ in range(ROUNDS):
            for one in both:
                one.measure_quiet()
        for _ in range(ROUNDS):
            for one in both:
                one.measure(seconds / ROUNDS)
        return row(attack, *both)


def tabulate(
    attacks: dict[str, str],
    starts: Sequence[Callable[[str], AbstractContextManager[Served]]],
    name: str,
    doc: str,
    argv: Sequence[str] = tuple(sys.argv[1:]),
) -> None:
    """Make the attacks, described by name, and write the table of this name if it is all of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--attack", action="append", choices=attacks, help="one attack (all); may be repeated")
    given = parser.parse_args(argv)
    lines = [HEAD, "|---" * HEAD.count(" | ") + "|---|"]
    for attack in given.attack or attacks:
        lines.append(measured(starts, attack, given.seconds))
        print(lines[-1], flush=True)
    what = "\n".join(f"- {attack}: {said}" for attack, said in attacks.items())
    rules = "\n\n".join((__doc__ or "").strip().split("\n\n")[1:])
    table = "\n".join(lines)
    text = f"{doc}\n{rules}\n\n{what}\n\n{machine_line()}; {given.seconds:g} s each\n\n{table}\n"
    if not given.attack:
        (RESULTS / name).write_text(text)
