"""The ratios of each measured commit in one table, and a chart of step cost over the number of requests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.bench.peer.plan import AHEAD, DECODE, REFERENCE, UNIX
from tests.bench.peer.report import GOALS, Cell, Report

HEAD = """\
# Steps sent ahead, by commit

Time of the engine's thread for a step that was sent ahead over a Unix socket, divided by the time of a step of vLLM's
manager in the same run: from 2026-11-25 on of a step behind the same pause, before of a step in a loop, and the engine
hashed its tokens (`tests/bench/peer/report.py` says what is in an interval). `receive` is the part of it, in µs,
that waits for the answer, and CPU the time of all threads of the engine's process, in µs; both at 256 requests. Rows
of one date were measured in turn on one machine. `ahead.svg` shows the last measured commit.

"""
NAMES = ["date", "commit", "load", "model", *(f"N = {size}" for size in GOALS), "receive", "CPU"]
COLORS = ("#1b6ca8", "#c0392b", "#27864a", "#8e44ad")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 420, 60, 170, 30, 45


def add(path: Path, report: Report, commit: str) -> None:
    """Append the rows of a report to the table; create the file if it is missing."""
    rows = [f"| {' | '.join(row)} |\n" for row in rows_of(report, commit)]
    if not path.exists():
        limits = {model: [f"≤ {goals[model]}" for goals in GOALS.values()] for model in GOALS[1]}
        goals = [["", "", "goal", model, *given, "–", "–"] for model, given in limits.items()]
        head = [NAMES, ["---"] * len(NAMES), *goals]
        path.write_text(HEAD + "".join(f"| {' | '.join(row)} |\n" for row in head), encoding="utf-8")
    with path.open("a", encoding="utf-8") as file:
        file.writelines(rows)


def rows_of(report: Report, commit: str) -> list[list[str]]:
    """Return one row per model."""
    loads = [load for pair in report.about["load_average"] for load in pair]
    about = [report.about["date"], commit, f"{min(loads):.0f} to {max(loads):.0f}"]
    table = {(cell.case.model, cell.case.kind, cell.case.size, cell.side): cell for cell in report.cells}
    rows = []
    for model in dict.fromkeys(cell.case.model for cell in report.cells):
        ahead = [table.get((model, AHEAD, size, UNIX)) for size in GOALS]
        rest = [table.get((model, f"{AHEAD}, {kind}", max(GOALS), UNIX)) for kind in ("waiting", "process CPU")]
        ratios = ["–" if cell is None or cell.ratio is None else f"{cell.ratio:.2f}" for cell in ahead]
        rows.append([*about, model, *ratios, *("–" if cell is None else f"{cell.median:.0f}" for cell in rest)])
    return rows


def chart(cells: Sequence[Cell]) -> str:
    """Return an SVG with logarithmic axes: per model a step sent ahead (solid), and one of the reference (dashed)."""
    lines: dict[tuple[str, str], dict[int, float]] = {}
    for cell in cells:
        if (cell.case.kind, cell.side) in ((AHEAD, UNIX), (DECODE, REFERENCE)) and cell.median > 0:
            lines.setdefault((cell.case.model, cell.side), {})[cell.case.size] = cell.median
    sizes = sorted({size for line in lines.values() for size in line})
    times = [time for line in lines.values() for time in line.values()]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    models = list(dict.fromkeys(model for model, _ in lines))

    def x(size: int) -> float:
        span = math.log(sizes[-1] / sizes[0]) or 1.0
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(size / sizes[0]) / span

    def y(time: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log10(time) - low) / max(1, high - low)

    drawn = [_text(x(size), HEIGHT - BOTTOM + 18, str(size), "middle") for size in sizes]
    for power in range(low, high + 1):
        at = y(10.0**power)
        drawn.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        drawn.append(_text(LEFT - 6, at + 4, f"{10.0**power:g}", "end"))
    for (model, side), line in lines.items():
        drawn.append(_line([(x(size), y(line[size])) for size in sorted(line)], COLORS[models.index(model)], side))
    for at, model in enumerate(models):
        drawn.append(_text(WIDTH - RIGHT + 12, TOP + 20 * at + 10, model, "start", COLORS[at]))
    drawn.append(_text(WIDTH - RIGHT + 12, TOP + 20 * len(models) + 20, f"dashed: {REFERENCE}", "start"))
    drawn.append(_text(LEFT, 16, "engine's thread, µs per step sent ahead", "start"))
    drawn.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "requests per step", "middle"))
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box}>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *drawn, "</svg>", ""])


def _line(points: Sequence[tuple[float, float]], color: str, side: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes: Mapping[str, str] = {REFERENCE: ' stroke-dasharray="5 4"'}
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dashes.get(side, "")}/>'


def _text(x: float, y: float, text: str, anchor: str, color: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{text}</text>'
