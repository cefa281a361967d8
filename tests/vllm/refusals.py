"""What an engine is refused whose pages would get no stamps, or whose cache would be wrong after a restart.

python tests/vllm/refusals.py WORKER

Runs in the environment of vLLM (`environment`). Prints the errors as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import vllm.v1.worker.gpu_model_runner as runner
from restarts import Life, forked, paged
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from workload import MODELS, OPTIONS, prompts

from kvplane.base.rank_plan import RankPlan
from kvplane.rank import Rank
from kvplane_vllm.options import options_of
from kvplane_worker.attach import attach

ONE = list(enumerate(prompts("llama", 3)))[:1]


def stock_fallback(worker: str, folder: Path) -> None:
    """Start an engine that may use vLLM's own manager."""
    options = paged(worker)
    options["additional_config"]["kvplane"]["fallback"] = "stock"
    Life("llama", folder, **options)


def no_worker_class(worker: str, folder: Path) -> None:
    """Start an engine without kvplane's worker class."""
    Life("llama", folder, additional_config=paged(worker)["additional_config"])


def stock_scheduler(worker: str, folder: Path) -> None:
    """Start an engine with kvplane's worker class and vLLM's scheduler, and run a request."""
    options = dict(OPTIONS["llama"], num_gpu_blocks_override=60, dtype="float32", **paged(worker))
    llm = LLM(model=str(MODELS / "llama"), skip_tokenizer_init=True, enforce_eager=True, **options)
    llm.generate(ONE[0][1], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)


def held_pages(worker: str, folder: Path) -> None:
    """Start an engine while another process has the pages."""
    receive, send = os.pipe()
    pid = os.fork()
    if not pid:
        attach(worker, opaque_plan=RankPlan.opaque(8, 800, "another"))
        os.write(send, b".")
        signal.pause()
    os.read(receive, 1)
    try:
        Life("llama", folder, **paged(worker))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def unnamed(worker: str, folder: Path) -> None:
    """Start an engine without the name of a worker."""
    options = paged(worker)
    del options["additional_config"]["kvplane"]["worker"]
    Life("llama", folder, **options)


def without_orders(worker: str, folder: Path) -> None:
    """Launch steps whose orders are not carried out."""
    life = Life("llama", folder, **paged(worker))
    Rank.carry_out = lambda *_: None  # type: ignore[method-assign]
    life.run(ONE, {})


def other_allocation(worker: str, folder: Path) -> None:
    """Let vLLM allocate its cache by another function."""
    allocate = runner.allocate_kv_cache

    def with_empty(*args: Any, **options: Any) -> Any:
        zeros, torch.zeros = torch.zeros, lambda *size, **more: torch.empty(*size, **more)
        try:
            return allocate(*args, **options)
        finally:
            torch.zeros = zeros

    runner.allocate_kv_cache = with_empty
    Life("llama", folder, **paged(worker))


def asynchronous(worker: str, folder: Path) -> None:
    """Check the options of an engine in mode remote that schedules asynchronously, which vLLM does not do on a CPU."""
    options = paged(worker, mode="remote", address="127.0.0.1:1", replica="r")
    config = EngineArgs(model=str(MODELS / "llama"), skip_tokenizer_init=True, **options).create_engine_config()
    config.scheduler_config.async_scheduling = True
    options_of(config)


CASES: dict[str, Callable[[str, Path], Any]] = {
    "no worker class": no_worker_class,
    "no scheduler class": stock_scheduler,
    "another engine": held_pages,
    "fallback": stock_fallback,
    "xxhash": lambda worker, folder: Life("llama", folder, **paged(worker), prefix_caching_hash_algo="xxhash"),
    "no worker named": unnamed,
    "asynchronous, in mode remote": asynchronous,
    "new weights": lambda worker, folder: Life("llama", folder, **paged(worker)).worker.reload_weights(),
    "steps without stamps": without_orders,
    "another allocation": other_allocation,
}


def main(worker: str) -> None:
    """Try each case in a process of its own, and print the errors."""
    errors = {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        for case, refused in CASES.items():

            def attempt(refused: Any = refused) -> None:
                refused(worker, folder)

            try:
                forked(folder, attempt)
            except AssertionError as error:
                errors[case] = str(error)[-600:]
            except FileNotFoundError:
                errors[case] = "not refused"
    print("RESULT " + json.dumps(errors))


if __name__ == "__main__":
    main(sys.argv[1])
