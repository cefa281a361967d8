"""Writes the tables of docs/published.md and their pictures from results/tables.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib import rc_context

from kvplane_tools.cli.plots import new_figure
from tests.bench.tables import fit, published, users
from tests.bench.tables.fleet import COLUMNS as PUBLISHED_COLUMNS
from tests.bench.tables.model import FITTED, LINK_BYTES_PER_S, STORAGE_BYTES_PER_S
from tests.bench.tables.product import COLUMNS as PRODUCT_COLUMNS
from tests.bench.tables.published import BASELINE, BOTH, OFFLOADED, RATES
from tests.bench.tables.runs import (
    BEYOND,
    LARGE_POOL,
    PUBLISHED_POLICY,
    SEED_COLUMN,
    SEEDS,
    TRACE_COLUMNS,
    TRACES,
    Run,
    bounds,
    capacity_ratio,
    key_of,
    least_drain_s,
)
from tests.service.tier_rows import rows_of_hit

DOCS = Path(__file__).parents[3] / "docs"
JSON = Path(__file__).parents[1] / "results" / "tables.json"
PUBLISHED: Mapping[str, Mapping[int, float]] = {
    "baseline": {rate: row.throughput for rate, row in BASELINE.items()},
    "offloaded": {rate: row.throughput for rate, row in OFFLOADED.items()},
    "both": BOTH,
}
MOST_ERROR, LATE_S, GOAL_RATES = 0.15, 2.0, (60, 80)
KNOWN_CPU = ("fleet", "beyond", "seeds", "sensitivity", "traces")  # tables whose stages state it
SHADES = {"light": "#222222", "dark": "#dddddd"}

Results = Mapping[str, Any]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def error(predicted: float, known: float) -> str:
    """Return a predicted value with its error; one above `MOST_ERROR` is bold."""
    share = predicted / known - 1
    text = f"{predicted:,.0f} ({share:+.0%})"
    return f"**{text}**" if abs(share) > MOST_ERROR else text


def fleet_table(results: Results) -> list[str]:
    """Predicted and published throughput, and mean TTFT."""
    found = {column: {stage["rate"]: stage for stage in results["fleet"][column]} for column in PUBLISHED_COLUMNS}
    head = ["QPS", *(f"{column}: published | predicted | TTFT s" for column in PUBLISHED_COLUMNS)]
    known: dict[str, Mapping[int, published.Row]] = {"baseline": BASELINE, "offloaded": OFFLOADED}
    rows = []
    for rate in RATES:
        cells = [str(rate)]
        for column in PUBLISHED_COLUMNS:
            stage, tokens = found[column][rate], PUBLISHED[column][rate]
            times = f"{stage['ttft_s']:.2f}"
            if column in known:
                times += f" (published {known[column][rate].ttft_s:.2f})"
            cells += [f"{tokens:,.0f}", error(stage["throughput"], tokens), times]
        rows.append(cells)
    return table([one for cell in head for one in cell.split(" | ")], rows)


def late_from(stages: Sequence[Mapping[str, float]]) -> str:
    """Return between which rates the p99 of TTFT passes `LATE_S`."""
    if stages[0]["ttft_p99_s"] > LATE_S:
        return f"below {stages[0]['rate']:.0f}"
    for one, other in pairwise(stages):
        if other["ttft_p99_s"] > LATE_S:
            return f"{one['rate']:.0f} to {other['rate']:.0f}"
    return f"above {stages[-1]['rate']:.0f}"


def beyond_table(results: Results) -> list[str]:
    """The published policy and kvplane's columns beyond the published rates."""
    head = ["column"]
    for rate in BEYOND:
        head += [f"{rate} QPS: tokens/s", "p50 s", "p99 s", "hit"]
    rows = []
    for column in (PUBLISHED_POLICY, *PRODUCT_COLUMNS):
        stages = results["beyond"].get(column)
        if stages is None:
            continue
        cells = ["published policy" if column == PUBLISHED_POLICY else column]
        for stage in (one for one in stages if one["rate"] in BEYOND):
            cells += [f"{stage['throughput']:,.0f}", f"{stage['ttft_p50_s']:.2f}", f"{stage['ttft_p99_s']:.2f}"]
            cells.append(f"{stage['hit']:.0%}")
        rows.append([*cells, late_from(stages)])
    return table([*head, f"QPS at which p99 passes {LATE_S:g} s"], rows)


