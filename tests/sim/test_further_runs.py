"""Further seeds, in a separate file so that they run in parallel with the first ones."""

from __future__ import annotations

import pytest

from tests.sim.campaign import campaign


@pytest.mark.timeout(300)
@pytest.mark.parametrize("base", range(61, 121, 20))
def test_further_seeds_break_no_rule(base):
    totals = campaign(range(base, base + 20))
    assert not totals.failed, "\n".join(
        f"make sim SEEDS=1 SEED_BASE={one.seed}: {one.findings[0]}" for one in totals.failed
    )
    assert totals.is_good, f"{totals}: too many runs show nothing"
