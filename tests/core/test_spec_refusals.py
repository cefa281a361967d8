"""Why specs are refused: what each would do without the rule, on the same pages and prompts as one that is accepted.

breaks    it raises, or a page does not hold what a hit claims
loses     prompts hit less than they could
waits     requests are admitted late, or never
hits      it hits what no hash proves
ignored   what was stated has no effect at all: the replica does what it does without
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random
from typing import Any, NamedTuple

import pytest

from kvplane.base import groups
from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import AlignSpec, CommitRule, EvictionPolicy, GroupSpec, MambaMode, ReplicaSpec
from kvplane.base.step import Admit, AdmitStatus, News, Part, RowFlag
from kvplane_core.face import setup
from tests.core.builders import Engine, chunked, cross, full, replica_spec, sinks, state, window
from tests.core.spec_campaign import PromptEngine

SEEDS, STEPS = (*range(4), 30), 50
SPLIT: dict[str, Any] = {"hash_block_size": 4, "align": AlignSpec(8, 4096), "blocks_per_state": 2}


class Case(NamedTuple):
    """A spec that is refused for a field, what it does without the rule, and an accepted one that is nearly equal."""

    field: str
    without: str
    bad: ReplicaSpec
    good: ReplicaSpec


def spec(*given: GroupSpec, **changes: Any) -> ReplicaSpec:
    return replica_spec(*given, **{"max_model_len": 64, "max_in_flight_tokens": 256, "num_blocks": 64, **changes})


def one(field: str, without: str, bad: dict[str, Any], good: ReplicaSpec) -> Case:
    """The same spec with another value in one field of the replica, or of its first group."""
    if not field.startswith("groups["):
        return Case(field, without, replace(good, **bad), good)
    return Case(field, without, replace(good, groups=(replace(good.groups[0], **bad), *good.groups[1:])), good)


PLAIN, WINDOWS = spec(full()), spec(window(6), full())
STATES = spec(state(8), full(), hash_block_size=4, align=AlignSpec(8, 4096))
CASES = [
    one("groups", "breaks", {"groups": ()}, PLAIN),
    one("num_blocks", "breaks", {"num_blocks": 1}, PLAIN),
    one("max_model_len", "breaks", {"max_model_len": 0}, PLAIN),
    one("hash_block_size", "breaks", {"hash_block_size": 0}, PLAIN),
    one("hash_block_size", "loses", {"hash_block_size": 2}, PLAIN),
    one("scheduler_block_size", "breaks", {"scheduler_block_size": 0}, PLAIN),
    one("scheduler_block_size", "loses", {"scheduler_block_size": 22}, PLAIN),
    one("max_in_flight_tokens", "ignored", {"max_in_flight_tokens": 0}, PLAIN),
    one("watermark_blocks", "waits", {"watermark_blocks": 64}, PLAIN),
    one("hash_lookahead_tokens", "breaks", {"hash_lookahead_tokens": -1}, PLAIN),
    one("prefill_lookahead", "ignored", {"prefill_lookahead": -1}, PLAIN),
    one("blocks_per_state", "breaks", {"blocks_per_state": 0}, PLAIN),
    one("hint_values", "breaks", {"hint_values": -1}, PLAIN),
    one("retention_interval", "ignored", {"retention_interval": -2}, WINDOWS),
    one("retention_interval", "ignored", {"retention_interval": 6}, replace(WINDOWS, retention_interval=8)),
    one("retention_interval", "ignored", {"retention_interval": 8}, PLAIN),
    one("groups[0].block_size", "breaks", {"block_size": 0}, PLAIN),
    one("groups[0].window", "breaks", {"window": 0}, WINDOWS),
    one("groups[0].window", "ignored", {"window": 8}, PLAIN),
    one("groups[0].chunk", "breaks", {"chunk": 0}, spec(chunked(8), full())),
    one("groups[0].chunk", "ignored", {"chunk": 8}, PLAIN),
    one("groups[0].sink_tokens", "ignored", {"sink_tokens": 6}, spec(sinks(4))),
    one("groups[0].sink_tokens", "breaks", {"sink_tokens": 8}, PLAIN),
    one("groups[0].speculative_blocks", "breaks", {"speculative_blocks": -1}, STATES),
    one("groups[0].admission_cap_blocks", "ignored", {"admission_cap_blocks": -1}, PLAIN),
    one("groups[0].extra_retained_tokens", "breaks", {"extra_retained_tokens": -3}, WINDOWS),
    one("groups[0].checkpoint_alignment", "ignored", {"checkpoint_alignment": 1}, PLAIN),
    one("groups[0].checkpoints_single_group_hits", "ignored", {"checkpoints_single_group_hits": True}, PLAIN),
    one("groups[0].checkpoints_single_group_hits", "ignored", {"checkpoints_single_group_hits": True}, STATES),
    one("groups[0].drops_last_block", "breaks", {"drops_last_block": True}, spec(chunked(8), full())),
    one("groups[0].mamba_mode", "breaks", {"mamba_mode": MambaMode.NONE}, STATES),
    Case("num_blocks", "waits", spec(sinks(4 * 63)), spec(sinks(4))),
    Case("groups[0].block_size", "breaks", spec(full(6), full(), hash_block_size=4, scheduler_block_size=12), PLAIN),
    Case(
        "groups[0].block_size",
        "breaks",
        spec(chunked(16, 4), full(8), scheduler_block_size=8),
        spec(chunked(16, 8), full(8)),
    ),
    Case("groups[1].block_size", "loses", spec(full(), full(6), hash_block_size=2, scheduler_block_size=4), PLAIN),
    Case("groups[1].kind", "hits", spec(full(), cross()), spec(full(), cross(), enable_caching=False)),
    Case(
        "scheduler_block_size",
        "loses",
        spec(full(is_draft=True, drops_last_block=True), prefill_lookahead=9),
        spec(full(is_draft=True, drops_last_block=True)),
    ),
    Case("groups[1].lookup_class", "breaks", spec(chunked(8), full(lookup_class=2)), spec(chunked(8), full())),
    one("blocks_per_state", "breaks", {"num_blocks": 63}, spec(full(), state(8), **SPLIT)),
    one("blocks_per_state", "waits", {"blocks_per_state": 64}, spec(full(), state(8), **SPLIT)),
    one("blocks_per_state", "loses", {"blocks_per_state": 2}, spec(full(), full(8), hash_block_size=4)),
    one("commit", "breaks", {"commit": CommitRule.REFERENCE}, spec(full(), state(8), **SPLIT)),
    one("eviction", "ignored", {"eviction": EvictionPolicy.TURN_TAIL}, spec(full(), state(8), **SPLIT)),
]


@pytest.fixture
def lawless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Specs are not checked."""
    monkeypatch.setattr(setup, "_require", lambda *_: None)
    monkeypatch.setattr(groups, "_require", lambda *_: None)