def goal_line(results: Results) -> list[str]:
    """What a column reaches of the goal at 60 QPS and beyond, by seed, and the bounds of the hardware."""
    found = {**results["beyond"], **results["seeds"]}
    (by_flops, by_both), (large, factors), first = bounds(FITTED), LARGE_POOL, GOAL_RATES[0]
    most = gain(found, key_of(Run(large, factors=factors)), PUBLISHED_POLICY, first)
    rows, seeds, both = [], (1, *SEEDS), (SEED_COLUMN, PUBLISHED_POLICY)
    mine, policy = ([key_of(Run(column, seed=seed)) for seed in seeds] for column in both)
    for rate in GOAL_RATES:
        least_s, cells = published.STAGE_S + least_drain_s(FITTED, rate), [str(rate)]
        for one, other in zip(mine, policy, strict=True):
            cells += [f"{gain(found, one, other, rate):.2f}", f"{_at(found, other, rate)['virtual_s'] / least_s:.2f}"]
            cells.append(" and ".join(f"{_at(found, key, rate)['ttft_p99_s']:.1f} s" for key in (one, other)))
        rows.append(cells)
    head = [cell for seed in seeds for cell in (f"seed {seed}: gain", "most possible", "p99, and of the policy")]
    return [
        *table(["QPS", *head], rows),
        "",
        f"With a pool {factors[0][1]:.0f} times as large `{large}` has {most:.2f} times the throughput at {first}.",
        f"Bounds of the model's hardware: {by_flops:.0f} QPS by the operations of prefills that reuse what is shared,",
        f"{by_both:.0f} QPS with the bytes that decode steps read, if one prefix and its requests fill each pool.",
    ]


def gain(found: Results, key: str, other: str, rate: int) -> float:
    """Return the throughput of a run, relative to that of another."""
    return _at(found, key, rate)["throughput"] / _at(found, other, rate)["throughput"]


def _at(found: Results, key: str, rate: int) -> Mapping[str, float]:
    stage: Mapping[str, float] = next(one for one in found[key] if one["rate"] == rate)
    return stage


def fit_table(results: Results) -> list[str]:
    """The fitted constants with their intervals, and the error of each rate that was left out."""
    del results
    tried = fit.read()
    values = (FITTED.flops, 1000 * FITTED.step_s, FITTED.pool_bytes / 2**30)
    names = ("prefill, of 989 TFLOP/s", "fixed part of a decode step, ms", "pool, GiB")
    rows = [
        [name, f"{value:.3g}", f"{low:.3g} to {high:.3g}"]
        for name, value, (low, high) in zip(names, values, fit.intervals(tried), strict=True)
    ]
    out = fit.left_out(tried)
    return [
        *table(["constant", "fitted", "interval"], rows),
        "",
        *table(
            ["left out, QPS", *map(str, out)], [["error of its throughput", *(f"{one:+.0%}" for one in out.values())]]
        ),
    ]


def sensitivity_table(results: Results) -> list[str]:
    """Throughput at 40 QPS with each constant changed, on a quarter of the fleet."""
    found, rows = results["sensitivity"], []
    changes = [key.removeprefix("baseline") for key in found if key.startswith("baseline")]
    for change in changes:
        stages = [found[column + change][-1] for column in PUBLISHED_COLUMNS]
        cells = [f"{one['throughput']:,.0f}, {one['ttft_s']:.1f} s" for one in stages]
        rows.append([change.strip().replace("*", " x ") or "as fitted", *cells])
    return table(["change", *PUBLISHED_COLUMNS], rows)


def traces_table(results: Results) -> list[str]:
    """The published policy and kvplane's columns on public traces."""
    rows = []
    for trace, rates in TRACES.items():
        for rate in rates:
            for column in TRACE_COLUMNS:
                (stage,) = results["traces"][f"{column} {trace} {rate}"]
                name = "published policy" if column == PUBLISHED_POLICY else column
                times = [f"{stage[f'ttft_{part}s']:.2f}" for part in ("", "p50_", "p99_")]
                rows.append([trace, str(rate), name, f"{stage['throughput']:,.0f}", *times, f"{stage['hit']:.0%}"])
    return table(["trace", "QPS", "column", "tokens/s", "mean TTFT s", "p50 s", "p99 s", "hit"], rows)


