"""One engine answers a prompt twice and prints what it hit: `python tests/vllm/first_request.py OPTIONS [OF_VLLM]`.

OPTIONS are those of kvplane, and OF_VLLM further ones of vLLM, as JSON. Runs where kvplane and vLLM are installed, see
`test_clean_install`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import vllm.model_executor.models.registry as registry
from vllm import LLM, SamplingParams

registry._run_in_subprocess = lambda inspect: inspect()  # a process of its own takes a minute to import
MODEL = Path(__file__).resolve().parents[2] / ".tools" / "vllm" / "models" / "llama"
LENGTH = 100


def main(given: dict[str, Any], further: dict[str, Any]) -> None:
    """Answer, and print the result."""
    more: dict[str, Any] = {"worker_cls": "kvplane_vllm.Worker"} if given.get("pages") == "worker" else {}
    llm = LLM(
        model=str(MODEL),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=256,
        block_size=32,
        num_gpu_blocks_override=20,
        scheduler_cls="kvplane_vllm.Scheduler",
        additional_config={"kvplane": given},
        **more,
        **further,
    )
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": list(range(5, 5 + LENGTH))}
    answers = [llm.generate(prompt, sampling, use_tqdm=False)[0] for _ in range(2)]
    import kvplane_vllm

    result = {
        "tokens": [list(one.outputs[0].token_ids) for one in answers],
        "cached": answers[1].num_cached_tokens,
        "scheduler": type(llm.llm_engine.engine_core.engine_core.scheduler).__name__,
        "installed": kvplane_vllm.__file__,
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(*(json.loads(one) for one in [*sys.argv[1:], "{}"][:2]))
