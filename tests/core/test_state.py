"""A replica that is loaded from the exported state of another one answers every later step with the same result."""

from __future__ import annotations

from array import array
from dataclasses import replace
from random import Random

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import EvictionPolicy
from kvplane.base.step import Step
from kvplane_core.face import inspect, state
from kvplane_core.face.state import export_state, slices
from kvplane_core.spec import state_entries
from kvplane_core.spec.in_flight import InFlightTracker
from kvplane_core.spec.loading import load_state
from kvplane_core.spec.pool import BlockPool
from kvplane_core.spec.replica import Replica
from kvplane_core.spec.requests import COLUMNS, Requests
from tests.core.builders import full, replica_spec
from tests.core.page_engine import RandomEngine
from tests.core.test_page_contents import ALL_MIXES, STEPS
from tests.core.test_step_law import MIXES as ROW_MIXES

SEEDS = range(1, 4)
# Attributes of managers that the spec determines.
SETTINGS = {
    "group", "spec", "replica", "pool", "requests", "orders", "drops_last_block", "block_size", "hash_size",
}  # fmt: skip
STATISTICS = {"allocated", "adopted"}
OWN_SETTINGS = {"_window", "_margin", "_rule", "_kept_every", "_admission_cap"}


class MirroredEngine(RandomEngine):
    """A random engine with a second replica, which is loaded from the state of the first one at random steps and
    applies every other step itself.
    """

    loads_of_state = 0

    mirror: Replica | None = None

    def apply(self, parts):
        if self.seq == 1:
            self.mirror = None  # a new engine life is not a step
        results = super().apply(parts)
        assert not self.replica.tracker._withdrawn, "not exported"
        step = Step(self.epoch, self.seq, parts, executed_through=self.executed_through)
        if self.mirror is not None:
            assert self.mirror.apply(step).parts == results
            assert export_state(self.mirror) == export_state(self.replica)
        if self.mirror is None or self._chance(20):
            raw = export_state(self.replica)
            self.mirror = load_state(self.spec, raw)
            assert export_state(self.mirror) == raw
            inspect.check(self.mirror)
            self.loads_of_state += 1
        assert state.digest(self.mirror) == state.digest(self.replica)
        return results


def play(mix, seed):
    rng = Random(seed)
    groups, changes = ALL_MIXES[mix]
    blocks = {"num_blocks": rng.choice([10, 16, 24, 40]), **changes}
    spec = replica_spec(*groups, max_model_len=64, max_in_flight_tokens=256, **blocks)
    engine = MirroredEngine(spec, rng, most_drafts=2 if "drafts" in mix else 0)
    for _ in range(STEPS):
        engine.step()
    return engine


@pytest.mark.parametrize("mix", ALL_MIXES)
def test_a_loaded_replica_answers_every_later_step_equally(mix):
    engines = [play(mix, seed) for seed in SEEDS]
    assert sum(engine.loads_of_state for engine in engines) > 2 * len(SEEDS)


def test_a_loaded_replica_names_the_keys_of_a_block_in_the_same_order():
    """The events of a block that loses several keys name them in the order in which they were registered."""
    replica = Replica(replica_spec(full(), num_blocks=10))
    keys = [("", 0, digest * 32) for digest in (b"m", b"z", b"a", b"k")]
    for num_tokens, key in enumerate(reversed(keys), 1):
        replica.coordinator.pool.register(3, key, num_tokens)
    replica.coordinator.pool.registered.clear()
    loaded = load_state(replica.spec, export_state(replica))
    assert state.digest(loaded) == state.digest(replica)
    assert loaded.coordinator.pool.unregister(3) == replica.coordinator.pool.unregister(3) == keys[::-1]


def test_slices_have_the_state_of_their_call():
    """The replica applies further steps between two slices."""
    engine = play("states, drafts and windows", 3)
    raw, pieces = export_state(engine.replica), slices(engine.replica)
    first = next(pieces)
    for _ in range(5):
        engine.step()
    assert first + b"".join(pieces) == raw != export_state(engine.replica)


def play_all():
    for seed in SEEDS:
        for mix in ALL_MIXES:
            play(mix, seed)


@pytest.mark.parametrize("left_out", ["shared", "more_keys", "tentative", "free", "ends_at", "eviction"])
def test_a_part_that_is_left_out_is_caught(monkeypatch, left_out):
    """Each part of the state decides some later answer, or its absence is refused."""
    export = state_entries.entries_of

    def copied(replica, with_statistics=True):
        entries = []
        for name, value in export(replica, with_statistics):
            if name == left_out:
                value = array("I", reversed(value)) if isinstance(value, array) else type(value)()
            elif isinstance(value, dict) and left_out in value:
                value = {**value, left_out: type(value[left_out])()}
            entries.append((name, value))
        return iter(entries)

    monkeypatch.setattr(state_entries, "entries_of", copied)
    with pytest.raises((AssertionError, InvalidArgument, IndexError, ValueError)):
        play_all()


@pytest.mark.parametrize("mix", ROW_MIXES)
def test_every_attribute_is_exported_or_named_as_a_setting(mix):
    groups, changes = ROW_MIXES[mix]
    replica = Replica(replica_spec(*groups, **changes))
    derived = {"num_blocks", "enable_caching", "with_events", "free", "key", "more_keys", "index",
               "num_groups", "stamped", "_stamp_base", "events", "residency", "retained"}  # fmt: skip
    pool: BlockPool = replica.coordinator.pool
    stored = {*state_entries.POOL_VALUES}.difference(state_entries.POOL_DERIVED)
    statistics = {*state_entries.POOL_STATISTICS, *state_entries.POOL_STATISTICS_COLUMNS}
    assert vars(pool).keys() == derived | statistics | {*state_entries.POOL_COLUMNS, *stored}
    requests: Requests = replica.requests
    columns = {*COLUMNS, *state_entries.REQUEST_VALUES}
    assert vars(requests).keys() == {"content", "hit_end", "hints"} | columns
    tracker: InFlightTracker = replica.tracker
    settings = {"_blocks", "_requests", "_counters", "_safe", "_withdrawn"}  # the last is empty between steps
    assert vars(tracker).keys() == settings | {*state_entries._tracker_state(tracker)}
    for manager in replica.coordinator.managers:
        assert vars(manager).keys() == SETTINGS | STATISTICS | {*manager.STATE} | (vars(manager).keys() & OWN_SETTINGS)


def test_damaged_and_other_states_are_refused():
    spec = replica_spec(full(), num_blocks=10)
    raw = export_state(Replica(spec))
    load_state(spec, raw)
    with pytest.raises(InvalidArgument, match="another spec"):
        load_state(replica_spec(full(), num_blocks=11), raw)
    with pytest.raises(InvalidArgument, match="this version"):
        load_state(spec, raw[1:])
    other = replace(spec, eviction=EvictionPolicy.WINDOW_TAIL)
    for mine, its, state_of in (("window_tail", "lru", raw), ("lru", "window_tail", export_state(Replica(other)))):
        with pytest.raises(InvalidArgument, match=f"'{mine}', but the state is that of a pool with '{its}'") as refused:
            load_state(replace(spec, eviction=EvictionPolicy(mine)), state_of)
        assert refused.value.field == "eviction"
    random = Random(7)
    for _ in range(400):
        cut = random.randrange(len(raw))
        damaged = bytearray(raw[:cut] if random.random() < 0.5 else raw)
        if len(damaged) > cut:
            damaged[cut] ^= 1 << random.randrange(8)
        try:
            load_state(spec, bytes(damaged))
        except InvalidArgument:
            continue
