"""The simulation of routing policies: the router knows what its engines have, and exact claims are what they hit."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from tests.bench.routing import SCENES, RoutedFleet, arrivals, run
from tests.core.specification import specification_of
from tests.router.fleets import content

SHARED = replace(SCENES[0], engines=3, num_blocks=900, limit=60)


def test_the_index_has_what_the_engines_have_once_all_events_have_come():
    with ExitStack() as files:
        fleet = RoutedFleet(SHARED, "cost", 1, arrivals(SHARED, 5.0, 1, files))
        while fleet.run_step():
            pass
        fleet.router.time.advance(1e9)
    for engine in fleet.engines:
        pool = specification_of(engine._publishing.replica).coordinator.pool  # type: ignore[attr-defined]
        named = [key for block in range(pool.num_blocks) if (key := pool.key_of(block)) is not None]
        keys = {(group, digest[-8:]) for _, group, digest in named}
        place = fleet.router._places.followed[engine._name].place  # type: ignore[attr-defined]
        found = {(group, key.to_bytes(8, "big")) for (_, group), of in content(place).items() for key in of}
        assert found == keys != set()


def test_hits_are_claimed_as_they_are_and_a_full_index_claims_more():
    exact, full, blind = (run(SHARED, 5.0, policy, 1) for policy in ("cost", "full_only", "round_robin"))
    assert len(exact.first_token_s) == len(full.first_token_s) == SHARED.limit
    assert exact.claimed <= 1.1 * exact.real
    assert full.claimed > 1.1 * full.real
    assert full.over > 3 * exact.over
    assert exact.real > 2 * blind.real
    assert sum(exact.first_token_s) < sum(blind.first_token_s)
