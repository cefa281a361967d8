"""What kvplane's manager answers to calls that no live engine here makes: prints it as JSON.

python tests/vllm/managers.py CASE

Runs in the environment of vLLM (`environment`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    RSWASpec,
    SlidingWindowMLASpec,
)
from vllm.v1.request import Request, RequestStatus

from kvplane.base.groups import GroupKind, GroupSpec, ReplicaSpec
from kvplane.base.step import Orders, Part, Step, StepResult
from kvplane_core.spec.replica import Replica
from kvplane_vllm.manager import InProcessManager
from kvplane_vllm.remote.books import Books
from kvplane_vllm.remote.driver import Driver
from kvplane_vllm.remote.link import Lost
from kvplane_vllm.scheduler import manager_factory
from kvplane_vllm.spec import UnsupportedModel

SIZE = 16  # tokens of a block
LENGTH = 4 * SIZE + 1
WINDOW = 32


def request(name: str, num_prompt: int) -> Any:
    """Return a request of `LENGTH` tokens, of which `num_prompt` are its prompt."""
    tokens = list(range(LENGTH))
    hasher = get_request_block_hasher(SIZE, sha256)
    made: Any = Request(name, tokens[:num_prompt], SamplingParams(max_tokens=9), None, block_hasher=hasher)
    if num_prompt < LENGTH:
        made.append_output_token_ids(tokens[num_prompt:])
        made.status = RequestStatus.PREEMPTED
    return made


def retained_window() -> dict[str, Any]:
    """Return the hit of a preempted request whose tokens behind the prompt are in another request's prompt."""
    spec = RSWASpec(block_size=SIZE, num_kv_heads=1, head_size=32, dtype=torch.float32, rswa_window=WINDOW)
    config = KVCacheConfig(100, [], [KVCacheGroupSpec(["layer"], spec)])
    options: dict[str, Any] = {"enable_caching": True, "log_stats": False}
    manager = InProcessManager(config, 1024, SIZE, SIZE, 1024, **options)
    manager.allocate_slots(request("long prompt", LENGTH), LENGTH)
    short = request("short prompt", SIZE + 1)
    blocks, num_hit, _ = manager.get_computed_blocks(short)
    granted = manager.allocate_slots(short, LENGTH - num_hit, num_hit, blocks)
    return {"hit": num_hit, "granted": granted is not None}


def bounded_replay() -> dict[str, str]:
    """Return the error for a window that is computed again after a hit, and the manager that `fallback` builds."""
    layer = {"block_size": SIZE, "num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
    window = SlidingWindowMLASpec(**layer, sliding_window=WINDOW, bounded_replay=True)
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**layer)), KVCacheGroupSpec(["window"], window)]
    options: dict[str, Any] = {"max_model_len": 1024, "scheduler_block_size": SIZE, "hash_block_size": SIZE}
    options |= {"kv_cache_config": KVCacheConfig(100, [], groups), "max_in_flight_tokens": 1024}
    error = ""
    try:
        manager_factory({}, [], "sha256")(**options)
    except UnsupportedModel as refused:
        error = str(refused)
    return {"error": error, "fallback": type(manager_factory({"fallback": "stock"}, [], "sha256")(**options)).__name__}


class ServiceInProcess:
    """The link to a service whose core runs here. It loses its session at the first reset, as a restart would do.

    Attributes:
        stamps: those that were written, by block.
        resets: whether each message so far had a reset.
    """

    in_flight, max_steps, num_messages = False, 4, 0

    def __init__(self, spec: ReplicaSpec) -> None:
        self.spec, self.replica, self.stamps = spec, Replica(spec), dict[int, int]()
        self.life, self.answered, self.is_open, self.resets = 1, 0, True, list[bool]()

    def exchange(self, parts: Sequence[Part], executed: int) -> StepResult:
        """Apply a step."""
        self.resets.append(parts[0].cache.reset)
        if sum(self.resets) == 1 and self.resets[-1]:
            self.is_open = False
            raise Lost
        self.answered += 1
        epoch = self.replica.coordinator.pool.epoch
        return self.replica.apply(Step(epoch, self.answered, list(parts), executed_through=executed))

    def reopen(self) -> None:
        """Begin a session that knows no request."""
        if not self.is_open:
            self.replica = Replica(self.spec)
            self.is_open, self.answered, self.life = True, 0, self.life + 1

    def write_stamps(self, orders: Orders) -> None:
        """Write stamps."""
        self.stamps |= zip(orders.stamp_block, orders.stamp, strict=True)


def reset_that_loses_its_session() -> dict[str, Any]:
    """Return what a reset of mode remote answers whose session ends, and what it has written by then."""
    groups = (GroupSpec(GroupKind.FULL_ATTENTION, SIZE),)
    link: Any = ServiceInProcess(ReplicaSpec(groups, 40, 128, SIZE, SIZE, 128))
    books = Books(link.spec)
    books.launch_orders = []
    limits = SimpleNamespace(enable_chunked_prefill=True, max_num_batched_tokens=64)
    config = SimpleNamespace(speculative_config=None)
    scheduler = SimpleNamespace(
        vllm_config=config,
        scheduler_config=limits,
        scheduler_reserve_full_isl=False,
        max_num_scheduled_tokens=64,
        running=[],
        waiting=[],
    )
    driver = Driver(scheduler, link, books, is_async=False, pipeline=False)
    done = driver.reset()
    return {"done": done, "lives": link.life, "resets": link.resets, "null stamp": 0 in link.stamps}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "retained window": retained_window,
    "bounded replay": bounded_replay,
    "reset that loses its session": reset_that_loses_its_session,
}


if __name__ == "__main__":
    init_none_hash(sha256)
    print("RESULT " + json.dumps(CASES[sys.argv[1]]()))
