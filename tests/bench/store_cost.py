"""Cost of the store: CPU time of a step with and without it, and its size over a long run.

    python -m tests.bench.store_cost [--steps N] [--pairs N] [--inserts N]

A step is the same decode step of 64 requests, applied by a host with or without a journal; the background writes are
counted too, on the same CPU. Both sides alternate in turns of a few steps, in alternating order, so that a machine of
varying speed affects both equally; the turns of `--steps` steps are a pair. The garbage collector is configured as in a
service. The interval is a bootstrap of the median difference.

The size is measured after a million inserts over a hundred thousand live entries, and compared with these when packed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

from kvplane.base.groups import GroupKind, GroupSpec, ReplicaSpec
from kvplane.base.session import OpenRequest
from kvplane.base.step import Admit, End, Facts, News, Part, Run, Step
from kvplane_core.face.state import digest
from kvplane_service.config import Config
from kvplane_service.replicas.host import ReplicaHost, new_replica
from kvplane_service.runtime import interpreter
from kvplane_service.store.interface import BlockingStore, LogName
from kvplane_service.store.journal import ReplicaJournal
from kvplane_service.store.record import ROW_BYTES
from kvplane_service.store.sqlite import SqliteStore
from tests.bench.machine import machine_line
from tests.store import servers
from tests.store.contract import load_log, opened

RESULTS = Path(__file__).parent / "results"
LOG = LogName("bench", b"n" * 16, 1)
SIZE, DIGEST, REQUESTS, FLUSH_STEPS = 16, 32, 64, 20
TURN = 7  # steps; what is written every 20 falls into first turns as often as into second ones


def spec_of(num_blocks: int) -> ReplicaSpec:
    return ReplicaSpec(
        (GroupSpec(GroupKind.FULL_ATTENTION, SIZE),),
        num_blocks=num_blocks,
        max_model_len=1 << 20,
        hash_block_size=SIZE,
        scheduler_block_size=SIZE,
        max_in_flight_tokens=1 << 20,
    )


class Decoding:
    """A host that decodes for `REQUESTS` requests, each a token a step; their blocks fill in different steps."""

    def __init__(self, store: BlockingStore | None) -> None:
        self.host = ReplicaHost("bench", new_replica(spec_of(1 << 17)), Config(), lambda: 0)
        self.epoch = self.host.open(OpenRequest("bench", 1)).epoch
        self.store = store
        self.journal = ReplicaJournal(LOG, self.host.replica, 100_000, lambda: 0)
        if store is not None:
            self.host.decisions.follow(self.journal.follow)
        self.seq = 0
        self.chance = random.Random(1)
        slots = list(range(REQUESTS))
        hashes = self.chance.randbytes(DIGEST * REQUESTS)
        news = News(slots, [SIZE + slot % SIZE for slot in slots], num_hashes=[1] * REQUESTS, hashes=hashes)
        self.step(Part(news=news, admit=Admit(slots)))

    def step(self, part: Part) -> None:
        self.seq += 1
        self.host.step(1, Step(self.epoch, self.seq, [part], executed_through=self.seq - 1), b"")

    def decode(self) -> None:
        """One step: a sixteenth of the requests fills a block in it."""
        full = {slot for slot in range(REQUESTS) if (self.seq + slot) % SIZE == 0}
        hashes = [int(slot in full) for slot in range(REQUESTS)]
        facts = Facts(
            list(range(REQUESTS)),
            appended=[1] * REQUESTS,
            num_hashes=hashes,
            hashes=self.chance.randbytes(DIGEST * len(full)),
        )
        self.step(Part(facts=facts, run=Run(list(range(REQUESTS)))))
        if self.store is not None and self.seq % FLUSH_STEPS == 0:
            self.flush(self.store)

    def flush(self, store: BlockingStore) -> None:
        while (batch := self.journal.take()) is not None:
            self.journal.wrote(batch, store.append(batch.log, batch.chunk, batch.trim_below))


def turns(sides: tuple[Decoding, Decoding], steps: int) -> tuple[int, int]:
    """Let both sides decode `steps` steps in turns; returns the CPU nanoseconds of each."""
    took = [0, 0]
    for turn, done in enumerate(range(0, steps, TURN)):
        for number in (0, 1) if turn % 2 else (1, 0):
            began = time.process_time_ns()
            for _ in range(min(TURN, steps - done)):
                sides[number].decode()
            took[number] += time.process_time_ns() - began
    return took[0], took[1]


def cost(steps: int, pairs: int) -> str:
    """Median difference of the pairs, and its interval."""
    without, differences = [], []
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder) / "entries.db")
        sides = Decoding(None), Decoding(store)
        interpreter.tune()
        turns(sides, steps)  # warm
        for _ in range(pairs):
            off_ns, on_ns = turns(sides, steps)
            without.append(off_ns / steps / 1000)
            differences.append((on_ns - off_ns) / steps / 1000)
        store.close()
    assert digest(sides[0].host.replica) == digest(sides[1].host.replica)
    low, high = bootstrap(differences)
    base, more = statistics.median(without), statistics.median(differences)
    return (
        f"{pairs} pairs of {steps:,} steps per side, in turns of {TURN}: {base:.1f} µs per step without a store, "
        f"with it {more:+.1f} µs (95 % interval {low:+.1f} to {high:+.1f}), {more / base:+.1%} "
        f"({low / base:+.1%} to {high / base:+.1%})"
    )


def bootstrap(values: list[float], rounds: int = 2000) -> tuple[float, float]:
    """95 % interval of the median."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(rounds))
    return medians[rounds // 40], medians[-rounds // 40]


def size(name: str, store: BlockingStore, on_disk, inserts: int, live: int) -> str:
    """Largest size over the run, and the size of the packed live entries. Prompts of 100 blocks evict old ones."""
    replica, chance, per_prompt = new_replica(spec_of(live + 101)), random.Random(2), 100
    journal = ReplicaJournal(LOG, replica, 100_000, lambda: 0)
    host = ReplicaHost("bench", replica, Config(), lambda: 0)
    host.decisions.follow(journal.follow)
    epoch, seq, largest = host.open(OpenRequest("bench", 1)).epoch, 0, 0
    for prompt in range(inserts // per_prompt):
        news = News([0], [per_prompt * SIZE], num_hashes=[per_prompt], hashes=chance.randbytes(DIGEST * per_prompt))
        for part in (Part(news=news, admit=Admit([0])), Part(facts=Facts([0], end=[int(End.FREE)]))):
            seq += 1
            host.step(1, Step(epoch, seq, [part], executed_through=seq - 1), b"")
        if prompt % 10 == 0:
            while (batch := journal.take()) is not None:
                journal.wrote(batch, store.append(batch.log, batch.chunk, batch.trim_below))
            largest = max(largest, on_disk())
    packed = replica.count_keys() * (ROW_BYTES + DIGEST)
    rows = load_log(store, LOG).rows
    return (
        f"{name}: {inserts:,} inserts over {replica.count_keys():,} live: at most {largest / 1e6:.1f} MB, "
        f"{largest / packed:.2f} of the packed live entries; {rows:,} rows at the end"
    )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--inserts", type=int, default=1_000_000)
    chosen = parser.parse_args()
    lines = []

    def show(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    with tempfile.TemporaryDirectory() as folder, servers.serving(Path(folder) / "redis") as server:
        path = Path(folder) / "entries.db"
        sqlite = SqliteStore(path)
        files = [path, path.with_name(path.name + "-wal")]
        on_disk = partial(size_of, files)
        show(size("SQLite, file and write-ahead log", sqlite, on_disk, *extent(chosen)))
        redis = opened(Config(store=f"redis://{server.address}"))
        show(size("Redis, memory of the stream", redis, lambda: redis.size_bytes(LOG), *extent(chosen)))
    show(cost(chosen.steps, chosen.pairs))
    RESULTS.mkdir(exist_ok=True)
    text = "\n\n".join([(__doc__ or "").rstrip(), machine_line(), *lines])
    (RESULTS / "store_cost.md").write_text(text + "\n", encoding="utf-8")


def size_of(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def extent(chosen: argparse.Namespace) -> tuple[int, int]:
    return chosen.inserts, chosen.inserts // 10


if __name__ == "__main__":
    main()
