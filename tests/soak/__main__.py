"""`python -m tests.soak --minutes 10 --store sqlite`: exits 1 when something grows, or a call fails unexpectedly."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.soak.load import Load
from tests.soak.verdict import Verdict, read
from tests.store.servers import Server

# Small logs, which are full within the warm-up, so that later growth is a leak.
BOUNDS = {"decision_log_steps": 256, "events_resume": 256, "op_window": 256, "log_bytes": 16 << 20}
# Expected errors of the load: the replica or request was just removed.
EXPECTED = ("ReplicaLapsed", "ReplicaRecovering")


def soak(seconds: float, store: str, folder: Path, say=print) -> tuple[Verdict, Load]:
    """Run a service under load for the given time."""
    with ExitStack() as stack:
        where = f"sqlite:{folder / 'kv.db'}"
        if store == "redis":
            server = Server(folder / "redis")
            stack.callback(server.kill)
            where = f"redis://{server.address}"
        samples = folder / "samples.jsonl"
        bounds = [f"--set={name}={value}" for name, value in BOUNDS.items()]
        options = ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", f"--set=store={where}", *bounds]
        command = [sys.executable, "-m", "tests.soak.service", str(samples), "serve", *options]
        service = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        stack.callback(service.kill)
        assert service.stdout is not None
        address = service.stdout.readline().rpartition(" ")[2].strip()
        metrics = service.stdout.readline().rpartition("http://")[2].removesuffix("/metrics\n")
        load = Load(address, metrics)
        load.begin()
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(60.0, left_s))
            assert service.poll() is None, "the service ended"
            say(f"{load.done.total()} calls, {load.errors.total()} refused, {max(left_s - 60, 0):.0f} s left")
        load.end()
        verdict = read(samples)
        service.terminate()
        assert service.wait(60) == 0, "the service did not exit with status 0"
    return verdict, load


def unexpected(load: Load) -> dict[str, int]:
    """Errors that the load does not explain."""
    return {error: count for error, count in load.errors.items() if not any(name in error for name in EXPECTED)}


def main() -> int:
    """Run the soak test that the command line describes."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--store", choices=("sqlite", "redis"), default="sqlite")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        verdict, load = soak(given.minutes * 60, given.store, Path(folder))
    print(verdict)
    print(", ".join(f"{name} {count}" for name, count in sorted(load.done.items())))
    for error, count in unexpected(load).items():
        print(f"refused {count} times: {error}")
    for leak in verdict.leaks:
        print(f"grows: {leak}")
    return 1 if verdict.leaks or unexpected(load) else 0


if __name__ == "__main__":
    sys.exit(main())
