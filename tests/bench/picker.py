"""CPU time of `kvplane router` per HTTP request that a real Envoy sends through its endpoint picker.

    python -m tests.bench.picker [REQUESTS]      600 requests of 8 clients to two engines, half of the answers streamed

Prints the CPU time of the router and of Envoy per request, and the time of a request through Envoy and directly, which
means something on a quiet machine only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory

from tests.bench.machine import machine_line
from tests.router.test_picker import Gateway, sent, tokens

CLIENTS = 8
PROMPT_BLOCKS = 128


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def times_s(url: str, requests: int) -> list[float]:
    """Return the duration of each request."""

    def one(number: int) -> float:
        prompt = [*tokens(number % 20, PROMPT_BLOCKS), *tokens(number, 1)]
        began = time.perf_counter()
        status, _, body = sent(url, {"model": "m", "prompt": prompt, "stream": number % 2 == 0})
        assert status == 200, body
        return time.perf_counter() - began

    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(one, range(requests)))


def main() -> None:
    """Print the figures."""
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 600
    with TemporaryDirectory() as folder:
        gateway = Gateway(Path(folder))
        try:
            gateway.wait_until(lambda places: all(one.state == "current" for one in places.values()))
            times_s(gateway.envoy.url, 50)
            processes = {"router": gateway.router.pid, "Envoy": gateway.envoy.process.pid}
            before = {name: cpu_s(pid) for name, pid in processes.items()}
            through = times_s(gateway.envoy.url, requests)
            spent = {name: 1e3 * (cpu_s(pid) - before[name]) / requests for name, pid in processes.items()}
            direct = times_s(f"http://127.0.0.1:{gateway.ports['a']}", requests)
        finally:
            gateway.close()
    print(machine_line())
    print(json.dumps({f"{name} CPU ms per request": round(value, 2) for name, value in spent.items()}))
    for name, found in (("through Envoy", through), ("directly", direct)):
        cuts = quantiles(found, n=100)
        print(f"{name}: p50 {1e3 * cuts[49]:.1f} ms, p99 {1e3 * cuts[98]:.1f} ms")


if __name__ == "__main__":
    main()
