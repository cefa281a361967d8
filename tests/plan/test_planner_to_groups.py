"""The groups of a plan, compared also with those that the reference recorded in its traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kvplane.base.groups import GroupKind, MambaMode
from kvplane.base.layers import Layer, RingSpec, RSWASpec, SinkFullAttentionSpec
from kvplane_plan.planner import CacheGroup, CachePlan, PlanOptions, to_groups
from tests.conformance.reference_specs import read_spec
from tests.plan.layers import PAGE, SMALL, chunked, full, latent, named, plan, state, window

TRACES = sorted((Path(__file__).parents[1] / "conformance" / "traces").glob("*.jsonl.gz"))


def groups_of(layers, **options):
    groups = to_groups(plan(layers, **options))
    for group in groups:
        group.validate("group")
    return groups


def only(spec, **options):
    (group,) = groups_of((Layer("a", spec),), **options)
    return group


def test_full_attention_group_has_no_admission_cap():
    group = only(full())
    assert (group.kind, group.block_size, group.admission_cap_blocks) == (GroupKind.FULL_ATTENTION, 16, 0)
    assert (group.layer_names, group.page_bytes) == (("a",), PAGE)
    assert only(latent()).kind is GroupKind.MLA


def test_a_window_group_has_the_admission_cap_of_its_window():
    group = only(window(64), max_batched_tokens=48, prefill_lookahead=3)
    assert (group.window, group.extra_retained_tokens) == (64, 2)
    assert group.admission_cap_blocks == 9, "63 + 2 + 48 = 113 tokens: 8 blocks and one at the edge"


def test_a_chunked_group_has_the_admission_cap_of_its_chunk():
    group = only(chunked(64), max_batched_tokens=48)
    assert (group.chunk, group.admission_cap_blocks) == (64, 7)


def test_a_state_group_has_its_cache_mode():
    group = only(state(speculative_blocks=2))
    assert (group.mamba_mode, group.speculative_blocks) == (MambaMode.ALIGN, 2)
    assert only(state(mode=MambaMode.NONE)).mamba_mode is MambaMode.NONE


def test_sinks_reference_windows_and_rings_are_distinguished():
    assert only(SinkFullAttentionSpec(**SMALL, sink_tokens=32)).sink_tokens == 32
    assert only(RSWASpec(**SMALL, window=64)).window == 64
    assert only(RingSpec(**SMALL)).kind is GroupKind.RING


def test_context_parallel_groups_have_blocks_of_all_ranks_tokens():
    assert only(full(), dcp_size=4).block_size == 64
    groups = groups_of(named(f=(1, full()), m=(1, state())), dcp_size=4)
    assert [group.block_size for group in groups] == [64, 16], "a state is not split"


def test_zero_new_blocks_is_set_for_attention_groups_of_state_models():
    groups = groups_of(named(f=(1, full()), m=(1, state()), r=(1, RingSpec(**SMALL))))
    assert [group.zero_new_blocks for group in groups] == [True, False, False]
    assert not only(full()).zero_new_blocks


def test_groups_of_one_format_have_one_lookup_class():
    groups = groups_of(named(f=(1, full()), w=(2, window(64)), v=(1, window(128))))
    assert [group.lookup_class for group in groups] == [0, 1, 1, 2]


def test_drops_last_block_is_set_for_draft_groups_and_equal_formats():
    layers = (*named(f=(1, full()), w=(2, window())), Layer("d", window(), is_draft=True))
    groups = groups_of(layers, drops_last_block=True)
    assert [group.layer_names for group in groups] == [("f.0",), ("w.0",), ("w.1",), ("d",)]
    assert [group.is_draft for group in groups] == [False, False, False, True]
    assert [group.drops_last_block for group in groups] == [False, True, True, True]


def test_drops_last_block_is_set_for_every_group_without_a_marked_draft_layer():
    groups = groups_of(named(f=(1, full()), w=(1, window())), drops_last_block=True)
    assert [(group.is_draft, group.drops_last_block) for group in groups] == [(False, True)] * 2


def test_drops_last_block_is_not_set_for_drafts_that_drop_nothing():
    groups = groups_of((Layer("d", full(), is_draft=True),))
    assert not groups[0].drops_last_block


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_groups_of_recorded_models_equal_the_reference(path):
    """The header of every recorded trace says what the reference's managers were given."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        header = json.loads(file.readline())
    recorded = header["groups"]
    groups = to_groups(recorded_plan(header))
    assert [
        (
            g.block_size,
            g.window or None,
            g.chunk or None,
            g.mamba_mode.value if g.kind is GroupKind.MAMBA else None,
            g.speculative_blocks if g.kind is GroupKind.MAMBA else None,
            g.admission_cap_blocks or None,
            g.zero_new_blocks,
            g.is_draft,
            g.drops_last_block,
        )
        for g in groups
    ] == [
        (
            g["block_size"],
            g["sliding_window"],
            g["attention_chunk_size"],
            g["mamba_cache_mode"],
            g["num_speculative_blocks"],
            g["max_admission_blocks_per_request"],
            g["records_new_block_ids"],
            g["is_eagle_group"],
            g["use_eagle"],
        )
        for g in recorded
    ]
    if header["attention_groups"]:
        joint = {tuple(one["group_ids"]) for one in header["attention_groups"]}
        classes = [group.lookup_class for group in groups]
        assert joint == {tuple(i for i, c in enumerate(classes) if c == one) for one in classes}


def recorded_plan(header) -> CachePlan:
    """A plan with the groups of a trace's header; its memory figures are of no matter here."""
    arguments = header["manager_args"]
    options = PlanOptions(
        max_model_len=arguments["max_model_len"],
        max_batched_tokens=arguments["max_in_flight_tokens"],
        drops_last_block=arguments["use_eagle"],
        dcp_size=arguments["dcp_world_size"],
    )
    groups = tuple(
        CacheGroup(
            tuple(f"{i}.{j}" for j in range(group["num_layers"])),
            (read_spec(group["spec"], f"groups[{i}].spec"),) * group["num_layers"],
            one_format=True,
            is_draft=group["is_eagle_group"],
        )
        for i, group in enumerate(header["groups"])
    )
    return CachePlan(
        options=options,
        groups=groups,
        workers=(),
        bytes_per_block=0,
        num_blocks=header["num_blocks"],
        blocks_per_request=1,
        scheduler_block_size=arguments["scheduler_block_size"],
        hash_block_size=arguments["hash_block_size"],
        partial_hits=header["partial_hash_hits"],
        needs_zeroing=header["needs_kv_cache_zeroing"],
        tp_replicas=1,
    )
