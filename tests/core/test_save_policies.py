"""When a tier saves: before an eviction (`behind`), what is computed (`through`), what is used twice (`reuse`)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import SavePolicy, TierKind, TierSpec
from kvplane_core.face import inspect
from kvplane_core.face.state import export_state
from kvplane_core.spec.loading import load_state
from kvplane_core.spec.tiers.behind import SaveBehind
from kvplane_core.spec.tiers.wanted import Wanted
from tests.core.builders import full, state, window
from tests.core.test_tiers import Mover
from tests.core.test_tiers import small_pools as small_pools

BEHIND, THROUGH, REUSE = SavePolicy
TEXT = "aaaabbbbcccc"


def host(save, num_blocks=400):
    return TierSpec(TierKind.HOST, num_blocks, save)


def disk(save, num_blocks=400):
    return TierSpec(TierKind.DISK, num_blocks, save)


def saving(*tiers, groups=None, **changes):
    """A device so large that nothing on it is evicted soon."""
    return Mover(*(groups or (full(),)), tiers=tiers, **{"num_blocks": 401, **changes})


def finish(engine, steps=6):
    """Steps in which nothing is computed, and every job ends."""
    for _ in range(steps):
        engine.report()


def held(engine, tier=0):
    return engine.tiers.each[tier].num_held


def crowd(engine, count=40):
    """Serve other prompts, each once, until the device has nothing of the earlier ones."""
    for number in range(count):
        engine.serve(1, "".join(chr(1000 + 16 * number + letter) for letter in range(16)))
        engine.report()


# -- through ---------------------------------------------------------------------------------------------------------


def test_through_saves_what_was_computed_though_nothing_is_evicted():
    engine = saving(host(THROUGH))
    engine.serve(0, TEXT)
    finish(engine)
    assert held(engine) == 3
    behind = saving(host(BEHIND))
    behind.serve(0, TEXT)
    finish(behind)
    assert held(behind) == 0


def test_through_saves_each_block_once():
    engine = saving(host(THROUGH))
    for slot in range(4):
        engine.serve(slot, TEXT)
        finish(engine)
    assert (held(engine), engine.tiers.counters.saved) == (3, 3)


def test_through_saves_the_blocks_of_a_request_that_runs():
    engine = saving(host(THROUGH))
    engine.admit(0, TEXT)
    finish(engine)
    assert held(engine) == 3
    engine.run(0, text="d")
    for letter in "ddde":
        engine.run(0, text=letter)
    finish(engine)
    assert held(engine) == 4


def test_through_saves_nothing_before_its_step_is_executed():
    engine = saving(host(THROUGH))
    engine.executed = 0
    engine.serve(0, TEXT)
    finish(engine)
    assert engine.tiers.counters.saved == 0
    engine.executed = None
    finish(engine)
    assert held(engine) == 3


def test_through_keeps_to_the_limit_on_saves_of_a_step():
    engine = saving(host(THROUGH), num_blocks=101)
    engine.admit(0, "a" * 160)
    engine.idle()
    for slot in range(1, 9):
        engine.serve(slot, f"{slot}" * 8)
    engine.saved.clear()
    engine.tiers.demand = engine.tiers.demand_now = 2
    engine.tiers.each[0].clear()
    engine.changed()
    for slot in range(10, 20):
        engine.serve(slot, f"{chr(200 + slot)}" * 8)
        assert len(engine.last[0].orders.save_job) <= 4
    finish(engine, 20)
    assert held(engine) >= 20


def test_what_through_saved_is_evicted_first_while_the_device_has_it():
    """So a tier of the same size holds what the device does not."""
    engine = Mover(full(), tiers=(host(THROUGH, 24),), num_blocks=21)
    engine.serve(0, TEXT)
    crowd(engine, 12)
    (tier,) = engine.tiers.each
    on_device = {key for key, _ in tier.in_order() if engine.pool.blocks_of(key)}
    assert set(tier.shadows) <= on_device
    assert len(on_device) < tier.num_held


def test_a_full_tier_of_through_keeps_what_left_the_device():
    engine = Mover(full(), tiers=(host(THROUGH, 40),), num_blocks=21)
    crowd(engine, 9)
    assert engine.outside("".join(chr(1000 + 16 * 3 + letter) for letter in range(16)) + "x") == 0
    asked = engine.ask(3, "".join(chr(1000 + 16 * 3 + letter) for letter in range(16)) + "x")
    assert asked.hit == 16


def test_a_block_that_was_allocated_again_is_not_saved_for_what_it_had():
    engine = saving(host(THROUGH))
    engine.executed = 0
    engine.serve(0, TEXT)
    blocks = list(engine.tiers.each[0].wanted.version)
    engine.cache(evicted=blocks)
    engine.executed = None
    finish(engine)
    assert held(engine) == 0
    assert not len(engine.tiers.each[0].wanted)


def test_the_disk_takes_what_the_host_stores():
    engine = saving(host(THROUGH), disk(THROUGH))
    engine.serve(0, TEXT)
    finish(engine)
    assert (held(engine, 0), held(engine, 1), engine.tiers.counters.moved) == (3, 3, 3)


@pytest.mark.parametrize("kinds", [(full(), window(6)), (state(), full())], ids=["windows", "states"])
def test_through_saves_only_blocks_that_a_hit_can_need(kinds):
    engine = saving(host(THROUGH), groups=kinds)
    engine.serve(0, "aaaabbbbccccdddd")
    keyed = sum(engine.pool.key_of(block) is not None for block in range(engine.pool.num_blocks))
    finish(engine)
    assert held(engine) == keyed


# -- reuse -----------------------------------------------------------------------------------------------------------


def test_reuse_never_saves_what_is_used_once():
    engine = Mover(full(), tiers=(host(REUSE),), num_blocks=21)
    crowd(engine)
    finish(engine)
    assert engine.tiers.counters.saved == 0
    behind = Mover(full(), tiers=(host(BEHIND),), num_blocks=21)
    crowd(behind)
    assert behind.tiers.counters.saved > 100


def test_reuse_saves_what_was_hit():
    engine = saving(host(REUSE))
    engine.serve(0, TEXT + "dddd")
    finish(engine)
    assert held(engine) == 0
    assert engine.serve(1, TEXT + "y").hit == 12
    finish(engine)
    assert held(engine) == 3


def test_reuse_saves_what_was_computed_again_after_its_eviction():
    engine = Mover(full(), tiers=(host(REUSE),), num_blocks=21)
    engine.serve(0, TEXT)
    crowd(engine)
    assert engine.outside(TEXT + "x") == 0
    engine.serve(0, TEXT)
    finish(engine)
    assert held(engine) == 3
    crowd(engine)
    assert engine.ask(3, TEXT + "x").hit == 12


def test_the_use_of_another_domain_does_not_count():
    """Else one tenant could see, by the time of its answers, what another one computed."""
    engine = saving(host(REUSE))
    engine.serve(0, TEXT, news={"domain": "one"})
    engine.serve(0, TEXT, news={"domain": "other"})
    finish(engine)
    assert held(engine) == 0
    engine.serve(0, TEXT + "x", news={"domain": "one"})
    finish(engine)
    assert {domain for domain, _, _ in engine.tiers.each[0].key.values()} == {"one"}


def test_blocks_of_two_groups_are_no_second_use():
    engine = saving(host(REUSE), groups=(full(), window(6)))
    engine.serve(0, "aaaabbbbccccdddd")
    finish(engine)
    assert held(engine) == 0


def test_reuse_remembers_as_many_keys_as_the_tier_has_slots():
    """At most twice as many."""
    engine = saving(host(REUSE, 30))
    engine.serve(0, TEXT)
    crowd(engine, 5)  # 20 blocks
    engine.serve(0, TEXT, news={"skip_reading": 1})
    finish(engine)
    assert held(engine) == 3
    engine.serve(0, "mmmmnnnnoooo")
    crowd(engine, 40)
    assert len(engine.tiers.each[0].wanted.recent | engine.tiers.each[0].wanted.before) < 60


def test_a_disk_of_reuse_takes_what_was_loaded_from_the_host():
    engine = Mover(full(), tiers=(host(BEHIND, 60), disk(REUSE)), num_blocks=21)
    engine.save(TEXT)
    crowd(engine)
    assert held(engine, 1) == 0
    engine.save("mmmmnnnnoooo")
    asked = engine.ask(3, "mmmmnnnnoooox")
    assert asked.hit == 12
    engine.cache(jobs_done=asked.result.admit_job)
    finish(engine)
    assert held(engine, 1) == 3


def test_a_slot_that_was_written_again_is_not_moved_for_what_it_had():
    """The disk could not take it before: its jobs were in use."""
    engine = Mover(full(), tiers=(host(BEHIND, 60), disk(REUSE)), num_blocks=21)
    engine.save(TEXT)
    near, far = engine.tiers.each
    slot, version = next((slot, version) for slot, version in near.version.items() if version > 1)
    far.wanted.note_used(slot, version - 1)
    engine.changed()
    finish(engine)
    assert (held(engine, 1), len(far.wanted)) == (0, 0)
    far.wanted.note_used(slot, version)
    engine.changed()
    finish(engine)
    assert held(engine, 1) == 1


# -- state and lives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [THROUGH, REUSE])
def test_the_exported_state_continues_what_is_wanted(save):
    engine = saving(host(save), disk(save))
    engine.serve(0, TEXT)
    engine.executed = engine.seq  # what follows is not executed, and waits
    engine.serve(0, TEXT + "x")
    engine.serve(1, "mmmmnnnn")
    engine.serve(2, "mmmmnnnny")
    assert len(engine.tiers.each[0].wanted)
    raw = export_state(engine.replica)
    twin = load_state(engine.spec, raw)
    inspect.check(twin)
    assert export_state(twin) == raw
    engine.executed, before, saved = None, engine.replica, engine.saved
    finish(engine, 2)
    jobs, engine.replica, engine.seq = engine.saved, twin, engine.seq - 2
    engine.saved = saved
    finish(engine, 2)
    assert engine.saved == jobs
    assert export_state(before) == export_state(twin)
    for tiers in ((host(BEHIND), disk(save)), (host(save), disk(BEHIND))):
        with pytest.raises(InvalidArgument, match="state is incomplete"):
            load_state(replace(engine.spec, tiers=tiers), raw)


def test_a_reset_forgets_what_is_wanted_and_was_seen():
    engine = saving(host(REUSE))
    engine.serve(0, TEXT)
    engine.executed = engine.seq
    engine.serve(0, TEXT + "x")
    engine.executed = None
    assert engine.cache(reset=True).reset_done
    wanted = engine.tiers.each[0].wanted
    assert [len(one) for one in (wanted, wanted.version, wanted.recent, wanted.before)] == [0] * 4


def test_a_new_life_saves_what_the_last_one_wanted_if_its_pages_stayed():
    engine = saving(host(THROUGH))
    engine.serve(0, TEXT)
    engine.replica.begin_epoch(1, engine.shown())
    engine.seq = 0
    finish(engine)
    assert held(engine) == 3
    inspect.check(engine.replica)


# -- planted faults --------------------------------------------------------------------------------------------------

TWINS = {
    "saved at the first use": (Wanted, "_was_seen", lambda self, key: True, test_reuse_never_saves_what_is_used_once),
    "a second use never counts": (
        Wanted, "_was_seen", lambda self, key: False,
        test_reuse_saves_what_was_computed_again_after_its_eviction,
    ),
    "hits do not count": (Wanted, "note_used", lambda self, place, version: None, test_reuse_saves_what_was_hit),
    "saved before the step is executed": (
        SaveBehind, "_is_executed", lambda self, block: True,
        test_through_saves_nothing_before_its_step_is_executed,
    ),
    "nothing is saved early": (
        SaveBehind, "_save_wanted", lambda self, room: room,
        test_through_saves_what_was_computed_though_nothing_is_evicted,
    ),
    "nothing is moved early": (
        SaveBehind, "_move_wanted", lambda self, tier, behind, room: room, test_the_disk_takes_what_the_host_stores,
    ),
}  # fmt: skip


@pytest.mark.parametrize("twin", TWINS)
def test_planted_faults_are_caught(twin, monkeypatch):
    owner, name, fault, case = TWINS[twin]
    case()
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(AssertionError):
        case()
