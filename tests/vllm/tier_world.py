"""A small vLLM for kvplane's tiers, without vLLM: requests with prompts in common, blocks that are used again at once,
chunks, preemptions, aborts (also while a request loads), and steps that are scheduled before earlier ones have run.

What a page holds follows from the tokens before it. A step checks each page that its attention reads, so a wrong load,
a save that read too late, or a row of host memory that was given away too early is found.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections import deque
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch

from kvplane.base.groups import GroupKind, GroupSpec, HashAlgorithm, ReplicaSpec, SavePolicy
from kvplane_vllm.tiers.host import HostAllocator, host_spec
from kvplane_vllm.tiers.messages import Ready
from kvplane_vllm.tiers.planner import Planner
from kvplane_vllm.tiers.rank import TierRank
from kvplane_vllm.tiers.service import Service
from kvplane_vllm.tiers.settings import Settings, tiers_of

BLOCK, WINDOW, PAGE = 4, 8, 64
NUM_BLOCKS, BUDGET = 40, 24
GROUPS = ("full", "window")
LOADING, WAITING, RUNNING, OVER = "loading", "waiting", "running", "over"


def digest(tokens: list[int], group: int = -1) -> bytes:
    return hashlib.blake2b(repr((group, tokens)).encode(), digest_size=32).digest()


class Request(SimpleNamespace):
    """A request of vLLM, as far as the tiers read it."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        return [digest(self.tokens[:end]) for end in range(BLOCK, len(self.tokens) + 1, BLOCK)]


def cache() -> Any:
    """The KV cache config: a layer of full attention, and one of a window, in the same blocks."""
    spec = SimpleNamespace(page_size_bytes=PAGE, prefix_replay_tokens=0, has_layer_views=True)
    groups = [
        SimpleNamespace(layer_names=[name], kv_cache_spec=spec, host_resident=False, is_eagle_group=False)
        for name in GROUPS
    ]
    tensors = [SimpleNamespace(layers=[name], offset=0, layer_stride=PAGE, block_stride=PAGE) for name in GROUPS]
    return SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_groups=groups, kv_cache_tensors=tensors)


def engine_spec(max_model_len: int, max_in_flight_tokens: int, window: int = WINDOW) -> ReplicaSpec:
    """The engine's allocator: a group of full attention, and one of a window."""
    windowed = GroupSpec(GroupKind.SLIDING_WINDOW, BLOCK, window=window)
    return ReplicaSpec(
        groups=(GroupSpec(GroupKind.FULL_ATTENTION, BLOCK), windowed),
        num_blocks=NUM_BLOCKS,
        hash_block_size=BLOCK,
        scheduler_block_size=BLOCK,
        hash_algorithm=HashAlgorithm.SHA256,
        hash_seed="vllm",
        retention_interval=-1,
        max_model_len=max_model_len,
        max_in_flight_tokens=max_in_flight_tokens,
    )


