"""Write what the classes of transformers give fields that a config.json leaves out, for the types that kvplane reads.

    .tools/vllm/bin/python tests/vllm/config_defaults.py

Only fields that a reader of `kvplane_plan.models.model_types` names are written, and none that is null by default.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "service"), str(ROOT / "clients" / "python")]

from transformers import CONFIG_MAPPING  # noqa: E402

from kvplane_plan.models.model_types import READERS  # noqa: E402

MODELS = ROOT / "service" / "kvplane_plan" / "models"
# Read to be ignored, or filled in by the class itself.
LEFT_OUT = {
    "adapter_rank",
    "architectures",
    "attention_hidden_size",
    "chunk_size",
    "intermediate_size",
    "kv_channels",
    "layer_types",
    "mamba_chunk_size",
    "max_window_layers",
    "model_type",
    "num_mem_blocks",
    "q_lora_rank",
    "qk_nope_head_dim",
    "time_step_rank",
    "v_head_dim",
}


def defaults_of(model_type: str, names: set[str]) -> dict[str, Any]:
    """The defaults of one class."""
    found = {}
    for one in fields(CONFIG_MAPPING[model_type]):
        value = one.default_factory() if one.default_factory is not MISSING else one.default
        if one.name in names and isinstance(value, bool | int | str | list) and value != []:
            found[one.name] = value
    return dict(sorted(found.items()))


def main() -> None:
    """Write defaults.json."""
    text = "".join((MODELS / name).read_text() for name in ("attention_types.py", "state_types.py", "model_types.py"))
    names = set(re.findall(r'"([a-z][a-zA-Z0-9_]{2,})"', text)) - LEFT_OUT
    known = [one for one in sorted(READERS) if one in CONFIG_MAPPING]
    made = {one: found for one in known if (found := defaults_of(one, names))}
    lines = [f"{json.dumps(name)}: {json.dumps(found)}" for name, found in made.items()]
    (MODELS / "defaults.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
