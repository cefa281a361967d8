"""A service over gRPC, two worker processes, an engine that is killed, and the engine that replaces it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvplane.base.groups import TierKind, TierSpec
from kvplane_worker.attach import describe
from tests.engine import child
from tests.engine.reference.config import MIXED
from tests.engine.reference.weights import draw_weights
from tests.engine.twin import Twin
from tests.engine.workload import Requests
from tests.engine.world import Pool
from tests.worker.rig import Child, World, world

POOL = Pool(num_blocks=300)
LIVES = 4
Prompt = tuple[list[int], int]
Ended = tuple[int, list[int], list[int]]  # number, hits, output


@pytest.fixture
def here(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path) as it:
        register(it, POOL)
        yield it


def register(here: World, pool: Pool) -> None:
    source = pool.source
    here.register(
        num_ranks=MIXED.num_ranks,
        namespace=b"MIXED",
        layers=source.layers,
        num_blocks=source.num_blocks,
        max_model_len=source.max_model_len,
        max_batched_tokens=source.max_batched_tokens,
        tiers=source.tiers,
    )


def prompts(seed: int) -> list[Prompt]:
    """Requests, of which only the first is long."""
    requests = Requests(POOL.max_model_len, seed)
    made = [requests.next() for _ in range(4)]
    return [([(seed + at) % 251 for at in range(100)], 8), *((one.prompt[:60], one.max_new_tokens) for one in made)]


def serve_until(engine: Child, num_ended: int) -> list[Ended]:
    """Wait until `count` requests have ended, and return them. The engine continues with the rest."""
    ended: list[Ended] = []
    while len(ended) < num_ended:
        ended += engine.receive()
    return ended


def count_wrong(sent: list[Prompt], ended: list[Ended]) -> int:
    """Number of tokens that differ from the dense model's."""
    twin = Twin(MIXED, draw_weights(MIXED))
    return sum(twin.count_wrong(sent[number][0], output) for number, _, output in ended)


def test_killed_engine_leaves_its_cache_to_the_next(here: World):
    """Each engine life first repeats the long prompt of the life before, which is cached, and is then killed."""
    workers = [here.worker(rank)[1] for rank in range(MIXED.num_ranks)]
    for life in range(LIVES):
        sent = [*prompts(life - 1)[: life > 0], *prompts(life)]
        engine = here.start(child.engine, here.service.address, "r", workers)
        kept_keys = engine.receive()
        engine.connection.send(sent)
        ended = serve_until(engine, len(sent) - 2)
        engine.kill()
        assert count_wrong(sent, ended) == 0
        hits = {number: hit for number, hit, _ in ended}
        if life:
            assert kept_keys > 0
            assert hits[0] == [96], "100 tokens, up to the last hash boundary"
        assert life > 0 or hits[0] == [0]


ROUNDS = 12
HOST, SMALL, DISK = TierSpec(TierKind.HOST, 900), TierSpec(TierKind.HOST, 90), TierSpec(TierKind.DISK, 900)


@pytest.mark.parametrize("tiers", [(HOST,), (SMALL, DISK)], ids=["host", "host and disk"])
def test_killed_engine_leaves_its_tiers_to_the_next(tmp_path: Path, tiers: tuple[TierSpec, ...]):
    """The next engine loads what the device has evicted; workers in processes of their own move it."""
    with world(tmp_path) as here:
        register(here, replace(POOL, tiers=tiers))
        workers = [here.worker(rank)[1] for rank in range(MIXED.num_ranks)]
        sent = [(([(seed + at) % 251 for at in range(150)]), 3) for seed in range(0, 240, 20)]
        for life in range(2):
            engine = here.start(child.engine, here.service.address, "r", workers)
            engine.receive()
            for _ in range(ROUNDS):  # how much is saved in time depends on the machine
                assert count_wrong(sent, serve_all(engine, sent)) == 0
                held = [tier for address in workers for tier in describe(address).tiers]
                if life == 0 or all(tier.loaded_blocks for tier in held):
                    break
            engine.kill()
        assert [tier.num_blocks for tier in held] == [tier.num_blocks for tier in tiers] * len(workers)
        assert min(tier.saved_blocks for tier in held) > 0
        assert min(tier.loaded_blocks for tier in held) > 0
        assert {tier.refused_blocks for tier in held} == {0}


def serve_all(engine: Child, sent: list[Prompt]) -> list[Ended]:
    engine.connection.send(sent)
    ended: list[Ended] = []
    while (some := engine.receive()) is not None:
        ended += some
    return ended
