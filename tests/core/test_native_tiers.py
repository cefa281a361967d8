"""The compiled core has tiers as the specification has them: equal results, orders, events and state."""

from __future__ import annotations

from array import array
from dataclasses import replace
from random import Random

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import EvictionPolicy, SavePolicy, TierKind, TierSpec
from kvplane.base.step import Admit, Cache, News, Part, RowFlag, Step
from kvplane_core.face.state import digest, export_state
from kvplane_core.spec.loading import load_state
from kvplane_core.spec.replica import Replica
from tests.core.builders import changed, digests, full, open_step, replica_spec, window
from tests.core.compared import CoresDiffer
from tests.core.images import image_of, values_of
from tests.core.specification import specification_of
from tests.core.test_tiers import DISK, Mover
from tests.core.test_tiers import small_pools as small_pools
from tests.core.tier_spoils import slots_of

native = pytest.importorskip(
    "kvplane_core.face.native",
    reason="the core is not compiled: install g++ and install kvplane again",
    exc_type=ImportError,
)
SMALL = TierSpec(TierKind.HOST, 24)
TEXT = "aaaabbbbcccc"


def loading(**changes):
    """An engine with keys in both tiers, shadows, pins, and jobs in flight of each kind."""
    engine = Mover(full(), window(8, lookup_class=3), tiers=(SMALL, DISK), num_blocks=33, **changes)
    engine.save(TEXT)
    engine.cache(jobs_done=engine.ask(3, TEXT + "x").result.admit_job)
    engine.save("ddddeeeeffff")
    engine.ask(4, "ddddeeeeffffx")
    engine.serve(5, "gggghhhhiiiijjjj")
    engine.idle()
    return engine


def test_the_state_survives_the_way_through_the_compiled_core():
    engine = loading()
    first = specification_of(engine.replica)
    assert all(first.tiers.open_jobs().values()), "jobs of each kind are in flight"
    second = native.NativeReplica.of(load_state(first.spec, export_state(first)))
    assert export_state(second) == export_state(first)
    assert digest(second) == digest(first)
    assert slots_of(second) == slots_of(first)
    asked = digests(first.spec, "ddddeeeeffff"), ""
    assert second.cached_columns(*asked) == first.cached_columns(*asked)
    keys = [(group, one) for group in range(len(first.spec.groups)) for one in asked[0]]
    tiers = [[core.tiers.tier_of("", *key) for key in keys] for core in (first, second)]
    assert tiers[0] == tiers[1]
    assert any(one is not None for one in tiers[0])
    end = Step(
        first.epoch, first.seq + 1, [Part(cache=Cache(jobs_done=first.tiers.jobs.numbers()))], 0, True, first.seq
    )
    assert native.NativeReplica.of(first).apply(end).parts == first.apply(end).parts


@pytest.mark.parametrize("shown", [True, False], ids=["stamps", "no stamps"])
@pytest.mark.parametrize("is_new", [True, False], ids=["new memory", "same memory"])
def test_engine_lives_of_tiers_are_equal(shown, is_new):
    engine = loading()
    twin = engine.replica
    table = engine.shown() if shown else []
    table[twin.spec.num_blocks :: 2] = [0] * len(table[twin.spec.num_blocks :: 2])
    twin.begin_epoch(twin.epoch + 1, table, memory_is_new=is_new)
    twin.take_events()
    twin.tiers.take_events()
    assert twin.apply(Step(twin.epoch, 1, [Part()])).parts


def test_tier_events_of_a_life_that_differ_are_an_error(monkeypatch):
    twin = loading().replica
    assert twin.second
    monkeypatch.setattr(native.NativeReplica, "end_epoch", lambda self, stamps=(): iter(()))
    with pytest.raises(CoresDiffer):
        twin.begin_epoch(twin.epoch + 1)


def test_a_reset_that_the_core_does_not_know_of():
    engine = loading()
    table = engine.shown()
    table[0] = max(table) + 1
    engine.replica.begin_epoch(engine.replica.epoch + 1, table)
    assert not engine.tiers.has_keys


def test_a_load_of_a_key_that_is_dropped_meanwhile():
    engine = Mover(full())
    engine.save(TEXT)
    (job,) = engine.ask(3, TEXT + "x").result.admit_job
    engine.admit(4, TEXT + "x")  # computes what slot 3 loads
    engine.idle()
    engine.cache(evicted=engine.table(4)[:1])
    assert engine.cache(jobs_done=[job]).preempted == [3]


def test_what_is_worth_least_leaves_and_is_saved():
    """The policy puts blocks among those that were looked at before."""
    changes = {"eviction": EvictionPolicy.HAZARD, "num_blocks": 60, "tiers": (SMALL, DISK)}
    engine, rng = Mover(full(), window(6, lookup_class=1), **changes), Random(5)
    learner = engine.pool.free.learner
    learner.leads, learner._gain = True, (1 << 30) - 1
    changed(engine.replica)
    for _ in range(120):
        text = rng.choice("abc") * rng.choice((4, 8)) + rng.choice("defghijkl") * rng.choice((4, 12, 30)) + "?"
        engine.cache(jobs_done=[job for job in engine.ask(0, text).result.admit_job if job])
        engine.end(0)
        engine.report()
    counters = engine.tiers.counters
    assert learner.leads
    assert min(counters.loaded, counters.saved, counters.moved) > 10, counters


