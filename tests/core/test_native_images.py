"""The compiled core reads images that others may have made: a damaged one is refused by the name of its field."""

from __future__ import annotations

import struct
from array import array
from functools import cache
from random import Random
from typing import Any

import pytest

from kvplane.base.errors import InternalError, InvalidArgument, KvplaneError
from kvplane.base.groups import EvictionPolicy, TierKind, TierSpec
from kvplane.base.step import Admit, Cache, End, Facts, News, Part, Run, Step
from kvplane_core.face.packed_values import pack_value
from kvplane_core.face.state import digest, export_state
from kvplane_core.spec.replica import Replica
from tests.core.builders import full, replica_spec
from tests.core.images import changed, image_of, places, values_of
from tests.core.specification import specification_of
from tests.core.test_native_safety import begin_save, little_memory
from tests.core.test_page_contents import run
from tests.core.test_tier_contents import run as with_tiers

native = pytest.importorskip(
    "kvplane_core.face.native",
    reason="the core is not compiled: install g++ and install kvplane again",
    exc_type=ImportError,
)
_native = native._native
DIVIDED = "divided"
POOL = replica_spec(full(), num_blocks=9, eviction=EvictionPolicy.WINDOW_TAIL)


@cache
def played(mix: str) -> tuple[Any, bytes]:
    """A spec with an image of it."""
    if mix == DIVIDED:
        return POOL, export_state(Replica(POOL))
    engine = with_tiers("window and full", 3) if mix == "tiers" else run(mix, 3)
    return engine.spec, export_state(engine.replica)


def value(values: dict[str, list[Any]], name: str) -> Any:
    return values[name][0]


def set_to(name: str, *path: Any) -> Any:
    """Set what is at the path but for its last part, which is the value."""
    *parts, last, wanted = path

    def change(values: dict[str, list[Any]]) -> None:
        at = values[name][0]
        for part in parts:
            at = at[part]
        at[last] = wanted

    return change


def key(group: int = 0, digest_of: bytes = b"d" * 32) -> tuple[str, int, bytes]:
    return "", group, digest_of


def rows_of_disk(values: dict[str, list[Any]]) -> Any:
    return value(values, "tiers")[1][1][4]


