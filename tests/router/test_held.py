"""The memory that prompts in flight hold at a place: counted as a set is, and waited for where it is short."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from msgspec.structs import replace

from kvplane_fleet import held
from kvplane_fleet.decisions import Event
from kvplane_fleet.held import STRIDE, Held, Share
from kvplane_fleet.policies import Policy
from tests.router.fleets import GROUPS, Scene, chosen, tokens


def share_of(keys, further=0):
    return Share(keys[STRIDE - 1 :: STRIDE], len(keys), further)


@pytest.mark.parametrize("seed", range(20))
def test_blocks_are_counted_as_a_set_of_all_prompts_counts_them(seed):
    rng, one, prompts, branches = Random(seed), Held(), dict[str, tuple[list[int], int]](), [list[int]()]
    for number in range(200):
        if prompts and rng.random() < 0.45:
            name = rng.choice(list(prompts))
            one.remove(name)
            del prompts[name]
        else:
            keys = rng.choice(branches) + [rng.getrandbits(64) for _ in range(STRIDE * rng.randrange(1, 9))]
            branches.append(keys)
            further, before = rng.randrange(5), set[int]().union(*(each for each, _ in prompts.values()))
            assert one.wanted(share_of(keys, further)) == pytest.approx(len(set(keys) - before) + further)
            prompts[str(number)] = keys, further
            one.add(str(number), share_of(keys, further))
        distinct = set[int]().union(*(each for each, _ in prompts.values()))
        assert one.blocks == pytest.approx(len(distinct) + sum(further for _, further in prompts.values()))
    for name in prompts:
        one.remove(name)
    assert one.blocks == 0


def test_a_prompt_shorter_than_the_stride_is_counted_alone():
    one = Held()
    for name in ("a", "b"):
        one.add(name, share_of([1, 2, 3], 1))
    assert one.blocks == 8
    one.remove("a")
    one.remove("never sent")
    assert one.blocks == 4


@pytest.mark.parametrize("is_same", [True, False], ids=["the same keys", "other keys"])
def test_the_keys_that_are_remembered_are_bounded(monkeypatch, is_same):
    """A caller may book one long prompt repeatedly: each booking keeps its keys."""
    monkeypatch.setattr(held, "MAX_KEYS", 25)
    one, blocks = Held(), STRIDE * 10
    for number in range(6):
        one.add(str(number), share_of(range(blocks) if is_same else range(number * blocks, (number + 1) * blocks)))
    kept = sum(len(share.keys) for share in one._prompts.values())
    assert kept == 20, "two prompts of six"
    assert one.blocks == (5 if is_same else 6) * blocks, "the others share nothing"
    for number in range(6):
        one.remove(str(number))
    assert one.blocks == 0
    one.add("again", share_of(range(blocks)))
    assert one.wanted(share_of(range(blocks))) == 0, "there is room again"


def busy(groups=GROUPS, **settings):
    """Place a has all of a prompt, and its memory is full of others, which decode; b is idle and has nothing."""
    scene, prompt = Scene("a", "b", groups=groups, **settings), tokens(1, 80)
    for name in "ab":
        place = scene.place(name)
        place.settings = replace(place.settings, num_blocks=400)
    scene.stores("a", prompt)
    names = [scene.book(tokens(seed, 100), candidates=frozenset("a"))[1] for seed in range(2, 6)]
    for name in names:
        scene.decisions.first_token(name, Event(scene.clock()))
    return scene, prompt, names


@pytest.mark.parametrize("policy", [Policy.COST, Policy.TTFT, Policy.WEIGHTS])
def test_a_prompt_does_not_wait_for_memory_where_another_place_is_free(policy):
    scene, prompt, names = busy()
    assert chosen(scene.score(prompt, policy=policy)) == "a", "no end was reported of any prompt"
    scene.clock.now_s += 20
    scene.decisions.ended(names.pop(), Event(scene.clock()))
    names += [scene.book(tokens(seed, 130), candidates=frozenset("a"))[1] for seed in range(9, 13)]
    decision = scene.score(prompt, policy=policy)
    costs = {one.claim.place: one.option.cost for one in decision.places}
    assert costs["a"].memory_s > 1
    assert costs["b"].memory_s == 0
    assert chosen(decision) == "b"
    for name in names:
        scene.decisions.ended(name, Event(scene.clock()))
    assert chosen(scene.score(prompt, policy=policy)) == "a"


def test_what_a_prompt_shares_with_those_in_flight_needs_no_memory():
    scene, _, names = busy()
    scene.clock.now_s += 20
    scene.decisions.ended(names.pop(), Event(scene.clock()))
    room = 400 - scene.decisions.work_of("a").held.blocks
    size = int(room) // 8 * 8
    alone = scene.score(tokens(7, size), candidates=frozenset("a")).places[0].option.cost.memory_s
    shared = scene.score(tokens(4, 100) + tokens(8, 16), candidates=frozenset("a")).places[0].option.cost.memory_s
    assert shared == 0 < alone


def test_ends_that_are_never_reported_hold_no_memory():
    scene, prompt, _ = busy()
    for seed in range(20):
        scene.book(tokens(seed, 100), candidates=frozenset("a"))
    assert scene.score(prompt).places[0].option.cost.memory_s == 0


@pytest.mark.parametrize("seed", range(5))
def test_every_prompt_gives_its_memory_back_however_it_ends(seed):
    scene, rng, live = Scene("a", "b", groups=GROUPS, forget_after_s=40), Random(seed), dict[str, str]()
    stages = Counter[str]()
    for number in range(120):
        place, name = scene.book(tokens(number % 17, 1 + number % 60))
        live[name] = place
        for other in rng.sample(list(live), len(live) // 3):
            stage = rng.choice(["first_token", "ended", "none"])
            stages[stage] += 1
            if stage == "first_token":
                scene.decisions.first_token(other, Event(scene.clock()))
            elif stage == "ended":
                scene.decisions.ended(other, Event(scene.clock(), output_tokens=2))
                del live[other]
        scene.clock.now_s += 0.1
    assert min(stages.values()) > 20
    assert any(scene.decisions.work_of(place).held.blocks for place in "ab")
    scene.clock.now_s += 100
    scene.decisions.sweep()
    assert [scene.decisions.work_of(place).held.blocks for place in "ab"] == [0, 0]
