"""Engine lives on the pages of one kvplane worker: each ends by SIGKILL at a random point, and the next one continues.

python tests/vllm/restarts.py MODEL WORKER SEED LIVES [FAULT|mirror ADDRESS|remote ADDRESS [PIPELINE]]

Runs in the environment of vLLM (`environment`). WORKER is the directory of a `kvplane worker --opaque`. Every token of
every life is compared with those of a stock engine that is not killed. FAULT is planted in the life before the last:
"overwritten" (its pages are overwritten and their stamps kept) or "unstamped" (it writes no stamps). With "mirror" the
service at ADDRESS follows each life, with "remote" it decides. Prints the result as JSON. A life is a fork of this
process, which has imported vLLM already.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from vllm import SamplingParams
from workload import engine, mirror_state, prompts

from kvplane.base.stamp_table import StampTable
from kvplane.rpc.channel import open_channel
from kvplane.v1.admin_pb2 import SnapshotRequest
from kvplane.v1.admin_pb2_grpc import AdminStub
from kvplane_vllm.pages import PagesOfWorker
from kvplane_vllm.remote.manager import RemoteManager

POOLS = {"llama": 60, "gptoss": 90, "gemma3": 200, "qwen3next": 120}  # so small that blocks are evicted
NUM_PROMPTS, NEW_TOKENS = 12, 24  # of each life
MAX_STEP = {"qwen3next": 200}  # a life is killed in one of its first steps
# The sums of bfloat16 depend on the other requests of a batch, in stock too: one request at a time.
MAX_REQUESTS = {"qwen3next": 1}
POINTS = ("before schedule", "after schedule", "in a layer", "after the launch", "after the update")


class Life:
    """One engine life in this process.

    Attributes:
        report: what the parent process learns, in a file that is written before the end.
    """

    def __init__(self, model: str, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.address = options.get("additional_config", {}).get("kvplane", {}).get("address", "")
        self.report: dict[str, Any] = {"compared": 0, "differing": 0, "cached": 0, "killed": False}
        begin = time.monotonic()
        kind, more = "kvplane" if options else "stock", {"max_num_seqs": MAX_REQUESTS.get(model, 16)}
        self.llm = engine(model, kind, POOLS[model], **options, **more)
        self.report["start_s"] = round(time.monotonic() - begin, 1)
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler, self.worker = core.scheduler, core.model_executor.driver_worker.worker
        self.manager: Any = self.scheduler.kv_cache_manager

    def published(self) -> list[tuple[int, str]]:
        """The keys whose content was executed, as the allocator has them."""
        if isinstance(self.manager, RemoteManager):
            with open_channel(self.address) as channel:
                cached = AdminStub(channel).Snapshot(SnapshotRequest(replica="r"), timeout=60).keys
            return sorted({(one.group, one.hash.hex()) for one in cached if not one.tentative})
        pool, executed = self.manager.pool, self.manager.executed or 0
        keys = [(pool.key_of(block), pool.key_step[block]) for block in range(1, pool.num_blocks)]
        return sorted({(key[1], key[2].hex()) for key, step in keys if key is not None and step <= executed})

    def end(self, killed: bool = False) -> None:
        """Write the report and get killed; `killed`: in the middle of its work."""
        self.report["killed"] = killed
        if isinstance(self.manager, (PagesOfWorker, RemoteManager)):
            self.report["published"] = self.published()
        (self.folder / "report.json").write_text(json.dumps(self.report))
        os.kill(os.getpid(), signal.SIGKILL)

    def run(self, chosen: list[tuple[int, dict[str, Any]]], expected: dict[str, list[int]]) -> dict[str, list[int]]:
        """Answer these prompts and compare every token; returns the tokens by prompt."""
        sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
        running, answers = self.llm.llm_engine, dict[str, list[int]]()
        for number, prompt in chosen:
            running.add_request(str(number), prompt, sampling)
        while running.has_unfinished_requests():
            for output in running.step():
                number = output.request_id.split("-")[0]
                tokens = list(output.outputs[0].token_ids)
                if expected:
                    wanted = expected[number][: len(tokens)]
                    self.report["compared"] += 1
                    self.report["differing"] += tokens != wanted
                if output.finished:
                    answers[number] = tokens
                    self.report["cached"] += output.num_cached_tokens or 0
        return answers

    def resets(self, prompt: tuple[int, dict[str, Any]], expected: dict[str, list[int]]) -> None:
        """Reset the cache more often than steps may be in flight, without a launch in between, and answer a prompt."""
        for _ in range(6):
            assert self.llm.reset_prefix_cache()
        cached = self.report["cached"]
        self.run([prompt], expected)
        assert self.report["cached"] == cached, "the cache was reset"

    def kill_at(self, step: int, point: str) -> None:
        """Arrange the end of this life in a step, at one of POINTS."""
        steps = 0

        def around(owner: Any, name: str, before: str, after: str) -> None:
            original = getattr(owner, name)

            def called(*args: Any, **options: Any) -> Any:
                nonlocal steps
                steps += before == POINTS[0]
                if steps == step and point == before:
                    self.end(killed=True)
                result = original(*args, **options)
                if steps == step and point == after:
                    self.end(killed=True)
                return result

            setattr(owner, name, called)

        around(self.scheduler, "schedule", POINTS[0], POINTS[1])
        around(self.worker.model_runner, "execute_model", "", POINTS[3])
        around(self.scheduler, "update_from_output", "", POINTS[4])
        layers = [module for name, module in self.worker.model_runner.model.named_modules() if name.endswith(".mlp")]

        def in_a_layer(*_: Any) -> None:
            if steps == step and point == POINTS[2]:
                self.end(killed=True)

        layers[len(layers) // 2].register_forward_hook(in_a_layer)


def forked(folder: Path, work: Callable[[], None]) -> dict[str, Any]:
    """Run `work` in a fork of this process that ends by SIGKILL; returns its report."""
    pid = os.fork()
    if not pid:
        try:
            work()
        except BaseException:
            (folder / "report.json").write_text(json.dumps({"error": traceback.format_exc()}))
        os._exit(1)
    os.waitpid(pid, 0)
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    (folder / "report.json").unlink()
    assert "error" not in found, found["error"]
    return found


def paged(worker: str, **more: str) -> dict[str, Any]:
    """The options that put the pages into a kvplane worker."""
    chosen = {"kvplane": {"pages": "worker", "worker": worker, **more}}
    return {"worker_cls": "kvplane_vllm.Worker", "additional_config": chosen}


def main(model: str, worker: str, seed: int, num_lives: int, fault: str = "", *target: str) -> None:
    """Run the reference and the lives, and print the result."""
    rng = random.Random(seed)
    numbered = list(enumerate(prompts(model, seed)))
    with TemporaryDirectory() as name:
        folder = Path(name)

        def reference() -> None:
            life = Life(model, folder)
            life.report["tokens"] = life.run(numbered, {})
            life.end()

        expected = forked(folder, reference)["tokens"]
        lives: list[dict[str, Any]] = []
        for number in range(num_lives):
            order = rng.sample(numbered, NUM_PROMPTS)
            step, point = rng.randint(1, MAX_STEP.get(model, 30)), rng.choice(POINTS)
            before = lives[-1]["published"] if lives else []

            def live(number: int = number, order: Any = order, at: Any = (step, point), before: Any = before) -> None:
                planted = fault if number == num_lives - 2 else ""
                if planted == "unstamped":
                    StampTable.write = lambda *_: None  # type: ignore[method-assign]
                mode = {"mode": fault, "replica": "r"} if target else {}
                mode |= dict(zip(("address", "pipeline"), target, strict=False))
                life = Life(model, folder, **paged(worker, **mode))
                if fault == "mirror":
                    life.report["mirror"] = mirror_state(life.manager, *target, "r")
                found = set(life.published())
                life.report["kept"] = sum(tuple(key) in found for key in before)
                life.report["epoch"] = (life.manager.link if fault == "remote" else life.manager).epoch
                life.report["point"] = at
                if fault in ("", "mirror", "remote") and number < num_lives - 1:
                    life.kill_at(*at)
                life.run(order, expected)
                if fault == "mirror":
                    life.report["mirror_at_end"] = mirror_state(life.manager, *target, "r")
                if fault == "remote":
                    life.resets(order[0], expected)
                if planted == "overwritten":
                    life.worker.kvplane_pages.region.fill_(0x11)
                life.end()

            lives.append(forked(folder, live))
            lives[-1]["of"] = len(before)
    for life in lives:
        life["published"] = len(life["published"])
    print("RESULT " + json.dumps(lives))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
