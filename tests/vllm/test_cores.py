"""Which core decides in the engine's process."""

from __future__ import annotations

import pytest

from kvplane.base.errors import FailedPrecondition, InvalidArgument
from kvplane.base.groups import EvictionPolicy, TierKind, TierSpec
from kvplane_core.face import loader
from kvplane_core.spec.open_step import OpenStep
from kvplane_core.spec.replica import Replica
from tests.core.builders import full, replica_spec, state, window

SPEC = replica_spec(full(), window(6))
HOST = (TierSpec(TierKind.HOST, 64),)


@pytest.fixture
def native():
    return pytest.importorskip(
        "kvplane_core.face.native",
        reason="the core is not compiled: install g++ and install kvplane again",
        exc_type=ImportError,
    )


@pytest.mark.parametrize(
    ("choice", "spec", "is_compiled"),
    [
        ("", SPEC, True),
        ("native", SPEC, True),
        ("python", SPEC, False),
        ("native", replica_spec(full(), state()), True),
        ("auto", replica_spec(full(), eviction=EvictionPolicy.HAZARD), True),
        ("auto", replica_spec(full(), tiers=HOST), True),
        ("auto", replica_spec(full(), tiers=HOST, eviction=EvictionPolicy.HAZARD), True),
    ],
)
def test_the_compiled_core_decides_where_it_can(native, monkeypatch, choice, spec, is_compiled):
    monkeypatch.setenv(loader.VARIABLE, choice)
    replica = loader.new_in_process(spec)
    assert type(replica) is (native.NativeReplica if is_compiled else Replica)
    assert isinstance(loader.open_step(replica, 0), OpenStep) is not is_compiled


def test_a_required_core_that_cannot_decide_is_an_error(native, monkeypatch):
    monkeypatch.setenv(loader.VARIABLE, "native")
    monkeypatch.setattr(loader, "problem", lambda: "the library is of other sources")
    with pytest.raises(FailedPrecondition, match="the library is of other sources"):
        loader.new_in_process(SPEC)
    monkeypatch.setenv(loader.VARIABLE, "auto")
    assert loader.core_of(loader.new_in_process(SPEC)) == "python"
    monkeypatch.setenv(loader.VARIABLE, "fast")
    with pytest.raises(InvalidArgument, match="it is 'fast'"):
        loader.new_in_process(SPEC)
