"""The outcome of replaying a recording."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from kvplane_replay.from_log import Outcome, replay_log
from kvplane_service.cli import FAILED
from kvplane_service.cli.asking import columns


def show_log(path: Path, pool_blocks: int | None, as_json: bool) -> int:
    """Replay and print; returns the exit code. A what-if is shown beside the recorded pool."""
    outcome = replay_log(path, pool_blocks)
    as_recorded = replay_log(path) if outcome.is_what_if else outcome
    if as_json:
        print(json.dumps({"replayed": asdict(outcome), "as_recorded": asdict(as_recorded)}, indent=2))
    else:
        print(_text(outcome, as_recorded))
    return 0 if as_recorded.identical == as_recorded.decisions else FAILED


def _text(outcome: Outcome, as_recorded: Outcome) -> str:
    head = f"{as_recorded.replica}, recorded by kvplane {as_recorded.version}: "
    head += f"{as_recorded.identical:,} of {as_recorded.decisions:,} decisions identical"
    if as_recorded.first_difference:
        head += f"; the first other one is step {as_recorded.first_difference}"
    if outcome.is_cut:
        head += "; the file ends inside the next one"
    if not outcome.is_what_if:
        rows = [("", f"{outcome.num_blocks:,} BLOCKS")]
        rows += [(name.replace("_", " "), f"{count:,}") for name, count in outcome.counts.items()]
        return f"{head}\n{columns(rows)}"
    table = [("", f"{outcome.recorded_blocks:,} BLOCKS", f"{outcome.num_blocks:,} BLOCKS")]
    for name, count in outcome.counts.items():
        table.append((name.replace("_", " "), f"{as_recorded.counts[name]:,}", f"{count:,}"))
    table.append(("steps not applied", "0", f"{outcome.not_applied:,}"))
    return f"{head}\n{columns(table)}"
