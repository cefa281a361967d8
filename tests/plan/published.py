"""Published config.json files, planned and compared with what vLLM 0.33 plans for them.

    python -m tests.plan.published FOLDER             with vLLM's figures in the table
    python -m tests.plan.published FOLDER --changes   with vLLM's plans of files with one field changed

The repository has no file of others. `reference_plans/published.json` has digest, origin (repository, commit, path)
and vLLM's figures of each; `tests/vllm/published_plans.py` compares them with vLLM. FOLDER has the files themselves,
under any name: a file is known by the digest of its JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from kvplane.base.errors import InvalidArgument
from kvplane_plan.models.hf_config import model_of
from kvplane_plan.models.shapes import ModelOptions
from kvplane_plan.models.sizing import Sizing, figures_of

TABLE = Path(__file__).with_name("reference_plans") / "published.json"
MEMORY_BYTES = 80 << 30
AS_VLLM = ModelOptions(max_model_len=32768, state_checkpoints=True)


def digest_of(config: dict[str, Any]) -> str:
    """The name of a file in the table."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def outcome_of(config: dict[str, Any], expected: dict[str, Any]) -> str:
    """What the planner says of a file: equal, refused by the name of a field, or the two plans that differ."""
    try:
        found = figures_of(Sizing(model_of(config), AS_VLLM, MEMORY_BYTES))
    except InvalidArgument as error:
        return f"refused: {error.field}"
    figures = (found.num_blocks, sorted(one.num_layers for one in found.groups), round(found.concurrency, 6))
    wanted = tuple(expected[name] for name in ("num_blocks", "groups", "concurrency"))
    wanted = (*wanted[:2], round(wanted[2], 6))
    return "equal" if figures == wanted else f"different: {figures} instead of {wanted}"


def outcomes(folder: Path) -> dict[str, str]:
    """The outcome of each file of the table that the folder has, by digest."""
    table = json.loads(TABLE.read_text())["files"]
    found = {}
    for path in folder.glob("*.json"):
        config = json.loads(path.read_text())
        if isinstance(config, dict) and (digest := digest_of(config)) in table:
            found[digest] = outcome_of(config, table[digest])
    return found


def of_changes(folder: Path) -> int:
    """Compare the plans that `tests/vllm/published_plans.py --changes` wrote; exit status 1 if one differs."""
    counts = Counter[str]()
    for case in json.loads((folder / "changes.json").read_text()):
        outcome = outcome_of(case["config"], case)
        counts[outcome.partition(":")[0]] += 1
        if outcome.startswith("different"):
            print(case["config"]["model_type"], case["what"], outcome)
    print(dict(counts))
    return int(bool(counts["different"]))


def main() -> int:
    """Print the outcomes; exit status 1 if a plan differs, or less than 95 % of the files are planned."""
    if "--changes" in sys.argv:
        return of_changes(Path(sys.argv[1]))
    table, found = json.loads(TABLE.read_text())["files"], outcomes(Path(sys.argv[1]))
    for digest, outcome in found.items():
        if outcome != "equal":
            print(f"{table[digest]['origin']}: {outcome}")
    counts = Counter(outcome.partition(":")[0] for outcome in found.values())
    print(f"{len(found)} of {len(table)} files: {dict(counts)}")
    return int(bool(counts["different"]) or counts["equal"] < 0.95 * len(table))


if __name__ == "__main__":
    sys.exit(main())
