"""The policy HAZARD: what it learns, that LRU guards it, and that it decides the order of victims and nothing else."""

from __future__ import annotations

import contextlib
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import accumulate
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import EvictionPolicy, ReplicaSpec
from kvplane.base.step import UNCHANGED, Admit, End, Facts, News, Part, Step
from kvplane_core.face import inspect
from kvplane_core.face.native import NativeReplica
from kvplane_core.face.part_rows import Update
from kvplane_core.face.state import digest, export_state
from kvplane_core.spec.hazard import (
    GHOST_POOLS,
    HORIZON,
    MANY_USES,
    MOST_SAMPLED,
    PIECES,
    Hazards,
    History,
    Learner,
)
from kvplane_core.spec.loading import load_state
from kvplane_core.spec.policies import HazardList
from kvplane_core.spec.recency import Recency
from kvplane_core.spec.replica import Replica
from tests.core import test_page_contents
from tests.core.builders import full, new_replica, open_step, replica_spec, window

BLOCK = 4
LRU, HAZARD = EvictionPolicy.LRU, EvictionPolicy.HAZARD


def chain(names: Sequence[int]) -> list[bytes]:
    """Return the digests of the blocks of a prompt with this content."""
    return list(
        accumulate(names, lambda parent, name: blake2b(parent + b"%d" % name, digest_size=32).digest(), initial=b"")
    )[1:]


