"""Callers that retain cached prefixes of an engine's prompts for a time, or release them: Allocation.Retain."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING

from kvplane.base.errors import KvplaneError
from kvplane.v1 import allocation_pb2 as pb
from tests.sim.transport import call

if TYPE_CHECKING:
    from tests.sim.engine import EngineLife

_PAUSE_S = 0.2  # between two calls, at most
_RECENT = 8  # prompts


async def retain_some(life: EngineLife) -> None:
    """Call until the engine dies, with some of the newest prompts. Calls are lost, refused, and answered late."""
    world, site = life.world, life.site
    rng, owners = Random(f"{world.seed} {life.process.pid}"), world.draw_owners()
    while not world.is_finishing:
        await asyncio.sleep(rng.random() * _PAUSE_S)
        if not life.digests:
            continue
        (_, domain), digests = rng.choice([*life.digests.items()][-_RECENT:])
        hashes = digests[: rng.randint(1, len(digests))]
        num_tokens = len(hashes) * site.spec.hash_block_size
        request = pb.RetainRequest(
            header=pb.MutationHeader(replica=site.name),
            content=pb.RequestContent(hashes=hashes, num_tokens=num_tokens, domain=domain),
            ttl_ms=rng.choice([0, 1, 100, 1000, 10_000]),
            priority=rng.choice([0, 0, 50, 100]),
        )
        with suppress(KvplaneError):
            answer: pb.RetainResponse = await call(world.network, owners, "host", "Allocation/Retain", request)
            world.num_retained += answer.retained_blocks > 0
