"""Fits the three constants of the model on rows of the baseline: `python -m tests.bench.tables.fit`, 6 minutes.

Coordinate descent over a grid that is even in logarithms, on a quarter of the fleet: 4 engines, a quarter of the groups
and of each rate. Every point that was tried is in results/tables_fit.json, and the rest is read from these: the best
point, the interval of each constant (points that are no more than `WORSE` above the least loss), and for each rate what
the best point of all *other* rates predicts of it.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.bench.tables.fleet import Load, published_fleet
from tests.bench.tables.model import Fitted
from tests.bench.tables.published import BASELINE, ENGINES, GROUPS, RATES, STAGE_S, Row

RESULTS = Path(__file__).parents[1] / "results" / "tables_fit.json"
START, STEP = (0.45, 0.004, 6.0), 1.03  # a share, seconds, GiB
WIDTHS = (4, 2, 1, 1)  # steps between the points of a line, by round
WORSE, PARTS = 1.15, 4
FIELDS = ("ttft_s", "latency_s", "throughput")  # of a row, that the loss compares

Point = tuple[int, int, int]  # in steps from START
Rows = Mapping[int, Row]


def fitted_at(point: Point) -> Fitted:
    """Return the constants of a point of the grid."""
    flops, step_s, gib = (start * STEP**at for start, at in zip(START, point, strict=True))
    return Fitted(flops, step_s, gib * 2**30)


def baseline_rows(point: Point) -> dict[int, Row]:
    """Predict the baseline. Its throughput is that of all parts."""
    fleet = published_fleet("baseline", fitted_at(point), engines=ENGINES // PARTS)
    load = Load(1, GROUPS // PARTS)
    rows = {rate: fleet.run(load, rate / PARTS, STAGE_S).row for rate in RATES}
    return {rate: row._replace(throughput=row.throughput * PARTS) for rate, row in rows.items()}


def loss(rows: Rows, rates: Iterable[int] = RATES) -> float:
    """Return the root of the mean square of what is compared, in logarithms."""
    errors = [math.log(getattr(rows[rate], name) / getattr(BASELINE[rate], name)) for rate in rates for name in FIELDS]
    return math.sqrt(sum(error * error for error in errors) / len(errors))


def descend(tried: dict[Point, Rows], processes: int) -> None:
    """Try points along each axis in turn, around the best one so far."""
    best: Point = (0, 0, 0)
    for axis, width in ((axis, width) for width in WIDTHS for axis in range(len(START))):
        line = [(*best[:axis], best[axis] + at * width, *best[axis + 1 :]) for at in (-2, -1, 0, 1, 2)]
        new = [point for point in line if point not in tried]
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            for point, rows in zip(new, pool.imap(baseline_rows, new), strict=True):  # type: ignore[arg-type]
                tried[point] = rows  # type: ignore[index]
                print(f"{fitted_at(point)} {loss(rows):.4f}", file=sys.stderr, flush=True)  # type: ignore[arg-type]
        best = min(tried, key=lambda point: loss(tried[point]))
        write(tried)


def write(tried: Mapping[Point, Rows]) -> None:
    """Keep every point that was tried."""
    found = [{"point": point, "rows": {rate: list(row) for rate, row in rows.items()}} for point, rows in tried.items()]
    RESULTS.write_text(json.dumps(found) + "\n")


def read() -> dict[Point, Rows]:
    """Return every point that was tried."""
    found = json.loads(RESULTS.read_text())
    return {tuple(one["point"]): {int(rate): Row(*row) for rate, row in one["rows"].items()} for one in found}


def intervals(tried: Mapping[Point, Rows]) -> list[tuple[float, float]]:
    """Return the least and the largest value of each constant among the points that are nearly the best."""
    least = min(map(loss, tried.values()))
    near = [fitted_at(point) for point, rows in tried.items() if loss(rows) <= WORSE * least]
    values: list[Sequence[float]] = [(one.flops, 1000 * one.step_s, one.pool_bytes / 2**30) for one in near]
    return [(min(axis), max(axis)) for axis in zip(*values, strict=True)]


def left_out(tried: Mapping[Point, Rows]) -> dict[int, float]:
    """Return by rate the error of its throughput at the point that is best for all other rates."""
    found = {}
    for rate in RATES:
        others = [one for one in RATES if one != rate]
        best = min(tried, key=lambda point: loss(tried[point], others))
        found[rate] = tried[best][rate].throughput / BASELINE[rate].throughput - 1
    return found


def main() -> int:
    """Fit, and print what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    tried = read() if RESULTS.exists() else dict[Point, Rows]()
    descend(tried, parser.parse_args().processes)
    best = min(tried, key=lambda point: loss(tried[point]))
    print(fitted_at(best), f"loss {loss(tried[best]):.3f} of {len(tried)} points")
    print("intervals", intervals(tried))
    print("left out", left_out(tried))
    return 0


if __name__ == "__main__":
    sys.exit(main())