def scans_and_chats(seed: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield prompts: long documents that are never asked for again, and between them short chats that are."""
    rng = Random(seed)
    for number in range(count):
        if rng.random() < 0.5:
            yield tuple(number * 1000 + at for at in range(48))
        else:
            yield (10**9 + rng.randrange(60), 1, 2, 3)


class Core:
    """One replica that serves prompts one after the other."""

    def __init__(self, policy: EvictionPolicy, num_blocks: int = 300, **changes: object) -> None:
        self.spec: ReplicaSpec = replica_spec(
            full(BLOCK),
            num_blocks=num_blocks,
            max_model_len=1024,
            max_in_flight_tokens=1024,
            eviction=policy,
            **changes,
        )
        self.replica, self.seq, self.tables = new_replica(self.spec), 0, list[list[int]]()
        self.replica.begin_epoch(1)

    def serve(self, names: Sequence[int], hint: int = 0, last_hint: int = UNCHANGED) -> None:
        hashes = b"".join(chain(names))
        news = News([0], [len(names) * BLOCK + 1], num_hashes=[len(names)], hashes=hashes, hint=[hint])
        result = self.step(Part(news=news, admit=Admit([0])))
        self.tables.append(result.new_blocks.ids)
        self.step(Part(facts=Facts([0], end=[int(End.FREE)], hint=[last_hint])))

    def step(self, part: Part):
        self.seq += 1
        return self.replica.apply(Step(1, self.seq, [part], executed_through=self.seq - 1)).parts[0]

    @property
    def free(self) -> HazardList:
        free = self.replica.coordinator.pool.free
        assert isinstance(free, HazardList)
        return free


# -- what it learns ----------------------------------------------------------------------------------------------------


def test_without_data_the_order_is_that_of_lru():
    history = History(Hazards(100))
    history.now = HORIZON * 2
    ages = np.array([3, 700, 1, 90, HORIZON - 1, HORIZON * 2 - 5, 91], np.int64)
    order = history.order((history.now - ages) * PIECES, np.full(len(ages), BLOCK), len(ages))
    assert ages[order].tolist() == sorted(ages.tolist(), reverse=True)


@settings(max_examples=40)
@given(st.data())
def test_no_key_is_chosen_before_one_behind_it_in_its_request(data):
    history = History(Hazards(1))
    history.now = 50
    history._hazards.index[:8] = np.array(data.draw(st.lists(st.integers(0, 9), min_size=8, max_size=8)))[:, None]
    history.node[:51] = np.array(data.draw(st.lists(st.integers(0, 7), min_size=153, max_size=153))).reshape(51, 3)
    numbers = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=5, unique=True))
    rows = [(number, depth, (depth < 4) + (depth < 2)) for number in numbers for depth in range(6)]
    kept = data.draw(st.lists(st.sampled_from(rows), min_size=1, unique=True))
    owners = np.array([number * PIECES + piece for number, _, piece in kept])
    order = history.order(owners, np.array([depth for _, depth, _ in kept]), len(kept))
    assert sorted(order.tolist()) == list(range(len(kept)))
    for number in numbers:
        depths = [kept[at][1] for at in order.tolist() if kept[at][0] == number]
        assert depths == sorted(depths, reverse=True)


def test_a_class_that_returns_after_a_pause_is_kept_through_it_and_not_behind_it():
    hazards = Hazards(10)
    node = hazards.node((1, 2, 3))
    hazards.waited[node], hazards.used[node] = 1 << 20, 0
    hazards.used[node, 12] = 1 << 20
    hazards.compute(np.array([node]))
    index = hazards.index[node]
    assert index[:13].argmax() == 12
    assert (np.diff(index[:13]) >= 0).all()
    assert index[13] < index[0]


def test_content_is_divided_where_it_was_seen_and_where_it_was_seen_many_times():
    learner = Learner(1000, BLOCK)
    for number in range(MANY_USES):
        learner.admit(chain((1, 2, 100 + number)), "", 13)
    learner.admit(chain((1, 2, 100, 7)), "", 17)
    found = learner.admit(chain((1, 2, 100, 7, 8)), "", 21)
    assert (found.many_end, found.seen_end) == (2 * BLOCK, 4 * BLOCK)
    other = learner.admit(chain((1, 2)), "domain", 9)
    assert (other.many_end, other.seen_end) == (0, 0)


def test_a_prompt_that_is_longer_than_the_pool_is_followed():
    learner = Learner(8, BLOCK)
    for _ in range(2):
        assert learner.admit(chain(range(40)), "", 161).number == learner.history.now
    assert learner.admit(chain((0, 1, 2)), "", 13).seen_end == 3 * BLOCK


def test_repeated_digests_count_once():
    """An engine that sends hashes may send any."""
    learner = Learner(8, BLOCK)
    for _ in range(5 * GHOST_POOLS * MOST_SAMPLED // 1000):
        learner.admit(chain((1,)) * 1000, "", 4001)
    assert len(learner._entry) == 1
    assert learner.history.alive.min() >= 0


def test_more_classes_than_there_is_room_for_take_that_above():
    hazards = Hazards(1)
    nodes = {hazards.node((first, second, third)) for first in range(16) for second in range(16) for third in range(16)}
    assert max(nodes) < len(hazards.parent)
    assert len(hazards.names) == len(hazards.parent) - 1
    assert hazards.node((200, 1, 1)) == 0


def test_the_lru_ghost_remembers_few_keys_that_are_used_for_long():
    recency = Recency(8)
    for used in ([0, 1, 2], [3]) * 40:
        recency.hold(used)
        recency.use(used)
    assert sorted(recency.recent) == [0, 1, 2, 3]


def test_the_worth_of_a_class_is_that_of_the_classes_above_it_however_deep_others_are():
    alone, with_deep_ones = Hazards(10), Hazards(10)
    with_deep_ones.node((1, 2, 3))
    for hazards in (alone, with_deep_ones):
        hazards.waited[0], hazards.used[0, 5] = 1 << 16, 1 << 15
        hazards.refresh()
    assert alone.index[0].tolist() == with_deep_ones.index[0].tolist()


def test_an_engine_that_repeats_or_chooses_its_hashes_is_followed_within_the_limits():
    learner = Learner(4 * MOST_SAMPLED, 16)
    zeros = [bytes(2) + number.to_bytes(14, "little") for number in range(GHOST_POOLS * MOST_SAMPLED)]
    for _ in range(2):
        learner.admit([*zeros, *zeros[:9]], "d", len(zeros) * 16)
    assert len(learner._entry) <= len(learner._key)
    assert learner.admit(zeros[:40], "", 640).seen_end == 0
    assert learner.admit([*zeros[:40], *zeros[:40]], "d", 1280).seen_end == 640


# -- what it decides ---------------------------------------------------------------------------------------------------


def test_it_hits_more_than_lru_where_documents_are_read_once():
    cores = {policy: Core(policy) for policy in (LRU, HAZARD)}
    for names in scans_and_chats(1, 900):
        for core in cores.values():
            core.serve(names)
    assert cores[HAZARD].free.learner.leads
    hits = {policy: core.replica.counters.hit_tokens for policy, core in cores.items()}
    assert hits[HAZARD] > 1.2 * hits[LRU] > 0


@pytest.mark.specification
def test_as_long_as_it_does_not_lead_its_victims_are_those_of_lru(monkeypatch):
    monkeypatch.setattr(Learner, "_duel", lambda *_: None)
    cores = [Core(policy) for policy in (LRU, HAZARD)]
    for names in scans_and_chats(2, 200):
        for core in cores:
            core.serve(names)
    assert cores[0].tables == cores[1].tables
    assert sum(core.replica.counters.hit_tokens for core in cores) > 0


def test_it_does_not_lead_where_lru_is_best():
    core = Core(HAZARD)
    for number in range(600):
        core.serve((number // 2, number // 2 + 1, 3))
    assert not core.free.learner.leads
    assert core.replica.counters.hit_tokens >= 300 * 3 * BLOCK


def duel_of(learner: Learner, hits: list[tuple[int, int]], num_keys: int = 100) -> list[bool]:
    """Who leads after each prompt, of which the ghosts of LRU and HAZARD hit that many keys."""
    led = []
    learner._resident[:num_keys] = True
    for lru, hazard in hits:
        learner._recency.recent = dict.fromkeys(one for one in range(num_keys) if one != lru)
        learner._resident[hazard] = False
        learner._duel(num_keys, np.arange(num_keys + 1))
        learner._resident[hazard] = True
        led.append(learner.leads)
    return led


def test_it_leads_only_after_some_pools_of_lookups_and_by_gains_that_losses_do_not_balance():
    led = duel_of(Learner(1000, BLOCK), [(10, 60)] * 40)
    assert led.index(True) == 29  # 3 pools of 1,000
    assert duel_of(Learner(1000, BLOCK), [(10, 60), (60, 10)] * 40) == [False] * 80


def test_it_does_not_lead_any_more_when_lru_hits_more():
    led = duel_of(Learner(1000, BLOCK), [(10, 60)] * 40 + [(60, 10)] * 45)
    assert led[39]
    assert not led[-1]


# -- hints -------------------------------------------------------------------------------------------------------------


def hinted(seed: int, count: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield prompts of equal length, some of which are soon asked again, with a hint: 1 = not again, 2 = again."""
    rng, due = Random(seed), deque[int]()
    for number in range(count):
        if len(due) > 8:
            yield (due.popleft(), 1, 2, 3), 1
        else:
            hint = rng.choice((1, 1, 1, 2))
            if hint == 2:
                due.append(number)
            yield (number, 1, 2, 3), hint


@pytest.mark.parametrize("said", ["when it arrives", "when it ends", "when it ends, wrong before"])
def test_it_learns_what_hints_of_the_engine_are_worth(said):
    cores = [Core(HAZARD, 100, hint_values=3) for _ in range(2)]
    for names, hint in hinted(5, 700):
        arrives, ends = {"when it arrives": (hint, UNCHANGED), "when it ends": (0, hint)}.get(said, (3 - hint, hint))
        cores[0].serve(names)
        cores[1].serve(names, arrives, ends)
        assert not cores[1].replica.requests.hints
    without, with_hints = (core.replica.counters.hit_tokens for core in cores)
    assert with_hints > 1.3 * without


def test_hints_are_kept_by_a_preempted_request_and_in_the_state():
    core = Core(HAZARD, hint_values=3)
    news = News([0], [9], num_hashes=[2], hashes=b"".join(chain((1, 2))), hint=[2])
    core.step(Part(news=news, admit=Admit([0])))
    core.step(Part(facts=Facts([0], end=[int(End.PREEMPTED)])))
    assert core.replica.requests.hints == {0: 2}
    loaded = load_state(core.spec, export_state(core.replica))
    assert loaded.requests.hints == {0: 2}
    with pytest.raises(InvalidArgument, match="hints"):
        load_state(replace(core.spec, hint_values=2), export_state(core.replica))


@pytest.mark.parametrize("kind", [Replica, NativeReplica])
@pytest.mark.parametrize(("announced", "hint"), [(0, 1), (3, 3), (3, -2), (3, 1 << 40)])
@pytest.mark.parametrize("section", ["news", "facts"])
def test_hints_that_were_not_announced_are_refused_and_change_nothing(kind, announced, hint, section):
    core = Core(HAZARD, hint_values=announced)
    core.replica = kind(core.spec)
    core.replica.begin_epoch(1)
    core.step(Part(news=News([0], [9], num_hashes=[2], hashes=b"".join(chain((1, 2)))), admit=Admit([0])))
    before = digest(core.replica)
    bad = Part(news=News([1], [9], hint=[hint])) if section == "news" else Part(facts=Facts([0], hint=[hint]))
    with pytest.raises(InvalidArgument, match=f"hint_values {announced}, found {hint}") as refused:
        core.step(bad)
    assert refused.value.field == f"parts[0].{section}.hint"
    assert digest(core.replica) == before
    core.seq -= 1
    core.step(Part(facts=Facts([0], hint=[max(0, announced - 1)], end=[int(End.FREE)])))


def test_more_hints_than_the_policy_distinguishes_are_refused_at_the_registration():
    with pytest.raises(InvalidArgument, match=r"hint_values|must be 0 to 64") as refused:
        Core(HAZARD, hint_values=65)
    assert refused.value.field == "hint_values"


def test_the_engine_of_a_mirror_records_the_hints_of_its_rows():
    spec = Core(HAZARD, hint_values=3).spec
    engine = new_replica(spec)
    engine.begin_epoch(1)
    step = open_step(engine, 0)
    step.add(0, 9, chain((1, 2)), hint=1)
    step.close()
    assert step.recorded().parts[0].news.hint == [1]
    step = open_step(engine, 1)
    step.update(Update(0, hint=2))
    assert engine.requests.hints == {0: 2}
    step.close()
    assert step.recorded().parts[0].facts.hint == [2]


# -- replays and images ------------------------------------------------------------------------------------------------


@pytest.mark.specification
def test_a_loaded_state_continues_with_the_same_decisions(monkeypatch):
    monkeypatch.setattr("kvplane_core.spec.hazard._WINS", 1 << 30)
    core, other = Core(HAZARD, 200), Core(HAZARD, 200)
    trace = [*scans_and_chats(3, 260)]
    for names in trace[:200]:
        core.serve(names)
        other.serve(names)
    assert digest(other.replica) == digest(core.replica)
    assert core.free.learner.leads
    raw = export_state(core.replica)
    other.replica = load_state(core.spec, raw)
    assert export_state(other.replica) == raw
    for names in trace[200:]:
        core.serve(names)
        other.serve(names)
    assert other.tables == core.tables
    assert digest(other.replica) == digest(core.replica)
    inspect.check(core.replica)


@pytest.mark.specification
@pytest.mark.parametrize("part", [0, 2])
def test_a_state_that_does_not_fit_is_refused(part):
    core = Core(HAZARD)
    core.serve((1, 2, 3))
    state = core.free.state()
    state[part] = core.free.owner[:5] if part == 0 else []
    with pytest.raises(ValueError):  # noqa: PT011 - of each kind
        core.free.load(state)


@pytest.mark.specification
@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_state_is_refused_or_harmless(seed, monkeypatch):
    """Any state may come from an engine that is mirrored; numpy would read another entry for a negative number."""
    monkeypatch.setattr(Learner, "_duel", lambda learner, *_: setattr(learner, "leads", True))
    core, rng = Core(HAZARD, 200), Random(seed)
    trace = [*scans_and_chats(3, 120)]
    for names in trace[:80]:
        core.serve(names)
    state = core.free.state()
    damage(state, rng)
    with contextlib.suppress(LookupError, ValueError, TypeError, AttributeError, ArithmeticError):  # as in load_state
        core.free.load(state)
        with contextlib.suppress(InvalidArgument):  # the compiled core takes it over, or refuses it
            assert digest(NativeReplica.of(core.replica)) == digest(core.replica)
        for names in trace[80:]:
            serve_or_fail(core, names)
        inspect.check(core.replica)


def damage(state: list[Any], rng: Random) -> None:
    """Change one number in a nested state."""
    places = []

    def walk(holder) -> None:
        for at in holder if isinstance(holder, dict) else range(len(holder)):
            if isinstance(holder[at], int):
                places.append((holder, at))
            elif isinstance(holder[at], array):
                places.extend((holder[at], rng.randrange(len(holder[at]))) for _ in range(3) if holder[at])
            elif isinstance(holder[at], dict | list):
                walk(holder[at])

    walk(state)
    holder, at = rng.choice(places)
    holder[at] = rng.choice([0, 1, 7, 1 << 12, 1 << 20, 1 << 40, (1 << 63) - 1])


def serve_or_fail(core: Core, names: Sequence[int]) -> None:
    """Serve a prompt; an exception that a load would raise fails the test here."""
    try:
        core.serve(names)
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise AssertionError(f"the state was loaded, and fails later: {error!r}") from error


@pytest.mark.parametrize(("mine", "other"), [(LRU, HAZARD), (HAZARD, LRU), (EvictionPolicy.WINDOW_TAIL, HAZARD)])
def test_the_state_of_another_policy_is_refused(mine, other):
    raw = export_state(Core(other).replica)
    with pytest.raises(InvalidArgument, match=other.value) as refused:
        load_state(Core(mine).spec, raw)
    assert refused.value.field == "eviction"


@pytest.mark.specification
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_any_order_of_victims_leaves_every_page_what_its_key_says(seed):
    """A page holds what its key says, whatever the policy chooses: here victims are drawn, and it always leads."""
    rng = Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "_duel", lambda learner, *_: setattr(learner, "leads", True))
        patch.setattr(
            History,
            "order",
            lambda _, owners, __, count: np.array(rng.sample(range(len(owners)), min(count, len(owners)))),
        )
        patch.setitem(test_page_contents.MIXES, "drawn", ([full(), window(6, lookup_class=1)], {"eviction": HAZARD}))
        test_page_contents.run("drawn", seed)
