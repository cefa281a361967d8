"""Hits by the size of tiers, on public traces: `KVPLANE_WORKLOADS=FOLDER python -m tests.bench.tiers`.

Prints a table and writes results/tiers.md (10 minutes); `--limit 500 --no-write` for less. Each cell is a replay of a
whole trace (of Weka, 120 sessions) on one core with its own managers: full attention alone, eight requests at a time,
in chunks of 8,192 tokens, with one generated token; movers end each job two steps after its order. The last column is
one pool of as many blocks as device and tiers have together, in which nothing is in two places.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvplane.base.groups import TierKind, TierSpec
from kvplane_replay.engine import Engine
from kvplane_replay.fleet import Fleet
from kvplane_replay.plan import CostModel, EngineConfig
from tests.bench.machine import machine_line
from tests.bench.policies import CHUNK, FULL_ONLY, TRACES, CoreSession, replica_of, requests_of
from tests.conftest import workloads_folder, workloads_line

RESULTS = Path(__file__).parent / "results" / "tiers.md"
RUNNING, MOVER_STEPS = 8, 2
POOLS = {"conversation": (2000, 10_000), "synthetic": (2000, 10_000), "Weka": (500, 2000)}
SHARES = ((0, 0), (1, 0), (2, 0), (4, 0), (1, 4), (0, 4))  # slots of host and disk, in pools


@dataclass(frozen=True, slots=True)
class Cell:
    """One replay: blocks of the device, and slots of the tiers."""

    trace: str
    pool: int
    host: int
    disk: int

    @property
    def tiers(self) -> tuple[TierSpec, ...]:
        """The tiers that the replica has."""
        sizes = {TierKind.HOST: self.host, TierKind.DISK: self.disk}
        return tuple(TierSpec(kind, count) for kind, count in sizes.items() if count)


@dataclass(frozen=True, slots=True)
class Hits:
    """Percentages of the prompts' tokens that hit: all, and what loads from each tier added."""

    share: float
    of_tiers: dict[str, float]
    waited: int
    discarded: float  # share of the saves and moves


def hits_of(cell: Cell, folder: Path, limit: int) -> Hits:
    """Replay a cell."""
    spec = replica_of(FULL_ONLY, TRACES[cell.trace][1], cell.pool, tiers=cell.tiers)
    session = CoreSession(spec)
    engine = Engine(
        session, EngineConfig(RUNNING, CHUNK, max_output=1, mover_steps=MOVER_STEPS), CostModel(10**9, 0, 0)
    )
    with ExitStack() as files:
        fleet = Fleet([engine], requests_of(folder, cell.trace, limit, files))
        while fleet.run_step():
            pass
    tally, tiers = engine.tally, session.replica.tiers
    assert tally.tier_hit_tokens == [tier.hit_tokens for tier in tiers.each]
    shares = zip(spec.tiers, tally.tier_hit_tokens, strict=True)
    of_tiers = {tier.kind.value: 100 * tokens / tally.queried_tokens for tier, tokens in shares}
    counts = tiers.counters
    discarded = counts.discarded / max(1, counts.saved + counts.moved + counts.discarded)
    return Hits(100 * tally.hit_tokens / tally.queried_tokens, of_tiers, counts.waited, discarded)


def rows(given: argparse.Namespace, folder: Path) -> list[str]:
    """Return the rows of the table."""
    cells = [
        Cell(trace, pool, host * pool, disk * pool)
        for trace in given.traces
        for pool in POOLS[trace]
        for host, disk in SHARES
    ]
    alone = {cell: Cell(cell.trace, cell.pool + cell.host + cell.disk, 0, 0) for cell in cells}
    asked = list(dict.fromkeys([*cells, *alone.values()]))
    with multiprocessing.get_context("spawn").Pool(given.processes) as processes:
        found = dict(zip(asked, processes.imap(partial(hits_of, folder=folder, limit=given.limit), asked), strict=True))
    lines = []
    for cell in cells:
        hits, whole = found[cell], found[alone[cell]]
        of_tiers = [f"{hits.of_tiers[kind]:.1f}" if kind in hits.of_tiers else "" for kind in ("host", "disk")]
        sizes = [f"{count:,}" for count in (cell.pool, cell.host, cell.disk)]
        shares = [f"{hits.share:.1f}", *of_tiers, f"{whole.share:.1f}", f"{hits.waited:,}"]
        lines.append(f"| {' | '.join([cell.trace, *sizes, *shares])} |")
    return lines


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.tiers", description=__doc__)
    parser.add_argument("--limit", type=int, default=1 << 30, help="requests of each trace")
    parser.add_argument("--traces", nargs="+", choices=POOLS, default=list(POOLS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--no-write", action="store_true")
    given = parser.parse_args()
    folder = workloads_folder()
    if folder is None:
        print(workloads_line(), file=sys.stderr)
        return 1
    head = [
        "# Tiers",
        "",
        "Percentage of the prompts' tokens that hit, by blocks of the device and slots of its tiers:",
        "`python -m tests.bench.tiers`. *from* is what loads from a tier added to the hits of the device, by the",
        "farthest tier that a load read. *one pool* is the hit of a device with as many blocks as device and tiers.",
        "*waited* counts refusals of admissions until loads in flight ended: loads fill a quarter of the device.",
        "",
        machine_line(),
        "",
        "| trace | device | host | disk | hit | from host | from disk | one pool | waited |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    text = "\n".join([*head, *rows(given, folder), ""])
    print(text)
    if not given.no_write:
        RESULTS.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
