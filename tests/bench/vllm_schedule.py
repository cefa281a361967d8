"""CPU time of schedule() of vLLM's scheduler, kvplane and stock: needs `make vllm-env`.

    python -m tests.bench.vllm_schedule [NUM_REQUESTS ...]

Stock, kvplane in process, the same on the Python core ("python"), kvplane followed by a service ("mirror"), and kvplane
with a service that decides ("remote"), whose program is sent while the step before it runs, take turns in one process
(`tests/vllm/schedule_times.py`), with a fake model. The times are CPU times of the engine's thread in schedule(); in
mode mirror they include submitting the step. `others` is the CPU time per step of the mirror's own thread; `waited` is
how long schedule() waited for the service that decides. Only the ratios can be compared between machines.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

from tests.vllm import environment
from tests.vllm.processes import Service

MODES = "kvplane", "python", "mirror", "remote"
SCRIPT = environment.ROOT / "tests" / "vllm" / "schedule_times.py"


def measure(num_requests: int, num_groups: int, load: str, address: str) -> str:
    """A line with the median times in microseconds and their ratios."""
    env = environment.variables()
    env["PYTHONPATH"] = f"{environment.SOURCE}:{env['PYTHONPATH']}"
    command = [str(environment.PYTHON), "-P", str(SCRIPT), str(num_requests), str(num_groups), load, address]
    done = subprocess.run(command, cwd=environment.SOURCE, env=env, capture_output=True, text=True, check=True)
    (line,) = [one for one in done.stdout.splitlines() if one.startswith("RESULT ")]
    times = json.loads(line.removeprefix("RESULT "))
    stock, *ours = (statistics.median(times[name]["schedule"]) / 1000 for name in ("stock", *MODES))
    others = statistics.median(times["mirror"]["others"]) / 1000
    waited = statistics.median(times["remote"]["waited"]) * 1e6
    columns = "".join(f" {one:>9.0f} {one / stock:>6.2f}" for one in ours)
    return f"{num_requests:>4} {num_groups:>6} {load:>5} {stock:>9.0f}{columns} {others:>7.0f} {waited:>7.0f}"


if __name__ == "__main__":
    columns = "".join(f" {name:>9}  ratio" for name in MODES)
    print(f"   N groups  load  stock us{columns}  others  waited")
    with Service() as service:
        for size in [int(given) for given in sys.argv[1:]] or [8, 64, 256]:
            for groups in (1, 7):
                for rows in ("phase", "even"):
                    print(measure(size, groups, rows, service.address), flush=True)
