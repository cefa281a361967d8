"""No hit on a tier is wrong: random engines with movers that are late, fail, repeat themselves or never end."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplane.base.groups import TierKind, TierSpec
from kvplane_core.face.setup import states_for_drafts
from tests.core.builders import replica_spec
from tests.core.save_rules import uses_noted, with_checkpoints, with_policies, with_shares
from tests.core.test_page_contents import MIXES
from tests.core.tier_engine import TierEngine, small_pools

STEPS, TIDE = 80, 8


def run(mix: str, seed: int, steps: int = STEPS) -> TierEngine:
    """One engine life (or a few): raises WrongPage, or what `inspect.check` finds."""
    rng = Random(seed)
    groups, changes = MIXES[mix]
    sizes = {"num_blocks": rng.choice([30, 60, 90])}
    host, disk = TierSpec(TierKind.HOST, rng.choice([12, 60, 200])), TierSpec(TierKind.DISK, rng.choice([10, 300]))
    tiers = with_policies(rng.choice([(host,), (host, disk), (host, disk), (disk,)]), Random(f"{mix} {seed}"))
    spec = replica_spec(*groups, max_model_len=64, max_in_flight_tokens=256, tiers=tiers, **{**changes, **sizes})
    spec = with_checkpoints(spec, Random(f"{seed} {mix}"))
    spec = replace(spec, tiers=with_shares(spec.tiers, Random(f"{mix} {seed} shares")))
    with small_pools(), uses_noted():
        engine = TierEngine(spec, rng, most_drafts=(states_for_drafts(spec) or 2) if "drafts" in mix else 0)
        engine.tide = TIDE if seed % 3 == 2 else 0
        engine.returns = seed % 4 == 3
        for _ in range(steps):
            engine.step()
    return engine


@pytest.mark.parametrize("mix", MIXES)
@settings(max_examples=6)
@given(seed=st.integers(0, 2**32))
def test_a_loaded_page_holds_what_its_key_says(mix, seed):
    run(mix, seed)
