"""Bad input about tiers: it is refused with the field and a remedy, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf import json_format

from kvplane import wire
from kvplane.base.errors import InvalidArgument, KvplaneError, LimitExceeded
from kvplane.base.groups import CommitRule, HashAlgorithm, SavePolicy, TierKind, TierSpec
from kvplane.base.step import Admit, Cache, News, Part, RowFlag, Run, Step
from kvplane.v1 import plan_pb2, replica_pb2
from kvplane.wire.spec import encode_tiers
from kvplane_core.face import setup
from kvplane_core.face.state import digest
from kvplane_service.config import Config
from kvplane_service.registry import Registration, Registry
from tests.core.specification import specification_of
from tests.service.hosts import spec_of
from tests.service.tiered import DISK, FILLS, HOST, Served

LOAD = int(RowFlag.LOAD)
NAMED = b"n" * 32
LIMITS = Config(max_blocks=1000, max_total_blocks=2000)

# What a registration changes of one that is right, the kind of the refusal, and its field.
SPECS: dict[str, tuple[dict[str, Any], type[KvplaneError], str]] = {
    "no slots": ({"tiers": (TierSpec(TierKind.HOST, 0),)}, InvalidArgument, "tiers[0].num_blocks"),
    "slots without end": ({"tiers": (HOST, TierSpec(TierKind.DISK, 1 << 40))}, InvalidArgument, "tiers[1].num_blocks"),
    "more slots than the service allows": (
        {"tiers": (TierSpec(TierKind.HOST, 1001),)}, LimitExceeded, "tiers[0].num_blocks",
    ),
    "more slots than there is room for": (
        {"tiers": (replace(HOST, num_blocks=1000), replace(DISK, num_blocks=1000))}, LimitExceeded, "num_blocks",
    ),
    "the disk before the host": ({"tiers": (DISK, HOST)}, InvalidArgument, "tiers"),
    "a kind twice": ({"tiers": (HOST, HOST)}, InvalidArgument, "tiers"),
    "nothing is cached": ({"enable_caching": False}, InvalidArgument, "tiers"),
    "content that may not be executed": ({"commit": CommitRule.REFERENCE}, InvalidArgument, "tiers"),
    "hashes that can be forged": ({"hash_algorithm": HashAlgorithm.XXHASH}, InvalidArgument, "hash_algorithm"),
    "forged by CBOR": ({"hash_algorithm": HashAlgorithm.XXHASH_CBOR}, InvalidArgument, "hash_algorithm"),
}  # fmt: skip


def names_remedy(error: KvplaneError, field: str) -> None:
    assert error.field == field
    assert error.remedy, error


@pytest.mark.parametrize("name", SPECS)
def test_a_registration_with_impossible_tiers_is_refused(name):
    changes, kind, field = SPECS[name]
    registry = Registry(LIMITS, lambda: 0)
    spec = spec_of(**{"tiers": (HOST, DISK), **changes})
    with pytest.raises(kind) as refused:
        registry.register("r", Registration(spec, namespace_digest=NAMED))
    names_remedy(refused.value, field)
    assert len(registry) == 0
    registry.register("r", Registration(spec_of(tiers=(HOST, DISK)), namespace_digest=NAMED))


def test_tiers_without_a_name_of_their_content_are_refused():
    registry = Registry(LIMITS, lambda: 0)
    with pytest.raises(InvalidArgument) as refused:
        registry.register("r", Registration(spec_of(tiers=(HOST,))))
    names_remedy(refused.value, "namespace_digest")
    assert len(registry) == 0


def tier_of(kind: int) -> replica_pb2.TierSpec:
    message: replica_pb2.TierSpec = json_format.ParseDict({"kind": kind, "num_blocks": 3}, replica_pb2.TierSpec())
    return message


def use_of(kind: int) -> plan_pb2.TierUse:
    message: plan_pb2.TierUse = json_format.ParseDict({"kind": kind}, plan_pb2.TierUse())
    return message


@pytest.mark.parametrize("kind", [0, 9])
def test_a_tier_of_an_unknown_kind_is_refused(kind):
    with pytest.raises(InvalidArgument) as refused:
        wire.decode_tiers([tier_of(1), tier_of(kind)])
    names_remedy(refused.value, "tiers[1].kind")


def test_a_tier_that_saves_in_an_unknown_way_is_refused():
    unknown = json_format.ParseDict({"kind": 1, "num_blocks": 3, "save": 9}, replica_pb2.TierSpec())
    with pytest.raises(InvalidArgument, match="SAVE_POLICY_REUSE") as refused:
        wire.decode_tiers([tier_of(1), unknown])
    names_remedy(refused.value, "tiers[1].save")


@pytest.mark.parametrize("save", SavePolicy)
def test_a_tier_keeps_its_policy_on_the_wire(save):
    tiers = (HOST, replace(DISK, save=save))
    assert wire.decode_tiers(encode_tiers(tiers)) == tiers
    assert encode_tiers(tiers)[0].ListFields()[-1][0].name == "num_blocks"  # the default has its earlier bytes


@pytest.mark.parametrize(
    ("tiers", "field"),
    [
        ([use_of(1), use_of(1)], "worker.tiers"),
        ([use_of(7)], "worker.tiers[0].kind"),
        ([use_of(0)], "worker.tiers[0].kind"),
    ],
)
def test_a_worker_that_reports_impossible_tiers_is_refused(tiers, field):
    with pytest.raises(InvalidArgument) as refused:
        wire.decode_worker(plan_pb2.WorkerInfo(worker_id=1, address="unix:/run/w", tiers=tiers))
    names_remedy(refused.value, field)


@pytest.fixture
def loading(monkeypatch):
    """A replica with a load in flight, which waits for a step, and that load's job."""
    monkeypatch.setattr(setup, "AHEAD_SHARE", 1)
    served = Served()
    for fill in range(FILLS):
        served.serve(fill)
    core = specification_of(served.host.replica)
    seq = served.engine.seq + 1
    part = Part(news=News([5], [65], tokens=[FILLS - 8] * 65), admit=Admit([5], flags=[LOAD]))
    (result,) = core.apply(Step(core.epoch, seq, [part], executed_through=seq - 2)).parts
    (job,) = result.admit_job
    return core, seq, job


