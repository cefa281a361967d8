"""Hits by the size of tiers, on public traces: `KVPLANE_WORKLOADS=FOLDER python -m tests.bench.tiers`.

Prints a table and writes results/tier_sizes.md (10 minutes); `--limit 500 --no-write` for less; `--policies` for the
table of when tiers save; `--goals` for the figures N10.

Each cell is a replay of a whole trace (of Weka, 120 sessions) on one core with its own managers:
full attention alone, eight requests at a time, in chunks of 8,192 tokens, with one generated token; movers end each job
two steps after its order. The last column is one pool of as many blocks as device and tiers have together, in which
nothing is in two places.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvplane.base.groups import SavePolicy, TierKind, TierSpec
from kvplane_tools.replay.engine import Engine
from kvplane_tools.replay.fleet import Fleet
from kvplane_tools.replay.plan import CostModel, EngineConfig
from tests.bench.goals import goal
from tests.bench.machine import machine_line
from tests.bench.policies import CHUNK, FULL_ONLY, TRACES, CoreSession, replica_of, requests_of
from tests.conftest import workloads_folder, workloads_line

RESULTS = Path(__file__).parent / "results"
RUNNING, MOVER_STEPS = 8, 2
LATE = (1, 2, 3, 4)  # steps until a job ends, of N10
POOLS = {"conversation": (2000, 10_000), "synthetic": (2000, 10_000), "Weka": (500, 2000)}
SHARES = ((0, 0), (1, 0), (2, 0), (4, 0), (1, 4), (0, 4))  # slots of host and disk, in pools
BEHIND, THROUGH, REUSE = SavePolicy
# Slots of host and disk, in pools, and their policies.
POLICIES = (
    *((2, 0, save, BEHIND) for save in SavePolicy),
    *((1, 4, BEHIND, save) for save in SavePolicy),
    (1, 4, THROUGH, THROUGH),
    (1, 4, REUSE, BEHIND),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One replay: blocks of the device, slots of the tiers, and when these are written."""

    trace: str
    pool: int
    host: int
    disk: int
    host_save: SavePolicy = BEHIND
    disk_save: SavePolicy = BEHIND
    mover_steps: int = MOVER_STEPS  # until a job ends

    @property
    def tiers(self) -> tuple[TierSpec, ...]:
        """The tiers that the replica has."""
        host, disk = (TierKind.HOST, self.host, self.host_save), (TierKind.DISK, self.disk, self.disk_save)
        return tuple(TierSpec(*tier) for tier in (host, disk) if tier[1])


@dataclass(frozen=True, slots=True)
class Hits:
    """Percentages of the prompts' tokens that hit: all, and what loads from each tier added.

    `writes`: blocks that were copied into each tier, per hundred blocks that were computed.
    """

    share: float
    of_tiers: dict[str, float]
    waited: int
    discarded: float  # share of the saves and moves
    writes: dict[str, float]


def hits_of(cell: Cell, folder: Path, limit: int) -> Hits:
    """Replay a cell."""
    spec = replica_of(FULL_ONLY, TRACES[cell.trace][1], cell.pool, tiers=cell.tiers)
    session = CoreSession(spec)
    config = EngineConfig(RUNNING, CHUNK, max_output=1, mover_steps=cell.mover_steps)
    engine = Engine(session, config, CostModel(10**9, 0, 0))
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
    computed = (tally.queried_tokens - tally.hit_tokens) / spec.hash_block_size
    copies = zip(spec.tiers, tally.tier_writes, strict=True)
    writes = {tier.kind.value: 100 * count / computed for tier, count in copies}
    return Hits(100 * tally.hit_tokens / tally.queried_tokens, of_tiers, counts.waited, discarded, writes)


def replayed(cells: Iterable[Cell], given: argparse.Namespace, folder: Path) -> dict[Cell, Hits]:
    """Replay cells, several at a time."""
    asked = list(cells)
    with multiprocessing.get_context("spawn").Pool(given.processes) as processes:
        hits = processes.imap(partial(hits_of, folder=folder, limit=given.limit), asked)
        return dict(zip(asked, hits, strict=True))


