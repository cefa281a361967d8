"""Random schedules of vLLM's scheduler on a model of page contents (`page_world`): prints what was wrong as JSON.

python tests/vllm/page_contents.py MODE SEEDS [--address ADDRESS] [--fault FAULT] [--only NAME=VALUE ...]

Runs in the environment of vLLM (`environment`). MODE is stock, inprocess, mirror, remote-on or remote-off (its
pipeline), with "+pages" behind it for pages that outlive the engine. SEEDS is the first seed and the last, as 1-20.
Each seed draws a model, limits, requests that share prefixes, clients that give up and send again, resets, lost
sessions and, with "+pages", ends of the engine's process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import vllm.v1.core.sched.scheduler as stock
from page_faults import FAULTS
from page_world import IMAGE, Client, World, WrongContent, lend
from vllm.config import KVEventsConfig, LoRAConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched import async_scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

import kvplane_vllm.scheduler as ours
from kvplane.base.key_records import records_bytes
from kvplane.base.stamp_table import StampTable, table_bytes
from kvplane_vllm import pages
from kvplane_vllm.remote.link import Link, Lost

SOURCE = Path(__file__).resolve().parents[2] / ".tools" / "vllm" / "source"
LAYER: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
KINDS = ("full", "window", "chunked", "state", "state", "state", "states", "checkpoint", "large state", "large state")
NUM_REQUESTS, MOST_STEPS, MOST_LEFT = 45, 700, 60
MOST_IDLE = 150  # steps that schedule nothing, one after the other, while sessions wait for an input


class Options:
    """What a seed draws: the model and the limits of the engine."""

    def __init__(self, rng: random.Random, mode: str, only: dict[str, Any]) -> None:
        self.kind = rng.choice(KINDS)
        self.unit = rng.choice([16, 16, 32])
        self.is_async = rng.random() < 0.35
        self.drafts = rng.choice([0, 0, 0, 2])
        self.seqs, self.batched = rng.randint(3, 12), rng.choice([96, 160, 512])
        self.longest, self.most = rng.choice([60, 150, 260]), rng.choice([4, 20, 50])
        self.policy = rng.choice(["fcfs", "fcfs", "priority"])
        self.threshold = rng.choice([0, 0, 40])
        self.active = rng.choice([None, None, 2])
        self.spare = rng.choice([0, 4, 30])
        self.abort, self.reset, self.reset_running = (
            rng.choice([0, 0.08, 0.15]),
            rng.choice([0, 0.04]),
            rng.choice([0, 0, 0.02]),
        )
        self.lost, self.crowd = rng.choice([0, 0, 0.01]), 0.01
        self.kill = rng.choice([0, 0.02]) if "+pages" in mode else 0
        self.has_adapters = False
        self.__dict__ |= only
        if self.has_states:
            self.drafts = self.threshold = 0
        if self.drafts or ("+pages" in mode and mode.startswith("remote")):
            self.is_async = False
        self.size = 4 * self.unit if self.kind == "large state" else self.unit  # of a block of attention
        self.hash_block_size = self.size if self.kind == "large state" else self.unit
        self.state_size = self.size if self.kind == "large state" else self.unit * rng.choice([1, 2, 4])
        if self.kind == "checkpoint":
            self.state_size = 4 * self.unit
        self.specs = self._specs(rng)
        self.num_blocks = (
            sum(-(-(self.longest + self.most + 8) // one.block_size) + 4 for one in self.specs) + self.spare
        )

    @property
    def has_states(self) -> bool:
        """Whether the model has recurrent states."""
        return self.kind in ("state", "states", "checkpoint", "large state")

    def _specs(self, rng: random.Random) -> list[Any]:
        full = FullAttentionSpec(block_size=self.size, **LAYER)
        window = SlidingWindowSpec(
            block_size=self.size, sliding_window=rng.choice([self.size + 3, 2 * self.size, 100]), **LAYER
        )
        chunked = ChunkedLocalAttentionSpec(block_size=self.size, attention_chunk_size=4 * self.size, **LAYER)
        state = self._state(0)
        return {
            "full": [full],
            "window": [full, window],
            "chunked": [chunked, full],
            "state": [full, state],
            "states": [full, state, state],
            "checkpoint": [full, self._state(1)],
            "large state": [full, state],
        }[self.kind]

    def _state(self, checkpoints: int) -> MambaSpec:
        return MambaSpec(
            block_size=self.state_size,
            shapes=((1, 1),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
            num_prefill_checkpoint_blocks=checkpoints,
            prefill_checkpoint_alignment=self.unit if checkpoints else None,
        )

    def scheduler(self, mode: str, given: dict[str, str]) -> Any:
        """Return a new scheduler of vLLM in this mode."""
        from tests.v1.core.utils import create_scheduler  # of vLLM

        base = create_scheduler(
            max_model_len=1024,
            max_num_seqs=self.seqs,
            max_num_batched_tokens=self.batched,
            enable_prefix_caching=True,
            block_size=self.size,
            long_prefill_token_threshold=self.threshold,
            num_speculative_tokens=self.drafts or None,
            speculative_method="ngram" if self.drafts else None,
            scheduling_policy=self.policy,
            max_num_active_seqs=self.active,
            async_scheduling=self.is_async,
        )
        config, block_size = base.vllm_config, self.size
        config.scheduler_config.async_scheduling = self.is_async  # vLLM switches it off on a CPU
        if self.has_states:
            config.cache_config.mamba_cache_mode = "align"
            block_size = config.cache_config.block_size = self.state_size
        if self.has_adapters:
            config.lora_config = LoRAConfig(max_lora_rank=8, max_loras=2)  # of three that are asked for
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        kind: Any = async_scheduler.AsyncScheduler if self.is_async else stock.Scheduler
        if mode != "stock":
            kind, config.additional_config = ours.Scheduler, {"kvplane": given}
        groups = [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(self.specs)]
        config.cache_config.num_gpu_blocks = self.num_blocks
        register_all_kvcache_specs(config)
        made = kind(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(self.num_blocks, [], groups),
            block_size=block_size,
            hash_block_size=self.hash_block_size,
            log_stats=True,
            structured_output_manager=base.structured_output_manager,
        )
        made.use_v2_model_runner = False
        made.max_num_encoder_input_tokens, made.encoder_cache_manager = 4096, EncoderCacheManager(4096)  # for images
        assert isinstance(made, async_scheduler.AsyncScheduler) == self.is_async, "the class follows the configuration"
        return made


class Memory:
    """Page memory that outlives the engine: its stamps and its key records, as a worker has them."""

    def __init__(self, num_blocks: int, incarnation: int) -> None:
        self._bytes = bytearray(table_bytes(num_blocks) + records_bytes(num_blocks))
        self.table = StampTable.create(self._bytes, num_blocks, incarnation)
        records = memoryview(self._bytes)[table_bytes(num_blocks) :]
        pages._map = lambda rank, address: (StampTable(self._bytes), records)


@contextmanager
def losing_sessions(rng: random.Random, often: float, seen: Counter[str]) -> Iterator[None]:
    """Let sessions end at random, before the service has the message or before the engine has the answer."""
    exchange, answered = Link.exchange, Link._answered

    def lose(link: Link) -> None:
        if rng.random() < often:
            seen["lost sessions"] += 1
            assert link._session is not None
            link._session.abort()
            link._session = None
            raise Lost

    def exchanging(self: Link, *args: Any) -> Any:
        lose(self)
        return exchange(self, *args)

    def answering(self: Link, result: Any) -> Any:
        lose(self)
        return answered(self, result)

    Link.exchange, Link._answered = exchanging, answering  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Link.exchange, Link._answered = exchange, answered  # type: ignore[method-assign]


class Play:
    """One seed in one mode."""

    def __init__(self, seed: int, mode: str, address: str, only: dict[str, Any]) -> None:
        self.rng = random.Random(seed)
        self.options = Options(self.rng, mode, only)
        self.has_sessions, self.sessions = only.get("sessions", seed % 3 == 0), random.Random(f"sessions {seed}")
        if self.has_sessions and mode == "stock" and self.options.has_states and self.options.is_async:
            self.has_sessions = False  # stock continues from a state that a launch in flight has overwritten
        if self.has_sessions:
            self.options.num_blocks += 60  # sessions that wait for an input hold blocks, and count as active
            self.options.active = None
        self.mode, self.given = mode.partition("+")[0], {}
        if self.mode not in ("stock", "inprocess"):
            name, _, pipeline = self.mode.partition("-")
            self.given = {"mode": name, "address": address, "replica": f"{mode.replace('+', '-')}-{seed}-{os.getpid()}"}
            if pipeline:
                self.given |= {"pipeline": pipeline, "step_timeout": "5"}
        self.memory = None
        if "+pages" in mode:
            self.given |= {"pages": "worker", "worker": "in this process"}
            self.memory = Memory(self.options.num_blocks, seed)
        options = self.options
        options.has_adapters = seed % 5 == 0 and "+pages" not in mode  # which refuse them
        self.adapters = random.Random(f"adapters {seed}")
        self.world = World(
            options.scheduler(self.mode, self.given), options.specs, options.hash_block_size, options.drafts
        )
        if self.memory is not None:
            self.world.lent = lend(self.memory.table, len(options.specs))
        rng = self.rng
        self.prefixes = [[rng.randrange(5, 900) for _ in range(options.longest)] for _ in range(3)]
        self.has_images, self.images = seed % 4 == 0, random.Random(f"images {seed}")
        self.sent, self.idle, self.crowds = 0, 0, random.Random(f"crowds {seed}")

    def run(self) -> None:
        """Play to the end. Raises WrongContent, or whatever the scheduler raises."""
        world, rng, options = self.world, self.rng, self.options
        depth = 2 if options.is_async else 1
        for number in range(MOST_STEPS + MOST_LEFT):
            if number == MOST_STEPS:
                for name in list(world.scheduler.requests):
                    world.seen["unfinished"] += 1
                    world.give_up(name)
            if number < MOST_STEPS and self.sent < NUM_REQUESTS and rng.random() < 0.4:
                for _ in range(rng.randint(1, 3)):
                    self._send()
            if rng.random() < options.reset:
                world.reset()
            if rng.random() < options.reset_running:
                world.reset(running=True)
            leaves = number < MOST_STEPS and world.clients and rng.random() < options.abort
            leaver = rng.choice(list(world.clients)[-8:]) if leaves else ""
            is_late = rng.random() < 0.6  # while the model runs
            if leaver and not is_late:
                self._leave(leaver)
            for name in list(world.scheduler.requests):
                if world.is_session(name) and self.sessions.random() < 0.1:
                    world.next_input(name)
            if world.is_busy:
                self._step(leaver if is_late else "", depth)
            elif self.sent >= NUM_REQUESTS or number > MOST_STEPS:
                break
        assert not world.is_busy, f"requests do not end: {list(world.scheduler.requests)}, {len(world.flight)} launches"

    def _step(self, leaver: str, depth: int) -> None:
        world, rng, kill = self.world, self.rng, self.options.kill
        output = world.schedule()
        self.idle = 0 if output.num_scheduled_tokens or world.flight else self.idle + 1
        assert self.idle < MOST_IDLE, f"nothing is scheduled for {list(world.scheduler.requests.values())}"
        if rng.random() < kill:
            self._kill()
            return
        world.launch(output)
        if leaver:
            self._leave(leaver, sends_again=False)
        if self.crowds.random() < self.options.crowd:  # the process that sent them has ended
            for name in list(world.scheduler.requests):
                self._leave(name, sends_again=False)
        if rng.random() < kill:
            self._kill()
            return
        while len(world.flight) >= depth or (world.flight and rng.random() < 0.5):
            world.update()
        if leaver and rng.random() < 0.7:
            self._send(world.clients[leaver])

    def _kill(self) -> None:
        """End the engine's process, as SIGKILL does; a new one begins on the same pages."""
        manager = self.world.scheduler.kv_cache_manager
        if self.mode == "mirror":
            manager.sender.close()
        if self.mode.startswith("remote") and manager.link.is_open:
            manager.link._session.abort()
        assert self.memory is not None, "its pages end with the process"
        self.world.lent = lend(StampTable(self.memory._bytes), len(self.options.specs))
        self.world.restart(self.options.scheduler(self.mode, self.given))

    def _leave(self, name: str, *, sends_again: bool = True) -> None:
        self.world.give_up(name)
        if sends_again and self.rng.random() < 0.7:
            self._send(self.world.clients[name])

    def _send(self, again: Client | None = None) -> None:
        rng, options = self.rng, self.options
        name, most, arrival = f"r{self.sent}", rng.randint(1, options.most), float(self.sent)
        self.sent += 1
        if again is not None:
            kept = {one: again.options[one] for one in again.options if one != "inputs"}
            self.world.send(Client(name, again.prompt, **kept | {"most": most, "arrival": arrival}))
            return
        length = rng.randint(4, options.longest)
        shared = rng.choice([0, length, rng.randint(0, length), rng.randint(0, length) // options.size * options.size])
        prompt = rng.choice(self.prefixes)[:shared] + [rng.randrange(5, 900) for _ in range(length - shared)]
        priority = rng.randrange(3) if options.policy == "priority" else 0
        salt = rng.choice([None, None, None, "salt"])
        image = self._image() if self.has_images and shared >= IMAGE.stop else None
        more: dict[str, Any] = self._session() if self.has_sessions and not image else {}
        if more:
            prompt, most = prompt[: options.longest // 2], min(most, options.longest // 8)
        if options.has_adapters:
            more["adapter"] = self.adapters.randrange(4)  # 0 = none
        self.world.send(
            Client(name, prompt, most=most, priority=priority, salt=salt, arrival=arrival, image=image, **more)
        )

    def _session(self) -> dict[str, Any]:
        """Draw what a client sends later, into a session of vLLM."""
        if self.sessions.random() < 0.5:
            return {}
        lengths = [self.sessions.randint(1, self.options.longest // 8) for _ in range(2)]
        return {"inputs": [[self.sessions.randrange(5, 900) for _ in range(length)] for length in lengths]}

    def _image(self) -> tuple[int, str]:
        """Draw an image, and its identifier, which some clients leave out; then stock vLLM takes one for another."""
        number = self.images.randrange(3)
        name, is_named = f"image {number}", self.images.random() < 0.7
        return number, name if is_named or self.mode == "stock" else ""


def play(seed: int, mode: str, address: str, only: dict[str, Any], seen: Counter[str]) -> str:
    """Play a seed; returns what was wrong."""
    one = None
    try:
        one = Play(seed, mode, address, only)
        with losing_sessions(random.Random(seed), one.options.lost, one.world.seen):
            one.run()
    except WrongContent as wrong:
        return f"wrong content: {wrong}"
    except Exception as error:
        return f"{error!r} {''.join(traceback.format_tb(error.__traceback__)[-2:])}"
    finally:
        if one is not None:
            seen.update(one.world.seen)
            seen[one.options.kind] += 1
            seen["async"] += one.options.is_async
            one.world.scheduler.shutdown()
    return ""


def main() -> None:
    """Play the seeds, and print the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mode")
    parser.add_argument("seeds")
    parser.add_argument("--address", default="")
    parser.add_argument("--fault", default="")
    parser.add_argument("--only", nargs="*", default=[])
    given = parser.parse_args()
    sys.path.insert(0, str(SOURCE))
    os.chdir(SOURCE)  # vLLM's tests name a model below it
    init_none_hash(sha256)
    if given.fault:
        FAULTS[given.fault]()
    only = {name: json.loads(value) for name, _, value in (one.partition("=") for one in given.only)}
    first, last = map(int, given.seeds.split("-"))
    seen: Counter[str] = Counter()
    wrong = {}
    for seed in range(first, last + 1):
        found = play(seed, given.mode, given.address, only, seen)
        if found:
            wrong[seed] = found
            sys.stderr.write(f"{given.mode} {seed}: {found}\n")
    print("RESULT " + json.dumps({"schedules": last - first + 1, "wrong": wrong, "seen": seen}))


if __name__ == "__main__":
    main()
