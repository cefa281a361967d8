"""One seed: draw, drive, and when the two differ shrink the sequence and keep it."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.conformance.live.driver import Driver
from tests.conformance.live.generator import Generator
from tests.conformance.live.intents import Intent, Look
from tests.conformance.live.kinds import draw_header
from tests.conformance.live.peer import Peer, ReferenceFailed
from tests.conformance.live.shrink import shrink
from tests.conformance.replay import Divergence

SCENARIOS = Path(__file__).parents[1] / "scenarios"
Record = dict[str, Any]


@dataclass
class Tally:
    """What was done. `failures`: seeds in which the reference raised, so the driver is at fault."""

    seeds: int = 0
    operations: int = 0
    values: int = 0
    differences: int = 0
    failures: int = 0

    def add(self, other: Tally) -> None:
        """Sum."""
        self.seeds += other.seeds
        self.operations += other.operations
        self.values += other.values
        self.differences += other.differences
        self.failures += other.failures

    def __str__(self) -> str:
        text = f"{self.seeds:5} seeds {self.operations:8} operations {self.values:9} values {self.differences:3} differences"
        return text + (f" {self.failures} failures of the reference" if self.failures else "")


def run_seed(peer: Peer, kind: str, seed: int, operations: int) -> Tally:
    """Draw a configuration and drive both with it."""
    header, habits = draw_header(kind, seed)
    driver = Driver(peer.ask(header), peer)
    done: list[Intent] = []
    tally = Tally(seeds=1)
    try:
        for intent in Generator(Random(f"{kind}/{seed}/intents"), driver, habits).intents():
            done.append(intent)
            driver.perform(intent)
            if len(driver.records) >= operations:
                break
        driver.perform(Look())
    except Divergence as error:
        tally.differences = 1
        print(f"DIFFER {kind} seed {seed}: {error}", flush=True)
        _keep(peer, header, done, error)
    except ReferenceFailed as error:
        tally.failures = 1
        print(f"FAILED {kind} seed {seed}: {error} at {done[-1]}", flush=True)
    tally.operations, tally.values = len(driver.records), driver.replayer.values
    return tally


def _keep(peer: Peer, header: Record, done: list[Intent], found: Divergence) -> None:
    sequence, driver, error = shrink(peer, header, done, found)
    path = SCENARIOS / f"{header['name']}-{error.op['op']}-{error.name}.jsonl.gz"
    write_scenario(path, driver)
    print(f"  shrunk from {len(done)} to {len(sequence)} intents, {len(driver.records)} operations: {path}")
    print(f"  {error}", flush=True)


def write_scenario(path: Path, driver: Driver) -> None:
    """The operations and the reference's answers as a kvtrace/1 file; equal content gives an equal file."""
    path.parent.mkdir(exist_ok=True)
    lines = [driver.header, *driver.records, {"op": "end", "stats": None}]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
