"""The simulation with steps applied on a thread, so that other work of the service runs in between."""

from __future__ import annotations

import pytest

from kvplane_service.replicas import applying
from kvplane_service.replicas.applying import Applying
from tests.sim import world
from tests.sim.campaign import quiet

TAKES_TIME = "allocation never waits for the store"  # this rule reports any answer that takes time, as here


@pytest.mark.parametrize("seed", range(1, 5))
def test_long_steps_on_a_thread_break_no_rule(seed, monkeypatch):
    aside = Applying._apply_aside
    num_steps = 0

    async def counted(self, *args):
        nonlocal num_steps
        num_steps += 1
        return await aside(self, *args)

    monkeypatch.setattr(applying, "MOST_INLINE_NS", 500)
    monkeypatch.setattr(Applying, "_apply_aside", counted)
    with quiet():
        outcome = world.run(seed)
    assert [finding for finding in outcome.findings if TAKES_TIME not in finding] == []
    assert num_steps > 100
