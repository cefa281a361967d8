"""Several ranks of a replica: equal plans, orders on every rank, and hits only where all stamps agree."""

from __future__ import annotations

import pytest

from kvplane.base.rank_plan import RankPlan
from kvplane.rank import RankGroup
from kvplane_worker.attach import attach, read_stamps
from tests.worker.rig import World, world

PROMPT = list(range(1000, 1100))  # six full blocks of 16 tokens, and four tokens


@pytest.fixture
def pair(tmp_path):
    """Start the workers of two ranks. Returns their addresses, by rank."""
    with world(tmp_path) as it:
        it.register(num_ranks=2, retention_interval=-1)
        yield it, [it.worker(rank)[1] for rank in range(2)]


def test_ranks_have_equal_plans_and_separate_memory(pair: tuple[World, list[str]]):
    here, addresses = pair
    with attach(addresses[0]) as first, attach(addresses[1]) as second:
        plans: list[RankPlan] = [first.plan, second.plan]
        assert plans[0] == plans[1]
        first.buffers.group(0).layers[0][1] = 3
        assert second.buffers.memory[8:].count_nonzero() == 0
    shown = here.shown()
    assert [worker.rank for worker in shown] == [0, 1]
    assert len({worker.incarnation for worker in shown}) == 2


def test_orders_are_carried_out_on_every_rank(pair: tuple[World, list[str]]):
    here, addresses = pair
    engine = here.engine()
    for address in addresses:
        engine.do("attach", address)
    engine.do("open", here.service.address, "r")
    hit, table = engine.do("serve", 0, PROMPT)
    assert hit == 0
    stamps = [engine.do("stamps", rank) for rank in range(2)]
    assert stamps[0] == stamps[1]
    assert all(stamps[0][block] for block in table)


def test_executed_through_is_the_slowest_rank(pair: tuple[World, list[str]]):
    """A scheduler with ranks in other processes reads their progress from their stamp tables."""
    here, addresses = pair
    ranks = [here.engine(), here.engine()]
    for rank, address in zip(ranks, addresses, strict=True):
        rank.do("attach", address)
        rank.do("claim", 5)
    group = RankGroup([read_stamps(address) for address in addresses])
    assert group.executed_through(5) == 0
    for seq in (1, 2, 3):
        ranks[0].do("carry_out", 5, seq)
    assert group.executed_through(5) == 0
    for seq in (1, 2):
        ranks[1].do("carry_out", 5, seq)
    assert group.executed_through(5) == 2
    ranks[1].kill()
    ranks[0].do("carry_out", 5, 4)
    assert group.executed_through(5) == 2
    assert group.executed_through(4) == 0


def test_read_stamps_maps_the_table_read_only(pair: tuple[World, list[str]]):
    here, addresses = pair
    rank = here.engine()
    rank.do("attach", addresses[0])
    stamps = read_stamps(addresses[0])  # also while the pages are lent to another process
    rank.do("restamp", 0, 3, 77)
    assert stamps.read(3) == 77
    with pytest.raises(TypeError):
        stamps.claim(9)
    with pytest.raises(TypeError):
        stamps.write([1], [1])
    assert stamps.owner_epoch == 0


@pytest.mark.parametrize(
    ("differs", "hit"), [(None, 96), (5, 80), (2, 32), (0, 0)], ids=["agree", "last", "third", "first"]
)
def test_block_with_a_different_stamp_on_one_rank_is_a_miss(pair: tuple[World, list[str]], differs, hit):
    """Kill the engine, and serve the first request of the next engine life."""
    here, addresses = pair
    first = here.engine()
    for address in addresses:
        first.do("attach", address)
    first.do("open", here.service.address, "r")
    assert first.do("serve", 0, PROMPT)[0] == 0
    hit_before, table = first.do("serve", 1, PROMPT)
    assert hit_before == 96
    if differs is not None:
        first.do("restamp", 1, table[differs], 12345)
    first.kill()
    second = here.engine()
    for address in addresses:
        second.do("attach", address)
    _, kept = second.do("open", here.service.address, "r")
    assert kept
    assert second.do("serve", 0, PROMPT)[0] == hit


def test_rank_with_new_memory_makes_every_block_a_miss(pair: tuple[World, list[str]]):
    here, addresses = pair
    first = here.engine()
    for address in addresses:
        first.do("attach", address)
    first.do("open", here.service.address, "r")
    first.do("serve", 0, PROMPT)
    here.children[1].kill()  # worker of rank 1
    first.kill()
    address = here.worker(1)[1]
    second = here.engine()
    for where in (addresses[0], address):
        second.do("attach", where)
    epoch, kept = second.do("open", here.service.address, "r")
    assert (epoch, kept) == (3, 0)
    assert second.do("serve", 0, PROMPT)[0] == 0


def test_restarted_engine_keeps_the_cache_of_a_running_worker(here: World):
    """Pages match their keys: a hit of the second engine life returns every byte that the first one wrote."""
    _, address = here.worker()
    first = here.engine()
    first.do("attach", address)
    epoch, _ = first.do("open", here.service.address, "r")
    _, table = first.do("serve", 0, PROMPT)
    for block in table:
        first.do("fill", 0, 0, block, 100 + block)
    first.do("serve", 1, [7] * 20)  # another step, so that the first request's step counts as executed
    first.kill()
    second = here.engine()
    second.do("attach", address)
    assert second.do("open", here.service.address, "r")[0] == epoch + 1
    hit, again = second.do("serve", 0, PROMPT)
    assert hit == 96
    assert again[:6] == table[:6]
    assert [second.do("look", 0, 0, block) for block in again[:6]] == [{100 + block} for block in table[:6]]
