"""Memory of the logs of busy replicas, and duration of full garbage collections with them.

    python -m tests.bench.logs                              prints the table, writes tests/bench/results/logs.{md,json}
    python -m tests.bench.logs --before PATH                also of another checkout, for comparison
    python -m tests.bench.logs --replicas 2 --steps 50 --no-write

Each line is a process configured as a service: replicas of 3,000 blocks, each of which computes prompts of 512 hash
blocks step by step with events on, until the logs have been full for some time. Memory and objects are those added by
the steps. Collections are full ones, in CPU time of the process, the median of five. A collection mostly reads the
columns of the pools, block by block; keys and packed logs are not among the objects that it visits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.bench.machine import machine, machine_line

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
REPLICAS, STEPS = (1, 8, 32), 300
MOST_MB, MOST_MS = 20.0, 20.0  # limits: memory of a busy replica beyond the budget, and a collection with 32 of them

# Runs in any checkout: it imports only modules that old versions have.
BUSY = """
import gc, json, os, statistics, sys, time
from kvplane.base.groups import GroupKind, GroupSpec, ReplicaSpec
from kvplane.base.session import OpenRequest
from kvplane.base.step import Admit, End, Facts, News, Part, Step
from kvplane_service.process import gc_policy
from kvplane_service.config import Config
from kvplane_service.registry import Registration, Registry

HASHES, BLOCKS, SIZE = 512, 3000, 16
replicas, steps = int(sys.argv[1]), int(sys.argv[2])
config = Config()

def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def state():
    gc.collect()
    return rss(), len(gc.get_objects()), statistics.median(collection() for _ in range(5))

def collection():
    began = time.process_time_ns()
    gc.collect()
    return (time.process_time_ns() - began) / 1e6

spec = ReplicaSpec(
    groups=(GroupSpec(GroupKind.FULL_ATTENTION, SIZE),), num_blocks=BLOCKS, max_model_len=2 * HASHES * SIZE,
    hash_block_size=SIZE, scheduler_block_size=SIZE, max_in_flight_tokens=1 << 17,
)
registry = Registry(config, time.monotonic_ns)
gc_policy.apply()
hosts = [registry.register(f"r{number}", Registration(spec)).host for number in range(replicas)]
epochs = [host.open(OpenRequest(host.name, nonce=1, with_events=True)).epoch for host in hosts]

def step(seq):
    for host, epoch in zip(hosts, epochs):
        facts = Facts([0], end=[int(End.FREE)]) if seq > 1 else Facts()
        hashes = os.urandom(32 * HASHES)
        news = News([0], [HASHES * SIZE], num_hashes=[HASHES], hashes=hashes)
        part = Part(facts=facts, news=news, admit=Admit([0]))
        host.step(1, Step(epoch, seq, [part], executed_through=seq - 1), b"")
    if hasattr(registry, "logs"):  # as a service does between its steps
        for _ in registry.logs.pack():
            pass

for seq in range(1, 13):  # enough to fill the pool
    step(seq)
before = state()
for seq in range(13, 13 + steps):
    step(seq)
after = state()
decisions = sum(len(host.decisions) for host in hosts)
print(json.dumps({
    "bytes": after[0] - before[0], "objects": after[1] - before[1], "decisions": decisions,
    "pools_ms": before[2], "collection_ms": after[2], "budget": getattr(config, "log_bytes", 0),
}))
"""


@dataclass(frozen=True)
class Weight:
    """Results of one line: what the steps of all replicas added.

    Attributes:
        pools_ms: CPU time of a full collection before the logs are full.
        collection_ms: the same once they are.
        decisions: kept at the end.
        budget: bytes that all logs may have together; 0 = there was no such bound.
    """

    tree: str
    replicas: int
    steps: int
    bytes: int
    objects: int
    pools_ms: float
    collection_ms: float
    decisions: int
    budget: int

    @property
    def mb_beyond(self) -> float:
        """Memory of a replica beyond its share of the budget, in MB."""
        return max(0, self.bytes - self.budget) / self.replicas / 1e6

    def line(self) -> str:
        """The line of the table."""
        return (
            f"| {self.tree} | {self.replicas} | {self.bytes / self.replicas / 1e6:.1f} | {self.mb_beyond:.1f} "
            f"| {self.objects / self.replicas:,.0f} | {self.pools_ms:.1f} | {self.collection_ms:.1f} "
            f"| {self.decisions / self.replicas:,.0f} |"
        )


def weigh(tree: str, root: Path, replicas: int, steps: int) -> Weight:
    """Run `replicas` replicas of a checkout for `steps` steps each."""
    folders = ("clients/python", "service")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(root / folder) for folder in folders)}
    command = [sys.executable, "-c", BUSY, str(replicas), str(steps)]
    raw = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, Any] = json.loads(raw)
    return Weight(tree, replicas, steps, **found)


def report(rows: list[Weight], command: str) -> str:
    """The results as Markdown."""
    lines = [
        "# What logs weigh",
        "",
        machine_line(),
        "",
        f"`{command}`; {rows[0].steps} steps of 512 hash blocks a replica, after the pools were full.",
        f"Allowed: {MOST_MB:.0f} MB a replica beyond its share of the budget, {MOST_MS:.0f} ms for a full collection.",
        "",
        "| tree | busy replicas | MB a replica | beyond the budget | objects a replica | full collection before, ms "
        "| once logs are full, ms | decisions a replica |",
        "|---" * 8 + "|",
    ]
    return "\n".join([*lines, *(row.line() for row in rows)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="What logs of busy replicas weigh.")
    parser.add_argument("--replicas", type=int, nargs="*", default=list(REPLICAS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--no-write", action="store_true")
    given = parser.parse_args()
    trees = {"before": given.before, "now": ROOT} if given.before else {"now": ROOT}
    rows = [weigh(name, root, count, given.steps) for name, root in trees.items() for count in given.replicas]
    command = f"python -m tests.bench.logs --steps {given.steps}"
    text = report(rows, command)
    sys.stdout.write(text)
    if not given.no_write:
        data = {"machine": machine(), "command": command, "rows": [asdict(row) for row in rows]}
        (RESULTS / "logs.md").write_text(text, encoding="utf-8")
        (RESULTS / "logs.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    over = [row for row in rows if row.tree == "now" and (row.mb_beyond > MOST_MB or row.collection_ms > MOST_MS)]
    sys.exit(f"over what is allowed: {over}" if over else 0)


if __name__ == "__main__":
    main()