CP, SPLIT, TIERS = "checkpoints and drafts", "split pages", "tiers"
# By name: an image, what is changed in it, and what the refusal says.
DAMAGES: dict[str, tuple[str, Any, str]] = {
    "more stamps than blocks": (CP, set_to("replica", 2, array("Q", range(61))), "replica has more stamps"),
    "a counter of 33 bits": (CP, set_to("pool", "_counter", 1 << 32), "_counter"),
    "an epoch of 25 bits": (CP, set_to("pool", "epoch", 1 << 24), "epoch"),
    "a negative step": (CP, set_to("pool", "step", -1), "step"),
    "a busy block behind the last": (CP, set_to("pool", "busy", {60}), "busy"),
    "a reserved block behind the last": (CP, set_to("pool", "reserved", [60]), "reserved"),
    "too few references": (CP, lambda values: value(values, "pool.references").pop(), "pool.references"),
    "a step of a key that is negative": (CP, set_to("pool.key_step", 3, (1 << 64) - 1), "pool.key_step"),
    "a key of no tokens": (CP, set_to("pool.key_tokens", 1, 0), "keys has a key without"),
    "a hash of 33 bytes": (CP, lambda values: value(values, "keys")[3].__setitem__(0, b"d" * 33), "keys"),
    "a hash too few": (CP, lambda values: value(values, "keys")[3].pop(), "keys has a key without"),
    "a hash too many": (CP, lambda values: value(values, "keys")[3].append(b"d" * 32), "keys has hashes of no block"),
    "a pair that is not there": (CP, lambda values: value(values, "keys")[2].__setitem__(1, 9), "keys"),
    "a group that is not there": (CP, lambda values: value(values, "keys")[1].__setitem__(0, ("", 2)), "keys"),
    "keys of other blocks": (CP, lambda values: value(values, "keys").__setitem__(0, 1), "keys"),
    "keys of fewer blocks": (CP, lambda values: value(values, "keys")[2].pop(), "keys has"),
    "a further key of a block without one": (CP, set_to("more_keys", 5, [(key(), 4)]), "more_keys has a key twice"),
    "a shared key of other blocks": (CP, lambda values: value(values, "shared")[0][1].append(2), "shared"),
    "a shared key of fewer blocks": (CP, lambda values: value(values, "shared")[0][1].pop(), "shared has other blocks"),
    "a shared key that no block has": (CP, lambda values: value(values, "shared").append((key(), [1])), "shared"),
    "a free block twice": (CP, set_to("free", 1, 5), "free has a block twice"),
    "a free null block": (CP, set_to("free", 1, 0), "free has a block twice"),
    "a divider behind the list": (DIVIDED, set_to("eviction", 1, 9), "eviction has a number"),
    "superblocks of another number": (SPLIT, set_to("split", 2, b"\0"), "split"),
    "loose blocks of another number": (SPLIT, set_to("split", 0, 3), "split"),
    "a prefix of no key": (CP, lambda values: value(values, "retained")[0][0].__setitem__(5, []), "retained"),
    "a prefix twice": (CP, lambda values: value(values, "retained")[0].append(value(values, "retained")[0][0]),
                       "retained"),
    "a priority above the highest": (CP, lambda values: value(values, "retained")[0][0].__setitem__(3, 101),
                                     "retained"),
    "a retained block in use": (CP, lambda values: value(values, "retained")[1].append([1, [1]]), "retained"),
    "a position behind the longest": (CP, set_to("requests", "num_tokens", 0, 1 << 20), "requests.num_tokens"),
    "slots of another number": (CP, lambda values: value(values, "requests")["num_tokens"].pop(), "num_tokens"),
    "another number of running requests": (CP, set_to("requests", "num_running", 2), "running"),
    "a slot that loads and was never used": (CP, set_to("requests", "loading", {5}), "loading"),
    "a request that runs and is not live": (CP, set_to("requests", "live", 0, False), "not live"),
    "grants of an unknown slot": (CP, set_to("tracker", "grants", {3: [[9], [6], [14]]}), "grants"),
    "grants in columns of two sizes": (CP, set_to("tracker", "grants", {3: [[2], [6, 7], [14]]}), "grants"),
    "a held block behind the last": (CP, set_to("tracker", "held", {0: [60]}), "held"),
    "blocks that wait behind the last": (CP, set_to("tracker", "waiting", [(5, [60])]), "waiting"),
    "adoptions of an unknown slot": (CP, set_to("tracker", "adoptions", {3: [(1, 9, 1)]}), "adoptions"),
    "tentative keys behind the last block": (CP, set_to("tracker", "tentative", {3: [(0, 6, [(60, key())])]}),
                                             "tentative"),
    "loads into blocks behind the last": (CP, set_to("tracker", "filling", {3: [60]}), "filling"),
    "a table with a block behind the last": (CP, set_to("manager", "table", 0, 0, 60), "table"),
    "fewer tables than slots": (CP, lambda values: value(values, "manager")["table"].pop(), "number of slots"),
    "more cached blocks than a table": (CP, set_to("manager", "num_cached", 0, 9), "less than num_cached"),
    "a state behind a table": (CP, set_to("manager", "last_state", 0, 5), "before last_state"),
    "more retired blocks than a table": (CP, set_to("manager", "num_retired", 0, 6), "less than num_retired"),
    "drafts without blocks": (CP, set_to("manager", "has_allocated", 1, True), "no blocks for drafts"),
    "a hit inside a block behind a table": (CP, set_to("manager", "partial_hit", {0: (5, 45)}), "before partial_hit"),
    "a checkpoint behind a table": (CP, set_to("manager", "last_checkpoints", {0: (1, 5, 1)}), "last_checkpoints"),
    "a copy to a block behind the last": (CP, set_to("manager", "copies", [(1, 60)]), "copies"),
    "one group too few": (CP, lambda values: values["manager"].pop(), "manager is missing"),
    "content of a slot without a request": (CP, set_to("content", 0, 2), "content"),
    "content twice": (CP, lambda values: values["content"].append(values["content"][0]), "content has a request twice"),
    "hashes of two sizes": (CP, set_to("content", 1, [b"d" * 32, b"d" * 16]), "content has hashes of several"),
    "stamps of a block behind the last": (CP, lambda values: values.__setitem__("stamped", [[60]]), "stamped"),
    "counters of another number": (CP, lambda values: value(values, "counters").pop(), "counters"),
    "ages of fewer blocks": (CP, lambda values: value(values, "pool._born").pop(), "pool._born"),
    "tiers with a job twice": (TIERS, lambda values: value(values, "tiers")[3].extend(value(values, "tiers")[3]),
                               "tiers has a job twice"),
    "a slot with two keys": (TIERS, lambda values: rows_of_disk(values).append(rows_of_disk(values)[0]),
                             "tiers has a slot or key twice"),
    "a stale slot with a key": (TIERS, lambda values: value(values, "tiers")[6][2].append(3), "tiers has a stale slot"),
    "an entry twice": (CP, lambda values: values["pool"].append(values["pool"][0]), "pool is there too often"),
    "no requests": (CP, lambda values: values.pop("requests"), "requests is missing"),
}  # fmt: skip


