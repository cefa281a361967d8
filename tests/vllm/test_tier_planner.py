"""What the scheduler's half of the tiers answers where vLLM's own hit grows, loads fail, and blocks are lost."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from kvplane.base.sections import AdmitRow
from kvplane.base.step import ANY_HIT, News, Part
from kvplane_core.face.part_rows import RunRow, Update, admit_section, facts_section, run_section
from kvplane_core.face.state import digest
from kvplane_vllm.tiers.host import HostAllocator, host_spec
from kvplane_vllm.tiers.messages import Progress, Ready
from kvplane_vllm.tiers.planner import Planner
from kvplane_vllm.tiers.shadows import State
from tests.vllm.tier_world import BLOCK, Request, engine_spec

HOST = 200


@pytest.fixture
def planner():
    engine = engine_spec(max_model_len=256, max_in_flight_tokens=64)
    return Planner(HostAllocator(host_spec(engine, HOST, ()), [Ready(1, [0] * HOST, False, b"")]), 5.0)


def request(name, length):
    tokens = [at * 7 % 97 for at in range(length)]
    flags = {"skip_reading_prefix_cache": False, "resumable": False}
    return Request(request_id=name, tokens=tokens, num_prompt_tokens=length, **flags)


def table(end, first, left=0):
    """The blocks of both groups for this number of tokens; `left` left the window."""
    count = end // BLOCK
    return [list(range(first, first + count)), [0] * left + list(range(first + 100 + left, first + 100 + count))]


def step(planner, *rows, ends=True):
    """Schedule rows (request, computed before, tokens, tables) of new requests, and, if there are some and the step
    `ends`, a step behind it, with which their copies end; returns the orders of the last one.
    """
    tables = {one.request_id: blocks for one, _, _, blocks in rows}
    new = [SimpleNamespace(req_id=one.request_id, block_ids=blocks) for one, _, _, blocks in rows]
    output: Any = SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(), new_block_ids=[]),
        total_num_scheduled_tokens=sum(count for _, _, count, _ in rows),
        num_scheduled_tokens={one.request_id: count for one, _, count, _ in rows},
        new_block_ids_to_zero=None,
        kv_cache_block_copies=None,
        kv_connector_block_state=SimpleNamespace(get_block_ids=tables.__getitem__),
    )
    orders = planner.orders(output)
    for one, computed, count, _ in rows:
        one.num_computed_tokens = computed + count
    if ends:
        planner.report(Progress({0: orders.seq}, {0: []}), (), ())
    return step(planner) if rows and ends else orders


def stored(planner, length):
    """Let the tiers hold the prefix of this length."""
    one = request("first", length + 1)
    planner.matched(one, 0)
    step(planner, (one, 0, length, table(length, 1)))
    planner.finish(one)


@pytest.mark.parametrize("is_broken", [False, True], ids=["its load", "the tiers"])
def test_a_request_whose_load_failed_is_computed_and_not_offered_the_same_hit(is_broken, planner):
    stored(planner, 36)
    one = request("one", 40)
    assert planner.matched(one, 0) == 36
    planner.take(one, table(36, 40, left=7), 36)
    step(planner)
    planner.report(Progress({0: planner.host.seq}, {0: []}, is_broken), ["one"], ["one"])
    assert planner.matched(one, 0) == 0
    assert planner.matched(request("other", 40), 0) == (0 if is_broken else 36)


def test_what_is_shorter_than_the_least_load_is_computed(planner):
    stored(planner, 36)
    planner._min_load = 12
    found = [
        planner.matched(request(f"{length} from {own}", length), own)
        for length, own in ((40, 0), (14, 0), (13, 0), (12, 0))
    ]
    assert found == [36, 12, 12, 0]
    assert [planner.matched(request(f"from {own}", 40), own) for own in (24, 28)] == [12, 0]


def test_a_request_that_waits_for_blocks_of_vllm_holds_none_in_host_memory(planner):
    stored(planner, 36)
    one = request("one", 40)
    for _ in range(3):
        assert planner.matched(one, 0) == 36
        assert planner.host.replica.block_counts.held == 0
    for other in range(5):  # which need all of host memory
        long = Request(**vars(request(f"other {other}", 200)))
        long.tokens = [other, *long.tokens[1:]]
        step(planner, (long, 0, 200, table(200, 1))) if planner.matched(long, 0) == 0 else None
        planner.finish(long)
    assert planner.matched(one, 0) == 0, "its blocks were evicted meanwhile"
    assert planner.counts.refused == 0


def test_a_hit_that_is_evicted_before_vllm_takes_it_is_computed(planner):
    """VLLM takes it within the same schedule(), so this cannot happen; if it does, the load fails."""
    stored(planner, 36)
    one = request("one", 40)
    assert planner.matched(one, 0) == 36
    assert planner.reset()
    planner.take(one, table(36, 40, left=7), 36)
    assert step(planner).loads == {"one": None}
    planner.report(Progress({0: planner.host.seq}, {0: []}), ["one"], ["one"])
    assert planner.matched(one, 0) == 0
    planner.finish(one)
    assert planner.host.replica.block_counts.held == 0


def test_a_hit_that_vllm_has_outgrown_is_given_up_and_what_is_computed_is_saved(planner):
    stored(planner, 16)
    one = request("one", 81)
    assert planner.matched(one, 0) == 16
    assert planner.matched(one, 64) == 0, "it waited, and vLLM has 64 tokens meanwhile"
    orders = step(planner, (one, 64, 16, table(80, 1, left=14)))
    assert orders.saves
    assert planner.counts.unsaved == 0
    assert planner._shadows["one"].held == 80


def test_requests_of_one_step_that_share_lost_blocks_lose_them_together(planner):
    """The second adopts the blocks that the first got; vLLM has freed one before it could be saved."""
    stored(planner, 16)
    one, two = request("one", 81), request("two", 97)
    for each in (one, two):
        assert planner.matched(each, 64) == 0, "vLLM has 64 tokens itself"
    hole = table(80, 1)
    hole[0][10] = 0
    orders = step(planner, (one, 64, 16, hole), (two, 64, 32, table(96, 40)))
    assert planner.counts.unsaved == 1
    assert not orders.saves
    for name in ("one", "two"):
        shadow = planner._shadows[name]
        held = {block for row in planner.host.tables(shadow.slot) for block in row if block}
        assert (shadow.state, shadow.held, held) == (State.IDLE, 0, set()), name


def test_what_a_request_computed_last_is_saved_although_it_has_ended_and_its_blocks_are_used_again(planner):
    one, other = request("one", 20), request("other", 40)
    for each in (one, other):
        assert planner.matched(each, 0) == 0
    assert not step(planner, (one, 0, 17, table(17, 1)), ends=False).saves
    planner.finish(one)
    orders = step(planner, (other, 0, 16, table(16, 1)), ends=False)
    assert [copies.device for copies in orders.saves] == table(16, 1)
    assert orders.overwritten == {*table(16, 1)[0], *table(16, 1)[1]}
    assert orders.seq == planner.host.seq == planner.host.last_copies
    planner.report(Progress({0: orders.seq}, {0: []}), (), ())
    assert planner.matched(request("again", 20), 0) == 16


def test_steps_in_which_nothing_fills_have_no_orders_and_no_step_of_the_allocator(planner):
    one = request("one", 40)
    assert planner.matched(one, 0) == 0
    step(planner, (one, 0, 16, table(17, 1)))
    while planner.is_busy:
        step(planner)
    before = planner.host.seq
    for computed in range(16, 19):
        assert not step(planner, (one, computed, 1, table(computed + 1, 1)), ends=False).parts
    assert planner.host.seq == before
    step(planner, (one, 19, 1, table(20, 1)), ends=False)
    assert [copies.device for copies in step(planner).saves] == [[5], [105]]


def test_a_step_of_running_requests_alone_is_applied_as_any_other():
    """Two allocators with the same requests: one gets their rows as a part, the other one by one."""
    spec, orders = host_spec(engine_spec(max_model_len=256, max_in_flight_tokens=64), 20, ()), []
    hosts = [HostAllocator(spec, [Ready(1, [0] * 20, False, b"")]) for _ in range(2)]
    for host in hosts:
        for slot in range(3):
            hashes = request("one", 80).block_hashes[:2]
            host.apply(Part(news=News([slot], [8], num_hashes=[2], hashes=b"".join(hashes), request_id=[str(slot)])))
            host.apply(Part(admit=admit_section([AdmitRow(slot, cap=8, expected_hit=ANY_HIT)])))
        host.apply(Part(), last=True)
    rng = random.Random(3)
    for number in range(1, 9):
        rows = [
            (Update(slot, appended=4, digests=[bytes([slot, number]) * 16]), 4) for slot in rng.sample(range(3), k=2)
        ]
        for host in hosts:
            host.executed = host.seq - 1
        known = [hosts[0].replica.requests.num_tokens[update.slot] for update, _ in rows]
        computed = [hosts[0].replica.requests.computed[update.slot] for update, _ in rows]
        extra = [at + 4 - tokens - 4 for at, tokens in zip(computed, known, strict=True)]
        runs = [RunRow(update.slot, more) for (update, _), more in zip(rows, extra, strict=True)]
        part = Part(facts_section([update for update, _ in rows]), run=run_section(runs))
        granted = [count > 0 for count in hosts[0].apply(part, last=True).granted]
        assert hosts[1].grow(rows) == granted
        assert digest(hosts[0].replica) == digest(hosts[1].replica)
        orders += [[host.take_orders() for host in hosts]]
        assert orders[-1][0] == orders[-1][1]
    assert not all(granted), "there is no room in the end"
