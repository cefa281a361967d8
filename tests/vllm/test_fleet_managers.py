"""Claims from the events of vLLM 0.33.0's own KV cache manager equal its look-ups in random runs, for all kinds.

KVPLANE_VLLM_RUNS seeds of each kind (10), more than 200 runs.
"""

from __future__ import annotations

import os

import pytest

from tests.conformance.live.kinds import KINDS
from tests.conformance.live.peer import Peer
from tests.conformance.live.session import run_seed
from tests.router.recorded import look_ups

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(0)]
RUNS = int(os.environ.get("KVPLANE_VLLM_RUNS", "10"))
OPERATIONS = 300


@pytest.fixture(scope="module")
def peer():
    with Peer() as one:
        yield one


@pytest.mark.parametrize("kind", KINDS)
def test_claims_equal_the_look_ups_of_the_manager(peer, kind, tmp_path):
    for seed in range(5000, 5000 + RUNS):
        assert run_seed(peer, kind, seed, OPERATIONS, keep=tmp_path).sound
    runs = sorted(tmp_path.iterdir())
    assert len(runs) == RUNS
    found = [(path.name, hit, claim.tokens) for path in runs for _, hit, claim in look_ups(path)]
    assert [one for one in found if one[1] != one[2]] == []
    print(f"{kind}: {len(runs)} runs, {len(found)} look-ups, {sum(hit > 0 for _, hit, _ in found)} hits")
