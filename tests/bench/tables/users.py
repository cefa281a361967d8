"""How many users of 16k-token prompts, in turn, still hit: one server of gpt-oss-120b with TP 4, on the real core.

The published figure has the throughput; here is the number of users at which it falls, which memory alone decides. How
much host memory that server had was not published, so there is no prediction with tiers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvplane.base.groups import GroupKind, GroupSpec, ReplicaSpec
from kvplane_plan.models.sizing import gpu_bytes
from kvplane_tools.replay.engine import Engine
from kvplane_tools.replay.fleet import Fleet
from kvplane_tools.replay.plan import CostModel, EngineConfig
from kvplane_tools.replay.workloads import Span, TokenSource, TraceRequest
from tests.bench.policies import CoreSession
from tests.bench.tables.fleet import PAGE_BYTES, spec_of
from tests.bench.tables.model import BUDGET, DENSE_BYTES, EXPERT_BYTES
from tests.bench.tables.published import BLOCK, MEMORY_SHARE

RANKS, PROMPT, CONCURRENT, USERS_STEP, MOST_USERS = 4, 16_384, 80, 50, 1200
ACTIVATIONS_BYTES = 4 << 30  # assumed: memory for activations and graphs of each rank
LEAST_SHARE = 0.5  # of the tokens that hit, below which the throughput has fallen


def spec(hybrid: bool) -> ReplicaSpec:
    """Return the server; without the hybrid allocator all layers keep every token."""
    rank = gpu_bytes("h100", MEMORY_SHARE) - ACTIVATIONS_BYTES
    pool, page = RANKS * rank - DENSE_BYTES - EXPERT_BYTES, PAGE_BYTES if hybrid else 2 * PAGE_BYTES
    found = spec_of(pool * PAGE_BYTES / page)
    if not hybrid:
        found = replace(found, groups=(GroupSpec(GroupKind.FULL_ATTENTION, BLOCK),))
    return found


def _round(users: int, number: int) -> Iterator[TraceRequest]:
    for user in range(users):
        answer = TokenSource((Span(user, 0, 1, generated=True),))
        yield TraceRequest(f"{number} {user}", 0.0, "", TokenSource((Span(user, 0, PROMPT),)), answer)


def falls_after(hybrid: bool) -> int:
    """Return the most users that hit. Their number grows: at each level all prompts are sent twice, and hits of the
    second time count, so that most prompts have hit before when others are computed.
    """
    config = EngineConfig(CONCURRENT, BUDGET, max_output=1)
    engine = Engine(CoreSession(spec(hybrid)), config, CostModel(10**9, 0, 0))
    for users in range(USERS_STEP, MOST_USERS + 1, USERS_STEP):
        hits = list[int]()
        for number in range(2):
            fleet = Fleet([engine], _round(users, number))
            while fleet.run_step():
                pass
            hits.append(engine.tally.hit_tokens)
        if hits[1] - hits[0] < LEAST_SHARE * users * PROMPT:
            return users - USERS_STEP
    return MOST_USERS
