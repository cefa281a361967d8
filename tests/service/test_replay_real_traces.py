"""Public traces through the replay engine have the hits that are computed from the traces alone."""

from __future__ import annotations

import pytest

from kvplane.base.groups import GroupKind, GroupSpec, ReplicaSpec
from kvplane_core.face.inspect import check
from kvplane_tools.replay.plan import EngineConfig
from kvplane_tools.replay.workloads import TraceFile
from tests.service.replaying import begin, spec_of

CONVERSATION = "mooncake_conversation_first_half.jsonl.gz"
SYNTHETIC = "mooncake_synthetic_first_half.jsonl.gz"
BUDGET = 8192

# One request at a time, and no generated tokens beyond the first: what the traces' own figures assume.
ALONE = EngineConfig(max_running=1, token_budget=BUDGET, max_output=1)


def replay(folder, file, spec, config):
    with TraceFile(folder / file) as trace:
        outcome = begin(trace, spec, config)
        while outcome.fleet.run_step():
            for session in outcome.sessions:
                session.parts.clear()
                session.answers.clear()
    check(outcome.replica)
    progress = outcome.fleet.progress
    assert progress.completed + progress.refused == progress.read
    assert outcome.replica.free_blocks == spec.num_blocks - 1
    return outcome


def blocks_of_512(num_blocks: int) -> ReplicaSpec:
    return spec_of(
        GroupSpec(GroupKind.FULL_ATTENTION, 512),
        num_blocks=num_blocks,
        max_model_len=262_144,
        hash_block_size=512,
        scheduler_block_size=512,
        max_in_flight_tokens=BUDGET,
        events=False,
    )


@pytest.mark.parametrize(
    ("file", "requests", "prompt_blocks", "hits"),
    [(CONVERSATION, 5606, 144_280, 49_050), (SYNTHETIC, 1925, 47_171, 14_786)],
)
def test_real_trace_with_a_large_pool_has_exactly_the_hits_of_its_ids(workloads, file, requests, prompt_blocks, hits):
    outcome = replay(workloads, file, blocks_of_512(200_000), ALONE)
    assert outcome.engine.completed == requests
    assert outcome.engine.tally.hit_blocks == [hits]
    assert outcome.engine.tally.allocated_blocks == [prompt_blocks - hits]


@pytest.mark.parametrize(
    ("file", "prompt_blocks", "capacity", "hit_percent"),
    [
        (CONVERSATION, 144_280, 1_000, 4.3),
        (CONVERSATION, 144_280, 10_000, 20.6),
        (SYNTHETIC, 47_171, 3_000, 5.2),
    ],
)
def test_real_trace_with_a_small_pool_has_the_hits_of_lru(workloads, file, prompt_blocks, capacity, hit_percent):
    """The traces' own figures put a request in at once and shrink the cache afterwards; hence the tolerance."""
    outcome = replay(workloads, file, blocks_of_512(capacity + 1), ALONE)
    (hits,) = outcome.engine.tally.hit_blocks
    assert 100 * hits / prompt_blocks == pytest.approx(hit_percent, abs=1.0)
