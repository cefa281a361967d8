"""The bytes of a decode step that are written without message objects are those of protobuf."""

from array import array
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplane.base.errors import InvalidArgument
from kvplane.base.hashing import native
from kvplane.base.step import Admit, Facts, OnRefusal, Part, Run, Step
from kvplane.base.when_read import PACKED
from kvplane.session.builder import StepBuilder
from kvplane.v1.allocation_pb2 import SessionRequest
from kvplane.wire import packed_step
from kvplane.wire.packed_step import step_bytes
from kvplane.wire.step import encode_step
from tests.client.test_wire import facts, names, runs, u32, u64

decode_parts = st.builds(Part, facts=facts(), run=runs()) | st.builds(Part, facts=facts()) | st.builds(Part, run=runs())
decode_steps = st.builds(
    Step, u64, u64, st.lists(decode_parts | st.just(Part()), min_size=1, max_size=1), u32, st.booleans(), u64, names
)


def by_protobuf(step: Step) -> bytes:
    return SessionRequest(step=encode_step(step)).SerializeToString()


@pytest.fixture(autouse=True, params=["on", "off"], ids=["compiled", "python"])
def form(request, monkeypatch):
    """Each test with both writers of the message."""
    if request.param == "on" and native._COMPILED is None:
        pytest.skip("the compiled module is not installed")
    monkeypatch.setenv(native.VARIABLE, request.param)
    packed_step._compiled.cache_clear()
    yield
    packed_step._compiled.cache_clear()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(decode_steps)
def test_step_bytes_are_those_of_protobuf(step):
    is_default = vars(step.parts[0]).get("run", Run()).on_refusal == OnRefusal.PREEMPT
    assert step_bytes(step) == (by_protobuf(step) if is_default else None)


@pytest.mark.parametrize("rows", [0, 1, 31, 32, 33, 127, 128, 4096])
def test_step_bytes_of_a_builder_are_those_of_protobuf(rows):
    builder = StepBuilder(range(rows))
    builder.tokens[:] = array("I", range(rows))
    builder.extra[:] = array("i", [-1]) * rows
    for part in (builder.part(), builder.part(appended=False), StepBuilder(range(rows), hashed=True).part()):
        packed = vars(part).get(PACKED)
        assert (packed is not None) == bool(rows)
        step = Step(1, 1 << 40, [part], rows=packed)
        written = step_bytes(step)
        assert written == by_protobuf(step)  # of the sections, which are made for it
        assert PACKED not in vars(part)
        assert step_bytes(Step(1, 1 << 40, [part])) == written


def test_step_bytes_are_left_to_protobuf_for_other_sections_and_wrong_types():
    assert step_bytes(Step(1, 1, [Part(), Part()])) is None
    assert step_bytes(Step(1, 1, [Part(admit=Admit([1]))])) is None
    assert step_bytes(Step(1, 1, [Part(with_tables=True)])) is None
    wrong: list[Any] = [{"facts": None}, {"facts": 3}, {"run": None}, {"facts": Facts([1], hashes=cast(Any, "text"))}]
    for given_fields in wrong:
        assert step_bytes(Step(1, 1, [Part(**given_fields)])) is None


def test_step_bytes_refuse_a_column_by_its_name():
    with pytest.raises(InvalidArgument) as refused:
        step_bytes(Step(1, 1, [Part(run=Run([1], cap=[-1]))]))
    assert refused.value.field == "parts[0].run.cap"
