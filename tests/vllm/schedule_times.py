"""CPU time of schedule() of vLLM's scheduler with a fake model: stock and kvplane take turns in one process.

python tests/vllm/schedule_times.py NUM_REQUESTS GROUPS even|phase NAMES [ADDRESS]

Runs in the environment of vLLM, with the folder of vLLM's sources as first entry of PYTHONPATH and without that of this
script (-P), since `tests` is the package of vLLM's tests here; see `tests.bench.vllm_schedule`. All requests decode;
one group is full attention, the others are sliding windows. "even": in each step 1 of 16 requests fills a block;
"phase": all requests fill a block in the same step, every 16 steps. NAMES has some of `NAMES`, with commas.
"remote" is kvplane with the service at ADDRESS, which gets each program ahead and answers while the engine
pauses; "mirror" is kvplane followed by this service, which applies the steps in such a pause. "python" is kvplane in
process on the Python core. "tiers" and "stock+tiers" are kvplane in process and stock with kvplane's connector: each
block that fills is ordered to be copied to host memory, and nothing is loaded; "null" and "stock+null" are the same
with a connector that does nothing. `others` is the CPU time of the
process's other threads in a step.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from kvplane_vllm.connector import RankMetadata, WorkerMetadata
from kvplane_vllm.scheduler import Scheduler as OnKvplane
from kvplane_vllm.tiers.messages import Progress, Ready
from tests.v1.core.utils import create_scheduler  # type: ignore[import-not-found,import-untyped,unused-ignore]

BLOCK, PROMPT, WINDOW, TURN = 16, 512, 128, 8  # tokens of a block, a prompt and a window; steps of a turn
WARM_UP = 16  # steps
WAIT_S = 60  # for the service to apply the last step
PAUSE_S = 0.02  # in each step of each side, as while a model runs: in it a service answers
STEPS = 160
NAMES = "stock", "kvplane", "python", "mirror", "remote", "tiers", "stock+tiers", "null", "stock+null"
WITH_SERVICE = "mirror", "remote"
WITH_TIERS = "tiers", "stock+tiers"
WITH_NULL = "null", "stock+null"
BLOCK_BYTES = 2 * BLOCK * 4  # of a layer


@dataclass
class Side:
    """One scheduler and its times in nanoseconds."""

    scheduler: Any
    schedule: list[int] = field(default_factory=list)
    update: list[int] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)  # seconds
    others: list[int] = field(default_factory=list)
    steps: int = 0
    grants: list[tuple[str, int]] = field(default_factory=list)

    def step(self, measured: bool) -> None:
        """Schedule a step and give each request one token."""
        all_threads, own = time.process_time_ns(), time.thread_time_ns()
        waited, before = self.total_wait(), time.thread_time_ns()
        output = self.scheduler.schedule()
        scheduled, waited = time.thread_time_ns(), self.total_wait() - waited
        ids = list(output.num_scheduled_tokens)
        self.grants.append((str(ids), output.total_num_scheduled_tokens))
        sampled = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={one: row for row, one in enumerate(ids)},
            sampled_token_ids=[[self.steps % 900 + 5]] * len(ids),
        )
        if hasattr(self.scheduler.connector, "planner"):  # all copies of the step have ended
            progress = Progress({0: self.scheduler.connector.planner.host.seq}, {})
            sampled.kv_connector_output = KVConnectorOutput(kv_connector_worker_meta=WorkerMetadata(progress))
        time.sleep(PAUSE_S)
        begin = time.thread_time_ns()
        self.scheduler.update_from_output(output, sampled)
        end = time.thread_time_ns()
        self.steps += 1
        if measured:
            self.schedule.append(scheduled - before)
            self.update.append(end - begin)
            self.waited.append(waited)
            self.others.append(time.process_time_ns() - all_threads - (time.thread_time_ns() - own))

    def total_wait(self) -> float:
        """Return how long schedule() has waited for a service, in seconds."""
        return float(getattr(getattr(self.scheduler.kv_cache_manager, "link", None), "waited_s", 0.0))


def side(name: str, num_requests: int, num_groups: int, load: str, steps: int, address: str) -> Side:
    """A scheduler with its requests, after their prompts are computed."""
    os.environ["KVPLANE_CORE"] = "python" if name == "python" else "auto"
    longest = PROMPT + BLOCK + WARM_UP + steps + 8
    sizes = {"max_num_seqs": num_requests, "max_num_batched_tokens": num_requests * (PROMPT + BLOCK)}
    model = create_scheduler(max_model_len=2048, enable_prefix_caching=True, block_size=BLOCK, **sizes)
    if name in WITH_SERVICE:
        options = {"mode": name, "address": address, "replica": f"{name}-{num_requests}-{num_groups}-{load}"}
        model.vllm_config.additional_config = {"kvplane": options}
    num_blocks = num_requests * num_groups * (longest // BLOCK + 2) + 1
    if name in WITH_TIERS:
        model.vllm_config.kv_transfer_config = KVTransferConfig(
            kv_connector="KvplaneConnector",
            kv_connector_module_path="kvplane_vllm.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"host": f"{num_blocks * BLOCK_BYTES >> 9}KiB"},
        )
    if name in WITH_NULL:
        model.vllm_config.kv_transfer_config = KVTransferConfig(
            kv_connector="NullConnector", kv_connector_module_path="null_connector", kv_role="kv_both"
        )
    attention = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    specs = [FullAttentionSpec(**attention)]
    specs += [SlidingWindowSpec(**attention, sliding_window=WINDOW) for _ in range(num_groups - 1)]
    scheduler = (Scheduler if name.startswith("stock") else OnKvplane)(
        vllm_config=model.vllm_config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"layer{n}"], spec) for n, spec in enumerate(specs)],
        ),
        block_size=BLOCK,
        log_stats=True,
        structured_output_manager=model.structured_output_manager,
    )
    scheduler.use_v2_model_runner = False
    if name in WITH_TIERS:
        scheduler.connector.set_xfer_handshake_metadata({0: RankMetadata(Ready(1, [0] * 2 * num_blocks, False, b""))})
    for number in range(num_requests):
        length = PROMPT + (number % BLOCK if load == "even" else 0)
        request = Request(
            request_id=str(number),
            prompt_token_ids=[number % 900 + 3] * length,
            sampling_params=SamplingParams(max_tokens=1000, ignore_eos=True),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        scheduler.add_request(request)
    return Side(scheduler)


def main(num_requests: int, num_groups: int, load: str, names: str, address: str = "") -> None:
    """Measure and print the times as JSON."""
    init_none_hash(sha256)
    sides = {name: side(name, num_requests, num_groups, load, STEPS, address) for name in names.split(",")}
    for one in sides.values():
        for _ in range(WARM_UP):
            one.step(False)
    gc.collect()
    gc.freeze()
    gc.disable()
    for _ in range(0, STEPS, TURN):
        for one in sides.values():
            for _ in range(TURN):
                one.step(True)
    assert all(one.grants == sides["stock"].grants for one in sides.values())
    if "mirror" in sides:
        sender = sides["mirror"].scheduler.kv_cache_manager.sender
        assert sender.wait_applied(WAIT_S), sender.state
        assert not sender.state.divergences, sender.state
    columns = "schedule", "update", "waited", "others"
    result = {name: {column: getattr(one, column) for column in columns} for name, one in sides.items()}
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
