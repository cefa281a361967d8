"""Recordings that hold the rules of the core still: what a `CORE_VERSION` stands for.

    python -m tests.core.core_version        record what the core decides now, for a new CORE_VERSION or a new mix

A mirror compares only CORE_VERSION before it trusts that engine and service decide equally. So a change after which
equal steps have other results, or the exported state other bytes, needs a new version. Each recording is of a random
engine that does everything that the contract permits: its state after some steps, and the steps behind it with digests
of their results.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from random import Random

from kvplane.base.session import CORE_VERSION
from kvplane.base.step import Part, PartResult, Step, StepResult
from kvplane_core.face.state import export_state
from kvplane_service.decisions.log import Decision, Entry, Life
from kvplane_service.decisions.recording import MAGIC, header_of, message_of, write_frame
from tests.core.builders import replica_spec
from tests.core.page_engine import RandomEngine
from tests.core.test_page_contents import MIXES

FOLDER = Path(__file__).with_name("core_versions")
BEFORE, STEPS = 25, 60  # steps before the state is exported, and recorded steps


class RecordedEngine(RandomEngine):
    """A random engine that keeps its steps and their results."""

    def __init__(self, *given, **options) -> None:
        self.decisions: list[Decision] = []
        super().__init__(*given, **options)
        self.hashes = True  # recordings have no tokens

    def apply(self, parts: list[Part]) -> list[PartResult]:
        results = super().apply(parts)
        step = Step(self.epoch, self.seq, parts, executed_through=self.executed_through)
        result = StepResult(self.seq, 0, results, self.replica.executed_through)
        self.decisions.append(Decision(step, result, tuple(part.events for part in results), 0, 0))
        return results


def files(version: int = CORE_VERSION) -> list[Path]:
    """The recordings of a version."""
    return sorted((FOLDER / f"v{version}").glob("*.log"))


def write() -> None:
    """Record this version; what is recorded already is not recorded again."""
    folder = FOLDER / f"v{CORE_VERSION}"
    paths = [folder / f"{number:02}.log" for number in range(len(MIXES))]
    if all(path.exists() for path in paths):
        sys.exit(f"{folder} is complete: raise CORE_VERSION in kvplane.base.session")
    if not folder.exists():
        shutil.rmtree(FOLDER, ignore_errors=True)
        folder.mkdir(parents=True)
    for number, (mix, path) in enumerate(zip(MIXES, paths, strict=True)):
        if path.exists():
            continue
        groups, changes = MIXES[mix][0], {"num_blocks": 24, **MIXES[mix][1]}
        drafts = 2 if "drafts" in mix else 0
        spec = replica_spec(*groups, max_model_len=64, max_in_flight_tokens=256, **changes)
        engine = RecordedEngine(spec, Random(number + 1), drafts)
        engine.deaths = 0
        for _ in range(BEFORE):
            engine.step()
        state = export_state(engine.replica)
        engine.decisions.clear()
        for _ in range(STEPS):
            engine.step()
        size = engine.replica.digest_size
        with path.open("wb") as file:
            file.write(MAGIC)
            write_frame(file, header_of(mix, engine.spec))
            recorded: list[Entry] = [Life(engine.epoch, (), [], 0, 1, state=state), *engine.decisions]
            for entry in recorded:
                write_frame(file, message_of(entry, size))


if __name__ == "__main__":
    write()
