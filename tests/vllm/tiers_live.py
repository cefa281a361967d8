"""One engine answers requests with kvplane's tiers, or without any, and prints what it did as JSON.

python tests/vllm/tiers_live.py MODEL KIND POOL SEEDS OPTIONS [FAULT]

KIND is stock, kvplane, one of them with " async" or " tp2", or "mirror ADDRESS REPLICA".
OPTIONS is JSON: the options of kvplane's connector; "lmcache" = LMCache's connector instead; null = none. Requests are
aborted, also while they load; the pool is so small that requests are preempted. FAULT is one of `FAULTS`, "killed STEP"
or "rank killed STEP". Runs in the environment of vLLM (`environment`).
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from connected import LMCACHE, skip_foreign_objects
from remote_aborts import Disturbed, gives_up
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from workload import engine, followed, prompts

from kvplane_vllm.tiers import rank
from kvplane_vllm.tiers.copier import Copier
from kvplane_vllm.tiers.planner import Planner
from kvplane_worker.tiers import DiskSlots

SLOW_S = 0.02  # a save takes as long as some steps
EMPTY_STEP_S = 0.001  # of vLLM's loop
STEPS = 150  # before a kill, unless the fault says how many
ROUNDS = 5  # of all prompts
HANG_S = 3.0  # that a read takes, on four threads
NUM_PROMPTS, NEW_TOKENS, IDLE_S = 12, 20, 60.0

answered: dict[str, list[list[int]]] = {}  # what an engine that will be killed has answered, by prompt


def transfer(options: Any) -> KVTransferConfig:
    """Return vLLM's options for the connector."""
    common = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    if options == "lmcache":
        skip_foreign_objects()
        return KVTransferConfig(**common, **LMCACHE)
    return KVTransferConfig(
        kv_connector="KvplaneConnector",
        kv_connector_module_path="kvplane_vllm.connector",
        kv_connector_extra_config=options,
        **common,
    )


def slow() -> None:
    """Saves take longer than steps: the next ones wait for them where they overwrite what is saved."""
    save = Copier.save

    def later(self: Copier, copies: Any) -> None:
        time.sleep(SLOW_S)
        save(self, copies)

    Copier.save = later  # type: ignore[method-assign]


def without_fence() -> None:
    """Saves take longer than steps, and nothing waits for them."""
    slow()
    Copier.fence = lambda self, blocks: None  # type: ignore[method-assign]


def shifted_layout() -> None:
    """The pages of a layer are one piece away from where vLLM says."""
    module: Any = rank
    pages = module.device_pages

    def shifted(config: Any, views: Any) -> Any:
        name, view = next(iter(views.items()))
        moved = view[..., 1:] if isinstance(view, torch.Tensor) else [view[0][..., 1:], *view[1:]]  # or states
        return pages(config, {**views, name: moved})

    module.device_pages = shifted


def overwritten() -> None:
    """The pages in host memory are overwritten before each load."""
    load = Copier.load

    def garbled(self: Copier, copies: Any) -> None:
        for block in copies.host:
            self._host[copies.group].layers[0][block] = 1
        load(self, copies)

    Copier.load = garbled  # type: ignore[method-assign]


def killed(steps: int = STEPS, *, is_rank: bool = False) -> None:
    """The engine, or a rank of it, is killed after some steps. Before, it prints its answers, and with how many keys it
    began.
    """
    orders, left = Planner.orders, iter(range(steps, 0, -1))

    def or_kill(self: Planner, output: Any) -> Any:
        if next(left) == 1:
            result = {"killed": True, "seeds": [{"tokens": answered}], "kept": self.host.kept}
            counts = {"loaded_tokens": self.counts.loaded_tokens}
            print("RESULT " + json.dumps(result | counts), flush=True)
            victim = multiprocessing.active_children()[-1].pid if is_rank else os.getpid()
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
        return orders(self, output)

    Planner.orders = or_kill  # type: ignore[method-assign]


def hung_disk() -> None:
    """Nothing is read from the disk in time."""
    read = DiskSlots.read

    def late(self: DiskSlots, *arguments: Any) -> Any:
        time.sleep(HANG_S)
        return read(self, *arguments)

    DiskSlots.read = late  # type: ignore[assignment, method-assign]


