"""A step applied row by row gives the results of the recorded step applied whole to a second replica."""

from __future__ import annotations

from random import Random

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.step import UNLIMITED, AdmitStatus, Cache, End, RowFlag, Step, Watermark
from kvplane_core.face import inspect, state
from kvplane_core.face.part_rows import AdmitTerms, Update
from kvplane_core.spec.open_step import OpenStep
from tests.core import builders
from tests.core.builders import (
    GRANTED,
    REFERENCE,
    REFUSED,
    SAFE,
    STALE_HIT,
    digests,
    full,
    new_replica,
    open_step,
    replica_spec,
    window,
)
from tests.core.test_step_law import MIXES
from tests.twins import weakened

PREFIXES = ["a" * 24, "b" * 40, "a" * 12 + "c" * 20]


class Engine:
    """Schedules random rows on a replica, and applies each recorded step to a second one."""

    lookaheads = 0, 0, 1, 3  # drawn for rows

    def __init__(self, spec, seed):
        self.spec, self.random = spec, Random(seed)
        self.replica, self.follower = new_replica(spec), new_replica(spec)
        self.text: dict[int, str] = {}  # by slot: the tokens of each live request
        self.executed = 0
        self.earlier: tuple[OpenStep, Step] | None = None
        self.parts = self.preempted = self.decoded = self.loads = self.load_after = 0

    def run_step(self):
        step = self.step = open_step(self.replica, self.executed)
        self.ran: set[int] = set()
        for _ in range(self.random.randint(1, 9)):
            self.random.choice(
                [self.add, self.admit, self.admit, self.run, self.run, self.run, self.change, self.end]
            )()
        result, sent = step.close(), step.recorded()
        assert self.earlier is None or self.earlier[0].recorded() == self.earlier[1], "a later step changed its rows"
        self.earlier = step, sent
        assert self.follower.apply(sent) == result
        assert state.digest(self.follower) == state.digest(self.replica)
        inspect.check(self.replica)
        self.parts += len(sent.parts)
        self.load_after += sum(map(bool, (step for part in result.parts for step in part.admit_load_after)))
        last = self.replica.seq
        self.executed = self.random.choice([self.executed, self.executed, max(self.executed, last - 1), last])

    def hashes(self, text):
        return digests(self.spec, text)

    def add(self):
        slot = next(slot for slot in range(99) if slot not in self.text)
        if slot > 5:
            return
        text = self.random.choice(PREFIXES)[: self.random.randint(1, 40)] + "x" * self.random.randint(0, 9)
        self.text[slot] = text
        self.step.add(slot, len(text), self.hashes(text), request_id=f"r{slot}")

    def pick(self, running):
        slots = [slot for slot in self.text if self.replica.requests.running[slot] is running]
        return self.random.choice(slots) if slots else None

    def admit(self):
        slot = self.pick(False)
        if slot is None or slot in self.ran:
            return
        limit = self.random.choice([UNLIMITED, UNLIMITED, 0, 8, 16])
        hit = self.step.look_up(slot, limit)
        assert hit.num_tokens <= limit
        left = len(self.text[slot]) - hit.num_tokens
        external = self.random.randint(1, left) if self.random.random() < 0.3 else 0
        late = bool(external) and self.random.random() < 0.6
        left -= external
        num_new = 0 if late else self.random.choice([left, self.random.randint(min(1, left), left), 0])
        flags = self.random.choice([0, 0, int(RowFlag.FULL_FIT)]) | int(RowFlag.DELAY_CACHING) * late
        reserved, watermark = self.random.choice([0, 0, 3]), self.random.choice(list(Watermark))
        terms = AdmitTerms(hit_limit=limit, external=external, reserved=reserved, watermark=watermark, flags=flags)
        status = self.step.admit(slot, hit.num_tokens, num_new, terms)
        if status is GRANTED:
            self.ran.add(slot)
            self.loads += late
        if not num_new and not hit.num_tokens and not external:
            assert status is AdmitStatus.NO_ROOM

    def run(self):
        slot = self.pick(True)
        requests = self.replica.requests
        if slot is None or slot in self.ran:
            return
        if slot in requests.loading and requests.load_after[slot] > self.executed:
            with pytest.raises(InvalidArgument, match="cannot have started"):
                self.step.extend(slot, 1)
            return
        gained = []
        if len(self.text[slot]) <= requests.computed[slot]:
            old = len(self.hashes(self.text[slot]))
            self.text[slot] += self.random.choice("xyz")
            gained = self.hashes(self.text[slot])[old:]
        num_tokens = len(self.text[slot])
        known = num_tokens - requests.computed[slot]
        lookahead, in_flight = self.random.choice(self.lookaheads), requests.in_flight[slot]
        new = self.step.decode(slot, num_tokens, gained, known, lookahead, in_flight) if known == 1 else False
        if new is not False:
            self.decoded += 1
            if new is not None:
                self.ran.add(slot)
            return
        if gained or num_tokens > requests.num_tokens[slot]:
            self.step.update(Update(slot, appended=num_tokens - requests.num_tokens[slot], digests=gained))
        num_new = self.random.randint(1, known)
        more = {"reserved": self.random.choice([0, 0, 2]), "flags": self.random.choice([0, 0, RowFlag.FULL_FIT])}
        while self.step.extend(slot, num_new, lookahead, **more) is None:
            victim = self.pick(True)
            self.preempted += 1
            self.ran -= {victim, *self.step.update(Update(victim, end=End.PREEMPTED))}
            if not requests.running[slot]:
                return
        self.ran.add(slot)

    def change(self):
        slot, pool = self.pick(True), self.replica.coordinator.pool
        choice = self.random.randint(0, 3)
        if choice == 0:
            self.step.change_cache(Cache(evicted=[self.random.randrange(1, pool.num_blocks)]))
        elif choice == 1:
            self.step.change_cache(Cache(reset=True))
            assert self.step.reset_done is (pool.num_free == pool.num_blocks - 1)
        elif slot is not None and choice == 2:
            self.step.update(Update(slot, release_skipped=self.random.randint(0, 40)))
        elif slot is not None and slot not in self.ran and slot not in self.replica.requests.loading:
            self.step.update(Update(slot, commit=self.random.randint(0, 40)))

    def end(self):
        slot = self.random.choice(list(self.text) or [None])
        if slot is None or self.random.random() < 0.5:
            return
        self.step.update(Update(slot, end=End.FREE))
        del self.text[slot]