def refusal_of(spec: Any, image: bytes) -> str:
    """How an image is refused; "" if it is not."""
    try:
        native.NativeReplica.load(spec, image)
    except InvalidArgument as error:
        return f"{error.field}: {error.message}"
    return ""


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_image_is_refused_by_the_name_of_its_field(name):
    mix, change, text = DAMAGES[name]
    spec, raw = played(mix)
    assert export_state(native.NativeReplica.load(spec, raw)) == raw
    values = values_of(raw)
    change(values)
    refusal = refusal_of(spec, image_of(values))
    assert refusal.startswith("state: the state is damaged: ")
    assert text in refusal


def test_an_image_is_written_in_slices_between_which_nothing_changes():
    core = native.NativeReplica(replica_spec(full(), num_blocks=100_000))
    pieces = list(core.image())
    assert len(pieces) > 5
    assert b"".join(pieces) == export_state(Replica(core.spec))
    walk = begin_save(core.core)
    assert _native.advance(walk)
    core.apply(Step(0, 1, [Part()]))
    with pytest.raises(AssertionError, match="the state changed during a walk over it"):
        _native.advance(walk)


@pytest.mark.parametrize("blocks", [1, 7, 8, 50])
def test_an_image_in_other_slices_has_the_same_state(monkeypatch, blocks):
    core = native.NativeReplica.of(with_tiers("window and full", 5).replica)
    whole = digest(core)
    monkeypatch.setattr(native, "SLICE_BLOCKS", blocks)
    pieces = b"".join(core.image())
    assert pieces != export_state(specification_of(core)), "entries of other blocks"
    monkeypatch.undo()
    assert digest(native.NativeReplica.load(core.spec, pieces)) == whole


