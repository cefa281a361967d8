"""One seed: draw, drive, and when the two differ shrink the sequence and keep it."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, fields
from pathlib import Path
from random import Random
from typing import Any

from kvplane.base.errors import InvalidArgument
from tests.conformance.divergence import Divergence
from tests.conformance.live.driver import Driver
from tests.conformance.live.generator import Generator
from tests.conformance.live.intents import Intent, Look
from tests.conformance.live.kinds import draw_header
from tests.conformance.live.peer import Reference, ReferenceFailed
from tests.conformance.live.shrink import shrink

SCENARIOS = Path(__file__).parents[1] / "scenarios"
Record = dict[str, Any]


@dataclass
class Tally:
    """Counts of a run.

    Attributes:
        hits: admissions with a cached prefix.
        refusals: allocations for which there were too few blocks.
        removals: keys that left the cache.
        copies: blocks copied before they are written.
        failures: seeds in which the reference raised: the driver is at fault.
        refused: seeds whose configuration one of the two refuses: the draw is at fault.
        named: seeds that ended with the difference that the README of the core names.
    """

    seeds: int = 0
    operations: int = 0
    values: int = 0
    hits: int = 0
    refusals: int = 0
    removals: int = 0
    copies: int = 0
    differences: int = 0
    failures: int = 0
    refused: int = 0
    named: int = 0

    @property
    def sound(self) -> bool:
        """Whether every seed ran and nothing differed."""
        return not (self.differences or self.failures or self.refused)

    def add(self, other: Tally) -> None:
        """Sum."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

    def count(self, record: Record) -> None:
        """Take note of an operation and its answer."""
        self.operations += 1
        self.copies += len(record.get("copies", ()))
        self.removals += sum(event[0] == "R" for event in record.get("ev", ()))
        if record["op"] == "alloc":
            self.refusals += not record["ok"]
            self.hits += record["ok"] and record.get("hit", 0) > 0

    def __str__(self) -> str:
        text = (
            f"{self.seeds:6}{self.operations:11}{self.values:9}{self.hits:7}{self.refusals:9}{self.removals:9}"
            f"{self.copies:7}{self.differences:12}"
        )
        text += f"  {self.failures} failures of the reference" if self.failures else ""
        text += f"  {self.named} hits in chunks that no block divides" if self.named else ""
        return text + (f"  {self.refused} refused" if self.refused else "")


HEADING = " seeds operations   values   hits refusals removals copies differences"


def run_seed(peer: Reference, kind: str, seed: int, operations: int, keep: Path | None = None) -> Tally:
    """Draw a configuration and drive both with it; `keep`: the folder where a run without a difference is recorded."""
    header, habits = draw_header(kind, seed)
    try:
        driver = Driver(peer.ask(header), peer)
    except (InvalidArgument, ReferenceFailed) as error:
        print(f"REFUSED {kind} seed {seed}: {type(error).__name__}: {error}", flush=True)
        return Tally(seeds=1, refused=1)
    done: list[Intent] = []
    tally = Tally(seeds=1)
    try:
        for intent in Generator(Random(f"{kind}/{seed}/intents"), driver, habits).intents():
            done.append(intent)
            driver.perform(intent)
            if len(driver.records) >= operations:
                break
        driver.perform(Look())
        if keep is not None:
            write_scenario(keep / f"{kind}-s{seed}.jsonl.gz", driver)
    except Divergence as error:
        if lacks_its_chunk(driver.header, error):
            tally.named = 1
            return tally
        tally.differences = 1
        print(f"DIFFER {kind} seed {seed}: {error}", flush=True)
        _keep(peer, header, done, error)
    except ReferenceFailed as error:
        tally.failures = 1
        print(f"FAILED {kind} seed {seed}: {error} at {done[-1]}", flush=True)
    tally.values = driver.replayer.values
    for record in driver.records:
        tally.count(record)
    return tally


def lacks_its_chunk(header: Record, error: Divergence) -> bool:
    """Whether the reference hits more because it does not look for the first blocks of a chunk that begins inside one.

    Such a hit is wrong: it ends in a chunk some of whose tokens have the null block.
    """
    uneven = [
        (number, group["attention_chunk_size"], group["block_size"])
        for number, group in enumerate(header["groups"])
        if (group.get("attention_chunk_size") or 0) % group["block_size"]
    ]
    if error.op["op"] != "lookup" or error.name not in ("hit", "blk"):
        return False
    hit, rows = error.op["hit"], error.op["blk"]
    return any(0 in rows[number][hit // chunk * chunk // size :] for number, chunk, size in uneven)


def _keep(peer: Reference, header: Record, done: list[Intent], found: Divergence) -> None:
    sequence, driver, error = shrink(peer, header, done, found)
    path = SCENARIOS / f"{header['name']}-{error.op['op']}-{error.name}.jsonl.gz"
    write_scenario(path, driver)
    print(f"  shrunk from {len(done)} to {len(sequence)} intents, {len(driver.records)} operations: {path}")
    print(f"  {error}", flush=True)


def write_scenario(path: Path, driver: Driver) -> None:
    """The operations and the reference's answers as a kvtrace/1 file; equal content gives an equal file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [driver.header, *driver.records, {"op": "end", "stats": None}]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
