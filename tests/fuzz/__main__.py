"""`python -m tests.fuzz SECONDS`: coverage-guided fuzzing of every gRPC handler of service and worker.

What is found is written to tests/fuzz/found, where the tests run it from then on, and ends the run with an error.
"""

from __future__ import annotations

import resource
import sys
import tempfile
from pathlib import Path

import atheris

FOUND = Path(__file__).parent / "found"
MAX_PROGRAM_BYTES = 8192
PROGRAM_S = 20  # a program that takes longer hangs
MAX_MIB = 3000
ENDS_WITH_MIB = 400  # growth after the first 5000 programs: more is a leak


def main(seconds: int) -> None:
    """Fuzz for this time; never returns, since libFuzzer ends the process."""
    with atheris.instrument_imports(include=["kvplane", "kvplane_service", "kvplane_worker"]):
        from tests.fuzz import mutator, world

    grounds = world.new_grounds()
    corpus = Path(tempfile.mkdtemp(prefix="kvplane-corpus-"))
    for at, program in enumerate(mutator.seeds()):
        (corpus / f"seed-{at:03}").write_bytes(program)
    memory = Memory()

    def run(data: bytes) -> None:
        world.run(grounds, data)
        memory.look()

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        return mutator.mutate(data, max_size, seed, lambda raw: atheris.Mutate(raw, max(64, 2 * len(raw))))

    arguments = [
        sys.argv[0],
        f"-max_total_time={seconds}",
        f"-max_len={MAX_PROGRAM_BYTES}",
        f"-timeout={PROGRAM_S}",
        f"-rss_limit_mb={MAX_MIB}",
        f"-artifact_prefix={FOUND}/",
        "-print_final_stats=1",
        "-len_control=0",
        str(corpus),
    ]
    atheris.Setup(arguments, run, custom_mutator=mutate)
    atheris.Fuzz()


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
    main(int(sys.argv[1]))