def users_table(results: Results) -> list[str]:
    """Where the throughput falls, and what it is before and after; the published one, then the predicted one."""
    rows = []
    for one in users.CACHES:
        (last, first), before, after = published.USERS[one.tiers, one.hybrid]
        known = [f"{last} to {first}", f"{before},000", f"{after},000"]
        pairs = zip(known, fall_cells(results["users"][one.name]), strict=True)
        rows.append([one.name, *(cell for pair in pairs for cell in pair)])
    names = ("fall, users", "tokens/s before", "after")
    head = [f"{name}: {by}" for name in names for by in ("published", "predicted")]
    return table(["cache", *head], rows)


def fall_cells(stages: Sequence[Mapping[str, float]]) -> list[str]:
    """Return between which numbers of users the throughput falls, and the throughputs there and after."""
    at = users.fall(stages)
    if at is None:
        return [f"above {stages[-1]['users']:.0f}", f"{stages[-1]['throughput']:,.0f}", "no fall"]
    before, after = stages[at - 1], stages[at]
    between = f"{before['users']:.0f} to {after['users']:.0f}"
    return [between, f"{before['throughput']:,.0f}", f"{stages[-1]['throughput']:,.0f}"]


@cache
def loads() -> Mapping[tuple[str, int, str], tuple[float, float]]:
    """Return the seconds of ten prompts of 131,072 tokens, without and with hybrid transfers: bytes by link alone."""
    found = {}
    for model, ranks, tier in published.LOADS:
        rows = rows_of_hit(model, 131_072, tensor_parallel=ranks)
        speed = LINK_BYTES_PER_S if tier == "CPU" else STORAGE_BYTES_PER_S / ranks
        whole, needed = (10 * rows.num_bytes(some) / speed for some in (rows.everything, rows.needed))
        found[model, ranks, tier] = whole, needed
    return found


def loads_table(results: Results) -> list[str]:
    """Loads of ten long prompts."""
    del results
    rows = []
    for (model, ranks, tier), (whole, needed) in published.LOADS.items():
        mine = loads()[model, ranks, tier]
        rows.append([
            f"{model}, TP {ranks}", tier, f"{whole:.2f} and {needed:.2f}, {whole / needed:.2f}x",
            f"{mine[0]:.2f} and {mine[1]:.2f}, {mine[0] / mine[1]:.2f}x",
        ])  # fmt: skip
    return table(["model", "tier", "published s", "bytes by link, s"], rows)


def claims_table(results: Results) -> list[str]:
    """One row per claim."""
    at_40 = {column: results["fleet"][column][-1]["throughput"] for column in PUBLISHED_COLUMNS}
    gains = [f"{at_40[column] / at_40['baseline'] - 1:+.0%}" for column in ("offloaded", "both")]
    ratio = loads()["gpt-oss-120b", 4, "CPU"]
    capacity = capacity_ratio(16_384)
    rows = [
        ["a CPU tier adds throughput at 40 QPS", "about 75 %", gains[0], "`make tables`"],
        ["scoring both tiers", "roughly 115 %", gains[1], "`make tables`"],
        ["capacity with the hybrid allocator", f"{published.CAPACITY_RATIO}x", f"{capacity:.2f}x",
         "`kvplane plan gpt-oss-120b --context 131072 --batched-tokens 16384 --block-size 128`"],
        ["loads of 128k tokens", "1.8x to 1.9x", f"{ratio[0] / ratio[1]:.2f}x the bytes", "`make tables`"],
    ]  # fmt: skip
    return table(["claim", "published", "here", "command"], rows)


def speed_line(results: Results) -> list[str]:
    """How fast the simulation is."""
    stages = [stage for column in results["fleet"].values() for stage in column]
    virtual, cpu, steps = (sum(stage[name] for stage in stages) for name in ("virtual_s", "cpu_s", "steps"))
    every = [stage for table in KNOWN_CPU for stages in results.get(table, {}).values() for stage in stages]
    return [
        f"All tables but that of users took {sum(stage['cpu_s'] for stage in every):,.0f} s of CPU.",
        f"The fleet table simulates {virtual:,.0f} s of 16 engines in {cpu:,.0f} s of CPU:",
        f"{virtual / cpu:.1f} simulated seconds per CPU second, {steps:,} steps of {1e6 * cpu / steps:,.0f} us.",
        f"Machine: {results['machine']}.",
    ]


