"""Weights that change in place: nothing that the old ones computed is ever hit again, wherever it was.

That no old record of the store, and no index of a disk, recovers a key from before a reset is tested in
tests/core/test_recovery.py, tests/core/test_kept_tiers.py and tests/worker/test_kept_slots.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplane.base.groups import TierKind, TierSpec
from kvplane.base.step import ExtraKeys, RowFlag
from kvplane_core.face import setup
from kvplane_service.explain.causes import Cause
from tests.core.follower import Follower
from tests.core.specification import specification_of
from tests.engine.reference.config import BOS, ModelConfig
from tests.engine.reference.request import Request
from tests.engine.reference.scheduler import SchedulerConfig
from tests.engine.reference.weights import Weights, draw_weights
from tests.engine.stress import DENSE, FULL, STATE
from tests.engine.test_canary import canary_of, mismatches
from tests.engine.tiers import WINDOW
from tests.engine.world import Pool, World
from tests.service.test_explain import Desk

MODEL = ModelConfig((STATE, FULL, WINDOW), num_ranks=2)
TIERS = (TierSpec(TierKind.HOST, 30), TierSpec(TierKind.DISK, 400))
POOL = Pool(MODEL, num_blocks=70, tiers=TIERS, batches=4, **DENSE)
LOADS = SchedulerConfig(admit_flags=RowFlag.LOAD, num_drafts=0)
PROMPTS = [[BOS, *((seed + 11 * at) % 240 for at in range(99))] for seed in range(8)]


def other_weights() -> Weights:
    return draw_weights(replace(MODEL, seed=2))


@pytest.fixture(autouse=True)
def small_pools(monkeypatch):
    monkeypatch.setattr(setup, "AHEAD_SHARE", 1)


def serve(world: World, at: int, domain: str = "") -> Request:
    request = Request(f"{domain} {at}", PROMPTS[at], 3, domain)
    world.engine.add(request)
    while world.engine.has_work:
        world.engine.step()
    return request


def right(weights: Weights, at: int) -> list[int]:
    """What these weights answer, without a cache."""
    world = World(Pool(MODEL, num_blocks=70), SchedulerConfig(num_drafts=0))
    world.engine._model.replace_weights(weights)
    return serve(world, at).output


def held(world: World) -> dict[str, int]:
    """Keys by place."""
    replica = specification_of(world.host.replica)
    counts = {tier.kind.value: one.num_held for tier, one in zip(TIERS, replica.tiers.each, strict=True)}
    return {"device": replica.count_keys(), **counts}


@pytest.fixture
def filled() -> World:
    """A replica with keys on the device, in host memory and on disk."""
    world = World(POOL, LOADS)
    for at in range(len(PROMPTS)):
        serve(world, at)
    while world.engine.num_running or min(held(world).values()) == 0:
        world.engine.step()
    return world


def test_a_change_of_weights_empties_every_place(filled):
    follower, subscription = Follower(), filled.host.events.subscribe(0, lambda: None)
    follower.read(subscription.take())
    assert follower.view
    new = other_weights()
    assert filled.engine.change_weights(new) == []
    assert held(filled) == {"device": 0, "host": 0, "disk": 0}
    follower.read(subscription.take())
    assert not follower.view, "a router knows no key of the old weights"
    for at in (7, 0, 7):
        again = serve(filled, at)
        assert again.output == right(new, at)
    assert again.hits[-1] > 0, "of the new weights"
    filled.check()


def test_running_requests_start_again_with_the_new_weights(filled):
    new, request = other_weights(), Request("long", PROMPTS[7], 6)
    filled.engine.add(request)
    while len(request.output) < 3:
        filled.engine.step()
    before = request.output
    filled.engine.change_weights(new)
    while filled.engine.has_work:
        filled.engine.step()
    assert request.output[:3] == before
    assert request.hits[-1] == 0
    alone = World(Pool(MODEL, num_blocks=70), SchedulerConfig(num_drafts=0))
    alone.engine._model.replace_weights(new)
    alone.engine.add(rest := Request("rest", [*PROMPTS[7], *before], 3))
    while alone.engine.has_work:
        alone.engine.step()
    assert request.output[3:] == rest.output


@pytest.mark.parametrize("changed", [False, True], ids=["before the change", "after it"])
def test_no_key_survives_a_crash_around_the_change(filled, changed):
    """The stamps of the reset are on every rank before the weights change."""
    if changed:
        filled.engine.change_weights(other_weights())
    else:
        filled.engine._scheduler.reset()
        while filled.engine._scheduler.is_resetting:
            filled.engine.step()
    filled.engine = filled.begin()
    assert filled.engine.kept_keys == 0
    assert held(filled) == {"device": 0, "host": 0, "disk": 0}
    filled.check()


def test_a_domain_that_names_the_weights_needs_no_reset():
    """Old keys age out; a return to the old weights, also in the next engine life, hits what they computed."""
    world, old, new = World(POOL, LOADS), draw_weights(MODEL), other_weights()
    first = serve(world, 0, "step 1")
    world.engine._model.replace_weights(new)
    second = serve(world, 0, "step 2")
    assert (first.hits, second.hits) == ([0], [0])
    assert second.output == right(new, 0)
    world.engine = world.begin()  # with the old weights
    third = serve(world, 0, "step 1")
    assert third.hits[-1] > 0
    assert third.output == first.output == right(old, 0)


def test_a_change_without_a_reset_is_found_by_the_canary():
    """The twin of the tests above: here an engine forgets to say that its weights changed."""
    world = World(replace(POOL, tiers=()), SchedulerConfig(num_drafts=0, canary_rate=1.0))
    serve(world, 0)
    new = other_weights()
    world.engine._model.replace_weights(new)
    assert serve(world, 0).output == right(new, 0)
    assert mismatches(world) > 0
    assert canary_of(world).mismatches


def test_an_adapter_that_is_reloaded_under_its_name_loses_its_keys_alone():
    """Its path has a generation: other keys than before for its requests, and those of all others stay."""
    desk = Desk(replace(Desk().world.host.replica.spec, num_blocks=60))
    before, after = (ExtraKeys(lora=("sql", f"/adapters/sql@{generation}")) for generation in (1, 2))
    desk.serve("base", "aaaabbbbc")
    desk.serve("adapted", "aaaabbbbc", extra_keys=before)
    assert desk.why("aaaabbbbc", keys=before).account.hit == 8
    found = desk.why("aaaabbbbc", keys=after)
    assert found.account.hit == 0
    assert (found.why.cause, found.why.by) in ((Cause.OTHER_LORA, "sql"), (Cause.OTHER_LORA, ""))
    assert desk.why("aaaabbbbc").account.hit == 8
