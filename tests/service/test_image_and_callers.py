"""What callers of the service ask for never refuses an image: it is alone in its step, and they get the next one."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from kvplane.base.sections import Retain
from kvplane.base.step import Cache, Part
from kvplane.session.rows import AdmitRow, NewsRow, ResumeRow, part_of, resume_of
from tests.core.specification import specification_of
from tests.service.hosts import Engine, HostWorld
from tests.twins import weakened

TOKENS = [7] * 40
ASKED = {
    "evict": Part(cache=Cache(evicted=[20])),
    "reset": Part(cache=Cache(reset=True)),
    "retain": Part(retain=Retain(num_hashes=[1], hashes=b"h" * 32, until_ns=[10**9], percent=[50])),
}


async def reopened(asked: list[str], before_news: list[str], ends: bool) -> list[asyncio.Task[object]]:
    """An engine that sends its requests and their image again, while callers ask and the time of a prefix comes."""
    world = HostWorld()
    first = Engine(world.host, incarnation=5)
    first.step(part_of(NewsRow(0, TOKENS), AdmitRow(0)))
    first.step(part_of())
    core = specification_of(world.host.replica)
    table, stamps = core.coordinator.tables(0), list(core.coordinator.pool.stamp)
    tasks = list[asyncio.Task[object]]()

    async def ask(names: list[str]) -> None:
        tasks.extend(asyncio.ensure_future(world.host.mirror.requests.ask("r", ASKED[name])) for name in names)
        await asyncio.sleep(0)

    engine = Engine(world.host, incarnation=5, stamp_table=stamps)
    await ask(before_news)
    engine.step(part_of(NewsRow(0, TOKENS)))
    await ask(asked)
    if ends:
        world.host.mirror.requests.next_end_ns, world.now_ns = 5_000, 10_000
    engine.step(Part(resume=resume_of([ResumeRow(0, len(TOKENS), table, len(TOKENS))])))
    assert world.host.replica.requests.running[0]
    engine.step(part_of())
    await asyncio.sleep(0)
    return tasks


def run(seed: int) -> None:
    rng = Random(seed)
    names = [[name for name in ASKED if rng.random() < 0.4] for _ in range(2)]

    async def main() -> None:
        tasks = await reopened(names[0], names[1], rng.random() < 0.4)
        assert all(task.done() and task.exception() is None for task in tasks)

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(12))
def test_an_image_is_accepted_whatever_callers_ask_meanwhile(seed):
    run(seed)


def test_a_service_that_merges_its_rows_into_an_image_is_found():
    with weakened("rows of callers join an image"), pytest.raises(Exception, match="an image is alone in its step"):
        run(1)