def failing_disk() -> None:
    """Each fourth read or write of the disk fails."""
    does, numbers = DiskSlots._does, iter(range(1 << 30))

    def sometimes(self: DiskSlots, act: Any, buffers: Any, offset: int) -> bool:
        def refuse(*_: Any) -> int:
            raise OSError(errno.EIO, "planted")

        return does(self, refuse if next(numbers) % 4 == 3 else act, buffers, offset)

    DiskSlots._does = sometimes  # type: ignore[method-assign]


FAULTS: dict[str, Callable[..., None]] = {
    "slow": slow,
    "without fence": without_fence,
    "shifted layout": shifted_layout,
    "overwritten": overwritten,
    "killed": killed,
    "rank killed": partial(killed, is_rank=True),
    "hung disk": hung_disk,
    "failing disk": failing_disk,
}


def modes_of(kind: str) -> dict[str, Any]:
    """Return options of the engine for the words behind the first of a KIND."""
    modes = kind.split()[1:]
    options: dict[str, dict[str, Any]] = {"async": {"async_scheduling": True}, "tp2": {"tensor_parallel_size": 2}}
    return {name: value for mode in modes if mode in options for name, value in options[mode].items()}


def main(model: str, kind: str, pool: int, seeds: str, options: Any, fault: str = "") -> None:
    """Run the seeds, and print the result."""
    if fault:
        words = fault.split()
        steps = [int(words.pop())] if words[-1].isdigit() else []
        FAULTS[" ".join(words)](*steps)
    more: dict[str, Any] = {"kv_transfer_config": transfer(options)} if options else {}
    more |= modes_of(kind)
    kind, *modes = kind.split()
    if kind == "mirror":
        more["additional_config"] = {"kvplane": {"mode": "mirror", "address": modes[0], "replica": modes[1]}}
    llm = engine(model, kind, pool, **more)
    live = Live(llm, SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False))
    first, last = map(int, seeds.split("-"))
    found = [live.seed(prompts(model, seed, NUM_PROMPTS), seed, options is None) for seed in range(first, last + 1)]
    result = {"seeds": found, "preempted": live.preempted, "infinite": live.infinite, "free": live.free}
    if options is not None:
        result |= live.of_tiers()
    print("RESULT " + json.dumps(result))


