"""How long a step holds the event loop of a real `kvplane serve`, in the steady state: full pool, events on, followed.

    python -m tests.bench.held                  prints the table and writes tests/bench/results/held.{md,json}
    python -m tests.bench.held --models llama-3.1-8b --no-write

A ticker in the service's loop wakes every two milliseconds and records the CPU time of the loop's thread since the last
tick, which excludes other load of the machine. A *step* is the handling of its message, bytes to bytes, in the same
clock. One engine computes prompts in chunks of 8192 tokens with three steps in flight, a second one sends small steps,
and a subscriber reads every event of the first.

The second table is of long operations while another engine sends small steps. A thread runs them and may delay the
loop, so intervals between ticks are in CPU time of the whole process. The other engine's waits are in real time, which
includes other load of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import kvplane
from kvplane import Allocate, Appended, Commit, Content, ExtraKeys, ModelSource, Part
from kvplane.base.groups import GroupKind, GroupSpec, ReplicaSpec
from kvplane.base.step import Admit, Budget, Cache, End, Facts, News, OnRefusal, Run
from tests.bench.machine import machine, machine_line
from tests.bench.ticking import TICK_S, noted, service

RESULTS = Path(__file__).parent / "results"
CHUNK, LONG, WARM, PROMPTS = 8192, 32_768, 4, 24
MILLION, WAITING, ROUNDS = 1_000_000, 10_000, 5
MODELS = ("llama-3.1-8b", "gpt-oss-20b", "gemma-3-27b", "jamba-v0.1")


# -- the load ----------------------------------------------------------------------------------------------------------


class Prefills:
    """An engine that computes one prompt after another, with steps in flight."""

    def __init__(self, session: kvplane.Session, in_flight: int) -> None:
        self._session, self._in_flight, self._done = session, in_flight, 0
        self._size = session.spec.hash_block_size
        self._chunk = CHUNK // self._size * self._size
        self._long = LONG // self._chunk * self._chunk

    def prompt(self) -> None:
        """All chunks of a new prompt, and its end."""
        count, budget = self._long // self._size, Budget(tokens=self._chunk)
        news = News([0], [self._long], num_hashes=[count], hashes=os.urandom(32 * count))
        self._send(Part(news=news, admit=Admit([0], cap=[self._chunk]), budget=budget))
        for _ in range(self._long // self._chunk - 1):
            self._send(Part(run=Run([0], cap=[self._chunk]), budget=budget))
        self._send(Part(facts=Facts([0], end=[int(End.FREE)])))

    def _send(self, part: Part) -> None:
        self._done = max(self._done, self._session.next_seq - 1 - self._in_flight)
        self._session.submit(part, executed_through=self._done)
        self._session.receive()


def follow(address: str, replica: str, ended: threading.Event) -> None:
    """Read every event of a replica."""
    with kvplane.connect(address) as client:
        for _ in client.subscribe(replica):
            if ended.is_set():
                return


def send_small_steps(address: str, ended: threading.Event) -> None:
    """An engine that sends an empty step every few milliseconds."""
    with kvplane.connect(address) as client:
        client.register_replica("small", ModelSource(model="llama-3.1-8b", num_blocks=2100, max_model_len=4096))
        with client.session("small") as session:
            while not ended.wait(0.005):
                session.apply(Part())


@dataclass(frozen=True)
class Held:
    """Results of one model, in ms: steps of 8192 tokens, and intervals of the ticker."""

    model: str
    groups: int
    steps: int
    step_median: float
    step_longest: float
    tick_p99: float
    tick_longest: float


def measure(model: str, in_flight: int) -> Held:
    """Fill the pool, then measure some prompts."""
    with service() as (address, process, path), kvplane.connect(address) as client:
        client.register_replica("probe", ModelSource(model=model, num_blocks=1 << 16, max_model_len=40_000))
        with client.session("probe") as session:
            spec = session.spec
        groups = len(spec.groups)
        blocks = groups * (3 * LONG // spec.hash_block_size + 64)
        client.register_replica("r", ModelSource(model=model, num_blocks=blocks, max_model_len=40_000))
        ended = threading.Event()
        others = [
            threading.Thread(target=follow, args=(address, "r", ended), daemon=True),
            threading.Thread(target=send_small_steps, args=(address, ended), daemon=True),
        ]
        for thread in others:
            thread.start()
        with client.session("r") as session:
            engine = Prefills(session, in_flight)
            for _ in range(WARM):
                engine.prompt()
            noted(process, path)
            for _ in range(PROMPTS):
                engine.prompt()
            found = noted(process, path)
            ended.set()
        steps, ticks = ([ns / 1e6 for ns in found[name]] for name in ("steps", "ticks"))
        busy = sorted(steps)[-PROMPTS * (LONG // CHUNK) :]
        return Held(model, groups, len(busy), statistics.median(busy), max(steps),
                    sorted(ticks)[int(len(ticks) * 0.99)], max(ticks))  # fmt: skip


# -- long operations ---------------------------------------------------------------------------------------------------


# Longest interval without a tick and longest wait of the other engine, when the event loop executed all of this itself
# (2026-11-22, the same machine at a load of 12 to 16; unary calls at a load of 5).
BEFORE = {
    "unary: 1 M tokens, allocated": (222, 260),
    "unary: 1 M tokens, looked up": (44, 101),
    "unary: its request, looked up": (49, 86),
    "unary: its end": (17, 24),
    "unary: 1 M tokens, all of which hit": (86, 191),
    "unary: a reset of its keys": (95, 174),
    "unary: first call after a session left 62,500 keys": (27, 38),
    "unary: a token of 1 M tokens in 4 groups": (15, 26),
    "1,400 victims of one row, 1,000 blocks shared by all": (114, 429),
    "a failed step of 4,000 rows": (2247, 14),
    "1,000 requests of 1,000 blocks, set back by a token": (23, 75),  # 2026-11-23, load 26
    "1,000 requests of 1,000 blocks, set back to 16 tokens": (140, 420),  # 2026-11-23, load 26
    "1 M tokens, admitted in one step": (313, 1927),
    "its end": (20, 79),
    "1 M tokens, all of which hit": (214, 1407),
    "1 M tokens, the first of chunks": (113, 744),
    "62,500 hashes, admitted in one step": (207, 1356),
    "llama-3.1-8b: 3,800 rows with SKIP, first": (49, 196),
    "llama-3.1-8b: 3,800 rows with SKIP, again": (59, 477),
    "llama-3.1-8b: close with 10,000 requests": (88, 658),
    "gemma-3-27b: 3,800 rows with SKIP, first": (136, 726),
    "gemma-3-27b: 3,800 rows with SKIP, again": (140, 904),
    "gemma-3-27b: close with 10,000 requests": (153, 944),
}


@dataclass(frozen=True)
class Long:
    """Results of one case, in ms: CPU time, longest interval without a tick, longest wait of the other engine."""

    case: str
    times: int
    cpu: float
    longest: float
    other_longest: float


class OtherEngine:
    """An engine that sends small steps and records the wait for each answer."""

    def __init__(self, address: str) -> None:
        self._waits, self._ended = list[float](), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(address,), daemon=True)
        self._thread.start()

    def _run(self, address: str) -> None:
        with kvplane.connect(address) as client:
            client.register_replica("small", ModelSource(model="llama-3.1-8b", num_blocks=2100, max_model_len=4096))
            with client.session("small") as session:
                while not self._ended.wait(0.002):
                    began = time.perf_counter()
                    session.apply(Part())
                    self._waits.append(1000 * (time.perf_counter() - began))

    def waits(self) -> list[float]:
        """Waits since the last call, ascending, in ms."""
        waits, self._waits = self._waits, []
        return sorted(waits) or [0.0]

    def end(self) -> None:
        """Close the session."""
        self._ended.set()
        self._thread.join()


class Meter:
    """Measures operations on a service."""

    def __init__(self, address: str, process: subprocess.Popen[str], path: Path) -> None:
        self.rows = list[Long]()
        self._other, self._process, self._path = OtherEngine(address), process, path

    @contextmanager
    def case(self, name: str, times: int = 1) -> Iterator[None]:
        """Measure the block, which repeats an operation `times` times."""
        time.sleep(0.3)
        self._other.waits()
        noted(self._process, self._path)
        before = self._cpu_ms()
        yield
        time.sleep(0.1)  # until the ticker has run
        cpu, found, waits = self._cpu_ms() - before, noted(self._process, self._path), self._other.waits()
        longest = max(found["together"]) / 1e6
        self.rows.append(Long(name, times, cpu / times, longest, waits[-1]))

    def _cpu_ms(self) -> float:
        user, system = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
        return 1000 * (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        """Stop the other engine."""
        self._other.end()


def long_prompt(client: kvplane.Client, meter: Meter) -> None:
    """A prompt of a million tokens: hashed, admitted in one step, hit, in one chunk, freed."""
    group = GroupSpec(GroupKind.FULL_ATTENTION, 16)
    size = 1 << 21
    spec = ReplicaSpec((group,), 200_000, size, hash_block_size=16, scheduler_block_size=16, max_in_flight_tokens=size)
    client.register_replica("long", spec)
    tokens = [random.randrange(1 << 17) for _ in range(MILLION)]
    news, end = News([0], [MILLION], tokens=tokens), Part(facts=Facts([0], end=[int(End.FREE)]))
    with client.session("long") as session:
        with meter.case("1 M tokens, admitted in one step"):
            session.apply(Part(news=news, admit=Admit([0])))
        with meter.case("its end"):
            session.apply(end)
        with meter.case("1 M tokens, all of which hit"):
            session.apply(Part(news=news, admit=Admit([0])))
        session.apply(end)
        other = News([0], [MILLION], tokens=[token + 1 for token in tokens])
        with meter.case("1 M tokens, the first of chunks"):
            session.apply(Part(news=other, admit=Admit([0]), budget=Budget(tokens=CHUNK)))
        hashes = News([1], [MILLION], num_hashes=[MILLION // 16], hashes=os.urandom(2 * MILLION))
        with meter.case("62,500 hashes, admitted in one step"):
            session.apply(Part(news=hashes, admit=Admit([1])))


def long_unary_calls(client: kvplane.Client, meter: Meter) -> None:
    """A prompt of a million tokens in unary calls: allocated, looked up, hit, freed; each is repeated ROUNDS times."""
    group = GroupSpec(GroupKind.FULL_ATTENTION, 16)
    size = 1 << 21
    spec = ReplicaSpec((group,), 200_000, size, hash_block_size=16, scheduler_block_size=16, max_in_flight_tokens=size)
    client.register_replica("unary", spec)
    for salt in range(ROUNDS):
        content = Content([random.randrange(1 << 17) for _ in range(MILLION)], extra_keys=ExtraKeys(salt=str(salt)))
        request = Allocate("a", content)
        with meter.case("unary: 1 M tokens, allocated"):
            client.allocate_slots("unary", request)
        with meter.case("unary: 1 M tokens, looked up"):
            client.find_cache_hit("unary", content)
        with meter.case("unary: its request, looked up"):
            client.find_cache_hit("unary", "a")
        with meter.case("unary: its end"):
            client.free("unary", "a")
        with meter.case("unary: 1 M tokens, all of which hit"):
            client.allocate_slots("unary", request)
        client.free("unary", "a")
        with meter.case("unary: a reset of its keys"):
            client.reset_prefix_cache("unary")
        with client.session("unary") as session:
            hashes = News([0], [MILLION], num_hashes=[MILLION // 16], hashes=os.urandom(2 * MILLION))
            session.apply(Part(news=hashes, admit=Admit([0])))
        with meter.case("unary: first call after a session left 62,500 keys"):
            client.commit_blocks("unary", Commit())


def long_table(client: kvplane.Client, meter: Meter) -> None:
    """Decode of a request of a million tokens in unary calls, whose answers have its tables of four groups."""
    group, size = GroupSpec(GroupKind.FULL_ATTENTION, 16), 1 << 21
    spec = ReplicaSpec((group,) * 4, 260_000, size, 16, 16, max_in_flight_tokens=size)
    client.register_replica("table", spec)
    content = Content(num_tokens=MILLION, hashes=[bytes(32)] * (MILLION // 16))
    client.allocate_slots("table", Allocate("a", content))
    for _ in range(4 * ROUNDS):
        with meter.case("unary: a token of 1 M tokens in 4 groups"):
            client.allocate_slots("table", Allocate("a", appended=Appended(num_tokens=1)))
    client.free("table", "a")


def many_waiting(client: kvplane.Client, meter: Meter, model: str, num_blocks: int) -> None:
    """10,000 requests of 256 tokens wait for a full pool."""
    client.register_replica(model, ModelSource(model=model, num_blocks=num_blocks, max_model_len=8192))
    session = client.session(model)
    for first in range(0, WAITING, 2000):
        slots = list(range(first, first + 2000))
        tokens = [random.randrange(1 << 17) for _ in range(256 * 2000)]
        session.apply(Part(news=News(slots, [256] * 2000, tokens=tokens)))
    running, statuses = 0, [1]
    while 0 not in statuses and statuses[-1] == 1:
        part = Part(admit=Admit(list(range(running, running + 64))))
        statuses = list(session.apply(part).parts[0].admit_status)
        running += statuses.count(1)
    rows = Part(admit=Admit(list(range(running, running + 3800)), on_refusal=OnRefusal.SKIP))
    with meter.case(f"{model}: 3,800 rows with SKIP, first"):
        session.apply(rows)
    with meter.case(f"{model}: 3,800 rows with SKIP, again", 10):
        for _ in range(10):
            session.apply(rows)
    with meter.case(f"{model}: close with 10,000 requests"):
        session.close()


def shared_prompts(client: kvplane.Client, meter: Meter) -> None:
    """1,400 requests share a prompt of 1,000 blocks, in a full pool; then a step of 4,000 rows fails."""
    group = GroupSpec(GroupKind.FULL_ATTENTION, 16)
    spec = ReplicaSpec((group,), 4100, 1 << 16, hash_block_size=16, scheduler_block_size=16, max_in_flight_tokens=65536)
    client.register_replica("shared", spec)
    with client.session("shared") as session:
        prompt, count = os.urandom(32_000), 1400
        for first in range(0, count, 100):
            slots = list(range(first, first + 100))
            news = News(slots, [16_001] * 100, num_hashes=[1000] * 100, hashes=prompt * 100)
            session.apply(Part(news=news, admit=Admit(slots)))
        with meter.case("1,400 victims of one row, 1,000 blocks shared by all"):
            session.apply(Part(run=Run([0], extra=[49_000], victims=list(range(1, count)))))
        session.apply(Part(facts=Facts(list(range(count)), end=[int(End.FREE)] * count)))
        slots = list(range(count, count + 4000))
        session.apply(Part(news=News(slots, [1] * len(slots))))
        failing = session.apply(Part(admit=Admit(slots))).seq
        with meter.case("a failed step of 4,000 rows"):
            session.apply(Part(cache=Cache(failed_steps=[failing])), executed_through=failing - 1)


def set_back(client: kvplane.Client, meter: Meter) -> None:
    """1,000 requests share a prompt of 1,000 blocks in two groups; all are set back by a token, then behind the window
    of the second group, which preempts them.
    """
    groups = GroupSpec(GroupKind.FULL_ATTENTION, 16), GroupSpec(GroupKind.SLIDING_WINDOW, 16, window=64, lookup_class=1)
    spec = ReplicaSpec(groups, 20_000, 1 << 16, hash_block_size=16, scheduler_block_size=16, max_in_flight_tokens=65536)
    client.register_replica("back", spec)
    with client.session("back") as session:
        prompt, count = os.urandom(32_000), 1000
        for first in range(0, count, 100):
            slots = list(range(first, first + 100))
            news = News(slots, [16_001] * 100, num_hashes=[1000] * 100, hashes=prompt * 100)
            session.apply(Part(news=news, admit=Admit(slots)))
        slots = list(range(count))
        session.apply(Part(facts=Facts(slots, appended=[1] * count), run=Run(slots)))
        with meter.case("1,000 requests of 1,000 blocks, set back by a token"):
            session.apply(Part(facts=Facts(slots, computed=[16_001] * count)))
        with meter.case("1,000 requests of 1,000 blocks, set back to 16 tokens"):
            lost = session.apply(Part(facts=Facts(slots, computed=[16] * count))).parts[0].preempted
        assert len(lost) == count, f"{len(lost)} requests were preempted"


def medians(rows: list[Long]) -> list[Long]:
    """One row for each case, with the medians of its measurements."""
    cases = dict.fromkeys(row.case for row in rows)
    return [_median([row for row in rows if row.case == case]) for case in cases]


def _median(rows: list[Long]) -> Long:
    columns = zip(*[(row.cpu, row.longest, row.other_longest) for row in rows], strict=True)
    cpu, longest, other_longest = map(statistics.median, columns)
    return Long(rows[0].case, sum(row.times for row in rows), cpu, longest, other_longest)


CASES: dict[str, Callable[[kvplane.Client, Meter], None]] = {
    "unary": long_unary_calls,
    "table": long_table,
    "prompt": long_prompt,
    "shared": shared_prompts,
    "back": set_back,
    "llama": partial(many_waiting, model="llama-3.1-8b", num_blocks=3000),
    "gemma": partial(many_waiting, model="gemma-3-27b", num_blocks=9000),
}


def measure_long(cases: Iterable[str]) -> list[Long]:
    """These cases, on one service."""
    with service() as (address, process, path), kvplane.connect(address, timeout_s=60) as client:
        meter = Meter(address, process, path)
        for case in cases:
            CASES[case](client, meter)
        meter.end()
        return medians(meter.rows)


def report_long(rows: list[Long]) -> str:
    """The results as Markdown."""
    lines = ["", "## Long operations", "", "CPU time of the process; the other engine's waits in real time. ms.", ""]
    lines += ["| case | CPU, each | longest without a tick | before | other engine, longest | before |"]
    lines.append("|---" * 6 + "|")
    for row in rows:
        tick, wait = BEFORE.get(row.case, ("", ""))
        line = f"{row.case} | {row.cpu:.0f} | {row.longest:.1f} | {tick} | {row.other_longest:.1f} | {wait}"
        lines.append(f"| {line} |")
    return "\n".join(lines) + "\n"


def report(rows: list[Held], command: str) -> str:
    """The results as Markdown."""
    lines = [
        "# How long a step holds the loop",
        "",
        machine_line(),
        "",
        f"`{command}`; CPU time of its thread, ms.",
        "A tick may hold it for the longest step and 2 ms.",
    ]
    lines += ["", "| model | groups | steps | a step, median | longest step | tick, p99 | longest tick | allowed |"]
    lines.append("|---" * 8 + "|")
    for row in rows:
        most = row.step_longest + TICK_S * 1000
        tick = f"{row.tick_longest:.1f}" if row.tick_longest <= most else f"**{row.tick_longest:.1f}**"
        lines.append(
            f"| {row.model} | {row.groups} | {row.steps} | {row.step_median:.1f} | {row.step_longest:.1f} "
            f"| {row.tick_p99:.1f} | {tick} | {most:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time that the event loop of a service is held.")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--in-flight", type=int, default=3)
    parser.add_argument("--long", nargs="*", choices=list(CASES), help="only these long operations; writes nothing")
    parser.add_argument("--no-write", action="store_true")
    given = parser.parse_args()
    if given.long:
        sys.stdout.write(report_long(measure_long(given.long)))
        return
    rows = [measure(model, given.in_flight) for model in given.models]
    long = measure_long(CASES)
    command = f"python -m tests.bench.held --in-flight {given.in_flight}"
    text = report(rows, command) + report_long(long)
    sys.stdout.write(text)
    if not given.no_write:
        data = {"machine": machine(), "command": command, "rows": [asdict(row) for row in rows]}
        data["long"] = [asdict(row) for row in long]
        (RESULTS / "held.md").write_text(text, encoding="utf-8")
        (RESULTS / "held.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
