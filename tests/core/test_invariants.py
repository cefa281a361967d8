"""Each invariant is violated here, and the check names it. The work of one slice of the check is bounded."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kvplane.base.groups import AlignSpec, TierKind, TierSpec
from kvplane.base.step import End, Part, RowFlag
from kvplane_core.face.interface import BrokenInvariant
from kvplane_core.spec import invariants
from kvplane_core.spec.invariants import check_in_slices
from tests.core.builders import Engine, digests, fake_digest, full, prompt_and_window, state, window
from tests.core.test_retain import rows_for
from tests.core.test_retained_tiers import OTHER, in_tier
from tests.core.tier_engine import small_pools

pytestmark = pytest.mark.specification  # faults are planted in its structures

NAME = re.compile(r'BrokenInvariant\(\s*"(\w+)"')


def check(replica):
    for _ in check_in_slices(replica):
        pass


def plain():
    """Slot 0 runs with blocks 1, 2, 3; slot 1 is held with 4; blocks 5 and 6 are cached and free."""
    engine = Engine(full(), num_blocks=12)
    engine.admit(0, "aaaabbbbc")
    engine.admit(1, "zzz")
    engine.end(1, how=End.HELD)
    engine.serve(2, "ccccdddd")
    return engine


def retained():
    """As `plain`; blocks 5 and 6 are retained."""
    engine = plain()
    engine.step(Part(retain=rows_for(engine, "ccccdddd")))
    return engine


def kept():
    """A tier has three slots whose keys are retained."""
    with small_pools():
        engine = in_tier()
    engine.step(Part(retain=rows_for(engine, OTHER)))
    assert tier(engine).num_retained == 3
    return engine


def promote(engine):
    """A slot is in the list of another priority."""
    slot = next(iter(tier(engine).retained))
    tier(engine).retained.remove(slot)
    tier(engine).retained.put(100, slot)


def running():
    """Slot 0 decodes."""
    engine = Engine(full(), num_blocks=12)
    engine.admit(0, "aaaab")
    engine.run(0, text="b")
    return engine


def windowed():
    """Slot 0 decodes; the first block has left its window."""
    engine = Engine(window(4), num_blocks=12)
    engine.admit(0, "aaaabbbbccccd")
    engine.run(0, text="d")
    engine.run(0, text="d")
    assert engine.table(0)[:2] == [0, 0]
    return engine


def gap():
    """Slot 0 decodes; blocks between its prompt and its window were released."""
    engine = Engine(prompt_and_window(4), num_blocks=30)
    engine.admit(0, "aaaab")
    for _ in range(14):
        engine.run(0, text="b")
    assert 0 in engine.table(0)
    return engine


def states():
    """Slot 0 has released states, and the running one."""
    engine = Engine(state(), full(), num_blocks=30)
    engine.admit(0, "aaaabbbb")
    for _ in range(6):
        engine.run(0, text="c")
    assert engine.table(0)[0] == 0
    return engine


def tiered():
    """Slot 3 waits for a load of three blocks."""
    engine = Engine(full(), num_blocks=40, tiers=(TierSpec(TierKind.HOST, 64),))
    for digest in digests(engine.spec, "aaaabbbbcccc"):
        slot = tier(engine).take_slot()
        tier(engine).store(("", 0, digest), slot, engine.replica.coordinator.tiers.next_job())
    assert engine.admit(3, "aaaabbbbccccd", flags=int(RowFlag.LOAD)).result.admit_job
    return engine


def tier(engine):
    return engine.replica.coordinator.tiers.each[0]


def in_flight():
    """No step is executed: slot 1 has adopted the tentative keys of slot 0, and 0 has tokens in flight."""
    engine = Engine(full(), num_blocks=12)
    engine.executed = 0
    engine.admit(0, "aaaabbbbc")
    engine.admit(1, "aaaabbbbd")
    assert engine.replica.tracker.adoptions
    return engine


def loading():
    """The load of slot 0 may start once step 1 is executed."""
    engine = Engine(full(), num_blocks=12)
    engine.admit(0, "aaaabbbbc", external=4, cap=0, flags=RowFlag.DELAY_CACHING)
    assert engine.replica.requests.loading == {0}
    return engine


def requests(engine):
    return engine.replica.requests


def tracker(engine):
    return engine.replica.tracker


def manager(engine):
    return engine.replica.coordinator.managers[0]


def take(engine, column, value):
    getattr(requests(engine), column)[0] = value


def lose_block(engine):
    """Consistently: the block is free again."""
    engine.pool.release([manager(engine).table[0][-1]])
    manager(engine).table[0][-1] = 0


def stop_with_blocks(engine):
    requests(engine).running[0] = False
    requests(engine).num_running = 0


def second_key_of_a_state(engine):
    block = engine.keyed(group=0)[0]
    engine.pool.register(block, ("", 0, fake_digest(1)), 2)


def lose_adopted_key(engine):
    adoptions = next(iter(tracker(engine).adoptions.values()))
    adoptions[9] = adoptions.pop(next(iter(adoptions)))


def lose_grants(engine):
    """As a step that is forgotten, with its tokens."""
    step = requests(engine).granted_step[0]
    tracker(engine).grants[step - 1] = tracker(engine).grants.pop(step)


def split():
    """Slot 0 has blocks 4 (its state, with 5 to 7) and 8; 9 to 11 are free; the other superblocks are whole."""
    engine = Engine(
        state(8), full(2), num_blocks=24, hash_block_size=2, partial_hits=True, align=AlignSpec(8, 4096, True),
        blocks_per_state=4,
    )  # fmt: skip
    engine.admit(0, "aaa")
    return engine


# Invariant, what holds before, the fault, and the words of the finding.
FAULTS: list[tuple[str, Callable[[], Engine], Callable[[Engine], object], str]] = [
    ("free_list", plain, lambda engine: engine.pool.free.append([99]), "block 99 twice, or none of the pool"),
    ("tables", plain, lambda engine: manager(engine).table[0].append(12), "slot 0: a block outside the pool, 12"),
    ("tables", plain, lambda engine: tracker(engine).held[1].append(-1), "a record: a block outside the pool, -1"),
    ("tables", windowed, lose_block, "group 0 lacks a block that the token after 15 needs"),
    ("tables", plain, stop_with_blocks, "slot 0 holds blocks of group 0, not running"),
    ("references", plain, lambda engine: engine.pool.references.__setitem__(3, 2), "block 3: 2 references, 1 holders"),
    ("busy_blocks", plain, lambda engine: engine.pool.hold_busy([8]) or engine.pool.register(
        8, ("", 0, fake_digest(1)), 4), "block 8 is under a load of an earlier epoch and has a key"),
    ("keys", plain, lambda engine: engine.pool.key_tokens.__setitem__(1, 0), "block 1: tokens without a key"),
    ("key_index", plain, lambda engine: engine.pool.key.__setitem__(2, None), "is not on block 2"),
    ("state_keys", states, second_key_of_a_state, "holds one state and has 2 keys"),
    ("stamps", plain, lambda engine: engine.pool.stamp.__setitem__(1, engine.pool.stamp[2]), "blocks 1 and 2"),
    ("tentative_keys", in_flight, lambda engine: tracker(engine).tentative.clear(), "its key waits for step 1"),
    ("retained", retained, lambda engine: setattr(engine.pool.retained, "num_free", 9), "counted 9"),
    ("retained", retained, lambda engine: engine.pool.retained.of_key.clear(), "do not lead to the name"),
    ("retained", retained, lambda engine: engine.pool.retained.remove(5), "retained, expected"),
    ("running_count", plain, lambda engine: setattr(requests(engine), "num_running", 2), "1 run, the count says 2"),
    ("partial_hits", plain, lambda engine: manager(engine).partial_hit.__setitem__(0, (9, 3)), "is not at index 9"),
    ("state_positions", states, lambda engine: manager(engine).num_retired.__setitem__(0, 9), "group 0 recorded"),
    ("state_positions", states, lambda engine: manager(engine).last_state.__setitem__(0, 40), "group 0 recorded"),
    ("transfers", plain, lambda engine: requests(engine).loading.add(7), "loads into slots \\[7\\] that are not live"),
    ("transfers", loading, lambda engine: requests(engine).not_zeroed.clear(), "not exempt from zeroing"),
    ("transfers", loading, lambda engine: take(engine, "load_after", 9), "its load waits for step 9"),
    ("transfers", plain, lambda engine: requests(engine).not_zeroed.add(1), "wait for a load and do not run"),
    ("grants", in_flight, lambda engine: take(engine, "in_flight", 3), "3 tokens in flight, grants say 9"),
    ("grants", in_flight, lambda engine: take(engine, "granted_step", 9), "a later grant, of step 9 after 2"),
    ("grants", in_flight, lambda engine: take(engine, "granted_step", 2), "no record of its grant in step 2"),
    ("grants", in_flight, lambda engine: tracker(engine).grants[1].slot.append(0), "columns of different lengths"),
    ("records", in_flight, lambda engine: tracker(engine).adoptions.setdefault(9, {}), "adoptions of step 9, the last"),
    ("records", plain, lambda engine: tracker(engine).filling.setdefault(1, []), "filling of step 1, 4 is executed"),
    ("adoptions", in_flight, lose_adopted_key, "slot 1 adopted block 9 of step 1, which has no record of its key"),
    ("adoptions", in_flight, lambda engine: requests(engine).adopted_step.__setitem__(1, 0), "the last recorded is 0"),
    ("fences", plain, lambda engine: tracker(engine).waiting.append((9, [])), "fences \\[9\\], 4 executed"),
    ("superblocks", split, lambda engine: engine.pool.free.held.__setitem__(2, 3), "superblock 2: 1 blocks held"),
    ("superblocks", split, lambda engine: engine.pool.free.has_state.__setitem__(2, 1), "another kind|under a state"),
    ("superblocks", split, lambda engine: engine.pool.free._list_of.__setitem__(10, engine.pool.free.cached),
     "block 10 is wrongly among those of cut superblocks"),
    ("tiers", kept, lambda engine: tier(engine).kept.update(dict.fromkeys(tier(engine).kept, 39)), "3 keys are"),
    ("tiers", kept, lambda engine: setattr(tier(engine).retained, "num_free", 9), "in 3 slots of 9"),
    ("tiers", kept, lambda engine: setattr(tier(engine), "most_retained", 1), "each at most 1"),
    ("tiers", kept, promote, "slots .* are retained, expected"),
    ("retained", kept, lambda engine: engine.pool.retained.of_key.update({("", 0, b""): set()}), "no block and no"),
    ("tiers", tiered, lambda engine: tier(engine).free.append(0), "slot 0 has two states"),
    ("tiers", tiered, lambda engine: setattr(tier(engine), "num_used", 64), "64 slots were used"),
    ("tiers", tiered, lambda engine: setattr(tier(engine).uses[0], "held", 9), "the groups have"),
    ("tiers", tiered, lambda engine: tier(engine).pins.clear(), "the pins are not those of the loads"),
    ("tiers", tiered, lambda engine: tier(engine).version.__setitem__(0, 1 << 40), "slot 0 has another key"),
    ("tiers", tiered, lambda engine: tier(engine).writing.add(("", 0, b"")), "keys are being written"),
    ("tiers", tiered, lambda engine: engine.replica.coordinator.tiers.loading.__setitem__(3, 1), "slot 3 waits for"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "prepare", "plant", "words"), FAULTS)
def test_a_violation_is_named(name, prepare, plant, words):
    engine = prepare()
    check(engine.replica)
    plant(engine)
    with pytest.raises(BrokenInvariant, match=words) as raised:
        check(engine.replica)
    assert raised.value.invariant == name


def test_each_invariant_has_a_planted_violation():
    source = Path(invariants.__file__).read_text()
    assert set(NAME.findall(source)) == {name for name, *_ in FAULTS}