def play(mix, commit, seed, steps=25):
    groups, changes = MIXES[mix]
    engine = Engine(replica_spec(*groups, num_blocks=20, commit=commit, **changes), seed)
    for _ in range(steps):
        engine.run_step()
    return engine


@pytest.mark.parametrize("commit", [SAFE, REFERENCE])
@pytest.mark.parametrize("mix", MIXES)
def test_an_open_step_equals_the_recorded_step_applied_whole(mix, commit):
    engines = [play(mix, commit, seed) for seed in range(12)]
    assert sum(engine.parts for engine in engines) > 12 * 25  # rows of earlier sections start further parts
    assert sum(engine.preempted for engine in engines)
    assert sum(engine.loads for engine in engines)
    assert sum(engine.decoded for engine in engines) > 100
    assert commit is REFERENCE or sum(engine.load_after for engine in engines)


def test_an_open_step_that_does_not_record_a_refused_row_is_caught(monkeypatch):
    """The refused row released blocks that left the window, which the follower then still holds."""

    def unrecorded(self, slot, num_new, lookahead=0, in_flight=-1, flags=0, reserved=0):
        new = extend(self, slot, num_new, lookahead, in_flight, flags, reserved)
        if new is None:
            self._rows.runs.pop()
            self._result.granted.pop()
        return new

    extend = OpenStep.extend
    monkeypatch.setattr(OpenStep, "extend", unrecorded)
    with pytest.raises(AssertionError):
        any(play("window and full", SAFE, seed) is None for seed in range(30))


def test_an_open_step_without_load_after_is_caught():
    with weakened("open step without load_after"), pytest.raises(AssertionError):
        any(play(mix, SAFE, seed) is None for seed in range(6) for mix in MIXES)


