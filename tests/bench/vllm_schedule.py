"""CPU time of schedule() of vLLM's scheduler, kvplane and stock: needs `make vllm-env`.

    python -m tests.bench.vllm_schedule [NUM_REQUESTS ...]

Stock, kvplane in process, and kvplane with a service, whose program is sent while the step before it runs, take turns
in one process (`tests/vllm/schedule_times.py`), with a fake model. The times are CPU times of the engine's thread;
`waited` is how long schedule() waited for the service's answer. Only the ratios can be compared between machines.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

from tests.vllm import environment
from tests.vllm.processes import Service

SCRIPT = environment.ROOT / "tests" / "vllm" / "schedule_times.py"


def measure(num_requests: int, num_groups: int, load: str, address: str) -> str:
    """A line with the median times in microseconds and their ratios."""
    env = environment.variables()
    env["PYTHONPATH"] = f"{environment.SOURCE}:{env['PYTHONPATH']}"
    command = [str(environment.PYTHON), "-P", str(SCRIPT), str(num_requests), str(num_groups), load, address]
    done = subprocess.run(command, cwd=environment.SOURCE, env=env, capture_output=True, text=True, check=True)
    (line,) = [one for one in done.stdout.splitlines() if one.startswith("RESULT ")]
    times = json.loads(line.removeprefix("RESULT "))
    stock, ours, remote = (statistics.median(times[name]["schedule"]) / 1000 for name in ("stock", "kvplane", "remote"))
    waited = statistics.median(times["remote"]["waited"]) * 1e6
    line = f"{num_requests:>4} {num_groups:>6} {load:>5} {stock:>9.0f} {ours:>9.0f} {ours / stock:>6.2f}"
    return f"{line} {remote:>9.0f} {remote / stock:>6.2f} {waited:>9.0f}"


if __name__ == "__main__":
    print("   N groups  load  stock us   kvplane  ratio    remote  ratio   waited")
    with Service() as service:
        for size in [int(given) for given in sys.argv[1:]] or [8, 64, 256]:
            for groups in (1, 7):
                for rows in ("phase", "even"):
                    print(measure(size, groups, rows, service.address), flush=True)