def test_what_changes_far_from_eviction_is_not_saved():
    """Long prompts are saved far ahead; then steps take little, and a host that is full loses what was saved."""
    changes = {"num_blocks": 401, "max_model_len": 300, "max_in_flight_tokens": 300}
    engine = Mover(full(), tiers=(TierSpec(TierKind.HOST, 250),), **changes)
    for number in range(7):
        engine.serve(0, "".join(chr(300 + 256 * number + at) for at in range(256)))
        engine.report()
    for number in range(100):
        engine.serve(1, "".join(chr(3000 + 4 * number + at) for at in range(4)))
        engine.report()
    assert engine.tiers.demand < 16
    assert engine.tiers.counters.saved > 250, engine.tiers.counters


def test_keys_of_slots_are_recovered_equally():
    engine = loading()
    first = specification_of(engine.replica)
    stored, table = [first.entries(), first.entries([first.spec.num_blocks + 3])], engine.shown()
    for slot in range(first.spec.num_blocks, len(table), 5):
        table[slot] = 0
    python, compiled = Replica(first.spec), native.NativeReplica(first.spec)
    for core in (python, compiled):
        core.install_recovered(core.verify_entries([table], stored))
        core.enter_epoch(9, table)
        core.take_events()
    assert any(tier.num_held for tier in compiled.tiers.each)
    assert export_state(compiled) == export_state(python)


REFUSED = {
    "cache.jobs_done": Part(cache=Cache(jobs_done=[1 << 40])),
    "cache.jobs_failed": Part(cache=Cache(jobs_failed=[0])),
    "cache.jobs_before": Part(cache=Cache(jobs_before=1 << 40)),
    "cache.costs_ns": Part(cache=Cache(costs_ns=[1, 2])),
    "admit.flags": Part(admit=Admit([3], external=[4], flags=[int(RowFlag.LOAD)])),
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_tiers_do_not_permit_is_refused_without_a_copy_of_the_state(field):
    engine = loading()
    core = native.NativeReplica.of(engine.replica)
    before = digest(core)
    with pytest.raises(InvalidArgument) as caught:
        core.apply(Step(core.epoch, core.seq + 1, [REFUSED[field]]))
    assert caught.value.field.startswith(f"parts[0].{field}")
    assert digest(core) == before


def sound_state(core):
    """The values of an image of a core, and those of its tiers."""
    values = values_of(export_state(core))
    native.NativeReplica.load(core.spec, image_of(values))
    return values, values["tiers"][0]


@pytest.mark.parametrize("change", ["slot", "version", "free", "group", "job", "loading", "block", "wanted", "stale"])
def test_a_damaged_state_of_tiers_is_refused(change):
    """Every number that the core uses as an index has the range of one."""
    engine = loading()
    core = native.NativeReplica.of(engine.replica)
    values, (numbers, each, loads, saves, moves, waits, places) = sound_state(core)
    size, used, free, shadows, recent = each[0]
    (key, slot, version), *rest = recent
    changed = {
        "slot": (key, size, version),
        "version": (key, slot, 0),
        "group": ((key[0], 1 << 20, key[2]), slot, version),
    }.get(change, (key, slot, version))
    wanted = [["behind", [1], array("Q", [1]), array("Q"), array("Q")]] if change == "wanted" else []
    each[0] = [size, used, [*free, slot] if change == "free" else free, shadows, [changed, *rest], *wanted]
    if change == "job":
        saves[0] = (1 << 60, *saves[0][1:])
    if change == "block":
        saves[0] = (*saves[0][:2], 1 << 31, *saves[0][3:])
    if change == "loading":
        waits = [(slot, 1 << 50) for slot, _ in waits]
    if change == "stale":
        places = [places[0], [*places[1], slot], *places[2:]]
    values["tiers"] = [[numbers, each, loads, saves, moves, waits, places]]
    with pytest.raises(InvalidArgument, match="the state is damaged: tiers"):
        native.NativeReplica.load(core.spec, image_of(values))


@pytest.mark.parametrize("wanted", [("through", [33], [5]), ("through", [-1], [5]), ("through", [3], [0]),
                                    ("through", [3, 4], [5]), ("reuse", [3], [5]), ("other", [], [])])  # fmt: skip
def test_a_damaged_list_of_what_a_tier_wants_is_refused(wanted):
    core = native.NativeReplica(replica_spec(full(), num_blocks=33, tiers=(replace(SMALL, save=SavePolicy.THROUGH),)))
    values, tiers = sound_state(core)
    policy, places, versions = wanted
    tiers[1][0][5] = [policy, places, array("Q", versions), array("Q"), array("Q")]
    with pytest.raises(InvalidArgument, match="the state is damaged: tiers"):
        native.NativeReplica.load(core.spec, image_of(values))


def test_an_open_step_names_the_load_that_a_slot_waits_for():
    engine = loading()
    step, before = open_step(engine.replica, engine.replica.executed_through), engine.digest
    with pytest.raises(InvalidArgument, match="slot 4 waits for a load") as refused:
        step.extend(4, 1)
    assert refused.value.field == "slot"
    assert engine.digest == before


@pytest.mark.parametrize("core", [Replica, native.NativeReplica])
def test_a_flag_that_no_row_has_is_refused_with_tiers_too(core):
    """Found by the fuzzer: the complement of a RowFlag has no bits but those of its members, so these were taken."""
    replica = core(loading().replica.spec)
    part = Part(news=News([0], [4], [1, 2, 3, 4]), admit=Admit([0], flags=[-1 << 32]))
    with pytest.raises(InvalidArgument) as caught:
        replica.apply(Step(0, 1, [part]))
    assert caught.value.field == "parts[0].admit.flags"
