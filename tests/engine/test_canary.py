"""The canary of the reference engine: damaged pages are found before a launch reads them, and sound ones are not.

`python -m tests.engine --canary 1` and `python -m tests.engine.tiers --canary 1` are the large runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from kvplane.base.groups import TierKind, TierSpec
from kvplane.base.hashing import split_hashes
from kvplane.base.layer_spec import DType
from kvplane.base.step import NO_EXTRA_KEYS, Cache, RowFlag
from kvplane_core.face import setup
from kvplane_service.decisions.log import Decision
from kvplane_service.unary.hashing import hash_tokens
from kvplane_worker.tiers import HostSlots
from kvplane_worker.tiers.seal import Content
from kvplane_worker.tiers.slots import Fill
from tests.engine import tiers
from tests.engine.reference import canary
from tests.engine.reference.config import BOS, EVEN, LATENT, MIXED, ModelConfig
from tests.engine.reference.request import Request
from tests.engine.reference.scheduler import SchedulerConfig
from tests.engine.stress import DENSE, FULL, HYBRID, MIXES, QWEN3_NEXT, SPLIT, run_mix
from tests.engine.world import SOUND, Pool, World

PROMPT = [BOS, *(7 * at % 250 for at in range(99))]
ALL = SchedulerConfig(canary_rate=1.0, num_drafts=0)
MODELS = {
    "mixed": Pool(MIXED, num_blocks=200, **DENSE),
    "even": Pool(EVEN, num_blocks=200, **DENSE),
    "latent": Pool(LATENT, num_blocks=100),
    "8-bit": Pool(replace(MIXED, cache_dtype=DType.FLOAT8_E4M3FN), num_blocks=200, **DENSE),
    "8-bit latent": Pool(replace(LATENT, cache_dtype=DType.FLOAT8_E5M2), num_blocks=100),
    "bfloat16": Pool(replace(MIXED, cache_dtype=DType.BFLOAT16), num_blocks=200, **DENSE),
    "delta rule": Pool(ModelConfig((QWEN3_NEXT, FULL)), num_blocks=100, **DENSE),
    "split": Pool(HYBRID, num_blocks=280, max_model_len=250, **DENSE, **SPLIT),
}


def serve(world: World, name: str, tokens: Sequence[int] = PROMPT, num_tokens: int = 3) -> Request:
    request = Request(name, list(tokens), num_tokens)
    world.engine.add(request)
    while world.engine.has_work:
        world.engine.step()
    return request


def claimed(world: World, tokens: Sequence[int] = PROMPT) -> list[tuple[int, str, int]]:
    """Rank, layer and block of all that a hit of the prompt reads now."""
    host = world.host
    hashes = hash_tokens(host.scheme, list(tokens), NO_EXTRA_KEYS, None).hashes
    hit = host.replica.lookup(split_hashes(hashes, host.scheme.digest.size), "", len(tokens) - 1)
    return [
        (rank, place.name, block)
        for rank, memory in enumerate(world.memory)
        for place in memory.pages.plan.places()
        for block in sorted({*hit.blocks[place.group]} - {0})
    ]


def damage(world: World, rank: int, layer: str, block: int) -> None:
    """Overwrite the first token slot of a page with the second one, or half a state, behind the core's back."""
    pages = world.memory[rank].pages
    place = pages.layer(layer)
    for view in canary.views(pages, place):
        if place.spec.is_state:
            view[block] = view[block].flip(0)
        else:
            view[block, 0] = view[block, 1]


def mismatches(world: World) -> int:
    world.host.decisions.catch_up()
    return world.host.tally.mismatches


def reported(world: World) -> set[int]:
    """The blocks that the engine has reported."""
    steps = [one.step for one in world.host.decisions if isinstance(one, Decision)]
    return {block for step in steps for part in step.parts for block in part.cache.mismatched}


def canary_of(world: World) -> canary.Canary:
    assert world.engine.canary is not None
    return world.engine.canary


@pytest.mark.parametrize("model", MODELS)
def test_one_damaged_slot_of_any_layer_is_found_before_a_launch_reads_it(model):
    """In each layer of each rank, in another block each time; the output stays what it is without a cache."""
    world = World(MODELS[model], ALL)
    expected = serve(world, "first").output
    places = dict.fromkeys((rank, layer) for rank, layer, _ in claimed(world))
    for number, (rank, layer) in enumerate(places):
        blocks = [block for *place, block in claimed(world) if place == [rank, layer]]
        block, before = blocks[number % len(blocks)], mismatches(world)
        damage(world, rank, layer, block)
        again = serve(world, f"again {number}")
        assert again.output == expected
        assert again.hits[0] > 0
        assert again.hits[-1] == 0, "computed without a hit"
        assert (rank, layer) in {(one.rank, one.layer) for one in canary_of(world).mismatches}
        assert block in reported(world), "also where the launch reads a copy of it"
        assert mismatches(world) > before
    counted = mismatches(world), canary_of(world).checks
    assert serve(world, "at last").hits[-1] > 0, "what was computed again is hit again"
    assert (mismatches(world), canary_of(world).checks) == (counted[0], counted[1] + 1)
    world.check()


class Blind(canary.Canary):
    """Compares nothing: whatever a hit has is right."""

    def _differing(self, *_: object) -> Iterator[tuple[int, int, float, tuple[object, object]]]:  # type: ignore[override]
        yield from ()


@pytest.mark.parametrize("model", ["mixed", "split"])
def test_nothing_else_finds_the_damage(model, monkeypatch):
    """The twin of the tests here: without the comparison the damage is served, and no check of the product sees it."""
    monkeypatch.setattr("tests.engine.reference.engine.Canary", Blind)
    world = World(MODELS[model], ALL)
    serve(world, "first")
    for place in claimed(world):
        damage(world, *place)
    assert serve(world, "again").hits[-1] > 0
    assert mismatches(world) == 0
    assert canary_of(world).checks == 1
    world.check()


