"""Operators: EvictBlocks, ResetPrefixCache, Prefetch and Retain through a service's handlers, at any time.

While engines run, drain, restart and open again with images, on every kind of replica. A call that is lost is repeated
with its op_id, at any service. What was evicted or reset is then judged as what engines evict (`evictions.py`); that no
step or image is refused for it, by the engines, which end with a bug.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any

from kvplane.base.errors import InternalError, KvplaneError, Unavailable
from kvplane.v1 import allocation_pb2 as pb
from tests.sim import history
from tests.sim.transport import call

if TYPE_CHECKING:
    from tests.sim.world import Site, World

_PAUSE_S = 0.4  # between two calls, at most
_RECENT = 8  # prompts
_ATTEMPTS = 3
_SEEDS = (0, 6, 10, 11)  # of twelve


def has_operators(seed: int) -> bool:
    """In a third of the seeds; the other runs stay as they were."""
    return seed % 12 in _SEEDS


class Operator:
    """Calls for one replica until the run ends.

    Attributes:
        done: answers by kind of the call, and refusals by their class.
    """

    def __init__(self, world: World, site: Site) -> None:
        self._world, self._site = world, site
        self._rng, self._owners = Random(f"operator {world.seed} {site.name}"), world.draw_owners()
        self.done = Counter[str]()
        world.processes.start(f"operator of {site.name}").spawn(self._work())

    async def _work(self) -> None:
        """Call until every engine ends its requests: what they have then must be free."""
        rng = self._rng
        while not self._world.is_finishing:
            await asyncio.sleep(rng.random() * _PAUSE_S)
            header = pb.MutationHeader(replica=self._site.name, op_id=f"{rng.getrandbits(64):x}")
            name, request = rng.choice([self._evict, self._evict, self._reset, self._prefetch, self._retain])(header)
            if request is not None:
                await self._ask(name, request)

    async def _ask(self, name: str, request: Any) -> None:
        for _ in range(self._rng.randint(1, _ATTEMPTS)):
            try:
                answer = await call(self._world.network, self._owners, "host", f"Allocation/{name}", request)
            except Unavailable:
                self.done[f"{name} unavailable"] += 1
                if self._world.is_finishing:
                    return
            except KvplaneError as error:
                self.done[f"{name} {type(error).__name__}"] += 1
                if isinstance(error, InternalError):
                    self._world.record(history.Broken(f"{self._site.name}: {name}: {error}"))
                return
            else:
                self.done[name if getattr(answer, "done", True) else f"{name} not done"] += 1
                return

    def _evict(self, header: pb.MutationHeader) -> tuple[str, Any]:
        """Some blocks, of requests too, any part of a state, rarely one outside the pool."""
        num_blocks = self._site.spec.num_blocks
        blocks = self._rng.sample(range(1, num_blocks), self._rng.choice([1, 1, 2, 5]))
        blocks += [num_blocks] * (self._rng.random() < 0.05)
        return "EvictBlocks", pb.EvictBlocksRequest(header=header, block_ids=blocks)

    def _reset(self, header: pb.MutationHeader) -> tuple[str, Any]:
        is_drawn = self._rng.random() < 0.3
        return "ResetPrefixCache", pb.ResetPrefixCacheRequest(header=header) if is_drawn else None

    def _prefetch(self, header: pb.MutationHeader) -> tuple[str, Any]:
        content, within_ms = self._content(), self._rng.choice([0, 0, 1, 1000])
        return "Prefetch", content and pb.PrefetchRequest(header=header, content=content, within_ms=within_ms)

    def _retain(self, header: pb.MutationHeader) -> tuple[str, Any]:
        rng, content = self._rng, self._content()
        ttl_ms, priority = rng.choice([0, 1, 100, 1000, 10_000]), rng.choice([0, 0, 50, 100])
        request = content and pb.RetainRequest(header=header, content=content, ttl_ms=ttl_ms, priority=priority)
        return "Retain", request

    def _content(self) -> pb.RequestContent | None:
        """The beginning of one of the newest prompts."""
        known = [*self._site.life.digests.items()][-_RECENT:]
        if not known:
            return None
        (_, domain), digests = self._rng.choice(known)
        hashes = digests[: self._rng.randint(1, len(digests))]
        num_tokens = len(hashes) * self._site.spec.hash_block_size
        return pb.RequestContent(hashes=hashes, num_tokens=num_tokens, domain=domain)