def outcome(case: Case) -> str:
    """What the spec does, compared with the good one."""
    try:
        bad, good = _played(case.bad), _played(case.good)
    except (AssertionError, ArithmeticError, LookupError, ValueError, InvalidArgument):
        return "breaks"
    if bad == good:
        return "ignored"
    if sum(row[0] for row in bad) < 0.8 * sum(row[0] for row in good):
        return "waits"
    return "loses" if _share(bad) < _share(good) else "hits"


def _share(rows: list[tuple[int, int, int]]) -> float:
    return sum(hit for *_, hit in rows) / max(1, sum(tokens for _, tokens, _ in rows))


@cache
def _played(given: ReplicaSpec) -> list[tuple[int, int, int]]:
    rows = []
    for seed in SEEDS:
        engine = PromptEngine(given, Random(seed))
        for _ in range(STEPS):
            engine.step()
        rows.append((engine.prompts, engine.prompt_tokens, engine.hit_tokens))
    return rows


@pytest.mark.specification
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.field}-{case.without}")
def test_what_is_refused_goes_wrong_without_the_rule(case, lawless):
    assert outcome(case) == case.without


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.field}-{case.without}")
def test_what_is_refused_is_named_by_its_field(case):
    with pytest.raises(InvalidArgument) as caught:
        setup.check_spec(case.bad)
    assert caught.value.field == case.field
    setup.check_spec(case.good)


