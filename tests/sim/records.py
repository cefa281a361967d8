"""The table of campaigns (CAMPAIGNS.md): seeds and commit of each, and the cause of every failure."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from pathlib import Path

from tests.sim.campaign import Totals

TABLE = Path(__file__).with_name("CAMPAIGNS.md")
NONE, UNKNOWN = "none", "to be found"


def append(seeds: range, totals: Totals) -> None:
    """Append a campaign of the current commit; a plus marks uncommitted changes."""
    sha = _git("rev-parse", "--short=9", "HEAD") + "+" * bool(_git("status", "--porcelain", "--untracked-files=no"))
    failed = " ".join(str(outcome.seed) for outcome in totals.failed)
    cells = (
        f"{datetime.now(UTC):%Y-%m-%d}", sha, f"{seeds[0]}..{seeds[-1]}", totals.seeds, totals.steps,
        totals.faults.total(), totals.hits_across, totals.void, failed or 0, UNKNOWN if failed else NONE,
    )  # fmt: skip
    with TABLE.open("a") as table:
        table.write(f"| {' | '.join(map(str, cells))} |\n")


def rows() -> list[list[str]]:
    """The cells of every campaign."""
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| 2")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def total_seeds() -> int:
    """Of all campaigns."""
    return sum(int(row[3]) for row in rows())


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=TABLE.parent, capture_output=True, check=True, text=True
    ).stdout.strip()
