"""One engine answers requests under memory pressure and prints what it did as JSON: stock, or with kvplane.

python tests/vllm/workload.py MODEL stock|kvplane|overwritten|mirror SEED NUM_BLOCKS [ADDRESS REPLICA]

Runs in the environment of vLLM (`environment`). Prompts share prefixes; the pool is so small that requests are
preempted and cached blocks evicted. "overwritten" is kvplane with all pages overwritten between the two rounds;
"mirror" is kvplane with a service at ADDRESS that follows the engine.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import vllm.model_executor.models.registry as registry
from vllm import LLM, SamplingParams

from kvplane.rpc.channel import open_channel
from kvplane.v1.admin_pb2 import SnapshotRequest
from kvplane.v1.admin_pb2_grpc import AdminStub
from kvplane_service.core import inspect

registry._run_in_subprocess = lambda inspect: inspect()  # a process of its own takes a minute to import

MODELS = Path(__file__).resolve().parents[2] / ".tools" / "vllm" / "models"
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {"block_size": 32, "max_model_len": 640},
    "gptoss": {"block_size": 32, "max_model_len": 640},
    "gemma3": {"block_size": 32, "max_model_len": 640},
    "qwen3next": {"dtype": "bfloat16", "max_model_len": 2048},
}
REQUESTS = {"qwen3next": (16, 200, 1500, 24)}  # number, shortest and longest prompt, new tokens
DEFAULT = 48, 40, 400, 48


def engine(model: str, kind: str, num_blocks: int, **more: Any) -> LLM:
    """The engine; any kind but "stock" selects the scheduler and nothing else."""
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 16, "max_num_batched_tokens": 256}
    options |= OPTIONS[model] | more
    if kind != "stock":
        options["scheduler_cls"] = "kvplane_vllm.scheduler.Scheduler"
    return LLM(
        model=str(MODELS / model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=True,
        num_gpu_blocks_override=num_blocks,
        disable_log_stats=False,
        seed=0,
        **options,
    )


def prompts(model: str, seed: int) -> list[dict[str, list[int]]]:
    """Prompts of random lengths, each with a random part of one of six prefixes."""
    count, shortest, longest, _ = REQUESTS.get(model, DEFAULT)
    rng = random.Random(seed)
    prefixes = [[rng.randrange(3, 900) for _ in range(longest)] for _ in range(6)]
    found = []
    for _ in range(count):
        length = rng.randint(shortest, longest)
        prefix = rng.choice(prefixes)[: rng.randint(0, length)]
        found.append({"prompt_token_ids": prefix + [rng.randrange(3, 900) for _ in range(length - len(prefix))]})
    return found


def mirror_state(manager: Any, address: str, replica: str) -> dict[str, Any]:
    """How far the service is, once it has applied everything, and whether it has the engine's state."""
    manager.close_step()
    manager.send_steps()
    assert manager.sender.wait_applied(60), manager.sender.state
    state = manager.sender.state
    with open_channel(address) as channel:
        digest = AdminStub(channel).Snapshot(SnapshotRequest(replica=replica, summary=True)).digest
    is_same = digest == inspect.digest(manager.replica)
    return {"steps": state.newest, "images": state.images, "divergences": state.divergences, "same_state": is_same}


def main(model: str, kind: str, seed: int, num_blocks: int, target: list[str]) -> None:
    """Run the workload twice, and print the result."""
    more: dict[str, Any] = {}
    if kind == "mirror":
        address, replica = target
        more = {"additional_config": {"kvplane": {"mode": "mirror", "address": address, "replica": replica}}}
    llm = engine(model, kind, num_blocks, **more)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    times, preempted = list[float](), list[str]()
    schedule, preempt = scheduler.schedule, scheduler._preempt_request

    def timed(*args: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        output = schedule(*args, **options)
        times.append(time.perf_counter() - begin)
        return output

    def counted(request: Any, *args: Any, **options: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *args, **options)

    scheduler.schedule, scheduler._preempt_request = timed, counted
    tokens, cached = [], []
    most = REQUESTS.get(model, DEFAULT)[3]
    sampling = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False)
    for _ in range(2):
        for output in llm.generate(prompts(model, seed), sampling, use_tqdm=False):
            tokens.append(list(output.outputs[0].token_ids))
            cached.append(output.num_cached_tokens)
        if kind == "overwritten":
            worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
            for pages in worker.model_runner.kv_caches:
                pages.fill_(0.5)
    manager = scheduler.kv_cache_manager
    result = {
        "manager": type(manager).__name__,
        "tokens": tokens,
        "cached": cached,
        "steps": len(times),
        "preempted": len(preempted),
        "free_at_end": manager.block_pool.get_num_free_blocks(),
        "schedule_us": round(statistics.median(times) * 1e6),
    }
    if kind == "mirror":
        result["messages"] = manager.sender.num_submitted
        result["mirror"] = mirror_state(manager, *target)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