def hits_of(given: ReplicaSpec) -> list[int]:
    """The hits of random prompts, in tokens."""
    hits: list[int] = []
    for seed in SEEDS:
        engine = PromptEngine(given, Random(seed))
        for _ in range(STEPS):
            before = engine.hit_tokens
            engine.step()
            hits.append(engine.hit_tokens - before)
    return hits


@pytest.mark.specification
def test_hits_inside_blocks_with_larger_windows_are_refused_since_there_are_none(lawless):
    larger = spec(window(6, 8), full(8), hash_block_size=4, scheduler_block_size=8, partial_hits=True)
    equal = replace(larger, groups=(window(6, 4), full(8)))
    assert not any(hit % 8 for hit in hits_of(larger))
    assert any(hit % 8 for hit in hits_of(equal))


@pytest.mark.parametrize("block_size", [4, 8])
def test_larger_windows_are_named_by_the_hits(block_size):
    given = spec(window(6, block_size), full(8), hash_block_size=4, scheduler_block_size=8, partial_hits=True)
    if block_size == 4:
        setup.check_spec(given)
        return
    with pytest.raises(InvalidArgument) as caught:
        setup.check_spec(given)
    assert caught.value.field == "partial_hits"


@pytest.mark.specification
def test_tables_that_no_pool_limits_are_refused(lawless):
    """A row of some bytes lets a request have a table of a million null blocks, whatever the size of the pool."""
    loaded, most = 1 << 20, (1 << 20) + 50
    sizes = {"max_model_len": most, "max_in_flight_tokens": most, "hash_block_size": 1, "scheduler_block_size": 1}
    endless = spec(window(4, 1), **sizes)
    engine = Engine(*endless.groups, num_blocks=64, **sizes)
    news, admit = News(slot=[0], num_tokens=[most], num_hashes=[0]), Admit(slot=[0], external=[loaded], cap=[50])
    engine.step(Part(news=news, admit=admit))
    assert len(engine.table(0)) > setup.MAX_TABLE_ENTRIES
    assert sum(map(bool, engine.table(0))) < 64


@pytest.mark.parametrize("limit", [1 << 20, (1 << 20) + 1])
def test_the_longest_table_is_named_by_the_block(limit):
    given = spec(window(4, 1), max_model_len=limit, hash_block_size=1, scheduler_block_size=1)
    if limit == setup.MAX_TABLE_ENTRIES:
        setup.check_spec(given)
        return
    with pytest.raises(InvalidArgument) as caught:
        setup.check_spec(given)
    assert caught.value.field == "groups[0].block_size"


def test_a_cap_below_what_a_request_holds_is_raised_to_that():
    """Under the cap as stated, a request that the pool has no room for was admitted, and no later row got a block."""
    for cap in (15, 1):
        engine = Engine(full(admission_cap_blocks=cap), num_blocks=13, max_model_len=60)
        assert engine.admit(0, "a" * 60, cap=16, flags=RowFlag.FULL_FIT).status == AdmitStatus.NEVER_FITS
    for group, least in ((full(), 15), (window(9), 2), (chunked(8), 2), (window(5), 1), (sinks(4), 15)):
        stated = spec(replace(group, admission_cap_blocks=1), max_model_len=60)
        assert stated.normalized.groups[0].admission_cap_blocks == least
    assert spec(full()).normalized.groups[0].admission_cap_blocks == 0