class World:
    """The engine, its scheduler ahead of its worker by at most `lag` steps. `is_v2`: it zeroes new blocks before it
    calls the connector, as vLLM's V2 runner.
    """

    def __init__(
        self,
        seed: int,
        settings: Settings,
        lag: int,
        window: int = WINDOW,
        service: Service | None = None,
        is_v2: bool = False,
    ) -> None:
        self.is_v2 = is_v2
        self.rng, self.lag, self.window = random.Random(seed), lag, window
        self.memory = torch.zeros((NUM_BLOCKS, PAGE), dtype=torch.uint8)
        views = dict.fromkeys(GROUPS, self.memory)
        config: Any = SimpleNamespace(
            use_v2_model_runner=is_v2, parallel_config=SimpleNamespace(data_parallel_index=0, world_size=1)
        )
        self.rank = self.start_rank(config, settings, views)
        num_blocks, tiers = tiers_of(cache(), settings)
        spec = host_spec(self.engine(BUDGET * (lag + 1)), num_blocks, tiers, events=service is not None)
        self.planner = Planner(HostAllocator(spec, self.ready, service=service), 5.0, settings.min_load, is_v2)
        self.prompts = [[self.rng.randrange(9) for _ in range(72)] for _ in range(4)]
        self.free = list(range(1, NUM_BLOCKS))
        self.requests: dict[str, Request] = {}
        self.flight: deque[Any] = deque()
        self.count = self.wrong = self.checked = self.preempted = self.aborted_loading = 0

    def start_rank(self, config: Any, settings: Settings, views: Any) -> Any:
        """Start the worker's half."""
        return TierRank(config, cache(), settings, views)

    @property
    def ready(self) -> list[Ready]:
        """What each rank has allocated."""
        return [self.rank.ready]

    def engine(self, max_in_flight_tokens: int) -> ReplicaSpec:
        """The engine's allocator."""
        return engine_spec(max_model_len=128, max_in_flight_tokens=max_in_flight_tokens, window=self.window)

    # -- the scheduler -------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Add a request with a part of a prompt that others have too."""
        prompt = self.rng.choice(self.prompts)[: self.rng.randrange(6, 72)]
        prompt = prompt + [self.rng.randrange(9) for _ in range(self.rng.randrange(3))]
        name, self.count = str(self.count), self.count + 1
        flags = {"skip_reading_prefix_cache": False, "resumable": False}
        self.requests[name] = Request(
            request_id=name,
            tokens=prompt,
            num_prompt_tokens=len(prompt),
            most=len(prompt) + self.rng.randrange(1, 12),
            state=WAITING,
            computed=0,
            num_computed_tokens=0,
            tables=([], []),
            is_new=True,
            fresh=[],
            **flags,
        )

    def allocate(self, one: Request, end: int) -> bool:
        """Give a request the blocks for its tokens up to `end`; those that left the window are freed first."""
        first = max(0, one.computed - self.window + 1) // BLOCK
        self.release([block for block in one.tables[1][:first] if block])
        one.tables[1][:first] = [0] * min(first, len(one.tables[1]))
        wanted = [-(-end // BLOCK) - len(table) for table in one.tables]
        skipped = max(0, first - len(one.tables[1]))
        if max(0, wanted[0]) + max(0, wanted[1] - skipped) > len(self.free):
            return False
        one.tables[1].extend([0] * skipped)
        for table in one.tables:
            while len(table) < -(-end // BLOCK):
                table.append(self.take())
                one.fresh.append(table[-1])
        return True

    def take(self) -> int:
        """Take a free block, of which there is one."""
        return self.free.pop()

    def release(self, blocks: list[int]) -> None:
        """Free blocks: the next allocation takes them."""
        self.free += blocks

    def drop(self, one: Request) -> None:
        """Free all blocks of a request."""
        self.release([block for block in chain(*one.tables) if block])
        one.tables, one.computed, one.num_computed_tokens, one.fresh = ([], []), 0, 0, []

    def schedule(self) -> None:
        """Plan a step, which runs later."""
        cached = SimpleNamespace(resumed_req_ids=set(), new_block_ids=[])
        new, tokens, tables = [], dict[str, int](), dict[str, Any]()
        work, budget = [], BUDGET
        for one in [*self.of(RUNNING), *self.of(WAITING)]:
            was_waiting = one.state == WAITING
            if was_waiting and not one.computed and not self.look_up(one):
                continue
            count = self.chunk(one, min(budget, one.num_tokens - one.computed))
            while count > 0 and not self.allocate(one, one.computed + count):
                victim = self.of(RUNNING)[-1] if self.of(RUNNING) else one
                if was_waiting or victim is one or victim.request_id in tokens:
                    count = 0
                    self.preempt(one)
                    break
                self.preempt(victim)
            if count <= 0:
                continue
            budget -= count
            one.state = RUNNING
            row = [list(table) for table in one.tables]
            tokens[one.request_id], tables[one.request_id] = count, row
            if one.is_new:
                new.append(SimpleNamespace(req_id=one.request_id, block_ids=row))
            else:
                cached.resumed_req_ids |= {one.request_id} if was_waiting else set()
                cached.new_block_ids.append([one.fresh] if not was_waiting else row)
            work.append((list(one.tokens), row, one.computed, one.computed + count, list(one.fresh)))
            one.is_new, one.fresh, one.computed = False, [], one.computed + count
            if one.computed == one.num_tokens:  # the sampled token is known when the step has run
                one.awaits = True
        output: Any = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            new_block_ids_to_zero=[block for row in work for block in row[-1]] if self.is_v2 else None,
            kv_cache_block_copies=None,
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=tables.__getitem__, boundary_state_offloads=self.offers(tokens)
            ),
        )
        self.flight.append((self.planner.orders(output), work, list(tokens)))
        for one in [self.requests[name] for name in tokens]:
            one.num_computed_tokens = one.computed

    def chunk(self, one: Request, count: int) -> int:
        """Return how many of these tokens a step computes."""
        del one
        return count

    def offers(self, tokens: dict[str, int]) -> dict[str, list[tuple[int, int, int]]]:
        """The recurrent states that vLLM offers with a step: there are none."""
        del tokens
        return {}

    def of(self, state: str) -> list[Request]:
        return [one for one in self.requests.values() if one.state == state]

    def look_up(self, one: Request) -> bool:
        """Ask the tiers; returns whether the request may be scheduled now."""
        found = self.planner.matched(one, 0)
        if found is None:
            return False
        if not found:
            return True
        waits = [other for other in (*self.of(LOADING), *self.of(WAITING)) if other.computed]
        if sum(map(self.whole, (one, *waits))) > len(self.free):
            return False  # as vLLM: else requests that loaded could wait for each other's blocks
        one.computed = found
        if not self.allocate(one, found):
            one.computed = 0
            return False
        one.fresh = []
        self.planner.take(one, one.tables, found)
        one.state = LOADING
        return False

    def whole(self, one: Request) -> int:
        """Return how many further blocks the whole prompt of a request takes at most."""
        held = sum(map(bool, chain(*one.tables)))
        return -(-one.num_tokens // BLOCK) + (BUDGET + self.window) // BLOCK + 2 - held

    def preempt(self, one: Request) -> None:
        self.preempted += 1
        self.drop(one)
        one.state = WAITING

    def abort(self) -> None:
        """End a request of the user's will; the blocks of one that loads are freed when its load has ended."""
        one = self.rng.choice([one for one in self.requests.values() if one.state != OVER])
        self.planner.finish(one)
        if one.state == LOADING:
            self.aborted_loading += 1
            one.state = OVER
            return
        self.drop(one)
        del self.requests[one.request_id]

    # -- the worker ----------------------------------------------------------------------------------------------------

    def execute(self) -> None:
        """Run the oldest step, and take its output."""
        orders, work, names = self.flight.popleft()
        if not self.is_v2:
            self.rank.begin(orders)
        for *_, fresh in work:
            self.memory[fresh] = 0xFF
        if self.is_v2:
            self.rank.begin(orders)
        for tokens, tables, first, end, _ in work:
            self.check(tokens, tables, first)
            for group, table in enumerate(tables):
                for at in range(first // BLOCK, -(-end // BLOCK)):
                    self.memory[table[at]] = self.page(tokens[: min(end, (at + 1) * BLOCK)], group)
        self.rank.end(orders)
        loaded, failed = self.rank.take_loads()
        self.planner.report(self.rank.progress(), loaded, failed)
        for name in loaded:
            one = self.requests[name]
            if one.state == OVER:
                self.drop(one)
                del self.requests[name]
                continue
            one.state = WAITING
            if name in failed:
                self.drop(one)
        for one in [self.requests[name] for name in names if name in self.requests]:
            if one.state == RUNNING and one.computed == one.num_tokens:
                one.tokens = [*one.tokens, int.from_bytes(digest(one.tokens)[:2], "little") % 9]
                if one.num_tokens >= one.most:
                    self.planner.finish(one)
                    self.drop(one)
                    del self.requests[one.request_id]

    def check(self, tokens: list[int], tables: list[list[int]], computed: int) -> None:
        """Compare the pages that a step reads with what they should hold."""
        for group, table in enumerate(tables):
            first = 0 if group == 0 else max(0, computed - self.window + 1) // BLOCK
            for at in range(first, computed // BLOCK):
                self.checked += 1
                self.wrong += not torch.equal(self.memory[table[at]], self.page(tokens[: (at + 1) * BLOCK], group))

    @staticmethod
    def page(tokens: list[int], group: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(digest(tokens, group) * 2), dtype=torch.uint8)

    def run(self, steps: int) -> None:
        """Run steps, then until all requests have ended and the tiers are idle."""
        for number in range(steps + 4000):
            if number < steps and len(self.requests) < 8 and self.rng.random() < 0.6:
                self.arrive()
            if number < steps and any(one.state != OVER for one in self.requests.values()) and self.rng.random() < 0.08:
                self.abort()
            self.schedule()
            while len(self.flight) > self.rng.randint(0, self.lag):
                self.execute()
            if number >= steps:
                time.sleep(0.0005)  # copies and the disk have threads of their own
            if number >= steps and not self.requests and not self.flight and not self.planner.is_busy:
                return
        left = [(one.request_id, one.state, one.computed, one.num_tokens) for one in self.requests.values()]
        raise AssertionError(f"the requests do not end: {left}, {len(self.free)} blocks are free")


def options(host: int, disk: Any = None, slots: int = 0, save: SavePolicy = SavePolicy.THROUGH) -> Settings:
    """Return settings with these numbers of blocks in host memory and on the disk."""
    return Settings(host * PAGE, disk, slots * 8192, save, 5.0)
