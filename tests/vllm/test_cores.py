"""Which core decides in the engine's process."""

from __future__ import annotations

import pytest

from kvplane.base.errors import FailedPrecondition, InvalidArgument
from kvplane.base.groups import EvictionPolicy, TierKind, TierSpec
from kvplane_service.core.open_step import OpenStep
from kvplane_service.core.replica import Replica
from kvplane_vllm import cores
from tests.core.builders import full, replica_spec, state, window

SPEC = replica_spec(full(), window(6))
HOST = (TierSpec(TierKind.HOST, 64),)


@pytest.fixture
def native():
    return pytest.importorskip(
        "kvplane_service.core.native",
        reason="the core is not compiled: install g++ and install kvplane again",
        exc_type=ImportError,
    )


@pytest.mark.parametrize(
    ("choice", "spec", "is_compiled"),
    [
        ("", SPEC, True),
        ("native", SPEC, True),
        ("python", SPEC, False),
        ("twin", SPEC, False),
        ("native", replica_spec(full(), state()), True),
        ("auto", replica_spec(full(), eviction=EvictionPolicy.HAZARD), True),
        ("auto", replica_spec(full(), tiers=HOST), True),
        ("auto", replica_spec(full(), tiers=HOST, eviction=EvictionPolicy.HAZARD), True),
    ],
)
def test_the_compiled_core_decides_where_it_can(native, monkeypatch, choice, spec, is_compiled):
    monkeypatch.setenv(cores.VARIABLE, choice)
    replica = cores.new_core(spec)
    assert type(replica) is (native.NativeReplica if is_compiled else Replica)
    assert isinstance(cores.open_step(replica, 0), OpenStep) is not is_compiled


def test_a_required_core_that_cannot_decide_is_an_error(native, monkeypatch):
    monkeypatch.setenv(cores.VARIABLE, "native")
    monkeypatch.setattr(cores, "problem_of", lambda folder: f"{folder.name} is of other sources")
    with pytest.raises(FailedPrecondition, match="native is of other sources"):
        cores.new_core(SPEC)
    monkeypatch.setenv(cores.VARIABLE, "auto")
    assert type(cores.new_core(SPEC)) is Replica
    monkeypatch.setenv(cores.VARIABLE, "fast")
    with pytest.raises(InvalidArgument, match="it is 'fast'"):
        cores.new_core(SPEC)
