"""The tests of the core run both cores."""

from __future__ import annotations

from collections import Counter

import pytest

from kvplane_core.spec.replica import Replica
from tests.core import compared, test_tier_contents
from tests.core.builders import Engine, full, new_replica, replica_spec
from tests.core.compared import ComparedCores, CoresDiffer, Published
from tests.core.test_page_contents import run


def test_both_cores_are_compared():
    if reason := compared.reason():
        pytest.skip(f"the tests of the core run the specification alone: {reason}")
    assert isinstance(new_replica(replica_spec(full())), ComparedCores)


@pytest.mark.specification
def test_a_test_of_the_specification_runs_it_alone():
    assert type(new_replica(replica_spec(full()))) is Replica


@pytest.mark.skipif(not compared.compares(), reason=compared.reason())
def test_events_are_published_in_each_way(monkeypatch):
    """As they are packed, read because they concern held ones, and those of tiers."""
    monkeypatch.setattr(Published, "counts", Counter())
    for seed in range(4):
        run("window and full", seed)
        test_tier_contents.run("window and full", seed)
    assert min(Published.counts[way] for way in ("packed", "read", "tiers")) > 3, Published.counts


@pytest.mark.skipif(not compared.compares(), reason=compared.reason())
def test_a_change_of_the_specification_alone_is_found_unless_it_is_noted():
    engine = Engine(full())
    engine.serve(0, "aaaab")
    engine.pool.references[1] += 1
    compared.changed(engine.replica)
    engine.pool.references[1] -= 1
    compared.changed(engine.replica)
    engine.serve(0, "aaaab")
    engine.pool.stamp[1] += 1
    with pytest.raises(CoresDiffer, match="state"):
        engine.serve(0, "aaaab")


@pytest.mark.skipif(not compared.compares(), reason=compared.reason())
@pytest.mark.parametrize("name", sorted(compared.CALLS | compared.NUMBERS))
def test_each_question_is_asked_of_both(name):
    engine = Engine(full())
    engine.serve(0, "aaaab")
    assert isinstance(engine.replica, ComparedCores)
    assert hasattr(engine.replica.second, name)