class Live:
    """An engine.

    Attributes:
        preempted: requests that it has preempted.
        loaded: tokens that its connector was asked to load.
        infinite: tokens that an infinite cache would hit, where each request has been computed when the next one comes.
    """

    def __init__(self, llm: Any, sampling: SamplingParams) -> None:
        self.llm, self.sampling, self.preempted, self.loaded = llm, sampling, 0, 0
        self.scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        preempt = self.scheduler._preempt_request

        def counted(*args: Any, **options: Any) -> Any:
            self.preempted += 1
            return preempt(*args, **options)

        self.scheduler._preempt_request = counted
        if self.scheduler.connector is not None:
            self._count_loads(self.scheduler.connector)
        self.infinite, seen, add = 0, set[bytes](), self.scheduler.add_request

        def noted(request: Any) -> Any:
            hashes = request.block_hashes
            known = next((at for at, one in enumerate(hashes) if one not in seen), len(hashes))
            size = llm.llm_engine.vllm_config.cache_config.block_size
            self.infinite += min(known, (request.num_tokens - 1) // size) * size
            seen.update(hashes)
            return add(request)

        self.scheduler.add_request = noted
        self._let_others_run()

    def _let_others_run(self) -> None:
        """Sleep behind a schedule() of nothing, as vLLM's own loop does: copies end within a few steps."""
        schedule = self.scheduler.schedule

        def waited(*args: Any, **options: Any) -> Any:
            output = schedule(*args, **options)
            if not output.total_num_scheduled_tokens:
                time.sleep(EMPTY_STEP_S)
            return output

        self.scheduler.schedule = waited

    def _count_loads(self, connector: Any) -> None:
        note = connector.update_state_after_alloc

        def counted(request: Any, blocks: Any, num_external_tokens: int) -> Any:
            self.loaded += num_external_tokens
            return note(request, blocks, num_external_tokens)

        connector.update_state_after_alloc = counted

    @property
    def is_exact(self) -> bool:
        """Whether tokens do not depend on where chunks end."""
        found: bool = self.llm.llm_engine.vllm_config.model_config.dtype == torch.float32
        return found

    @property
    def free(self) -> int:
        """Free blocks of the device."""
        found: int = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return found

    def seed(self, chosen: list[Any], seed: int, is_alone: bool) -> dict[str, Any]:
        """Answer prompts: all at once, repeatedly with an empty device, then some at a time, of which some are
        aborted. `is_alone`: once, one after another; and also as above in less than float32, where tokens may depend on
        the ends of chunks.
        """
        if is_alone:
            alone = {str(at): self.right(one["prompt_token_ids"]) for at, one in enumerate(chosen)}
            if not self.is_exact:
                for at, some in self.seed(chosen, seed, False)["tokens"].items():
                    alone[at] += [one for one in some if one not in alone[at]]
            return {"tokens": alone}
        answered.clear()
        tokens, cached = answered, 0
        for _ in range(ROUNDS):
            self.forget()
            answers, hits = self.answers(chosen)
            cached += hits
            for at, one in enumerate(answers):
                tokens.setdefault(str(at), []).append(one)
        self.forget()
        result = gives_up(self.llm, chosen, self.sampling, random.Random(seed), Disturbed(0))
        for at, some in result["tokens"].items():
            tokens.setdefault(str(at), []).extend(some)
        self.forget()
        sent = ROUNDS * len(chosen) + result["sent"]
        return {"tokens": dict(tokens), "cached": cached + result["cached"], "sent": sent, "aborted": result["aborted"]}

    def right(self, prompt: list[int]) -> list[list[int]]:
        """Return the answer to a prompt. In less than float32 also the answers of requests that are preempted once,
        behind each of their tokens, and computed again, and of requests whose prompt is computed in two parts.
        """
        whole = [{"prompt_token_ids": prompt}]
        (first,), _ = self.answers(whole)
        if self.is_exact:
            return [first]
        again, _ = self.answers([{"prompt_token_ids": prompt + first[:at]} for at in range(1, NEW_TOKENS)])
        found = [first] + [first[:at] + one[: NEW_TOKENS - at] for at, one in enumerate(again, 1)]
        size = self.llm.llm_engine.vllm_config.cache_config.block_size
        for end in range(size, len(prompt), size):
            self.forget()
            self.answers([{"prompt_token_ids": prompt[:end]}])
            found += self.answers(whole)[0]
        return [list(one) for one in dict.fromkeys(map(tuple, found))]

    def answers(self, chosen: list[Any]) -> tuple[list[list[int]], int]:
        """Return the tokens of each answer, and the cached tokens of all."""
        found = self.llm.generate(chosen, self.sampling, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in found], sum(one.num_cached_tokens or 0 for one in found)

    def forget(self) -> None:
        """Wait until no copy and no job of the disk is in flight, and empty the prefix cache of the device."""
        deadline = time.monotonic() + IDLE_S
        while self.scheduler.has_requests():  # also while a connector holds blocks of requests that have ended
            assert time.monotonic() < deadline, "the engine is never idle"
            self.llm.llm_engine.step()
        assert self.llm.reset_prefix_cache()

    def of_tiers(self) -> dict[str, Any]:
        """Return what the tiers did, and what they still hold."""
        left = {"requests": len(self.scheduler.requests)}
        planner = getattr(self.scheduler.connector, "planner", None)
        if planner is None:
            return {"counts": {"loaded_tokens": self.loaded, "from_disk": 0, "mismatched": 0}, "left": left}
        host = planner.host
        replica = host.replica
        more = {"followed": self._followed(host)} if host.service is not None else {}
        counts = {name: getattr(planner.counts, name) for name in planner.counts.__slots__}
        return more | {
            "kept": host.kept,
            "counts": counts | {"from_disk": replica.tiers.counters.loaded_tokens},
            "left": left
            | {"shadows": len(planner._shadows), "held": replica.block_counts.held, **replica.tiers.open_jobs()},
        }

    def _followed(self, host: Any) -> dict[str, Any]:
        """Return how far the service is that follows the tiers. One that came back gets its image with a step."""
        sender, deadline = host.service.sender, time.monotonic() + IDLE_S
        while not sender.wait_applied(1.0) and time.monotonic() < deadline:
            self.answers(prompts("llama", 0, 1))
            self.forget()
        target = self.llm.llm_engine.vllm_config.kv_transfer_config.kv_connector_extra_config
        return followed(sender, host.replica, target["address"], target["replica"])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], json.loads(sys.argv[5]), *sys.argv[6:])
