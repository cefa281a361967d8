"""`make tables`: the published tables, predicted, and what kvplane adds; 10 minutes on 2 quiet cores.

    python -m tests.bench.tables                 writes results/tables.json, docs/published.md and its pictures
    python -m tests.bench.tables --only fleet    runs these tables, and leaves the others as they were
    python -m tests.bench.tables --draw          writes page and pictures from results/tables.json

What each table shows is in docs/published.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Sequence

from tests.bench.machine import machine_line
from tests.bench.tables import fleet, product
from tests.bench.tables.page import JSON, write
from tests.bench.tables.runs import (
    LARGE_POOL,
    PARTS,
    PUBLISHED_POLICY,
    SEED_COLUMN,
    SEEDS,
    SWEEP,
    TRACE_COLUMNS,
    TRACES,
    Run,
    key_of,
    stages_of,
)
from tests.bench.tables.users import CACHES, sweep
from tests.conftest import workloads_folder, workloads_line

SENSITIVE, FACTORS = ("flops", "step_s", "pool_bytes", "bandwidth"), (0.8, 1.2)
TABLES: dict[str, Sequence[Run]] = {
    "beyond": [
        *(Run(column, SWEEP, parts=PARTS) for column in (PUBLISHED_POLICY, *product.COLUMNS)),
        Run(LARGE_POOL[0], SWEEP, LARGE_POOL[1], PARTS),
    ],
    "seeds": [
        Run(column, SWEEP, parts=PARTS, seed=seed) for column in (PUBLISHED_POLICY, SEED_COLUMN) for seed in SEEDS
    ],
    "sensitivity": [
        Run(column, (40,), factors, PARTS)
        for column in fleet.COLUMNS
        for factors in ((), *(((name, factor),) for name in SENSITIVE for factor in FACTORS))
    ],
    "traces": [
        Run(column, (rate,), stage_s=1e9, trace=trace)
        for trace, rates in TRACES.items()
        for rate in rates
        for column in TRACE_COLUMNS
    ],
    "fleet": [Run(column) for column in fleet.COLUMNS],
}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.tables", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[*TABLES, "users"], default=[*TABLES, "users"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--draw", action="store_true")
    given = parser.parse_args()
    results = json.loads(JSON.read_text()) if JSON.exists() else {}
    if not given.draw:
        if "traces" in given.only and workloads_folder() is None:
            print(workloads_line(), file=sys.stderr)
            given.only.remove("traces")
        results |= {table: {} for table in given.only}
        runs = [(table, run) for table in given.only if table in TABLES for run in TABLES[table]]
        with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
            if "users" in given.only:
                swept = pool.map(sweep, CACHES, chunksize=1)
                results["users"] = {cache.name: stages for cache, stages in zip(CACHES, swept, strict=True)}
            found = pool.imap(stages_of, [run for _, run in runs])
            for (table, run), stages in zip(runs, found, strict=True):
                results[table][key_of(run)] = stages
                JSON.write_text(json.dumps(results, indent=1) + "\n")
                last = stages[-1]
                print(f"{table}: {key_of(run)}: {last['throughput']:,.0f} tokens/s, TTFT {last['ttft_s']:.2f} s at "
                      f"{last['rate']} QPS", file=sys.stderr, flush=True)  # fmt: skip
        if "fleet" in given.only:
            results["machine"] = machine_line()  # of the table whose speed is printed
        JSON.write_text(json.dumps(results, indent=1) + "\n")
    print(write(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
