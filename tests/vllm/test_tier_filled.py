"""The requests that fill a block are found without a look at all others."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from kvplane_vllm.tiers.shadows import Filled, Shadow

UNIT, REQUESTS, STEPS = 4, 12, 600


def play(seed, filled):
    """Play steps; yields of each the requests that filled a block, and those that were found, with their tokens."""
    rng, shadows, fresh = random.Random(seed), dict[str, Shadow](), set[str]()
    for number in range(STEPS):
        if rng.random() < 0.05 and shadows:
            del shadows[rng.choice([*shadows])]
        if len(shadows) < REQUESTS:
            one: Any = SimpleNamespace(request_id=str(number), num_computed_tokens=0, num_tokens=rng.randrange(1, 20))
            shadows[one.request_id] = Shadow(number, one)
            fresh.add(one.request_id)
        counts, resumed, new, expected = dict[str, int](), set[str](), list[Any](), set[str]()
        for name, shadow in shadows.items():
            one = shadow.request
            if rng.random() < 0.03:
                one.num_computed_tokens = 0  # it is preempted
                continue
            if rng.random() < 0.1:
                continue
            resumed |= {name} - fresh if not one.num_computed_tokens else set()
            new += [SimpleNamespace(req_id=name)] if name in fresh else []
            fresh.discard(name)
            before = one.num_computed_tokens + (rng.randrange(one.num_tokens) if not one.num_computed_tokens else 0)
            counts[name] = min(one.num_tokens - before, rng.choice([1, 2, 7]))
            one.num_computed_tokens = before + counts[name]
            one.num_tokens = max(one.num_tokens, one.num_computed_tokens + 1)
            expected |= {name} if before // UNIT < one.num_computed_tokens // UNIT else set()
        output: Any = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=resumed),
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
        )
        found = {shadow.request.request_id: count for shadow, count in filled.of(output, shadows)}
        yield expected, found, counts


@pytest.mark.parametrize("seed", range(5))
def test_every_request_that_fills_a_block_is_found(seed):
    right = 0
    for expected, found, counts in play(seed, Filled(UNIT)):
        assert expected <= set(found)
        assert found.items() <= counts.items()
        right += len(expected)
    assert right > 500


def test_one_that_comes_up_too_late_is_missed():
    """The planted fault: blocks that are larger than they are."""
    assert any(not expected <= set(found) for expected, found, _ in play(1, Filled(UNIT + 1)))


def test_decodes_come_up_when_they_fill_a_block_and_not_before():
    filled, one = Filled(UNIT), SimpleNamespace(request_id="one", num_computed_tokens=5, num_tokens=6)
    shadows: Any = {"one": Shadow(0, one)}  # type: ignore[arg-type]
    came = []
    for number in range(40):
        one.num_computed_tokens, one.num_tokens = one.num_computed_tokens + 1, one.num_tokens + 1
        output: Any = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id="one")] if not number else [],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
            num_scheduled_tokens={"one": 1},
            total_num_scheduled_tokens=1,
        )
        came += [one.num_computed_tokens for _ in filled.of(output, shadows)]
    assert came == [6, *range(8, 46, UNIT)]


def test_a_request_whose_state_is_offered_a_step_after_it_filled_its_block_is_found():
    one: Any = SimpleNamespace(request_id="one", num_computed_tokens=9, num_tokens=10)
    output: Any = SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
        num_scheduled_tokens={"one": 1},
        total_num_scheduled_tokens=1,
    )
    shadow = Shadow(0, one)
    assert list(Filled(UNIT).of(output, {"one": shadow})) == []
    assert list(Filled(UNIT).of(output, {"one": shadow}, {"one": [], "other": []})) == [(shadow, 1)]
