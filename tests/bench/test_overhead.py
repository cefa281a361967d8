"""The benchmark of overheads: both sides do the same work, and the interval narrows with samples."""

from __future__ import annotations

import random

from kvplane_service.decisions.log import Entry
from kvplane_service.replicas.host import ReplicaHost
from tests.bench.overhead import Side, always_on, bootstrap, log_only, measure, table, unwatched


def test_overhead_sides_decide_alike_and_are_observed_as_configured():
    seen: list[Entry] = []

    def watched(host: ReplicaHost) -> None:
        host.decisions.follow(seen.append)

    result = measure("a follower", watched, unwatched, pairs=2, steps=3)
    assert (result.pairs, result.steps) == (2, 3)
    assert result.low <= result.percent <= result.high
    assert len(seen) == 1 + (3 + 2) + 2 * (3 + 2)  # an engine life; warm-up and two runs, each admitted and freed
    assert "| a follower | " in table([result])


def test_overhead_sides_log_nothing_or_every_decision():
    sides = [Side(2, watch) for watch in (unwatched, log_only, always_on)]
    for side in sides:
        side.begin()
        side.decode(2)
        side.end()
    assert [len(side.host.decisions) for side in sides] == [0, 5, 5]  # an engine life, an admission, two steps, the end
    assert [sum(side.host.tally.step_times.counts) for side in sides] == [0, 0, 4]


def test_bootstrap_interval_covers_the_mean_and_narrows_with_more_pairs():
    source = random.Random(7)
    values = [source.gauss(2.0, 1.0) for _ in range(400)]
    few, many = bootstrap(values[:20], random.Random(1)), bootstrap(values, random.Random(1))
    assert few[0] < 2.0 < few[1]
    assert many[0] < 2.0 < many[1]
    assert many[1] - many[0] < few[1] - few[0]
