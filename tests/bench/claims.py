"""Claimed against real hits by memory: an index of full attention alone, and that of all groups.

    python -m tests.bench.claims              writes docs/claims.svg, prints the numbers
    python -m tests.bench.claims --no-write --limit 100

One engine of `tests.bench.routing` answers the prompts of its `shared`, one request per second, so that no queue is
between claim and hit.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from kvplane_tools.cli.plots import new_figure, save
from tests.bench.machine import machine_line
from tests.bench.routing import BLOCK, OWN, SCENES, SHARED, Outcome, run

CHART = Path(__file__).parents[2] / "docs" / "claims.svg"
POOLS = (300, 450, 700, 1000, 1500, 2200, 3200, 4600)
FULL, EXACT, REAL = "claimed by an index of full attention", "claimed by kvplane's index", "hit by the engine"


def outcome_of(num_blocks: int, limit: int) -> Outcome:
    """Return what one engine of this many blocks made of the prompts."""
    return run(replace(SCENES[0], engines=1, num_blocks=num_blocks, limit=limit), 1.0, "round_robin", 1)


def shares(outcome: Outcome) -> dict[str, float]:
    """Return the percentages of the prompts' tokens."""
    tokens = {FULL: outcome.full, EXACT: outcome.claimed, REAL: outcome.real}
    return {name: 100 * one / outcome.prompt for name, one in tokens.items()}


def draw(memory: list[float], found: list[dict[str, float]]) -> None:
    """Write the chart."""
    figure = new_figure()
    axes = figure.add_subplot()
    for name, style in ((FULL, "o-"), (EXACT, "s-"), (REAL, "x:")):
        axes.plot(memory, [one[name] for one in found], style, label=name, markersize=8 if style == "x:" else 5)
    axes.set_xscale("log")
    axes.set_xticks(memory, [f"{one:.1f}" for one in memory], minor=False)
    axes.minorticks_off()
    axes.set_xlabel("memory of the engine, in whole prompts of 16,800 tokens")
    axes.set_ylabel("% of prompt tokens")
    axes.set_ylim(0, 100)
    axes.set_title("gpt-oss: full attention and windows; prompts share 15,900 tokens in groups of 10")
    axes.legend(loc="lower right")
    save(figure, CHART)
    CHART.write_text("".join(f"{line.rstrip()}\n" for line in CHART.read_text().splitlines()))


def main() -> None:
    """Measure, print, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=400)
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    memory, found = list[float](), list[dict[str, float]]()
    print(
        machine_line(), "", "| blocks | prompts | full only % | kvplane % | real % |", "|---|---|---|---|---|", sep="\n"
    )
    for num_blocks in POOLS:
        memory.append(num_blocks * BLOCK / (SHARED + OWN))
        found.append(shares(outcome_of(num_blocks, options.limit)))
        cells = " | ".join(f"{one:.1f}" for one in found[-1].values())
        print(f"| {num_blocks} | {memory[-1]:.1f} | {cells} |", flush=True)
    if not options.no_write:
        draw(memory, found)


if __name__ == "__main__":
    main()
