"""The fuzzer of the compiled core: seeds reach every operation, earlier findings stay fixed, and differences that are
planted are caught.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.step import Admit, Cache, Facts, News, Part, Run, Step
from kvplane_core.face.state import digest, export_state
from kvplane_core.spec.replica import Replica
from tests.core.builders import full, replica_spec, state

native = pytest.importorskip(
    "kvplane_core.face.native",
    reason="the core is not compiled: install g++ and install kvplane again",
    exc_type=ImportError,
)
from tests.fuzz import steps  # noqa: E402
from tests.fuzz.test_fuzz import fuzz  # noqa: E402

SEEDS = list(steps.seeds())
FOUND = sorted(path for path in (Path(__file__).parent / "found_steps").iterdir() if path.suffix != ".md")


def test_seeds_are_equal_on_both_cores_and_reach_every_operation():
    counts = Counter[str]()
    for program in SEEDS:
        counts.update(steps.run(program).counts)
    assert counts["steps"] > 2 * counts["refused"]
    assert counts["steps"] > 10 * (counts["broken"] + counts["strange"]), "these begin again"
    assert not [name for name, count in counts.items() if name not in ("broken", "strange") and count < 3], counts


def test_earlier_findings_stay_fixed():
    for path in FOUND:
        steps.run(path.read_bytes())


def test_a_short_fuzzing_run_finds_nothing(tmp_path):
    pytest.importorskip("atheris", reason="atheris 3 is not installed, see make fuzz in tests/README.md")
    assert fuzz(tmp_path, "2", "--steps") > len(SEEDS)


def is_seen() -> bool:
    """Whether some seed breaks a rule."""
    for program in SEEDS:
        try:
            steps.run(program)
        except AssertionError:
            return True
    return False


def of_blocks(result):
    result.parts[-1].free_blocks += 1
    return result


PLANTED = {
    "answers": ("apply", of_blocks),
    "look-ups": ("peek_slot", lambda hit: replace(hit, num_tokens=hit.num_tokens + 1)),
    "keys": ("count_keys", lambda count: count + 1),
    "chunks": ("shorten_chunk", lambda count: count and count - 1),
    "engine lives": ("enter_epoch", lambda kept: kept + 1),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_difference_is_caught(monkeypatch, fault):
    name, change = PLANTED[fault]
    real = getattr(native.NativeReplica, name)
    monkeypatch.setattr(native.NativeReplica, name, lambda self, *given: change(real(self, *given)))
    assert is_seen()


def test_keys_that_a_recovery_loses_are_caught(monkeypatch):
    monkeypatch.setattr(native.NativeReplica, "install_recovered", lambda self, _: None)
    assert is_seen()


def test_a_refusal_of_another_row_or_reason_is_caught(monkeypatch):
    def first_row(core, step, *others):
        try:
            return apply(core, step, *others)
        except native._native.Refused as refused:
            reason, part, column, row, values = refused.args
            raise native._native.Refused(reason, part, column, max(row - 1, -1), values) from None

    apply = native._native.apply
    monkeypatch.setattr(native._native, "apply", first_row)
    assert is_seen()


STRANGE: dict[str, Any] = {
    "facts.tokens": Part(facts=Facts([0], appended=[2], tokens=array("i", [1, -1]))),
    "news.tokens": Part(news=News([1], [1], array("q", [1 << 40]))),
    "news.request_id": Part(news=News([1], [1], request_id=cast(Any, [7]))),
    "cache.costs_ns": Part(cache=Cache(costs_ns=[1 << 40])),
    "cache.jobs_before": Part(cache=Cache(jobs_before=cast(Any, None))),
    "cache.mismatched": Part(cache=Cache(evicted=[1, 2], mismatched=[2, 3])),
    "cache.hits_checked": Part(cache=Cache(hits_checked=-1)),
    "news.domain": Part(news=News([1], [1], domain=cast(Any, [b"d"]))),
}


@pytest.mark.parametrize("field", STRANGE)
@pytest.mark.parametrize("core", [Replica, native.NativeReplica])
def test_a_value_of_another_type_or_range_is_refused_before_any_change(core, field):
    """Found by the fuzzer: rows before the value were applied, or the compiled core could not load the state, or took
    a cost of more than a minute.
    """
    replica = core(replica_spec(full()))
    replica.apply(Step(0, 1, [Part(news=News([0], [4], [1, 2, 3, 4]), admit=Admit([0]))]))
    before = digest(replica)
    with pytest.raises(InvalidArgument) as caught:
        replica.apply(Step(0, 2, [STRANGE[field]]))
    assert caught.value.field == f"parts[0].{field}"
    assert digest(replica) == before
    replica.apply(Step(0, 2, [Part()]))


def test_a_replica_without_tiers_refuses_reports_of_jobs():
    """Found by the fuzzer: an engine life numbers jobs from its epoch on, which no exported state has without tiers;
    negative numbers were taken.
    """
    replica = Replica(replica_spec(full()))
    replica.begin_epoch(1)
    before = digest(replica)
    wrong = {"the last one is 0": Cache(jobs_failed=[1 << 30]), "-1 is not 0 to 1": Cache(jobs_before=-1)}
    for core, (problem, cache) in product((replica, native.NativeReplica.of(replica)), wrong.items()):
        with pytest.raises(InvalidArgument, match=problem):
            core.apply(Step(1, 1, [Part(cache=cache)]))
        assert digest(core) == before


def test_a_replica_is_loaded_whose_row_asked_for_fewer_tokens_than_none():
    """Found by the fuzzer: a row may take back more tokens than its request has."""
    replica = Replica(replica_spec(state(), full()))
    run = Run([0], extra=[-2])
    replica.apply(Step(0, 1, [Part(news=News([0], [1], [7]), admit=Admit([0]))]))
    replica.apply(Step(0, 2, [Part(run=run)]))
    assert replica.requests.asked[0] == (2, -1)
    assert export_state(native.NativeReplica.of(replica)) == export_state(replica)
