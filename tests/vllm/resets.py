"""Resets the prefix cache of an engine in mode remote whose service does not answer: prints how long it took, as JSON.

python tests/vllm/resets.py ADDRESS PIPELINE

Prints "STEP" and waits for a line before the reset, and before the request behind it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import vllm.model_executor.models.registry as registry
from vllm import LLM, SamplingParams

from kvplane_vllm.ready import why_waiting

registry._run_in_subprocess = lambda inspect: inspect()  # a process of its own takes a minute to import
MODEL = Path(__file__).resolve().parents[2] / ".tools" / "vllm" / "models" / "llama"
ONE_REQUEST = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)


def step() -> None:
    """Let the test do something."""
    print("STEP", flush=True)
    sys.stdin.readline()


def main(address: str, pipeline: str) -> None:
    """Answer, reset, answer again, and print the result."""
    llm = LLM(
        model=str(MODEL),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=256,
        block_size=32,
        num_gpu_blocks_override=20,
        scheduler_cls="kvplane_vllm.Scheduler",
        additional_config={
            "kvplane": {"mode": "remote", "address": address, "replica": "r", "pipeline": pipeline, "step_timeout": "3"}
        },
    )

    def answer() -> tuple[list[int], int]:
        one = llm.generate({"prompt_token_ids": list(range(5, 105))}, ONE_REQUEST, use_tqdm=False)[0]
        return list(one.outputs[0].token_ids), one.num_cached_tokens or 0

    answers = [answer(), answer()]
    step()
    begin = time.monotonic()
    resets = [llm.reset_prefix_cache() for _ in range(6)]
    took_s = time.monotonic() - begin
    core = llm.llm_engine.engine_core.engine_core  # in this process
    core.scheduler.schedule()  # as with a request: without one the engine opens no session
    waits = why_waiting(llm.llm_engine.vllm_config)
    step()
    answers += [answer(), answer()]
    print(
        "RESULT "
        + json.dumps(
            {
                "resets": resets,
                "took_s": took_s,
                "waits": waits,
                "still_waits": why_waiting(llm.llm_engine.vllm_config),
                "tokens": [tokens for tokens, _ in answers],
                "cached": [cached for _, cached in answers],
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