BLOCKS: Mapping[str, Callable[[Results], list[str]]] = {
    "claims": claims_table, "fleet": fleet_table, "fit": fit_table, "beyond": beyond_table, "goal": goal_line,
    "sensitivity": sensitivity_table,
    "traces": traces_table, "users": users_table, "loads": loads_table, "speed": speed_line,
}  # fmt: skip


NEEDS = {"claims": "fleet", "speed": "machine", "goal": "seeds"} | {
    name: name for name in ("fleet", "beyond", "sensitivity", "traces", "users")
}


def lines_of(name: str, results: Results) -> list[str]:
    """Return a generated part, if its runs are recorded."""
    return BLOCKS[name](results) if NEEDS.get(name, "fleet") in results else ["Not run."]


def filled(page: str, results: Results) -> str:
    """Return the page with its generated parts, of which each is between two comments."""
    for name in BLOCKS:
        begin, end = f"<!-- generated: {name} -->", "<!-- end -->"
        text = "\n".join([begin, "", *lines_of(name, results), "", end])
        page, count = re.subn(f"{begin}.*?{end}", lambda _, text=text: text, page, count=1, flags=re.DOTALL)  # type: ignore[misc]
        assert count, f"docs/published.md has no part {name!r}"
    return page


def draw(results: Results) -> None:
    """Write the pictures, light and dark."""
    inked: tuple[Any, ...] = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    for shade, ink in SHADES.items():
        settings: dict[Any, Any] = {"svg.hashsalt": "tables", "axes.facecolor": "none", "legend.framealpha": 0.0}
        with rc_context({**dict.fromkeys(inked, ink), **settings}):
            for name, picture in (("fleet", _draw_fleet), ("beyond", _draw_beyond), ("users", _draw_users)):
                if name in results:
                    picture(results[name], DOCS / f"published-{name}-{shade}.svg")


def _draw_fleet(columns: Mapping[str, Any], path: Path) -> None:
    figure = new_figure()
    axes = figure.add_subplot()
    for number, (name, stages) in enumerate(columns.items()):
        axes.plot(RATES, [one["throughput"] for one in stages], color=f"C{number}", label=f"{name}, predicted")
        axes.plot(RATES, list(PUBLISHED[name].values()), "o", color=f"C{number}", label=f"{name}, published")
    axes.set_xlabel("requests per second")
    axes.set_ylabel("tokens/s, as published")
    axes.legend(loc="upper left")
    _save(figure, path)


def _draw_beyond(columns: Mapping[str, Any], path: Path) -> None:
    figure = new_figure()
    axes = figure.add_subplot()
    for name in (PUBLISHED_POLICY, *PRODUCT_COLUMNS):
        label, stages = "published policy" if name == PUBLISHED_POLICY else name, columns[name]
        axes.plot([one["rate"] for one in stages], [one["ttft_p99_s"] for one in stages], "o-", label=label)
    axes.set_yscale("log")
    axes.axhline(LATE_S, linestyle=":", color="C7")
    axes.set_xlabel("requests per second")
    axes.set_ylabel("p99 of TTFT, s")
    axes.legend(loc="upper left")
    _save(figure, path)


def _draw_users(columns: Mapping[str, Any], path: Path) -> None:
    """Predicted are lines; published are points: the last level before a fall, and the first one after it."""
    figure = new_figure()
    axes = figure.add_subplot()
    for number, one in enumerate(users.CACHES):
        stages, style = columns[one.name], "-" if one.hybrid else "--"
        throughputs = [stage["throughput"] for stage in stages]
        axes.plot([stage["users"] for stage in stages], throughputs, style, color=f"C{number // 2}", label=one.name)
        levels, *thousands = published.USERS[one.tiers, one.hybrid]
        points = [1000 * value for value in thousands]
        axes.plot(levels, points, "o" if one.hybrid else "x", color=f"C{number // 2}")
    axes.set_xlabel("users")
    axes.set_ylabel("prompt tokens/s")
    axes.set_ylim(0, 600_000)  # room for the legend
    axes.legend(loc="upper right", ncols=2)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, transparent=True, metadata={"Date": None})
    path.write_text("".join(f"{line.rstrip()}\n" for line in path.read_text().splitlines()))


def write(results: Results) -> str:
    """Write page and pictures; return the page's generated parts."""
    page = DOCS / "published.md"
    page.write_text(filled(page.read_text(), results))
    draw(results)
    return "\n\n".join("\n".join(lines_of(name, results)) for name in BLOCKS)