def rows_of_policies(given: argparse.Namespace, folder: Path) -> list[str]:
    """Return the rows of the table of policies."""
    cells = [
        Cell(trace, pool, host * pool, disk * pool, host_save, disk_save)
        for trace in given.traces
        for pool in POOLS[trace]
        for host, disk, host_save, disk_save in POLICIES
    ]
    lines = []
    for cell, hits in replayed(cells, given, folder).items():
        names = [f"{tier.num_blocks:,} {tier.save.value}" for tier in cell.tiers] + [""] * (cell.disk == 0)
        writes = [f"{hits.writes[kind]:.0f}" if kind in hits.writes else "" for kind in ("host", "disk")]
        shares = [f"{hits.share:.1f}", *writes, f"{100 * hits.discarded:.2f}"]
        lines.append(f"| {' | '.join([cell.trace, f'{cell.pool:,}', *names, *shares])} |")
    return lines


def rows(given: argparse.Namespace, folder: Path) -> list[str]:
    """Return the rows of the table."""
    cells = [
        Cell(trace, pool, host * pool, disk * pool)
        for trace in given.traces
        for pool in POOLS[trace]
        for host, disk in SHARES
    ]
    alone = {cell: Cell(cell.trace, cell.pool + cell.host + cell.disk, 0, 0) for cell in cells}
    found = replayed(dict.fromkeys([*cells, *alone.values()]), given, folder)
    lines = []
    for cell in cells:
        hits, whole = found[cell], found[alone[cell]]
        of_tiers = [f"{hits.of_tiers[kind]:.1f}" if kind in hits.of_tiers else "" for kind in ("host", "disk")]
        sizes = [f"{count:,}" for count in (cell.pool, cell.host, cell.disk)]
        shares = [f"{hits.share:.1f}", *of_tiers, f"{whole.share:.1f}", f"{hits.waited:,}"]
        lines.append(f"| {' | '.join([cell.trace, *sizes, *shares])} |")
    return lines


def goals(given: argparse.Namespace, folder: Path) -> int:
    """Print N10, for movers that end a job after 1 to 4 steps; returns whether a goal is missed."""
    cells = [Cell("conversation", pool, 2 * pool, 0, mover_steps=steps) for pool in (2000, 10_000) for steps in LATE]
    alone = {cell: Cell(cell.trace, 3 * cell.pool, 0, 0) for cell in cells}
    found, reached = replayed(dict.fromkeys([*cells, *alone.values()]), given, folder), []
    for cell in cells:
        mine, one = found[cell], found[alone[cell]]
        where = f"pool of {cell.pool:,} blocks, host tier of twice as many, jobs end after {cell.mover_steps} steps"
        shares = f"{mine.share:.1f} % of the tokens hit, in one pool of three times {one.share:.1f} %"
        reached.append(goal("N10", f"{where}: {shares}", mine.share / one.share, least=0.95))
        reached.append(goal("N10", f"{where}: saves that were discarded, in percent", 100 * mine.discarded, most=2))
    return not all(reached)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.tiers", description=__doc__)
    parser.add_argument("--limit", type=int, default=1 << 30, help="requests of each trace")
    parser.add_argument("--traces", nargs="+", choices=POOLS, default=list(POOLS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--no-write", action="store_true")
    parser.add_argument("--policies", action="store_true", help="the table of policies, not that of sizes")
    parser.add_argument("--goals", action="store_true", help="the figures N10 alone")
    given = parser.parse_args()
    folder = workloads_folder()
    if folder is None:
        print(workloads_line(), file=sys.stderr)
        return 1
    if given.goals:
        return goals(given, folder)
    if given.policies:
        head = [*HEAD_OF_POLICIES, machine_line(), "", *COLUMNS_OF_POLICIES]
        return show("tier_policies.md", [*head, *rows_of_policies(given, folder), ""], given)
    head = [
        "# Sizes of tiers",
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
    return show("tier_sizes.md", [*head, *rows(given, folder), ""], given)


HEAD_OF_POLICIES = (
    "# When tiers save",
    "",
    "As [the sizes of tiers](tier_sizes.md), by when host and disk save: `python -m tests.bench.tiers --policies`.",
    "*to* is how many blocks were copied into a tier per hundred that were computed; *discarded* is the percentage of",
    "these whose source was used again first.",
    "",
)
COLUMNS_OF_POLICIES = (
    "| trace | device | host | disk | hit | to host | to disk | discarded |",
    "|---|---|---|---|---|---|---|---|",
)


def show(name: str, lines: Sequence[str], given: argparse.Namespace) -> int:
    """Print a table, and write it."""
    text = "\n".join(lines)
    print(text)
    if not given.no_write:
        (RESULTS / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
