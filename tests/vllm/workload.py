"""One engine answers requests under memory pressure and prints what it did as JSON: stock, or with kvplane.

python tests/vllm/workload.py MODEL stock|kvplane|overwritten|mirror|remote SEEDS NUM_BLOCKS
    [--with JSON] [--ngram | --priority | --full] [ADDRESS REPLICA [PIPELINE]]

Runs in the environment of vLLM (`environment`). SEEDS is the first seed and the last, as 1-20; each seed is two rounds
of the same prompts. Prompts share prefixes; the pool is so small that requests are preempted and cached blocks evicted.
"overwritten" is kvplane with all pages overwritten after the first round; "mirror" is kvplane with a service at ADDRESS
that follows the engine; "remote", with "on" or "off" for its pipeline behind REPLICA, lets that service decide;
"--with" adds options of the engine, "--ngram" n-gram speculation, "--priority" random priorities, "--full" clients to
which hits are announced again.
"""

from __future__ import annotations

import hashlib
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm.model_executor.models.registry as registry
from messages import Messages
from vllm import LLM, SamplingParams
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import MEDIUM_GPU, BlockRemoved, BlockStored
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

from kvplane.rpc.channel import open_channel
from kvplane.v1.admin_pb2 import SnapshotRequest
from kvplane.v1.admin_pb2_grpc import AdminStub
from kvplane.v1.allocation_pb2 import EvictBlocksRequest, MutationHeader
from kvplane.v1.allocation_pb2_grpc import AllocationStub
from kvplane_core.face.state import digest as digest_of

if TYPE_CHECKING:
    from kvplane.blocking.mirror import MirrorSender
    from kvplane_core.face.interface import ReplicaCore
    from kvplane_vllm.mirror import MirrorManager

registry._run_in_subprocess = lambda inspect: inspect()  # a process of its own takes a minute to import

