"""Model sources with speculative decoding: states for drafts, the drafter's layer, and groups that drop a block."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplane import wire
from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import Drafter, GroupKind, ReplicaSpec
from kvplane.base.layer_spec import DType
from kvplane.base.layers import FullAttentionSpec, Layer, MambaSpec
from kvplane.base.sources import LayerSource, ModelSource
from kvplane.base.step import AdmitStatus, Budget, End, PartResult, Step
from kvplane.session.rows import AdmitRow, FactRow, NewsRow, RunRow, part_of
from kvplane.v1 import allocation_pb2 as pb
from kvplane_core.spec.replica import Replica
from kvplane_plan.models.catalogue import MODELS
from kvplane_plan.models.shapes import MAX_SPECULATIVE_TOKENS
from kvplane_service.rpc.sources import plan_source

HYBRID = ["jamba-v0.1", "qwen3-next-80b"]
FULL = Layer("a.0", FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=128, dtype=DType.BFLOAT16))
DRAFT = replace(FULL, name="a.1", is_draft=True)
STATES = MambaSpec(block_size=16, shapes=((8, 128),), dtypes=(DType.FLOAT32,), padded_page_bytes=8192)
STATE = Layer("m.0", STATES)


def spec_of(source: ModelSource | LayerSource) -> ReplicaSpec:
    return plan_source(pb.RegisterReplicaRequest(replica="r", **wire.encode_source(source))).spec


def model(name: str, **fields) -> ModelSource:
    return ModelSource(model=name, num_blocks=8000, **fields)


@pytest.mark.parametrize("name", HYBRID)
def test_states_are_kept_for_every_draft_token(name):
    groups = spec_of(model(name, speculative_tokens=3)).groups
    assert {one.speculative_blocks for one in groups if one.kind is GroupKind.MAMBA} == {3}
    assert {one.speculative_blocks for one in groups if one.kind is not GroupKind.MAMBA} == {0}
    assert not any(one.is_draft or one.drops_last_block for one in groups)


def test_states_of_given_layers_are_kept_for_every_draft_token():
    groups = spec_of(LayerSource(layers=(FULL, STATE), num_blocks=100, max_model_len=64, speculative_tokens=2)).groups
    assert {one.speculative_blocks for one in groups if one.kind is GroupKind.MAMBA} == {2}


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-20b", "gemma-3-27b", "qwen3-next-80b", "deepseek-v3"])
def test_eagle_adds_its_layer_and_its_groups_drop_a_block(name):
    plain, drafted = spec_of(model(name)), spec_of(model(name, speculative_tokens=2, drafter=Drafter.EAGLE))
    layers = [layer for group in drafted.groups for layer in group.layer_names]
    assert len(layers) == sum(len(group.layer_names) for group in plain.groups) + 1
    assert any(one.is_draft and one.drops_last_block for one in drafted.groups)
    assert all(one.drops_last_block for one in drafted.groups if one.is_draft)


@pytest.mark.parametrize("name", MODELS)
def test_models_with_an_mtp_layer_accept_the_mtp_method(name):
    source = model(name, speculative_tokens=1, drafter=Drafter.MTP)
    if name in ("deepseek-v3", "qwen3-next-80b"):
        assert any(one.is_draft and one.drops_last_block for one in spec_of(source).groups)
        return
    with pytest.raises(InvalidArgument, match="no known layer for multi-token prediction") as caught:
        spec_of(source)
    assert caught.value.field == "model.drafter"


@pytest.mark.parametrize(
    ("source", "field"),
    [
        (model("jamba-v0.1", drafter=Drafter.EAGLE), "model.speculative_tokens"),
        (model("jamba-v0.1", speculative_tokens=MAX_SPECULATIVE_TOKENS + 1), "model.speculative_tokens"),
        (LayerSource(layers=(FULL,), num_blocks=9, speculative_tokens=1, drafter=Drafter.MTP), "layers.drafter"),
        (LayerSource(layers=(FULL, DRAFT), num_blocks=9, drafter=Drafter.MTP), "layers.speculative_tokens"),
        (
            LayerSource(
                layers=(FULL, replace(STATE, spec=replace(STATES, speculative_blocks=1))),
                num_blocks=9,
                speculative_tokens=2,
            ),
            "layers.layers[1].format.speculative_blocks",
        ),
    ],
)
def test_contradictory_speculation_options_are_refused_by_field(source, field):
    with pytest.raises(InvalidArgument) as caught:
        spec_of(source)
    assert caught.value.field == field


# -- progress ----------------------------------------------------------------------------------------------------------


class Loop:
    """An engine as README has it, with any budget, caps and drafts; every step runs at once."""

    def __init__(self, spec: ReplicaSpec, rng: Random, budget: int, drafts: int) -> None:
        self.replica, self.rng, self.budget, self.drafts = Replica(spec), rng, budget, drafts
        self.steps = count(1)

    def step(self, *rows) -> PartResult:
        seq = next(self.steps)
        part = part_of(*rows, budget=Budget(tokens=self.budget))
        return self.replica.apply(Step(0, seq, [part], executed_through=seq - 1)).parts[0]

    def serve(self, slot: int, prompt: list[int], cap: int) -> int:
        """Run one request of the prompt and a few tokens to its end; its hit. Each step gives it something."""
        first = self.step(NewsRow(slot, prompt), AdmitRow(slot, cap=cap))
        assert first.admit_status == [AdmitStatus.GRANTED]
        computed, known = first.admit_hit[0] + first.admit_granted[0], len(prompt)
        while known < len(prompt) + 3:
            if computed < known:
                extra = self.drafts if computed == known - 1 else 0
                granted = self.step(RunRow(slot, cap=cap, extra=extra)).granted[0]
                assert granted > 0
                computed = min(computed + granted, known)
            else:
                result = self.step(FactRow(slot, [7], computed=computed))
                assert not result.preempted
                known += 1
        self.step(FactRow(slot, end=End.FREE))
        return first.admit_hit[0]


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 30), budget=st.sampled_from([1, 7, 79, 80, 81, 512, 543, 544, 600, 8192]))
@pytest.mark.parametrize("name", MODELS)
def test_speculation_makes_progress_with_any_budget_and_the_second_turn_hits(name, seed, budget):
    rng = Random(seed)
    cap = rng.choice([3, 100, 4_000_000])
    drafts = rng.randint(0, 3)
    loop = Loop(spec_of(model(name, speculative_tokens=drafts, max_model_len=4096)), rng, budget, drafts)
    length = rng.choice([1, 50, 700 if min(budget, cap) > 1 else 60, 1500 if min(budget, cap) > 50 else 60])
    prompt = [rng.randrange(1000) for _ in range(length)]
    assert loop.serve(0, prompt, cap) == 0
    hit = loop.serve(1, prompt, cap)
    assert hit >= length - 1 - 2 * loop.replica.spec.scheduler_block_size
    small = min(budget, cap) < loop.replica.spec.align.block_size
    assert small or loop.replica.counters.unaligned_chunks == 0