# A part that is refused, given the job of the load, and the field.
PARTS: dict[str, tuple[Callable[[int], Part], str]] = {
    "a job that was never ordered": (lambda job: Part(cache=Cache(jobs_done=[job + 999])), "cache.jobs_done[0]"),
    "a failure of one": (lambda job: Part(cache=Cache(jobs_failed=[job + 999])), "cache.jobs_failed[0]"),
    "no job": (lambda job: Part(cache=Cache(jobs_done=[0])), "cache.jobs_done[0]"),
    "a job of a later life": (lambda job: Part(cache=Cache(jobs_done=[job + (1 << 32)])), "cache.jobs_done[0]"),
    "the end of later jobs": (lambda job: Part(cache=Cache(jobs_before=job + 999)), "cache.jobs_before"),
    "external tokens with LOAD": (
        lambda job: Part(news=News([6], [40], tokens=[1] * 40), admit=Admit([6], external=[16], flags=[LOAD])),
        "admit.flags[0]",
    ),
    "all tokens with LOAD": (
        lambda job: Part(news=News([6], [40], tokens=[1] * 40), admit=Admit([6], flags=[LOAD | int(RowFlag.WHOLE)])),
        "admit.flags[0]",
    ),
    "a late commit with LOAD": (
        lambda job: Part(
            news=News([6], [40], tokens=[1] * 40), admit=Admit([6], flags=[LOAD | int(RowFlag.DELAY_CACHING)])
        ),
        "admit.flags[0]",
    ),
    "LOAD of a running request": (lambda job: Part(run=Run([5], flags=[LOAD])), "run.flags"),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_step_with_impossible_jobs_is_refused(name, loading):
    core, seq, job = loading
    make, field = PARTS[name]
    before = digest(core)
    with pytest.raises(InvalidArgument) as refused:
        core.apply(Step(core.epoch, seq + 1, [Part(), make(job)], executed_through=seq))
    names_remedy(refused.value, f"parts[1].{field}")
    assert digest(core) == before
    core.apply(Step(core.epoch, seq + 1, [Part(cache=Cache(jobs_done=[job]))], executed_through=seq))


def test_a_load_that_cannot_have_begun_is_not_done(loading):
    core, seq, job = loading
    load = core.tiers.jobs.loads[job]
    core.tiers.jobs.loads[job] = load._replace(after=seq + 5)  # a launch in flight still reads its pages
    before = digest(core)
    with pytest.raises(InvalidArgument, match="cannot have started") as refused:
        core.apply(Step(core.epoch, seq + 1, [Part(cache=Cache(jobs_done=[job]))], executed_through=seq))
    names_remedy(refused.value, "parts[0].cache.jobs_done[0]")
    assert digest(core) == before


def test_a_job_reported_twice_changes_nothing(loading):
    core, seq, job = loading
    twice = Part(cache=Cache(jobs_done=[job, job]))
    core.apply(Step(core.epoch, seq + 1, [twice], executed_through=seq))
    loaded = core.tiers.counters.loaded
    for again in (Cache(jobs_done=[job]), Cache(jobs_failed=[job])):
        core.apply(Step(core.epoch, core.seq + 1, [Part(cache=again)], executed_through=seq))
    assert (core.tiers.counters.loaded, core.tiers.counters.loads_failed) == (loaded, 0)


@pytest.mark.parametrize("part", [Part(admit=Admit([0], flags=[LOAD])), Part(run=Run([0], flags=[LOAD]))])
def test_load_without_tiers_is_refused(part):
    served = Served(spec=spec_of(21))
    core = specification_of(served.host.replica)
    core.apply(Step(core.epoch, 1, [Part(news=News([0], [20], tokens=[1] * 20))]))
    before = digest(core)
    with pytest.raises(InvalidArgument, match="of a replica with tiers") as refused:
        core.apply(Step(core.epoch, 2, [part]))
    names_remedy(refused.value, f"parts[0].{'admit' if part.admit.slot else 'run'}.flags")
    assert digest(core) == before
