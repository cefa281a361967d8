"""Engine lives on one kvplane worker, each with one more changed setting: which get new memory, and which keep theirs?

python tests/vllm/incarnations.py WORKER

Runs in the environment of vLLM (`environment`). Prints the result as JSON: for each life whether its memory is new, and
how many keys it kept.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import workload
from restarts import POOLS, Life, forked, paged
from safetensors.torch import load_file, save_file

import kvplane_vllm.worker as kvplane_worker

# Name of a life → the settings that change; all further lives have them too.
CHANGES: dict[str, dict[str, Any]] = {
    "first": {},
    "same": {},
    "moved model": {"folder": "moved"},
    "num_blocks": {"num_blocks": 70},
    "block_size": {"block_size": 64},
    "dtype": {"dtype": "bfloat16"},
    "weights": {"folder": "changed"},
    "hash seed": {"variable": ("PYTHONHASHSEED", "7")},
    "layout": {"layout": "BLHNC"},
}


def change_weights(folder: Path) -> None:
    """Change one number of one layer."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.2.mlp.up_proj.weight"][3, 5] += 1.0
    save_file(weights, file, {"format": "pt"})


def main(worker: str) -> None:
    """Run the lives, and print the result."""
    results: dict[str, dict[str, Any]] = {}
    settings: dict[str, Any] = {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        for copy in ("moved", "changed"):
            shutil.copytree(workload.MODELS / "llama", folder / copy / "llama")
        change_weights(folder / "changed" / "llama")
        incarnation = 0
        for life_name, changes in CHANGES.items():
            settings |= changes

            def live(options: dict[str, Any] = dict(settings)) -> None:  # noqa: B006
                if "variable" in options:
                    variable, value = options.pop("variable")
                    os.environ[variable] = value
                if "layout" in options:
                    name = options.pop("layout")  # the CPU has one layout only
                    digest = kvplane_worker.layout_digest
                    kvplane_worker.layout_digest = lambda one, config, _, sizes: digest(one, config, name, sizes)  # type: ignore[assignment]
                if "folder" in options:
                    workload.MODELS = folder / options.pop("folder")
                POOLS["llama"] = options.pop("num_blocks", POOLS["llama"])
                life = Life("llama", folder, **paged(worker), **options)
                life.report["incarnation"] = life.manager._memory.tables[0].incarnation
                life.report["kept"] = life.manager.recovered.kept
                life.run(list(enumerate(workload.prompts("llama", 3)))[:2], {})
                life.end()

            found = forked(folder, live)
            results[life_name] = {"new": found["incarnation"] != incarnation, "kept": found["kept"]}
            incarnation = found["incarnation"]
    print("RESULT " + json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
