"""`python -m tests.fuzz SECONDS`: coverage-guided fuzzing of every gRPC handler of service and worker.

`--steps` fuzzes the compiled core instead, with the Python core as oracle (`tests.fuzz.steps`). What is found is
written to tests/fuzz/found, with `--steps` to found_steps, where the tests run it from then on, and ends the run with
an error.
"""

from __future__ import annotations

import resource
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import atheris

FOUND = Path(__file__).parent / "found"
MAX_PROGRAM_BYTES = 8192
PROGRAM_S = 20  # a program that takes longer hangs
STEPS_S = 300  # of steps, on a machine with other work
MAX_MIB = 3000
ENDS_WITH_MIB = 400  # growth after the first 5000 programs: more is a leak


def main(seconds: int) -> None:
    """Fuzz for this time; never returns, since libFuzzer ends the process."""
    with atheris.instrument_imports(
        include=["kvplane", "kvplane_kernels", "kvplane_plan", "kvplane_service", "kvplane_worker"]
    ):
        from tests.fuzz import mutator, world

    grounds = world.new_grounds()
    memory = Memory()

    def run(data: bytes) -> None:
        world.run(grounds, data)
        memory.look()

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        return mutator.mutate(data, max_size, seed, lambda raw: atheris.Mutate(raw, max(64, 2 * len(raw))))

    atheris.Setup(_arguments(seconds, FOUND, mutator.seeds()), run, custom_mutator=mutate)
    atheris.Fuzz()


def fuzz_steps(seconds: int) -> None:
    """Fuzz the compiled core for this time; never returns."""
    with atheris.instrument_imports(include=["kvplane_core"]):
        from tests.fuzz import steps
    memory = Memory()

    def run(data: bytes) -> None:
        steps.run(data)
        memory.look()

    atheris.Setup(_arguments(seconds, FOUND.with_name("found_steps"), steps.seeds(), STEPS_S), run)
    atheris.Fuzz()


def _arguments(seconds: int, found: Path, seeds: Iterable[bytes], most_s: int = PROGRAM_S) -> list[str]:
    corpus = Path(tempfile.mkdtemp(prefix="kvplane-corpus-"))
    for at, program in enumerate(seeds):
        (corpus / f"seed-{at:03}").write_bytes(program)
    return [
        sys.argv[0],
        f"-max_total_time={seconds}",
        f"-max_len={MAX_PROGRAM_BYTES}",
        f"-timeout={most_s}",
        f"-rss_limit_mb={MAX_MIB}",
        f"-artifact_prefix={found}/",
        "-print_final_stats=1",
        "-len_control=0",
        "-report_slow_units=1000",
        str(corpus),
    ]


class Memory:
    """The memory of this process, after warm-up and later."""

    def __init__(self) -> None:
        self.programs = 0
        self.warm_mib = 0.0

    def look(self) -> None:
        """Call it after each program; AssertionError when memory has grown by ENDS_WITH_MIB."""
        self.programs += 1
        if self.programs % 1000:
            return
        now_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        if self.programs == 5000:
            self.warm_mib = now_mib
        assert not self.warm_mib or now_mib < self.warm_mib + ENDS_WITH_MIB, f"{self.warm_mib} -> {now_mib} MiB"


if __name__ == "__main__":
    (fuzz_steps if "--steps" in sys.argv else main)(int(sys.argv[1]))