@pytest.fixture
def step():
    replica = new_replica(replica_spec(full(), num_blocks=9))
    step = open_step(replica, 0)
    step.add(0, 12, digests(replica.spec, "a" * 12))
    assert step.admit(0, 0, 12) is GRANTED
    step.close()
    return open_step(replica, 1)


def test_a_row_may_adopt_less_than_the_longest_hit(step):
    text = "a" * 16
    step.add(1, 16, digests(replica_spec(full()), text))
    assert (step.look_up(1).num_tokens, step.look_up(1, 11).num_tokens) == (12, 8)
    assert step.admit(1, 8, 4) is STALE_HIT  # the longest hit has 12
    assert step.admit(1, 8, 4, AdmitTerms(hit_limit=8)) is GRANTED
    first, second = step.close().parts  # a slot has one row in a section
    assert (first.admit_hit, second.admit_hit, second.admit_granted) == ([12], [8], [4])


def test_a_row_may_adopt_a_hit_and_be_granted_no_tokens(step):
    step.add(1, 16, digests(replica_spec(full()), "a" * 16))
    assert step.admit(1, 12, 0) is GRANTED
    step.add(2, 4, [])
    assert step.admit(2, 0, 0) is AdmitStatus.NO_ROOM  # there is nothing to adopt


def test_a_running_row_leaves_reserved_blocks_free(step):
    free = 8 - 3
    step.update(Update(0, appended=1))
    assert step.extend(0, 1, reserved=free) is None
    assert step.extend(0, 1, reserved=free - 1) == [[4]]
    refused, granted = step.close().parts
    assert (refused.run_needed, granted.run_needed) == ([free + 1], [])


def test_a_running_row_can_require_that_its_whole_sequence_fits(step):
    step.update(Update(0, appended=4 * 6))
    assert step.extend(0, 1, flags=RowFlag.FULL_FIT) is None
    assert step.extend(0, 1) == [[4]]


def test_skipped_blocks_are_released_only_up_to_executed_tokens():
    replica = new_replica(replica_spec(window(4), num_blocks=9))
    step = open_step(replica, 0)
    step.add(0, 16, [])
    assert step.admit(0, 0, 16) is GRANTED
    step.close()
    step = open_step(replica, 0)
    step.update(Update(0, release_skipped=16))
    assert replica.free_blocks == 4  # the launch in flight reads every block
    step.close()
    open_step(replica, 2).update(Update(0, release_skipped=16))
    assert replica.free_blocks == 7


def test_a_refused_admission_changes_nothing(step):
    step.add(1, 4 * 6, [])
    assert step.admit(1, 0, 24) is REFUSED
    assert step.admit(1, 0, 20) is GRANTED


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (lambda step: step.extend(5, 1), "slot"),
        (lambda step: step.extend(0, 0), "num_new"),
        (lambda step: step.extend(0, 4096), "num_new"),
        (lambda step: step.extend(0, 1, reserved=99), "run.reserved"),
        (lambda step: step.admit(5, 0, 1), "admit.slot[0]"),
        (lambda step: step.admit(0, 0, 9999), "num_new"),
        (lambda step: step.look_up(-1), "slot"),
        (lambda step: step.update(Update(7, appended=1)), "facts.slot[0]"),
        (lambda step: step.add(0, 4, []), "news.slot[0]"),
    ],
)
def test_rows_without_their_request_are_refused_by_field(step, row, field):
    with pytest.raises(InvalidArgument) as refused:
        row(step)
    assert refused.value.field == field
    step.close()
    assert step.recorded().parts[0].facts.slot == []


def test_a_step_recorded_in_the_next_epoch_belongs_to_its_own(step):
    step.close()
    replica, sent = step._replica, step.recorded()
    replica.begin_epoch(sent.epoch + 1)
    assert step.recorded() == sent


def test_a_slot_runs_once_in_a_step(step):
    """Two grants in one step would be two launches of the whole step, which has one row of a request."""
    step.update(Update(0, appended=2))
    assert step.extend(0, 1) is not None
    with pytest.raises(InvalidArgument, match="tokens of this step already"):
        step.extend(0, 1)