def test_a_rate_of_zero_makes_no_canary_and_the_rate_chooses_by_id():
    assert World(MODELS["latent"]).engine.canary is None
    world = World(MODELS["latent"], SchedulerConfig(canary_rate=0.25))
    due = [is_due(world, f"q{at}") for at in range(4000)]
    assert 0.22 < sum(due) / len(due) < 0.28
    assert due == [is_due(world, f"q{at}") for at in range(4000)]


def is_due(world: World, name: str) -> bool:
    return canary_of(world).is_due(Request(name, PROMPT, 1), 16)


def test_what_was_computed_from_a_bad_page_is_found_at_any_rate():
    """An unchecked request computes from the damaged page. Later the damage is found; after that every hit with
    this beginning is checked, so what the first one left behind is found too.
    """
    world = World(MODELS["latent"], replace(ALL, canary_rate=0.5))
    names = [f"q{at}" for at in range(99)]
    sampled = next(name for name in names if is_due(world, name))
    others = [name for name in names if not is_due(world, name)]
    longer = [*PROMPT, *range(40)]
    serve(world, others[0])
    damage(world, *claimed(world)[0])
    serve(world, others[1], longer)  # keys of its own, computed from the damaged page
    assert mismatches(world) == 0
    assert serve(world, sampled).hits[-1] == 0
    found = mismatches(world)
    assert found > 0
    serve(world, others[2])  # the beginning is computed again, so the longer prompt would be hit whole
    late = serve(world, others[3], longer)
    assert mismatches(world) > found
    assert late.output == serve(World(MODELS["latent"]), "alone", longer).output


def test_a_wrong_hit_is_reported_again_if_a_new_life_began_before_it_was_applied():
    world = World(MODELS["latent"], ALL)
    serve(world, "first")
    damage(world, *claimed(world)[0])
    world.engine.add(Request("again", PROMPT, 3))
    found = canary_of(world)
    while not found.mismatches:
        world.engine.step()
    cache = Cache()
    found.report(cache)
    assert cache.mismatched
    assert set(cache.mismatched) <= set(cache.evicted)
    found.report_again()
    again = Cache()
    found.report(again)
    assert (again.mismatched, again.evicted) == (cache.mismatched, cache.evicted)


def test_a_hit_on_blocks_that_the_same_launch_writes_is_no_mismatch():
    """Two equal prompts admitted in one step: the second one hits what the first one computes in this launch."""
    world = World(MODELS["latent"], replace(ALL, token_budget=300))
    for name in ("first", "second"):
        world.engine.add(Request(name, PROMPT, 3))
    while world.engine.has_work:
        world.engine.step()
    assert canary_of(world).checks == 1
    assert not canary_of(world).mismatches


# -- tiers -------------------------------------------------------------------------------------------------------------


class Resealed(HostSlots):
    """Damages what it is given before it is sealed, so that only the content is wrong: a copy that went astray."""

    is_on = False

    def write(self, contents: Sequence[Content], num_bytes: int, fill: Fill) -> list[bool]:
        def damaged(rows: object) -> object:
            done = fill(rows)  # type: ignore[arg-type]
            if Resealed.is_on:
                rows[:, : num_bytes // 4] = rows[:, num_bytes // 4 : num_bytes // 4 * 2]  # type: ignore[index]
            return done

        return super().write(contents, num_bytes, damaged)  # type: ignore[arg-type]


def test_damage_that_came_through_a_tier_is_found_and_leaves_the_tier(monkeypatch):
    monkeypatch.setattr(setup, "AHEAD_SHARE", 1)
    monkeypatch.setattr(Resealed, "is_on", True)
    host_tier = (TierSpec(TierKind.HOST, 200),)
    pool = Pool(ModelConfig((FULL, FULL), num_ranks=1), num_blocks=24, tiers=host_tier, batches=4)
    world = World(pool, replace(ALL, admit_flags=RowFlag.LOAD), fault=replace(SOUND, slots=Resealed))
    expected = serve(world, "first").output
    push_out(world, 0)
    monkeypatch.setattr(Resealed, "is_on", False)
    again = serve(world, "again")
    assert world.engine.counts.loads > 0
    assert (again.output, again.hits[-1]) == (expected, 0)
    found = mismatches(world)
    assert found > 0
    push_out(world, 10)
    loads, last = world.engine.counts.loads, serve(world, "at last")
    assert world.engine.counts.loads > loads, "from a slot that was written after the damage"
    assert last.hits[-1] > 0
    assert last.output == expected
    assert mismatches(world) == found
    world.check()


def push_out(world: World, first: int) -> None:
    """Serve other prompts until the device has no block of the first one."""
    for number in range(first, first + 4):
        serve(world, f"other {number}", [BOS, *(number + 11 * at % 240 for at in range(99))])
    assert not claimed(world)


# -- no false alarm ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_a_sound_engine_has_no_mismatch(mix):
    report = run_mix(replace(mix, config=replace(mix.config, canary_rate=1.0)), 9, 2)
    assert report.complaints == []
    assert report.mismatches == 0
    assert report.counts.completed == 9


def test_a_sound_engine_with_tiers_has_no_mismatch():
    mix = tiers.of("all kinds")
    report, _ = tiers.run(replace(mix, config=replace(mix.config, canary_rate=1.0)), 40, 1)
    assert report.complaints == []
    assert report.checks > 10
    assert report.mismatches == 0
