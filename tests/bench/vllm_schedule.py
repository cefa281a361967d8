"""CPU time of schedule() of vLLM's scheduler, kvplane and stock: needs `make vllm-env`.

    python -m tests.bench.vllm_schedule [NUM_REQUESTS ...]
    python -m tests.bench.vllm_schedule --tiers [NUM_REQUESTS ...]

Stock, kvplane in process, the same on the Python core ("python"), kvplane followed by a service ("mirror"), and kvplane
with a service that decides ("remote"), whose program is sent while the step before it runs, take turns in one process
(`tests/vllm/schedule_times.py`), with a fake model. The times are CPU times of the engine's thread in schedule(); in
mode mirror they include submitting the step. `others` is the CPU time per step of the mirror's own thread; `waited` is
how long schedule() waited for the service that decides. With --tiers: stock and kvplane in process, without and with
the tiers of kvplane's connector, which copy each block that fills and load nothing; ratios are to the same without,
"none" is the ratio with a connector that does nothing: what vLLM takes for having one, and "both" that of the means of
schedule() and update_from_output() together: there the connector finds what a step fills.
Only the ratios can be compared between machines.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

from tests.vllm import environment
from tests.vllm.processes import Service

MODES = "kvplane", "python", "mirror", "remote"
TIERS = {"stock+tiers": "stock", "tiers": "kvplane"}  # the same without them
NULL = {"stock+tiers": "stock+null", "tiers": "null"}  # the same with a connector that does nothing
SCRIPT = environment.ROOT / "tests" / "vllm" / "schedule_times.py"


def times_of(*arguments: object) -> Any:
    """The times of a run of the script with these arguments."""
    env = environment.variables()
    env["PYTHONPATH"] = f"{environment.SOURCE}:{env['PYTHONPATH']}"
    command = [str(environment.PYTHON), "-P", str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, cwd=environment.SOURCE, env=env, capture_output=True, text=True, check=True)
    (line,) = [one for one in done.stdout.splitlines() if one.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def measure(num_requests: int, num_groups: int, load: str, address: str) -> str:
    """A line with the median times in microseconds and their ratios."""
    times = times_of(num_requests, num_groups, load, ",".join(("stock", *MODES)), address)
    stock, *ours = (statistics.median(times[name]["schedule"]) / 1000 for name in ("stock", *MODES))
    others = statistics.median(times["mirror"]["others"]) / 1000
    waited = statistics.median(times["remote"]["waited"]) * 1e6
    columns = "".join(f" {one:>9.0f} {one / stock:>6.2f}" for one in ours)
    return f"{num_requests:>4} {num_groups:>6} {load:>5} {stock:>9.0f}{columns} {others:>7.0f} {waited:>7.0f}"


def measure_tiers(num_requests: int, num_groups: int, load: str) -> str:
    """A line with the median times without and with tiers in microseconds, and the ratios of medians and of means, of
    them and of both.
    """
    times = times_of(num_requests, num_groups, load, ",".join((*TIERS.values(), *TIERS, *NULL.values())))
    columns = ""
    for tiers, without in TIERS.items():
        median, more, nothing = (
            statistics.median(times[name]["schedule"]) / 1000 for name in (without, tiers, NULL[tiers])
        )
        means = [statistics.mean(times[name]["schedule"]) for name in (without, tiers)]
        updates = [statistics.mean(times[name]["update"]) for name in (without, tiers)]
        ratios = (
            more / median,
            means[1] / means[0],
            nothing / median,
            (means[1] + updates[1]) / (means[0] + updates[0]),
        )
        columns += f" {median:>9.0f} {more:>9.0f}" + "".join(f" {one:>6.2f}" for one in ratios)
    return f"{num_requests:>4} {num_groups:>6} {load:>5}{columns}"


def main(sizes: list[int], has_tiers: bool) -> None:
    """Print the table."""
    names = "".join(f" {name:>9}  ratio" for name in MODES)
    head = f" stock us{names}  others  waited"
    if has_tiers:
        head = "".join(f" {without:>9} {'tiers':>9}  ratio  means   none   both" for without in TIERS.values())
    print(f"   N groups  load {head}")
    with Service() as service:
        for size in sizes:
            for groups in (1, 7):
                for rows in ("phase", "even"):
                    of = (size, groups, rows)
                    print(measure_tiers(*of) if has_tiers else measure(*of, service.address), flush=True)


if __name__ == "__main__":
    given = sys.argv[1:]
    main([int(one) for one in given if one != "--tiers"] or [8, 64, 256], "--tiers" in given)