MODELS = Path(__file__).resolve().parents[2] / ".tools" / "vllm" / "models"
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {"block_size": 32, "max_model_len": 640},
    "gptoss": {"block_size": 32, "max_model_len": 640},
    "gemma3": {"block_size": 32, "max_model_len": 640},
    "qwen3next": {"dtype": "bfloat16", "max_model_len": 2048},
    "gdn": {"block_size": 32, "dtype": "bfloat16", "max_model_len": 640},
}
REQUESTS = {"qwen3next": (16, 200, 1500, 24)}  # number, shortest and longest prompt, new tokens
DEFAULT = 48, 40, 400, 48
ROUND = {"gptoss": (8, 80), "gemma3": (12, 60), "qwen3next": (10, 24)}  # of one seed: number of prompts, new tokens
FEW = 8, 32
SMALL = 8  # requests in a batch, of which the times are reported
EVENTS = {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null")}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def engine(model: str, kind: str, num_blocks: int, **more: Any) -> LLM:
    """The engine; any kind but "stock" selects the scheduler and nothing else."""
    if model == "mamba2":  # vLLM asks for states from inside a chunk, which its kernels for CPUs do not return
        MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec  # type: ignore[method-assign]
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 16, "max_num_batched_tokens": 256}
    options["enable_prefix_caching"] = True
    options |= OPTIONS.get(model, OPTIONS["llama"]) | more
    if kind != "stock":
        options["scheduler_cls"] = "kvplane_vllm.scheduler.Scheduler"
    return LLM(
        model=str(MODELS / model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        num_gpu_blocks_override=num_blocks,
        disable_log_stats=False,
        seed=0,
        **options,
    )


def prompts(model: str, seed: int, count: int | None = None, words: int = 900) -> list[dict[str, list[int]]]:
    """Prompts of random lengths, each with a random part of one of six prefixes."""
    default, shortest, longest, _ = REQUESTS.get(model, DEFAULT)
    rng = random.Random(seed)
    prefixes = [[rng.randrange(3, words) for _ in range(longest)] for _ in range(6)]
    found = []
    for _ in range(count or default):
        length = rng.randint(shortest, longest)
        prefix = rng.choice(prefixes)[: rng.randint(0, length)]
        found.append({"prompt_token_ids": prefix + [rng.randrange(3, words) for _ in range(length - len(prefix))]})
    return found


def mirror_state(manager: MirrorManager, address: str, replica: str) -> dict[str, Any]:
    """As `followed`, of the device."""
    manager.close_step()
    manager.send_steps()
    assert manager.sender is not None
    return followed(manager.sender, manager.replica, address, replica)


def followed(sender: MirrorSender, core: ReplicaCore, address: str, replica: str) -> dict[str, Any]:
    """How far the service is, once it has applied everything, and whether it has the engine's state."""
    assert sender.wait_applied(60), sender.state
    state = sender.state
    with open_channel(address) as channel:
        digest = AdminStub(channel).Snapshot(SnapshotRequest(replica=replica, summary=True)).digest
    is_same = digest == digest_of(core)
    return {"steps": state.newest, "images": state.images, "divergences": state.divergences, "same_state": is_same}


def evict_by_service(observed: Observed, address: str, replica: str) -> tuple[int, int]:
    """Ask the service to evict all cached blocks while the engine answers another prompt; returns the number of keys
    before, and how many of these are left.
    """
    manager = observed.scheduler.kv_cache_manager

    def keys() -> set[Any]:
        return {manager.pool.key_of(block) for block in range(1, manager.pool.num_blocks)} - {None}

    before, blocks = keys(), range(1, manager.pool.num_blocks)
    with open_channel(address) as channel:
        request = EvictBlocksRequest(header=MutationHeader(replica=replica), block_ids=blocks)
        call = AllocationStub(channel).EvictBlocks.future(request, timeout=60)
        while not (call.done() or manager.sender._requests):
            time.sleep(0.01)
        observed.round(prompts(observed.model, 12345, 1))
        assert call.result().result.seq, "the answer has no step"
    return len(before), len(before & keys())


class Observed:
    """An engine whose decisions are recorded: everything that stock and kvplane have in common, by seed.

    Attributes:
        times: seconds of each schedule(), with the number of requests in its batch.
        stored: number of keys of the prefix cache that the KV events announced, over all seeds; `removed`: withdrew.
    """

    def __init__(self, llm: LLM, model: str) -> None:
        self.llm, self.model = llm, model
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.times: list[tuple[int, float]] = []
        self.stored = self.removed = self.zeroed = self.copied = self.drafted = 0
        self._decisions, self._events, self._preempted = hashlib.sha256(), hashlib.sha256(), 0
        self.has_priorities = self.scheduler.scheduler_config.policy == "priority"
        schedule, preempt = self.scheduler.schedule, self.scheduler._preempt_request

        def timed(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            output = schedule(*args, **options)
            self.times.append((len(output.num_scheduled_tokens), time.perf_counter() - begin))
            self._scheduled(output)
            return output

        def counted(*args: Any, **options: Any) -> Any:
            self._preempted += 1
            return preempt(*args, **options)

        self.scheduler.schedule, self.scheduler._preempt_request = timed, counted
        self.scheduler.kv_event_publisher.publish = self._published

    def _scheduled(self, output: Any) -> None:
        zeroed, copied = output.new_block_ids_to_zero or [], output.kv_cache_block_copies or []
        self.zeroed += len(zeroed)
        self.copied += len(copied)
        self.drafted += sum(map(len, output.scheduled_spec_decode_tokens.values()))
        new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
        blocks = [one.block_ids for one in new], cached.new_block_ids
        decision = list(output.num_scheduled_tokens.values()), blocks, cached.num_computed_tokens, zeroed, copied
        self._decisions.update(repr(decision).encode())

    def _published(self, batch: Any) -> None:
        for event in batch.events:
            if isinstance(event, BlockStored) and not event.block_hashes:
                continue  # stock announces no keys where a group keeps none of the blocks
            if getattr(event, "medium", MEDIUM_GPU) != MEDIUM_GPU:
                continue  # of a connector, which announces them in random order
            self._events.update(repr(event).encode())
            self.stored += len(event.block_hashes) if isinstance(event, BlockStored) else 0
            self.removed += len(event.block_hashes) if isinstance(event, BlockRemoved) else 0

    def round(self, chosen: list[Any]) -> tuple[list[list[int]], list[int]]:
        """Answer these prompts; returns the tokens and the cached tokens of each."""
        most = ROUND.get(self.model, FEW)[1]
        full = {"kv_cache_report_mode": "full"}  # hits are announced again to some clients
        sampling = [
            SamplingParams(
                temperature=0,
                max_tokens=most,
                ignore_eos=True,
                detokenize=False,
                extra_args=full if "--full" in sys.argv and number % 8 == 3 else None,
            )
            for number in range(len(chosen))
        ]
        rng = random.Random(str(chosen))
        priorities = [rng.randrange(3) for _ in chosen] if self.has_priorities else None
        answers = self.llm.generate(chosen, sampling, use_tqdm=False, priority=priorities)
        return [list(one.outputs[0].token_ids) for one in answers], [one.num_cached_tokens or 0 for one in answers]

    def seed(self, seed: int, between: Callable[[], None] = lambda: None, words: int = 900) -> dict[str, Any]:
        """Answer the prompts of a seed twice, with a call between the rounds; returns what was decided."""
        if seed % 2:
            assert self.llm.reset_prefix_cache()
        self._decisions, self._events, self._preempted = hashlib.sha256(), hashlib.sha256(), 0
        steps, chosen = len(self.times), prompts(self.model, seed, ROUND.get(self.model, FEW)[0], words)
        first = self.round(chosen)
        between()
        second = self.round(chosen)
        return {
            "tokens": first[0] + second[0],
            "cached": first[1] + second[1],
            "steps": len(self.times) - steps,
            "preempted": self._preempted,
            "free": self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "events": self._events.hexdigest(),
            "decisions": self._decisions.hexdigest(),
        }

    def overwrite(self) -> None:
        """Overwrite all pages."""
        for pages in self.core.model_executor.driver_worker.worker.model_runner.kv_caches:
            for tensor in pages if isinstance(pages, list | tuple) else [pages]:
                tensor.fill_(0.5)


def main(model: str, kind: str, seeds: str, num_blocks: int, *target: str) -> None:
    """Run the seeds, and print the result."""
    more: dict[str, Any] = dict(EVENTS)
    words = 900
    if target and target[0] == "--with":
        more |= json.loads(target[1])
        target = target[2:]
    if target and target[0] == "--ngram":
        more["speculative_config"], target, words = NGRAM, target[1:], 30
    if target and target[0] == "--priority":
        more["scheduling_policy"], target = "priority", target[1:]
    if target and target[0] == "--full":
        target = target[1:]
    if kind == "mirror":
        address, replica = target
        more["additional_config"] = {"kvplane": {"mode": "mirror", "address": address, "replica": replica}}
    if kind == "remote":
        names = "address", "replica", "pipeline", "session_socket"
        more["additional_config"] = {"kvplane": {"mode": "remote", **dict(zip(names, target, strict=False))}}
    observed = Observed(engine(model, kind, num_blocks, **more), model)
    counts = Messages(observed.scheduler) if kind == "remote" else None
    between = observed.overwrite if kind == "overwritten" else lambda: None
    first, last = map(int, seeds.split("-"))
    found = [observed.seed(seed, between, words) for seed in range(first, last + 1)]
    manager = observed.scheduler.kv_cache_manager
    result = {name: getattr(observed, name) for name in ("stored", "removed", "zeroed", "copied", "drafted")}
    result |= {"manager": type(manager).__name__, "seeds": found}
    if kind not in ("stock", "remote"):
        result["core"] = type(manager.replica).__name__
    result["schedule_us"] = round(statistics.median(took for batch, took in observed.times if batch <= SMALL) * 1e6)
    if kind == "mirror":
        result["messages"] = manager.sender.num_submitted
        result["evicted"] = evict_by_service(observed, *target)
        result["mirror"] = mirror_state(manager, *target)
    if counts is not None:
        driver = observed.scheduler.on_service.driver
        result |= {"messages": driver.messages, "unused": manager.books.num_unused, "lives": manager.link.life}
        result |= {"messages_decoding": counts.decoding, "messages_others": counts.others}
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), *sys.argv[5:])
