"""Hits over the size of the pool for LRU, HAZARD and the optimum on three traces.

    KVPLANE_WORKLOADS=FOLDER python -m tests.bench.curves
    python -m tests.bench.curves --part second --chart curves.svg            the first half of each trace left out

A core serves one prompt after the other, each in one step. The optimum knows the future, and holds a request's own
blocks too: it is the bound of what any policy of an engine can hit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from kvplane.base.groups import EvictionPolicy, ReplicaSpec
from kvplane_tools.cli.plots import new_figure, save
from tests.bench.machine import machine_line
from tests.bench.policies import FULL_ONLY, TRACES, Chain, bound, percentage, prompts_of, replica_of
from tests.conftest import workloads_folder, workloads_line

POOLS = {
    "conversation": (500, 1000, 3000, 6000, 10_000, 30_000, 50_000),
    "synthetic": (500, 1000, 3000, 6000, 10_000, 20_000),
    "Weka": (500, 1000, 3000, 6000, 10_000),
}


class Hits(NamedTuple):
    """Percentages of the tokens that hit."""

    lru: float
    hazard: float
    optimum: float


def replica_for(size: int, num_blocks: int, policy: EvictionPolicy) -> ReplicaSpec:
    """Return a replica with one group of full attention, which takes prompts whole."""
    spec = replica_of(FULL_ONLY, size, num_blocks, eviction=policy)
    return replace(spec, max_in_flight_tokens=spec.max_model_len)


def hits_of(chains: Sequence[Chain], size: int, num_blocks: int) -> Hits:
    """Return what the policies hit of these prompts in a pool."""
    policies = (EvictionPolicy.LRU, EvictionPolicy.HAZARD)
    lru, hazard = (percentage(chains, replica_for(size, num_blocks, policy)) for policy in policies)
    return Hits(lru, hazard, bound(chains, size, num_blocks))


def draw(found: dict[str, dict[int, Hits]], path: Path) -> None:
    """Write the chart."""
    figure = new_figure()
    figure.set_size_inches(10, 3.6)
    for axes, (trace, by_size) in zip(figure.subplots(1, len(found)), found.items(), strict=True):
        for policy, style in (("optimum", ":"), ("hazard", "o-"), ("lru", "s--")):
            axes.plot(list(by_size), [getattr(one, policy) for one in by_size.values()], style, label=policy)
        axes.set_xscale("log")
        axes.set(title=trace, xlabel=f"blocks of {TRACES[trace][1]} tokens", ylabel="% of prompt tokens that hit")
        axes.legend()
    save(figure, path)


def main() -> int:
    """Compute, print, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["all", "first", "second"], default="all", help="which half of each trace")
    parser.add_argument("--chart", type=Path, help="write a chart to this .svg, .png or .pdf file")
    options = parser.parse_args()
    folder = workloads_folder()
    if folder is None:
        print(workloads_line(), file=sys.stderr)
        return 2
    print(machine_line(), "", "| trace | blocks | lru | hazard | optimum |", "|---|---|---|---|---|", sep="\n")
    found: dict[str, dict[int, Hits]] = {}
    for trace, sizes in POOLS.items():
        chains = prompts_of(folder, trace, None)
        half = len(chains) // 2
        chains = {"all": chains, "first": chains[:half], "second": chains[half:]}[options.part]
        for size in sizes:
            hits = found.setdefault(trace, {})[size] = hits_of(chains, TRACES[trace][1], size)
            print(f"| {trace} | {size:,} | {hits.lru:.2f} | {hits.hazard:.2f} | {hits.optimum:.2f} |", flush=True)
    if options.chart is not None:
        draw(found, options.chart)
    return 0


if __name__ == "__main__":
    sys.exit(main())
