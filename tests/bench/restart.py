"""Duration of a restart with a million entries, compared with reading and checksumming the same bytes.

    python -m tests.bench.restart [--entries N]     prints a table and writes tests/bench/results/restart.{md,json}

Ready means: chunks read and verified, stamps compared, index and eviction order restored. Reading means: the same
chunks from the same store in the same run, each checksummed. Both alternate; figures are medians over the rounds, in
CPU time of this process, because the machine may be shared. The garbage collector is configured as in the service. The
slowest round is reported too: mostly the first, on memory that the process uses for the first time. Then 1,000 random
prefixes must hit as before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from kvplane.base.groups import DENSE_RETENTION, GroupKind, GroupSpec, ReplicaSpec
from kvplane.base.step import Admit, End, Facts, News, Part, Step
from kvplane_core.spec.replica import Replica
from kvplane_service.config import Config
from kvplane_service.replicas.recovery import Recovering
from kvplane_service.replicas.stamps import Contents
from kvplane_service.runtime import interpreter
from kvplane_service.store.interface import BlockingStore, LogName
from kvplane_service.store.journal import ReplicaJournal
from kvplane_service.store.memory import MemoryStore
from kvplane_service.store.sqlite import SqliteStore
from tests.bench.machine import machine_line
from tests.store import servers
from tests.store.contract import load_log, opened

RESULTS = Path(__file__).parent / "results"
ROUNDS, PROMPT_BLOCKS, SIZE, DIGEST = 7, 100, 16, 32
LOG = LogName("bench", b"n" * 16, 1)
FULL = GroupSpec(GroupKind.FULL_ATTENTION, SIZE)
WINDOW = GroupSpec(GroupKind.SLIDING_WINDOW, SIZE, window=64, lookup_class=1)


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    store: str
    groups: int
    entries: int
    num_bytes: int
    read_s: float
    ready_s: float
    slowest_s: float
    hits: int
    expected_hits: int

    @property
    def ratio(self) -> float:
        return self.ready_s / self.read_s

    def line(self) -> str:
        return (
            f"| {self.store} | {self.groups} | {self.entries:,} | {self.num_bytes / 1e6:.1f} | "
            f"{self.read_s * 1e3:.0f} | {self.ready_s * 1e3:.0f} | {self.ratio:.1f} | "
            f"{self.slowest_s * 1e3:.0f} | "
            f"{self.hits:,} of {self.expected_hits:,} |"
        )


HEAD = """\
| store | groups | entries | MB | read and checksum, ms | ready, ms | ratio | slowest, ms | prefixes hit as before |
|---|---|---|---|---|---|---|---|---|"""


def spec_of(groups: int, entries: int) -> ReplicaSpec:
    """A pool of `entries` entries, every block cached."""
    return ReplicaSpec(
        (FULL, *[WINDOW] * (groups - 1)),
        num_blocks=entries + groups * PROMPT_BLOCKS + 2,
        max_model_len=1 << 20,
        hash_block_size=SIZE,
        scheduler_block_size=SIZE,
        max_in_flight_tokens=1 << 20,
        retention_interval=DENSE_RETENTION,
    )


def digests_of(prompt: int) -> bytes:
    """The block hashes of a prompt, as an engine would send them."""
    return random.Random(prompt).randbytes(DIGEST * PROMPT_BLOCKS)


def fill(spec: ReplicaSpec, entries: int) -> tuple[Replica, int]:
    """A replica that has served prompts until it has `entries` entries; also the number of keys."""
    replica, prompts = Replica(spec), entries // (PROMPT_BLOCKS * len(spec.groups))
    for prompt in range(prompts):
        tokens = PROMPT_BLOCKS * SIZE
        news = News([0], [tokens], num_hashes=[PROMPT_BLOCKS], hashes=digests_of(prompt))
        replica.apply(Step(0, 2 * prompt + 1, [Part(news=news, admit=Admit([0]))], executed_through=2 * prompt))
        end = Part(facts=Facts([0], end=[int(End.FREE)]))
        replica.apply(Step(0, 2 * prompt + 2, [end], executed_through=2 * prompt + 1))
    replica.apply(Step(0, 2 * prompts + 1, [Part()], executed_through=2 * prompts))
    return replica, prompts


def write(replica: Replica, store: BlockingStore) -> None:
    """All published entries, as a resync writes them."""
    journal = ReplicaJournal(LOG, replica, 1, lambda: 0)
    journal.resync()
    while (batch := journal.take()) is not None:
        journal.wrote(batch, store.append(batch.log, batch.chunk, batch.trim_below))


def read(store: BlockingStore) -> int:
    """Read and checksum; returns the number of bytes."""
    total = 0
    for chunk in store.load(LOG):
        xxhash.xxh3_64_intdigest(chunk.raw)
        total += len(chunk.raw)
    return total


def recover(spec: ReplicaSpec, store: BlockingStore, stamps: tuple[int, ...]) -> tuple[Replica, float]:
    """A new replica with all entries that the stamps verify, and the seconds without the creation of the empty pool."""
    replica = Replica(spec)
    interpreter.tune()
    begin = time.process_time()
    log = load_log(store, LOG)
    Recovering(1, Contents(1), loading=False, entries=log.entries()).prove(replica, stamps)
    replica.enter_epoch(2, stamps)
    return replica, time.process_time() - begin


def hits_of(replica: Replica, prompts: list[tuple[int, int]]) -> list[int]:
    """Hit tokens of prefixes of these numbers of blocks."""
    found = []
    for prompt, blocks in prompts:
        hashes = digests_of(prompt)
        digests = [hashes[at : at + DIGEST] for at in range(0, blocks * DIGEST, DIGEST)]
        found.append(replica.lookup(digests, "", blocks * SIZE + 1).num_tokens)
    return found


def timed(act: Callable[[], object]) -> float:
    begin = time.process_time()
    act()
    return time.process_time() - begin


class Served:
    """A replica that has served, with the hits it would answer and its stamp table."""

    def __init__(self, groups: int, entries: int) -> None:
        self.spec = spec_of(groups, entries)
        self.replica, prompts = fill(self.spec, entries)
        self.stamps = tuple(self.replica.coordinator.pool.stamp)
        chance = random.Random(0)
        self.asked = [(chance.randrange(prompts), chance.randrange(1, PROMPT_BLOCKS + 1)) for _ in range(1000)]
        self.hits, self.num_keys = hits_of(self.replica, self.asked), self.replica.count_keys()

    def measure(self, name: str, store: BlockingStore) -> Figure:
        """Restore from this store; returns one line of the table."""
        write(self.replica, store)
        reads, readies = [], []
        for _ in range(ROUNDS):
            reads.append(timed(lambda: read(store)))
            back, seconds = recover(self.spec, store, self.stamps)
            readies.append(seconds)
        assert back.count_keys() == self.num_keys, f"{back.count_keys()} of {self.num_keys} keys"
        same = sum(one == other > 0 for one, other in zip(self.hits, hits_of(back, self.asked), strict=True))
        times = statistics.median(reads), statistics.median(readies), max(readies)
        return Figure(name, len(self.spec.groups), self.num_keys, read(store), *times, same, len(self.asked))


@contextlib.contextmanager
def stores(folder: Path) -> Iterator[list[tuple[str, BlockingStore]]]:
    """One of each kind."""
    with servers.serving(folder / "redis") as server:
        redis = opened(Config(store=f"redis://{server.address}", store_timeout_ms=60_000))
        sqlite = SqliteStore(folder / "entries.db")
        yield [("in memory", MemoryStore()), ("SQLite", sqlite), ("Redis", redis)]
        sqlite.close()
        redis.close()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000)
    entries = parser.parse_args().entries
    figures = []
    print(HEAD, flush=True)
    for groups in (1, 7):
        served = Served(groups, entries)
        with tempfile.TemporaryDirectory() as folder, stores(Path(folder)) as all_stores:
            for name, store in all_stores:
                figures.append(served.measure(name, store))
                print(figures[-1].line(), flush=True)
    RESULTS.mkdir(exist_ok=True)
    table = "\n".join([__doc__ or "", machine_line(), "", HEAD, *(figure.line() for figure in figures)])
    (RESULTS / "restart.md").write_text(table + "\n", encoding="utf-8")
    (RESULTS / "restart.json").write_text(json.dumps([asdict(one) for one in figures], indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
