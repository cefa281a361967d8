"""Claims equal the hits of vLLM 0.33.0 and of the core."""

from __future__ import annotations

import pytest

from tests.router.recorded import TRACES, look_ups


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_claims_equal_the_recorded_hits(path):
    found = [(hit, claim.tokens, follower.unknown) for follower, hit, claim in look_ups(path)]
    assert [claim for _, claim, _ in found] == [hit for hit, _, _ in found]
    assert not any(unknown for _, _, unknown in found)