def test_growth_between_the_rows_of_other_requests_stays_in_one_part(step):
    for slot in (1, 2):
        step.add(slot, 7, [])
        assert step.admit(slot, 0, 7) is GRANTED
    step.close()
    step = open_step(step.both, step.seq)
    assert step.decode(0, 13, [], 1, 0, 0) == [[8]]
    assert step.decode(1, 8, [], 1, 0, 0) == ()
    step.update(Update(2, appended=1))
    assert step.extend(2, 1) == ()
    step.close()
    (part,) = step.recorded().parts
    assert (part.facts.slot, part.run.slot) == ([0, 1, 2], [0, 1, 2])


@pytest.mark.parametrize(
    "row",
    [
        (0, 13, [], 0, 0, 0),
        (0, 14, [], 1, 0, 0),  # computes one of two tokens
        (0, 11, [], 1, 0, 0),
        (0, 13, [], 5000, 0, 0),
        (0, 13, [], 1, -1, 0),
        (0, 13, [], 1, 0, -1),
        (0, 13, [b"short"], 1, 0, 0),
        (0, 13, [bytes(32)], 1, 0, 0),  # no block is full
        (1, 5, [], 1, 0, 0),  # waits
        (2, 13, [], 1, 0, 0),  # ran in this step
    ],
)
def test_an_unusual_row_is_left_to_the_methods_that_check_it(row):
    replica = new_replica(replica_spec(full(), num_blocks=20))
    step = open_step(replica, 0)
    for slot in (0, 2):
        step.add(slot, 12, [])
        assert step.admit(slot, 0, 12) is GRANTED
    step.close()
    step = open_step(replica, 1)
    step.add(1, 4, [])
    assert step.decode(2, 13, [], 1, 0, 0)
    before = state.digest(replica)
    assert step.decode(*row) is False
    assert state.digest(replica) == before
    assert step.decode(0, 13, [], 1, 0, 0)


def test_drafts_of_a_request_with_states_are_left_to_the_method_that_checks_them():
    """After tokens that are all computed."""
    replica = new_replica(replica_spec(full(), builders.state(), num_blocks=20))
    step = open_step(replica, 0)
    step.add(0, 12, [])
    assert step.admit(0, 0, 12) is GRANTED
    step.close()
    step = open_step(replica, 1)
    assert step.decode(0, 12, [], 1, 0, 0) is False
    assert step.decode(0, 13, [], 1, 0, 0)


def test_the_first_row_of_a_part_states_when_its_load_may_start():
    replica = new_replica(replica_spec(full(), num_blocks=4))
    step = open_step(replica, 0)
    step.add(0, 12, [])
    assert step.admit(0, 0, 12) is GRANTED
    step.close()
    step = open_step(replica, 0)
    step.update(Update(0, end=End.FREE))
    step.add(1, 9, [])
    terms = AdmitTerms(external=8, flags=int(RowFlag.DELAY_CACHING))
    assert step.admit(1, 0, 0, terms) is GRANTED
    with pytest.raises(InvalidArgument, match="cannot have started"):
        step.update(Update(1, commit=8))
    with pytest.raises(InvalidArgument, match="a load of this step"):
        step.change_cache(Cache(released=[1]))
    assert step.close().parts[-1].admit_load_after == [1]


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
    replica = step._replica
    before = state.digest(replica)
    with pytest.raises(InvalidArgument):
        row(step)
    assert state.digest(replica) == before
    assert step.decode(0, 13, [], 1, 0, 0) == [[4]]
    step.close()


def test_requests_that_adopted_a_withdrawn_key_count_as_taken_back(step):
    text = "b" * 16
    step.add(1, 16, digests(step._replica.spec, text))
    assert step.admit(1, 0, 16) is GRANTED
    step.add(2, 20, digests(step._replica.spec, text + "c" * 4))
    assert step.admit(2, step.look_up(2).num_tokens, 4) is GRANTED
    assert step.update(Update(1, end=End.FREE)) == [2]
    assert sum(part.taken_back for part in step.close().parts) == 1
