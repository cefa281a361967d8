"""`python -m tests.core.native_damage [NAME ...]`: damages a compiled core, and says what its check finds.

`native_damage.h` changes one entry of one structure, as a bug or a flipped bit does, in a private library that has this
further function. Each damage is planted into a state that is sound, and must be found by the check alone, by the name
of its invariant. Exit 1 if one is not.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import native_build
from kvplane.base.groups import EvictionPolicy, TierKind, TierSpec
from kvplane_core.face import inspect
from kvplane_core.face.interface import BrokenInvariant
from kvplane_core.spec.replica import Replica
from tests.core import native_builds
from tests.core import test_invariants as states
from tests.core.builders import Engine, fake_digest, full, window
from tests.core.compared import specification
from tests.core.tier_engine import small_pools

if TYPE_CHECKING:
    from kvplane_core.face.native import NativeReplica

SOURCE = Path(__file__).with_name("native_damage.h")
FLAGS = ["-O0", "-fno-access-control"]
METHOD = '    {"new", New,'
PLANTED = '    {"damage", Damage, METH_VARARGS, "Plant a damage."},\n'


class Damage(NamedTuple):
    """A damage, the state in which it is planted, and how it is found."""

    name: str
    state: Callable[[], Engine]
    invariant: str
    words: str


# -- states ------------------------------------------------------------------------------------------------------------


def compiled(engine: Engine) -> Engine:
    """The engine continues with a compiled core."""
    engine.replica = cast(Replica, compiled_core(engine))
    return engine


def shared() -> Engine:
    """Two blocks have the key of "bbbb": a prompt that ends there computes it again."""
    engine = Engine(full(), num_blocks=12)
    engine.serve(0, "aaaabbbb")
    engine.serve(0, "aaaabbbb")
    return engine


def further() -> Engine:
    """Block 1 has a second key."""
    engine = states.plain()
    engine.pool.register(1, ("", 0, fake_digest(1)), 2)
    engine.pool.registered.clear()
    return engine


def divided() -> Engine:
    """Slot 0 decodes; blocks have left its window."""
    engine = Engine(window(4), num_blocks=12, eviction=EvictionPolicy.WINDOW_TAIL)
    engine.admit(0, "aaaabbbbccccd")
    return engine


def learning() -> Engine:
    """Slot 0 runs with blocks 1 to 3; HAZARD has followed four prompts."""
    engine = Engine(full(), num_blocks=40, eviction=EvictionPolicy.HAZARD)
    engine.admit(0, "aaaabbbbc")
    for text in ("ccccdddd", "aaaaeeee", "ccccdddde"):
        engine.serve(1, text)
    return engine


def seen() -> Engine:
    """The saves of free blocks have begun."""
    with small_pools():
        engine = compiled(Engine(full(), num_blocks=12, tiers=(TierSpec(TierKind.HOST, 64),)))
        for first in "acegik":
            engine.serve(0, first * 4 + chr(ord(first) + 1) * 5)
    return engine


def on_the_fast_path(state: Callable[[], Engine]) -> Callable[[], Engine]:
    """A state in which the compiled core has found the bounds of slot 0: what is loaded has none."""

    def make() -> Engine:
        engine = compiled(state())
        engine.run(0, text="d")
        return engine

    return make


_running, _windowed = on_the_fast_path(states.running), on_the_fast_path(states.windowed)
_gap, _states = on_the_fast_path(states.gap), on_the_fast_path(states.states)

DAMAGES = [
    Damage("a block is twice in the list", states.plain, "free_list", "block 6 (twice|does not point back)"),
    Damage("a block is lost", states.plain, "references", "block 6: 0 holders, free: False"),
    Damage("a link back is wrong", states.plain, "free_list", "does not point back"),
    Damage("a link leads out of the list", states.plain, "free_list", "block 6 leads to 1048576"),
    Damage("a link leaves blocks out", states.plain, "free_list", "does not point back|count says"),
    Damage("free blocks are miscounted", states.plain, "free_list", "blocks, count says"),
    Damage("the divider is lost", divided, "free_list", "the divider is not in it"),
    Damage("a block is on the wrong side of the divider", learning, "free_list", "other side of the divider"),
    Damage("a held block has a place in the list", learning, "free_list", "have a place in it"),
    Damage("a block without a key was copied", states.plain, "free_list", "block 11 was copied and has no key"),
    Damage("a seen block is forgotten", seen, "free_list", "is not seen, or out of order"),
    Damage("the last seen block is wrong", seen, "free_list", "is the last one that is seen"),
    Damage("seen blocks are miscounted", seen, "free_list", "is the last one that is seen"),
    Damage("a block that is not seen changed", seen, "free_list", "changed, and is not seen"),
    Damage("an owner's retained keys are forgotten", states.retained, "retained", "keys are not counted"),
    Damage("a retained key does not lead to its name", states.retained, "retained", "do not lead to the name"),
    Damage("a retained block is in no list", states.retained, "references", "block 5: 0 holders, free: False"),
    Damage("a retained block is lost to the others", states.retained, "retained", "block 5 is free and not retained"),
    Damage("a retained block has another priority", states.retained, "retained", "with priority 99, expected"),
    Damage("a retained block leads to another place", states.retained, "retained", "or one in two lists"),
    Damage("retained keys are miscounted", states.retained, "retained", "keys are not counted"),
    Damage("a key that is nowhere is retained", states.retained, "retained", "no block and no tier has"),
    Damage("held blocks of a superblock are miscounted", states.split, "superblocks", "superblock 2: 1 blocks held"),
    Damage("held blocks of all superblocks are miscounted", states.split, "superblocks", "blocks are held, the count"),
    Damage("a superblock has a state that it has not", states.split, "superblocks", "another kind|under a state"),
    Damage("a block is recorded in another list", states.split, "superblocks", "block 10 is wrongly among those"),
    Damage("a whole superblock is lost", states.split, "superblocks", "0 blocks held, the count says 0, whole: False"),
    Damage("the order of use does not lead back", learning, "hazard", "does not point back"),
    Damage("the ghost is miscounted", learning, "hazard", "in the ghost, the count says"),
    Damage("resident keys are miscounted", learning, "hazard", "are resident, the count says"),
    Damage("unused keys are miscounted", learning, "hazard", "unused keys of admissions"),
    Damage("a followed key leads to another entry", learning, "hazard", "a key that leads to another one"),
    Damage("a reference has no holder", states.plain, "references", "block 3: 2 references, 1 holders"),
    Damage("a holder has no reference", states.plain, "references", "block 3: 0 references, 1 holders"),
    Damage("a key is lost to the index", states.plain, "key_index", "is not in the index|does not find"),
    Damage("an entry is not written", states.plain, "key_index", "entries, the count says"),
    Damage("a tag is stale", states.plain, "key_index", "a look-up does not find"),
    Damage("a distance is wrong", states.plain, "key_index", "a look-up does not find"),
    Damage("two entries are swapped", states.plain, "key_index", "a look-up does not find"),
    Damage("an entry leads to a record without a key", states.plain, "key_index", "an entry without a key"),
    Damage("entries are miscounted", states.plain, "key_index", "entries, the count says"),
    Damage("distinct keys are miscounted", states.plain, "key_index", "keys, counted"),
    Damage("a ring leaves a block out", shared, "key_index", "is not in the index|to which its ring leads"),
    Damage("a ring leads to another key", shared, "key_index", "to which its ring leads"),
    Damage("a ring leads out of the records", shared, "key_index", "to which its ring leads"),
    Damage("a ring does not close", shared, "key_index", "to which its ring leads|is not in the index"),
    Damage("a bit of a key flips", states.plain, "key_index", "a look-up does not find"),
    Damage("a key stays on a block that lost it", states.plain, "key_index", "of block 11 is not in the index"),
    Damage("the null block has a key", states.plain, "keys", "the null block has a key"),
    Damage("a key has no tokens", states.plain, "keys", "a key without tokens"),
    Damage("two stamps are equal", states.plain, "stamps", "blocks 1 and 7 have the same stamp"),
    Damage("a key has no stamp", states.plain, "stamps", "block 1 has a key and no stamp"),
    Damage("a stamp to order is not marked", states.plain, "stamps", "block 4 has a stamp to order"),
    Damage("a marked stamp is not ordered", states.plain, "stamps", "are marked"),
    Damage("evictable blocks are miscounted", states.plain, "evictable_count", "2 free blocks carry a key"),
    Damage("further keys have no primary one", further, "keys", "block 11: 1 further keys without a primary one"),
    Damage("a further key is lost to its block", further, "keys", "1 records of further keys, 0 are used or free"),
    Damage("a further key is of another block", further, "keys", "has no further key of it"),
    Damage("the record of a further key is free", further, "keys", "is used twice"),
    Damage("a state has two keys", states.states, "state_keys", "holds one state and has 2 keys"),
    Damage("a domain has lost its name", states.plain, "domains", "1 numbers, 0 in use, 0 free"),
    Damage("a domain has another's number", states.plain, "domains", "has number 0, which is of another one"),
    Damage("a domain in use is free", states.plain, "domains", "free twice, or in use"),
    Damage("a request is of a swept domain", states.plain, "domains", "slot 0 is of domain 9"),
    Damage("a block under load has a key", states.plain, "busy_blocks", "block 1 is under a load"),
    Damage("a key waits for a step without a record", states.in_flight, "tentative_keys", "which has no record of it"),
    Damage("a table has a block that is none", states.plain, "tables", "slot 0: a block outside the pool"),
    Damage("a table lacks a block", states.windowed, "tables", "lacks a block that the token after"),
    Damage("a stopped request has blocks", states.plain, "tables", "slot 0 holds blocks of group 0, not running"),
    Damage("more blocks are registered than there are", states.plain, "tables", "40 cached blocks in a table of 3"),
    Damage("running requests are miscounted", states.plain, "running_count", "1 run, the count says 2"),
    Damage("requests hashed elsewhere are miscounted", states.plain, "running_count", "are hashed elsewhere"),
    Damage("a shared block is not in the table", states.plain, "partial_hits", "is not at index 9"),
    Damage("states are retired that are there", states.states, "state_positions", "group 0 recorded"),
    Damage("the last state is behind the table", states.states, "state_positions", "group 0 recorded"),
    Damage("a state has more tokens than were computed", states.states, "state_positions", "group 0 recorded"),
    Damage("a load goes into no request", states.plain, "transfers", r"loads into slots \[7\] that are not live"),
    Damage("a load is zeroed", states.loading, "transfers", "not exempt from zeroing"),
    Damage("a load waits for a step to come", states.loading, "transfers", "its load waits for step 9"),
    Damage("blocks of a transfer are not held", states.plain, "transfers", "slot 1: blocks of a transfer"),
    Damage("tokens in flight are miscounted", states.in_flight, "grants", "3 tokens in flight, grants say 9"),
    Damage("a grant is of a later step", states.in_flight, "grants", "a later grant, of step 9 after 2"),
    Damage("a grant has no record", states.in_flight, "grants", "no record of its grant in step 2"),
    Damage("a record is of a later step", states.in_flight, "records", "adoptions of step 9, the last"),
    Damage("a record is of an executed step", states.plain, "records", "filling of step 1, 4 is executed"),
    Damage("an adoption is not noted", states.in_flight, "adoptions", "the last recorded is 0"),
    Damage("an adopted key has no record", states.in_flight, "adoptions", "slot 1 adopted block 9 of step 1"),
    Damage("blocks wait for a step to come", states.plain, "fences", r"fences \[9\], 4 executed"),
    Damage("the fast path is too long", _running, "fast_path", "wrong bounds, fast path until 400"),
    Damage("the bound of blocks is wrong", _running, "fast_path", "slot 0 needs a block after 8 slots, not 400"),
    Damage("the bound of keys is wrong", _running, "fast_path", "slot 0 registers a key at"),
    Damage("the bound of a window is wrong", _windowed, "fast_path", "a block leaves its window before"),
    Damage("the bound of a window is wrong", _gap, "fast_path", "a block leaves its window before"),
    Damage("the bound of a window is wrong", _states, "fast_path", "a block leaves its window before"),
    Damage("a stopped request has a bound", states.plain, "fast_path", "wrong bounds, it does not run"),
    Damage("a slot is free and has a key", states.tiered, "tiers", "has two states"),
    Damage("a slot has no state", states.tiered, "tiers", "4 slots were used, 3 have a state"),
    Damage("a slot is written by no job", states.tiered, "tiers", "4 slots were used, 3 have a state"),
    Damage("slots with a key are miscounted", states.tiered, "tiers", "3 keys lead to 4 slots"),
    Damage("shadows are miscounted", states.tiered, "tiers", "of them to 1 shadows"),
    Damage("the blocks of a group are miscounted", states.tiered, "tiers", "the groups have"),
    Damage("a slot has a version to come", states.tiered, "tiers", "or no version"),
    Damage("a slot has another key's record", states.tiered, "tiers", "has another key than the one that leads to it"),
    Damage("the record of a key has another slot", states.tiered, "tiers", "has another key than the one that leads"),
    Damage("a key of a tier is not in its index", states.tiered, "tiers", "entries, the count says"),
    Damage("a record that is unused has a key", states.tiered, "tiers", "records, 3 of keys, 1 unused"),
    Damage("a link of a tier does not lead back", states.tiered, "tiers", "which does not point back"),
    Damage("pins of a load are lost", states.tiered, "tiers", "the pins are not those of the loads"),
    Damage("blocks that are loaded are miscounted", states.tiered, "tiers", "blocks are loaded, counted 4"),
    Damage("a request waits for another load", states.tiered, "tiers", "slot 3 waits for load 1"),
    Damage("a block that is loaded has a key", states.tiered, "tiers", "loads in flight fill blocks"),
    Damage("a job is numbered above the last", states.tiered, "tiers", "or one above the last|or no version"),
    Damage("something is wanted that is no place", states.tiered, "tiers", "wants 1 of 1 places, below 40"),
    Damage("something is wanted early by no policy", states.tiered, "tiers", "wants something early"),
    Damage("a retained slot is in another list", states.kept, "tiers", "is retained with priority 100"),
    Damage("an owner retains too much", states.kept, "retained", "keys, counted"),
    Damage("a block is noted that no tier has", seen, "tiers", "is noted as saved, and no tier keeps its key"),
]


# -- running -----------------------------------------------------------------------------------------------------------


def build() -> Path:
    """Compile the library that can be damaged, unless that was done for these sources; returns its path."""
    core, text = native_build.CORE, SOURCE.read_text()
    mark = native_build.digest_of_sources(core) + text
    root = native_builds.FOLDER / "damage"
    path, made = root / "damage.so", root / "sources"
    if path.exists() and made.exists() and made.read_text() == mark:
        return path
    shutil.rmtree(root, ignore_errors=True)
    sources = (root / core.source).parent
    shutil.copytree((native_build.ROOT / core.root / core.source).parent, sources)
    module = root / core.source
    (sources / SOURCE.name).write_text(text)
    listed = module.read_text().replace(METHOD, PLANTED + METHOD)
    assert PLANTED in listed, f"{module} has no line {METHOD!r}"
    module.write_text(listed.replace('#include "bind_pack.h"', f'#include "bind_pack.h"\n#include "{SOURCE.name}"'))
    native_build.compile_library(core._replace(root=str(root)), path, flags=FLAGS)
    made.write_text(mark)
    return path


def find(damage: Damage) -> BrokenInvariant | None:
    """Plant a damage; returns what the check finds, None if it finds nothing."""
    from kvplane_core.cpp import _native

    with specification():  # the damaged core continues without it
        core = compiled_core(damage.state())
    inspect.check(core)
    vars(_native)["damage"](core.core, damage.name)
    try:
        inspect.check(core)
    except BrokenInvariant as broken:
        return broken
    return None


def compiled_core(engine: Engine) -> NativeReplica:
    """The compiled core of an engine, or one with the state of its Python core."""
    from kvplane_core.face.native import NativeReplica

    core: object = engine.replica
    return core if isinstance(core, NativeReplica) else NativeReplica.of(engine.replica)


def main(chosen: list[str]) -> bool:
    """Print a row per damage; whether all are found."""
    native_builds.load(build())
    is_good = True
    print("| damage | found |\n|---|---|")
    for damage in DAMAGES:
        if chosen and damage.name not in chosen:
            continue
        found = find(damage)
        is_right = found is not None and found.invariant == damage.invariant and re.search(damage.words, str(found))
        said = "nothing" if found is None else f"{found.invariant}: {found}"
        print(f"| {damage.name} | {said}{'' if is_right else ', WRONG'} |", flush=True)
        is_good &= bool(is_right)
    return is_good


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