def use(core):
    """Does what can be done with a state; returns how many calls failed."""
    errors = 0
    slots = core.requests.slots()
    running = [slot for slot in slots if core.requests.running[slot]]
    seq, tokens = core.seq, array("I", [7] * 40)
    parts = [
        Part(facts=Facts(running, appended=[1] * len(running), num_hashes=[0] * len(running)), run=Run(running)),
        Part(news=News([5000], [40], tokens), admit=Admit([5000])),
        Part(facts=Facts(slots, end=[int(End.FREE)] * len(slots))),
        Part(cache=Cache(reset=True)),
    ]
    calls = [lambda: [core.peek_slot(slot) for slot in slots], lambda: core.entries(), core.group_counters]
    calls += [lambda: list(core.stored_events()), lambda: [core.group_blocks(slot) for slot in slots]]
    calls += [core.common_prefix_blocks]
    calls += [
        lambda at=at, part=part: core.apply(Step(core.epoch, seq + at, [part], executed_through=seq + at - 1))
        for at, part in enumerate(parts, 1)
    ]
    calls += [lambda: core.begin_epoch(core.epoch + 1), lambda: export_state(core)]
    for call in calls:
        try:
            call()
        except (AssertionError, InternalError):
            errors += 1
        except (KvplaneError, ValueError, LookupError, TypeError):
            pass
    return errors


MIXES = ["window and full", "checkpoints and drafts", "split pages", "three sizes, hits inside blocks"]


@pytest.mark.parametrize(("mix", "play"), [*((mix, run) for mix in MIXES), (MIXES[0], with_tiers)])
def test_a_damaged_state_is_refused_or_does_no_harm(mix, play):
    rng, engine = Random(mix), play(mix, 3)
    spec, values = engine.spec, values_of(export_state(engine.replica))
    kinds: dict[object, list[tuple[object, ...]]] = {}
    for path in places(values):
        kinds.setdefault(tuple(one if isinstance(one, str) else "" for one in path), []).append(path)
    assert use(native.NativeReplica.load(spec, image_of(values))) == 0
    refused = 0
    for path in [path for found in kinds.values() for path in rng.choices(found, k=2)]:
        try:
            core = native.NativeReplica.load(spec, image_of(changed(values, path, rng)))
        except InvalidArgument:
            refused += 1
        else:
            use(core)
    assert refused > len(kinds) // 2


@pytest.mark.parametrize("seed", range(60))
def test_damaged_bytes_of_an_image_are_refused_or_do_no_harm(seed):
    rng = Random(seed)
    engine = with_tiers(MIXES[0], 3) if rng.random() < 0.2 else run(rng.choice(MIXES), 3)
    raw = export_state(engine.replica)
    for _ in range(40):
        damaged = bytearray(raw[: rng.randrange(len(raw))] if rng.random() < 0.2 else raw)
        for _ in range(rng.randint(0 if len(damaged) < len(raw) else 1, 3)):
            at = rng.randrange(len(damaged))
            damaged[at : at + rng.choice([1, 1, 4])] = rng.randbytes(rng.choice([1, 1, 4]))
        try:
            core = native.NativeReplica.load(engine.spec, bytes(damaged))
        except InvalidArgument:
            continue
        use(core)
    assert export_state(native.NativeReplica.load(engine.spec, raw)) == raw


def test_counts_of_an_image_take_no_memory_before_their_bytes_are_there():
    """Every list and array says how long it is."""
    spec = replica_spec(full())
    values = values_of(export_state(Replica(spec)))
    most = (1 << 32) - 1
    for value in (b"L", b"U", b"V", b"AI", b"AQ", b"B", b"H", b"S", b"d", b"Q", b"t", b"s", b"b"):
        for name in values:
            raw = image_of({one: each for one, each in values.items() if one != name})
            bad = raw + pack_value(name) + value + struct.pack("<I", most)
            with little_memory(200 << 20):
                assert "the state is damaged" in refusal_of(spec, bad)


def test_an_image_with_more_slots_than_rows_is_refused_before_they_take_memory():
    tier = TierSpec(TierKind.HOST, 1 << 22)
    core = native.NativeReplica(replica_spec(full(), tiers=(tier,)))
    values = values_of(export_state(core))
    values["tiers"][0][1][0][1] = 1 << 22
    with pytest.raises(InvalidArgument, match="more used slots than rows"):
        native.NativeReplica.load(core.spec, image_of(values))
