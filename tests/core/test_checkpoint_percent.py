"""Checkpoints: with tiers, windows and states are kept inside prompts too, as often as a percentage allows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplane import wire
from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import AlignSpec, TierKind, TierSpec
from kvplane_core.face.hit_rules import blocks_kept
from kvplane_core.face.setup import check_spec
from kvplane_core.face.state import digest
from tests.core.builders import chunked, full, new_replica, replica_spec, state, window
from tests.core.test_tiers import DISK, HOST, Mover
from tests.core.test_tiers import small_pools as small_pools

TEXT = "aaaabbbbccccddddeeeeffffgggghhhh"


def kept(percent):
    return (replace(HOST, checkpoint_percent=percent),)


def serving(*groups, percent, **changes):
    """An engine that has computed a prompt of 32 tokens."""
    engine = Mover(*groups, tiers=kept(percent), retention_interval=0, num_blocks=61, **changes)
    engine.serve(0, TEXT)
    engine.idle()
    return engine


def hits(engine):
    """What prompts hit that leave this one after 8, 12, ... tokens."""
    return [engine.would_hit(TEXT[:length] + "?").num_tokens for length in range(8, 29, 4)]


@pytest.mark.parametrize(
    ("groups", "percent", "expected"),
    [
        ((full(16), window(128, 16)), 15, 864),  # 8 blocks each 853 tokens, in blocks of 16
        ((full(80), *[state(80)] * 7), 15, 3760),
        ((full(544), *[state(544)] * 3), 15, 10_880),
        ((full(16), *[window(1024, 16)] * 5), 15, 34_144),
        ((full(16), chunked(8192, 16), window(128, 16)), 15, 432),
        ((full(16), window(128, 16)), 100, 128),
        ((full(16), window(1, 16)), 15, 0),
    ],
)
def test_the_percentage_decides_how_far_checkpoints_are_apart(groups, percent, expected):
    if not sum(group.checkpoint_blocks for group in groups):
        with pytest.raises(InvalidArgument, match="no effect"):
            check_spec(replica_spec(*groups, tiers=kept(percent), retention_interval=0))
        return
    assert replica_spec(*groups, tiers=kept(percent), retention_interval=0).kept_every == expected


def test_prompts_that_leave_another_inside_hit_its_last_checkpoint():
    assert hits(serving(window(5), full(), percent=0)) == [0, 0, 0, 0, 0, 28]
    assert hits(serving(window(5), full(), percent=50)) == [8, 8, 16, 16, 24, 28]
    assert hits(serving(window(5), full(), percent=100)) == [8, 12, 16, 20, 24, 28]


def test_of_a_chunk_over_a_multiple_the_last_state_is_kept():
    """The states at 8, 16, ... are wanted, and the chunks of 12 tokens end at 12 and 24."""
    engine = Mover(state(), full(), tiers=kept(50), retention_interval=0, num_blocks=61, align=AlignSpec(4, 12))
    engine.admit(0, TEXT, cap=12)
    while engine.extend(0, "", cap=12).granted != [0]:
        engine.idle()
    engine.end(0)
    assert hits(engine) == [0, 12, 12, 12, 24, 28]


def test_checkpoints_come_back_from_the_tier():
    engine = Mover(window(5), full(), tiers=kept(50), retention_interval=0, num_blocks=31)
    engine.save(TEXT)
    asked = engine.ask(3, TEXT[:18] + "?")
    assert asked.hit == 16
    assert 0 in asked.result.orders.load_group, "the window before 16"


@pytest.mark.parametrize("percent", [0, 50, 100])
@pytest.mark.parametrize(
    ("groups", "chunk"), [((window(5), full()), 12), ((state(), full()), 12), ((state(), full()), 4)]
)
def test_the_blocks_that_a_plan_counts_are_those_that_a_prompt_keeps(groups, chunk, percent):
    """Computed in chunks; the prompt has a token more, so that its end can be hit."""
    engine = Mover(*groups, tiers=kept(percent), retention_interval=0, num_blocks=61, align=AlignSpec(4, chunk))
    engine.admit(0, TEXT + "?", cap=chunk)
    while engine.extend(0, "", cap=chunk).granted != [0]:
        engine.idle()
    engine.end(0)
    engine.idle()
    pool = engine.replica.coordinator.pool
    keys = [key for block in range(1, pool.num_blocks) if (key := pool.key_of(block)) is not None]
    counted = blocks_kept(engine.replica.spec, len(TEXT), chunk)
    assert counted == [sum(key[1] == group for key in keys) for group in range(len(groups))]


@pytest.mark.parametrize(
    ("groups", "changes", "field"),
    [
        ((full(), window(8)), {"tiers": kept(101)}, "tiers[0].checkpoint_percent"),
        ((full(), window(8)), {"tiers": kept(-1)}, "tiers[0].checkpoint_percent"),
        ((full(), window(8)), {"tiers": (HOST, replace(DISK, checkpoint_percent=5))}, "tiers[1].checkpoint_percent"),
        ((full(), window(8)), {"tiers": kept(5), "retention_interval": 8}, "tiers[0].checkpoint_percent"),
        ((full(), window(8)), {"tiers": kept(5), "retention_interval": -1}, "tiers[0].checkpoint_percent"),
        ((full(),), {"tiers": kept(5)}, "tiers[0].checkpoint_percent"),
        ((window(8),), {"tiers": kept(5)}, "tiers[0].checkpoint_percent"),
    ],
)
def test_percentages_without_effect_are_refused(groups, changes, field):
    with pytest.raises(InvalidArgument) as refused:
        check_spec(replica_spec(*groups, **{"retention_interval": 0, **changes}))
    assert refused.value.field == field
    assert refused.value.remedy


def test_the_percentage_is_in_messages_and_in_the_state():
    specs = [replica_spec(full(), window(8), tiers=kept(percent), retention_interval=0) for percent in (0, 15)]
    assert [wire.decode_spec(wire.encode_spec(spec)) for spec in specs] == specs
    assert digest(new_replica(specs[0])) != digest(new_replica(specs[1]))
    disk = TierSpec(TierKind.DISK, 9, checkpoint_percent=15)
    assert replica_spec(full(), window(8), tiers=(disk,), retention_interval=0).kept_every > 0
