"""The estimate of a step's effort: computed before the step is applied, and never too low."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplane.base.groups import GroupKind, GroupSpec, TierKind, TierSpec
from kvplane.base.step import Admit, Budget, Cache, End, Facts, News, OnRefusal, Part, Peek, Resume, RowFlag, Run, Step
from kvplane_service.replicas import applying
from tests.core.compared import unit_ns
from tests.service.hosts import BLOCK, HostWorld, spec_of

LONG = 1 << 20  # tokens
MANY = 4096  # units
SPEC = spec_of(200_000, max_model_len=LONG, max_in_flight_tokens=LONG)


def effort(step, replica):
    """In units: blocks that are allocated and registered."""
    return replica.effort(step) // unit_ns(replica)


def hashes(count):
    return bytes(32 * count)


class Busy:
    """A replica with 256 requests in decode, whose prompts took 32,768 tokens, and 300 that wait."""

    def __init__(self, spec=SPEC):
        self.world = HostWorld(spec=spec)
        self.engine = self.world.open()
        for slot in range(256):
            self.engine.step(Part(news=News([slot], [128]), admit=Admit([slot])))
        waiting = list(range(256, 556))
        self.engine.step(Part(news=News(waiting, [4096] * 300)))
        self.decoding = list(range(256))

    def effort(self, *parts):
        return effort(Step(1, 1, list(parts)), self.world.host.replica)


@pytest.fixture(scope="module")
def busy():
    return Busy()


@pytest.mark.parametrize(
    ("part", "is_long"),
    [
        (Part(), False),
        (Part(facts=Facts(list(range(256)), appended=[1] * 256), run=Run(list(range(256)))), False),
        (Part(news=News([600], [LONG], tokens=[0] * LONG)), True),
        (Part(news=News([600], [LONG], num_hashes=[1 << 16], hashes=hashes(1 << 16)), admit=Admit([600])), True),
        (Part(news=News([600], [8192]), admit=Admit([600])), False),
        (Part(admit=Admit(list(range(256, 556)))), True),
        (Part(admit=Admit(list(range(256, 266)), cap=[512] * 10)), False),
        (Part(admit=Admit(list(range(256, 266))), budget=Budget(tokens=8192)), False),
        (Part(peek=Peek(list(range(256, 556)))), True),
        (Part(peek=Peek([256])), False),
        (Part(facts=Facts([0], computed=[1], commit=[LONG])), True),
        (Part(facts=Facts([0], num_hashes=[5000], hashes=hashes(5000))), True),
        (Part(run=Run([0], extra=[LONG])), True),
        (Part(run=Run([0], lookahead=[4096])), False),
        (Part(facts=Facts([0], end=[int(End.FREE)])), False),
        (Part(run=Run(list(range(256)) * 8)), True),
        (Part(admit=Admit([9999])), False),
    ],
)
def test_effort_of_a_step_decides_whether_it_is_long(busy, part, is_long, monkeypatch):
    assert (busy.effort(part) > MANY) == is_long
    monkeypatch.setattr(applying, "MOST_INLINE_NS", MANY * unit_ns(busy.world.host.replica))
    assert busy.world.host.steps.is_long(Step(1, 1, [part])) == is_long


def test_effort_of_a_step_is_the_sum_of_its_parts(busy):
    one = Part(admit=Admit(list(range(256, 264)), cap=[1024] * 8))
    assert busy.effort(one) <= MANY < busy.effort(*[one] * 4)


def test_a_step_that_continues_requests_is_as_long_as_the_pool_is_large():
    """The stamps of all blocks are compared."""
    part = Part(resume=Resume())
    few, many = (HostWorld(spec=spec_of(num_blocks=count)).host.replica for count in (100, MANY + 1))
    assert effort(Step(1, 1, [part]), few) <= MANY < effort(Step(1, 1, [part]), many)


@pytest.mark.parametrize("number", [1 << 63, (1 << 64) - 1])
def test_a_step_with_a_number_that_none_has_is_estimated_too(busy, number):
    """It is refused after the estimate."""
    usual = effort(Step(1, 1, [Part()]), busy.world.host.replica)
    assert effort(Step(1, number, [Part()], part=number), busy.world.host.replica) == usual


def test_effort_of_pool_operations_follows_the_pool_size():
    spec = spec_of(60_000, max_model_len=LONG, max_in_flight_tokens=LONG)
    world = HostWorld(spec=spec)
    engine = world.open()
    count = 40_000
    digests = b"".join(number.to_bytes(32, "little") for number in range(count))
    engine.step(Part(news=News([0], [count * BLOCK], num_hashes=[count], hashes=digests), admit=Admit([0])))
    evict, reset = Step(1, 1, [Part(cache=Cache(evicted=[5]))]), Step(1, 1, [Part(cache=Cache(reset=True))])
    end = Step(1, 1, [Part(facts=Facts([0], end=[int(End.FREE)]))])
    assert min(effort(evict, world.host.replica), effort(end, world.host.replica)) > MANY
    engine.step(*end.parts)
    assert effort(reset, world.host.replica) > MANY >= effort(evict, world.host.replica)


def test_an_eviction_counts_the_slots_that_get_another_version_and_no_free_ones():
    """Those of which the memory shows what no key of the core names, when the engine life begins."""
    spec = spec_of(50, tiers=(TierSpec(TierKind.HOST, 100_000),))
    evict = Step(1, 1, [Part(cache=Cache(evicted=[5]))])
    efforts = []
    for num_stale in (0, 50_000):
        world = HostWorld(spec=spec)
        shown = [0] * (spec.num_stamps - num_stale) + [77] * num_stale
        engine = world.open(stamp_table=shown, incarnation=7)
        efforts.append(effort(evict, world.host.replica))
        result = engine.step(*evict.parts)
        assert len(result.parts[0].orders.stamp_block) == num_stale + 1
        assert effort(evict, world.host.replica) == efforts[0]
    assert efforts[1] - efforts[0] == 50_000


SHARED = spec_of(1302, max_model_len=LONG, max_in_flight_tokens=LONG)
WINDOW = GroupSpec(GroupKind.SLIDING_WINDOW, BLOCK, window=64, lookup_class=1)


class Sharing:
    """A full pool of 300 requests, which share the 1,000 blocks of their prompt."""

    def __init__(self, spec=SHARED):
        self.world = HostWorld(spec=spec)
        self.engine = self.world.open()
        digests = b"".join(number.to_bytes(32, "little") for number in range(1000))
        for slot in range(300):
            news = News([slot], [1000 * BLOCK + 1], num_hashes=[1000], hashes=digests)
            self.engine.step(Part(news=news, admit=Admit([slot])))
        self.slots = list(range(300))
        self.seq = self.engine.step(Part(facts=Facts(self.slots, appended=[1] * 300), run=Run(self.slots))).seq

    def is_long(self, part):
        return effort(Step(1, 1, [part]), self.world.host.replica) > MANY


@pytest.fixture(scope="module")
def sharing():
    return Sharing()


@pytest.mark.parametrize(
    ("row", "is_long"),
    [
        (Run([0]), False),
        (Run([0], extra=[BLOCK]), True),  # its victims are all others
        (Run([0], extra=[BLOCK], victims=[1, 2, 3]), False),
        (Run([0], extra=[BLOCK], on_refusal=OnRefusal.STOP), False),
        (Run([0], reserved=[1]), True),
        (Run([0], flags=[int(RowFlag.FULL_FIT)]), True),
        (Run([0], flags=[int(RowFlag.UNALIGNED)]), False),
    ],
)
def test_effort_of_a_row_that_may_preempt_counts_the_tables_of_its_victims(sharing, row, is_long):
    row.victims = row.victims or sharing.slots[1:]
    assert sharing.is_long(Part(run=row)) == is_long


def test_effort_of_rows_that_go_back_counts_the_tables_of_requests_that_they_preempt():
    sharing = Sharing(replace(SHARED, groups=(*SHARED.groups, WINDOW), num_blocks=4000))
    near, far = (Part(facts=Facts(sharing.slots, computed=[count] * 300)) for count in (1000 * BLOCK, BLOCK))
    assert [sharing.is_long(near), sharing.is_long(far)] == [False, True]
    assert not sharing.engine.step(near).parts[0].preempted
    assert len(sharing.engine.step(far).parts[0].preempted) == 300


def test_effort_of_a_failed_step_counts_the_tables_of_all_requests(sharing):
    assert sharing.is_long(Part(cache=Cache(failed_steps=[sharing.seq])))


def test_effort_of_a_row_counts_the_tables_in_its_answer(sharing):
    asked = Run(sharing.slots[:140], on_refusal=OnRefusal.STOP)
    assert sharing.is_long(Part(run=asked, with_tables=True))
    assert not sharing.is_long(Part(run=asked))


def test_effort_of_ends_counts_the_requests_that_end(sharing):
    one, all_end = [int(End.FREE)] + [0] * 299, [int(End.FREE)] * 300
    assert not sharing.is_long(Part(facts=Facts(sharing.slots, end=one)))
    assert sharing.is_long(Part(facts=Facts(sharing.slots, end=all_end)))


def test_effort_of_a_failed_step_counts_its_rows():
    world = HostWorld(spec=spec_of(3000))
    engine, slots = world.open(), list(range(1100))
    seq = engine.step(Part(news=News(slots, [1] * 1100), admit=Admit(slots))).seq
    assert effort(Step(1, 1, [Part(cache=Cache(failed_steps=[seq]))]), world.host.replica) > MANY


def test_effort_of_a_chunk_is_lower_with_windows():
    plain = spec_of(2000, max_model_len=LONG)
    mixed, dense = (replace(plain, groups=(plain.groups[0], *[group] * 4)) for group in (WINDOW, plain.groups[0]))
    part = Part(news=News([0], [8192]), admit=Admit([0]))
    few, many, most = (effort(Step(1, 1, [part]), HostWorld(spec=spec).host.replica) for spec in (plain, mixed, dense))
    assert few < many < most < 5 * few
