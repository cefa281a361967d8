"""Cost of opening a session: CPU per million keys, and how long the event loop of a service is held.

    python -m tests.bench.opening [--blocks 1000000 4000000] [--keys 300000 1000000]

In process: the CPU time of ending an engine life on a full pool, by the share of keys in the stamp table, and its
longest slice.

In a `kvplane serve` process a task that wakes every 5 ms records its delay, and the session of another replica sends an
empty step every 5 ms, while a large replica is registered and opened: empty, then full of keys with a stamp table of
all, half, and none of them. Then services with a SQLite store and `--keys` keys are killed and restarted; their time is
from the start of the process to the answer of the open.

Figures are of one run on a machine that may be shared. Other load holds the loop too, so the CPU time of its thread is
given as well; and a loop that removes digests from a dict is the reference of the CPU times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import kvplane
from kvplane.base.groups import GroupKind, GroupSpec, ReplicaSpec
from kvplane.base.step import Admit, End, Facts, News, Part
from kvplane.sansio.retry import RetryPolicy
from kvplane_service.core.replica import Replica
from kvplane_service.process import gc_policy
from tests.bench.machine import machine_line

RESULTS = Path(__file__).parent / "results"
TICK_S, HASHES, PROMPT = 0.005, 32, 10_000  # PROMPT: blocks of a request
OPEN_S = 120.0


def spec_of(num_blocks: int) -> ReplicaSpec:
    return ReplicaSpec(
        (GroupSpec(GroupKind.FULL_ATTENTION, 16),),
        num_blocks=num_blocks,
        max_model_len=1 << 20,
        hash_block_size=16,
        scheduler_block_size=16,
        max_in_flight_tokens=1 << 20,
    )


# -- in process --------------------------------------------------------------------------------------------------------


def full_replica(num_blocks: int) -> Replica:
    replica = Replica(spec_of(num_blocks))
    replica.begin_epoch(1)
    pool = replica.coordinator.pool
    blocks = pool.take(num_blocks - 1)
    for block in blocks:
        pool.register(block, ("", 0, random.randbytes(HASHES)), 16)
    pool.release(blocks)
    pool.registered.clear()
    pool.stamped.clear()
    replica.take_events()
    pool.executed_through = 1
    return replica


def pops(count: int) -> float:
    """CPU seconds per million digests."""
    taken = {random.randbytes(HASHES): number for number in range(count)}
    digests = list(taken)
    begin = time.process_time()
    for digest in digests:
        taken.pop(digest)
    return (time.process_time() - begin) / count * 1e6


def cpu_rows(num_blocks: int) -> list[str]:
    rows = [f"| (`dict.pop` alone) | {min(pops(num_blocks) for _ in range(3)):.2f} s | |"]
    for what, shows in (("all", 1), ("every second", 2), ("none", 0), ("no stamp table", None)):
        best, longest = 1e9, 0.0
        for _ in range(3):
            replica = full_replica(num_blocks)
            stamps = array("Q", replica.coordinator.pool.stamp)
            if shows != 1:
                stamps[:: shows or 1] = array("Q", bytes(8 * len(stamps[:: shows or 1])))
            seconds, slices = _timed_life(replica, () if shows is None else stamps)
            best, longest = min(best, seconds), max(longest, *slices)
        rows.append(f"| {what} | {best / num_blocks * 1e6:.2f} s | {longest * 1e3:.1f} ms |")
    return rows


def _timed_life(replica: Replica, stamps: Any) -> tuple[float, list[float]]:
    slices, begin = [], time.process_time()
    if hasattr(replica, "end_epoch"):
        last = begin
        for _ in replica.end_epoch(stamps):
            now = time.process_time()
            slices.append(now - last)
            last = now
        replica.enter_epoch(2, stamps)
    else:
        replica.begin_epoch(2, stamps)
    return time.process_time() - begin, slices or [time.process_time() - begin]


# -- a real service ----------------------------------------------------------------------------------------------------


def serve(holds: str, arguments: list[str]) -> None:
    """`kvplane serve` with a task that writes a line whenever the loop was held: `[at, ms, CPU ms of its thread]`."""
    from kvplane_service.cli import main
    from kvplane_service.process import app as service

    start, tasks, out = service.App.start, [], Path(holds).open("a")  # noqa: SIM115 - until the process ends

    async def tick(out: Any) -> None:
        while True:
            begin, cpu = time.monotonic(), time.thread_time()
            await asyncio.sleep(TICK_S)
            late, cpu = time.monotonic() - begin - TICK_S, time.thread_time() - cpu
            if late > TICK_S:
                print(json.dumps([begin, late * 1e3, cpu * 1e3]), file=out, flush=True)

    async def started(self: service.App) -> str:
        tasks.append(asyncio.create_task(tick(out)))
        return await start(self)

    service.App.start = started  # type: ignore[method-assign]
    sys.argv = ["kvplane", "serve", *arguments]
    main()


class Serving:
    """A service process."""

    def __init__(self, folder: Path, *settings: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self._holds = folder / "holds"
        self._holds.write_text("")
        sets = [word for one in settings for word in ("--set", one)]
        self.began = time.monotonic()
        command = [sys.executable, "-m", "tests.bench.opening", "--serve", str(self._holds), "--listen", self.address]
        with (folder / "log").open("ab") as log:
            self.process = subprocess.Popen([*command, *sets], stdout=log, stderr=log)
        while socket.socket().connect_ex(("127.0.0.1", int(self.address.rpartition(":")[2]))):
            assert self.process.poll() is None, (folder / "log").read_text()[-2000:]
            time.sleep(0.02)

    def longest_hold(self, begin: float, end: float) -> str:
        """Longest time that the loop was held, and CPU time of its thread, in ms."""
        time.sleep(0.2)
        holds = [json.loads(line) for line in self._holds.read_text().splitlines()]
        seen = [(held, cpu) for at, held, cpu in holds if begin - held / 1e3 <= at <= end]
        return f"{max((held for held, _ in seen), default=0):.0f} | {max((cpu for _, cpu in seen), default=0):.0f}"

    def end(self, how: int) -> None:
        self.process.send_signal(how)
        self.process.wait(60)


@contextmanager
def bystander(address: str) -> Iterator[list[tuple[float, float]]]:
    """Another engine: records when it sent each step, and milliseconds to the answer."""
    seen: list[tuple[float, float]] = []
    over = threading.Event()

    def steps() -> None:
        with kvplane.connect(address) as client:
            client.register_replica("bystander", spec_of(1000))
            with client.session("bystander") as session:
                while not over.is_set():
                    begin = time.monotonic()
                    session.apply(Part())
                    seen.append((begin, (time.monotonic() - begin) * 1e3))
                    over.wait(TICK_S)

    thread = threading.Thread(target=steps)
    thread.start()
    time.sleep(1)
    yield seen
    over.set()
    thread.join()


class Memory:
    """An engine that fills its cache, with the stamps of its pages."""

    def __init__(self, num_blocks: int) -> None:
        self.stamps = array("Q", bytes(8 * num_blocks))

    def fill(self, session: Any, num_keys: int) -> None:
        for _ in range(num_keys // PROMPT):
            news = News([0], [PROMPT * 16 + 1], num_hashes=[PROMPT], hashes=random.randbytes(HASHES * PROMPT))
            self._note(session.apply(Part(news=news, admit=Admit([0]))))
            self._note(session.apply(Part(facts=Facts([0], end=[int(End.FREE)]))))
        self._note(session.apply(Part()))

    def _note(self, result: Any) -> None:
        for part in result.parts:
            for block, stamp in zip(part.orders.stamp_block, part.orders.stamp, strict=True):
                self.stamps[block] = stamp


def pool_rows(num_blocks: int) -> list[str]:
    """A replica of this size on a service process."""
    rows, folder = [], Path(tempfile.mkdtemp())
    service, memory = Serving(folder, "max_blocks=20000000", "max_total_blocks=20000000"), Memory(num_blocks)
    spec, none = spec_of(num_blocks), array("Q", bytes(8 * num_blocks))
    with bystander(service.address) as steps, kvplane.connect(service.address, timeout_s=OPEN_S) as client:

        def measured(what: str, act: Callable[[], Any]) -> Any:
            begin = time.monotonic()
            outcome = act()
            end = time.monotonic()
            hold = service.longest_hold(begin, end)
            slowest = max((took for at, took in steps if begin - took / 1e3 <= at <= end), default=0.0)
            kept = getattr(outcome, "kept_keys", "")
            rows.append(f"| {num_blocks:,} | {what} | {kept} | {end - begin:.2f} s | {hold} | {slowest:.0f} |")
            print(rows[-1], flush=True)
            return outcome

        measured("register", lambda: client.register_replica("big", spec))
        session = measured("open, untouched", lambda: client.session("big"))
        memory.fill(session, num_blocks - PROMPT)
        half = memory.stamps[:]
        half[::2] = none[::2]
        for what, stamps in (("all keys shown", memory.stamps), ("half of them", half), ("none of those", none)):
            session.close()
            session = measured(f"open, {what}", partial(client.session, "big", stamp_table=stamps))
        session.close()
    service.end(signal.SIGTERM)
    shutil.rmtree(folder)
    return rows


def restart_row(num_keys: int) -> str:
    """Kill a service with this many keys in its store, and restart it while another engine runs."""
    folder, spec = Path(tempfile.mkdtemp()), spec_of(num_keys + 2 * PROMPT)
    store, memory = f"store=sqlite:{folder / 'entries.db'}", Memory(num_keys + 2 * PROMPT)
    service = Serving(folder, store)
    with kvplane.connect(service.address, timeout_s=OPEN_S) as client:
        client.register_replica("big", spec)
        memory.fill(client.session("big"), num_keys)
        time.sleep(10)
    service.end(signal.SIGKILL)
    service = Serving(folder, store)
    with bystander(service.address) as steps, kvplane.connect(service.address, timeout_s=OPEN_S) as client:
        while True:
            try:
                session = client.session("big", stamp_table=memory.stamps, retry=RetryPolicy(attempts=1))
                break
            except kvplane.KvplaneError:
                time.sleep(0.05)
        end = time.monotonic()
        time.sleep(1)
        hold = service.longest_hold(service.began, end + 1)
        slowest = max((took for _, took in steps), default=0.0)
        row = f"| {num_keys:,} | {session.kept_keys:,} | {end - service.began:.1f} s | {hold} | {slowest:.0f} |"
        session.close()
    service.end(signal.SIGTERM)
    shutil.rmtree(folder)
    return row


def main(arguments: argparse.Namespace) -> None:
    gc_policy.apply()  # as in a service
    lines = [f"# Opening sessions\n\n{machine_line()}, load {os.getloadavg()[0]:.1f}\n"]
    lines += ["| the memory shows | CPU per million keys | longest slice |", "|---|---|---|", *cpu_rows(500_000)]
    lines += [
        "\n| blocks | what | keys kept | took | loop held, ms | of it CPU | slowest step of another engine, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for num_blocks in arguments.blocks:
        lines += pool_rows(num_blocks)
    lines += [
        "\n| keys stored | kept | start to open | loop held, ms | of it CPU | slowest step of another engine, ms |",
        "|---|---|---|---|---|---|",
    ]
    lines += [restart_row(num_keys) for num_keys in arguments.keys]
    text = "\n".join(lines) + "\n"
    print(text)
    arguments.out.write_text(text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3:])
    else:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--blocks", type=int, nargs="*", default=[1_000_000, 4_000_000])
        parser.add_argument("--keys", type=int, nargs="*", default=[300_000, 1_000_000])
        parser.add_argument("--out", type=Path, default=RESULTS / "opening.md")
        main(parser.parse_args())
