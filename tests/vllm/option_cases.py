"""What `options_of` makes of options and settings of vLLM: `python tests/vllm/option_cases.py CASES`.

CASES is JSON: by name, the options of kvplane, the rank and size of data parallelism, and switches of vLLM. Prints as
JSON the options, or the field and the text of the refusal. Runs in the environment of vLLM (`environment`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs

from kvplane.base.errors import KvplaneError
from kvplane_vllm.options import options_of
from kvplane_vllm.target import MODEL_NAME

MODEL = Path(__file__).resolve().parents[2] / ".tools" / "vllm" / "models" / "llama"


def main(cases: dict[str, list[Any]]) -> None:
    """Check each case, and print the results."""
    config = EngineArgs(model=str(MODEL), skip_tokenizer_init=True).create_engine_config()
    found: dict[str, Any] = {}
    for name, (given, rank, size, *more) in cases.items():
        config.additional_config = {"kvplane": given}
        config.parallel_config.data_parallel_index, config.parallel_config.data_parallel_size = rank, size
        config.observability_config.kv_cache_metrics = "kv_cache_metrics" in more
        config.scheduler_config.prefill_schedule_interval = 4 if "prefill_schedule_interval" in more else 1
        try:
            found[name] = {key: value for key, value in options_of(config).items() if key != MODEL_NAME}
        except KvplaneError as error:
            found[name] = [error.field, f"{error.message}; {error.remedy}"]
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
