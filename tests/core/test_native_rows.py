"""An engine that applies its steps row by row gets equal answers, errors and states of both cores."""

from __future__ import annotations

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.step import Cache, End, RowFlag
from kvplane_service.core import state
from kvplane_service.core.part_rows import AdmitTerms, Update
from tests.core import test_open_step
from tests.core.builders import GRANTED, REFERENCE, SAFE, digests, full, replica_spec
from tests.core.test_step_law import MIXES

pytest.importorskip(
    "kvplane_service.core.native",
    reason="the core is not compiled: install g++ and install kvplane again",
    exc_type=ImportError,
)
from tests.core.paired_rows import PairedReplica, PairedStep, paired


@pytest.mark.parametrize("commit", [SAFE, REFERENCE])
@pytest.mark.parametrize("mix", MIXES)
def test_rows_of_random_engines_get_equal_answers(mix, commit):
    with paired():
        engines = [test_open_step.play(mix, commit, seed) for seed in range(6)]
    assert sum(engine.preempted for engine in engines)
    assert sum(engine.loads for engine in engines)
    assert sum(engine.decoded for engine in engines) > 40


@pytest.fixture
def step():
    replica = PairedReplica(replica_spec(full(), num_blocks=9))
    step = PairedStep(replica, 0)
    step.add(0, 12, digests(replica.spec, "a" * 12))
    assert step.admit(0, 0, 12) is GRANTED
    step.close()
    return PairedStep(replica, 1)


@pytest.mark.parametrize(
    "row",
    [
        lambda step: step.extend(5, 1),
        lambda step: step.extend(-1, 1),
        lambda step: step.extend(0, 0),
        lambda step: step.extend(0, 4096),
        lambda step: step.extend(0, 1, reserved=99),
        lambda step: step.extend(0, 1, flags=RowFlag.WHOLE),
        lambda step: step.extend(0, 1, lookahead=-1),
        lambda step: step.admit(5, 0, 1),
        lambda step: step.admit(0, 0, 9999),
        lambda step: step.admit(0, 0, 1, AdmitTerms(reserved=-1)),
        lambda step: step.look_up(-1),
        lambda step: step.update(Update(7, appended=1)),
        lambda step: step.update(Update(0, appended=99999)),
        lambda step: step.update(Update(0, end=End.FREE, fence=9)),
        lambda step: step.add(0, 4, []),
        lambda step: step.add(3, 4, [b"short"]),
        lambda step: step.change_cache(Cache(evicted=[0])),
        lambda step: step.change_cache(Cache(released=[0])),
        lambda step: step.change_cache(Cache(failed_steps=[9])),
    ],
)
def test_refused_rows_name_the_same_fault_and_change_nothing(step, row):
    before = state.digest(step.replica.second)
    with pytest.raises(InvalidArgument):
        row(step)
    assert state.digest(step.replica.second) == before
    assert step.decode(0, 13, [], 1, 0, 0) == [[4]]
    step.close()


def test_requests_that_adopted_a_withdrawn_key_count_as_taken_back(step):
    text = "b" * 16
    step.add(1, 16, digests(step.replica.spec, text))
    assert step.admit(1, 0, 16) is GRANTED
    step.add(2, 20, digests(step.replica.spec, text + "c" * 4))
    assert step.admit(2, step.look_up(2).num_tokens, 4) is GRANTED
    assert step.update(Update(1, end=End.FREE)) == [2]
    assert sum(part.taken_back for part in step.close().parts) == 1
