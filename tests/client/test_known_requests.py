"""A session without a `revive` sends a restarted service the requests that it has recorded."""

from __future__ import annotations

import itertools
from array import array

import pytest

from kvplane.base.errors import InvalidArgument, ServiceRestarted
from kvplane.base.hashing import HashScheme, RequestHasher
from kvplane.base.session import OpenRequest
from kvplane.base.step import (
    AdmitStatus,
    Cache,
    End,
    ExtraKeys,
    Multimodal,
    News,
    Part,
    PartResult,
    Resume,
    RowFlag,
    Step,
    StepResult,
)
from kvplane.blocking.session import Session
from kvplane.sansio.retry import RetryPolicy
from kvplane.session.builder import StepBuilder
from kvplane.session.known_requests import KnownRequests
from kvplane.session.rows import AdmitRow, FactRow, NewsRow, RunRow, part_of
from kvplane.session.tables import BlockTables
from tests.client.lasting import HYBRID, STATE
from tests.client.mini_engine import MiniEngine
from tests.core.specification import specification_of
from tests.store.test_restart import NAME, NONCES, Wire, World


def open_session(world: World) -> Session:
    retry = RetryPolicy(3, sleep=lambda _: None)
    request, nonces = OpenRequest(NAME, next(NONCES)), NONCES.__next__
    return Session(Wire(world), request, retry=retry, nonces=nonces, heartbeats=False, revive=KnownRequests())


def requests_of(world: World) -> dict[int, tuple[object, ...]]:
    """What the service knows of each."""
    known = specification_of(world.life.host.replica).requests
    columns = (known.request_id, known.domain, known.num_tokens, known.limit, known.skip_reading)
    return {slot: (*(column[slot] for column in columns), tuple(known.content[slot].digests)) for slot in known.slots()}


@pytest.mark.parametrize("spec", [HYBRID, STATE], ids=["hybrid", "state"])
@pytest.mark.parametrize("every", [7, 12, 25])
def test_an_engine_without_revive_survives_a_restart(spec, every):
    """Killed repeatedly: each new service has every request in the state of the old one, and every request finishes."""
    world, seqs = World(spec), []
    with open_session(world) as session:
        engine = MiniEngine(lambda part: session.apply(part).parts[0], seed=every)
        for turn in itertools.count(1):
            if not (engine._waiting or engine.running or engine._facts):
                break
            seqs.append(session.next_seq)
            engine.step()
            if turn % every == 0:
                before = requests_of(world)
                world.life.flush()
                world.restart()
                session.apply(Part(), executed_through=session.next_seq - 1)
                seqs.append(session.next_seq - 1)
                assert requests_of(world) == before
                take_back(engine)
        assert world.deaths > 3
        assert seqs == list(range(1, len(seqs) + 1)), "step numbers continue"
        assert not requests_of(world)


def take_back(engine):
    """All have been preempted by the answer to the empty step."""
    for slot, request in reversed(list(engine.running.items())):
        request.computed = 0
        engine._waiting.appendleft((slot, request))
    engine.running.clear()


def test_requests_in_flight_are_recorded_and_running_ones_preempted():
    world = World(HYBRID)
    with open_session(world) as session:
        session.apply(part_of(NewsRow(0, range(40)), NewsRow(1, range(50)), AdmitRow(0), AdmitRow(1)))
        session.submit(part_of(FactRow(0, tokens=[7]), FactRow(1, end=End.FREE), RunRow(0)), executed_through=1)
        session.submit(part_of(NewsRow(2, range(10), domain="d")), executed_through=1)
        world.life.flush()
        world.restart()
        first, second = session.receive().parts[0], session.receive().parts[0]
        assert (first.granted, first.preempted, second.preempted) == ([0], [0], [])
        known = specification_of(world.life.host.replica).requests
        assert {slot: known.num_tokens[slot] for slot in known.slots()} == {0: 41, 2: 10}
        assert known.domain[2] == "d"
        world.restart()
        assert session.apply(part_of(AdmitRow(0), AdmitRow(2))).parts[0].admit_status == [0, 0]
        assert session.apply(part_of(AdmitRow(0), AdmitRow(2))).parts[0].admit_status == [1, 1]


def test_a_service_that_dies_during_a_reopen_is_sent_the_same_again(monkeypatch):
    world = World(HYBRID)
    with open_session(world) as session:
        session.apply(part_of(NewsRow(0, range(40)), AdmitRow(0)))
        before = requests_of(world)
        world.life.flush()
        world.restart()
        deaths, real = iter([True, False]), Wire.send

        def send(self, step):
            if next(deaths, False):
                world.restart()
            real(self, step)

        monkeypatch.setattr(Wire, "send", send)
        session.apply(part_of(FactRow(0, tokens=[7])))
        assert world.deaths == 2
        before[0] = (*before[0][:2], 41, *before[0][3:])
        assert requests_of(world) == before


def step(*parts, seq=1):
    return Step(1, seq, list(parts))


def noted(*parts: Part) -> KnownRequests:
    known = KnownRequests()
    for seq, part in enumerate(parts, 1):
        done = PartResult(admit_status=[1] * len(part.admit.slot), granted=[1] * len(part.run.slot))
        known.note(step(part), StepResult(seq, 0, [done]))
    return known


def test_hashes_and_all_fields_of_a_request_are_sent_again():
    keys = ExtraKeys(salt="s")
    first = News([4, 5], [20, 33], [], [1, 2], b"aabbcc", ["x", "y"], ["", "d"], [keys, keys], [0, 1], [0, 99])
    first.hint = [1, 2]
    known = noted(Part(news=first), part_of(FactRow(4, num_tokens=12, hashes=[b"dd"])), part_of(FactRow(5, hint=3)))
    news = known.revival(7, 4).news
    expected = News([4, 5], [32, 33], [], [2, 2], b"aaddbbcc", *[getattr(first, name) for name in OTHERS])
    expected.hint = [1, 3]
    assert news == expected


UNPROVEN = {
    "too few digests": ExtraKeys(prompt_embeds=(b"e" * 32,)),
    "too many digests": ExtraKeys(prompt_embeds=(b"e" * 32,) * 4),
    "an item across the end": ExtraKeys(multimodal=(Multimodal("i", 2, 12),)),
    "an item behind the end": ExtraKeys(multimodal=(Multimodal("i", 13, 2),)),
}


@pytest.mark.parametrize("keys", UNPROVEN.values(), ids=UNPROVEN)
@pytest.mark.parametrize("length", [12, 16])
def test_keys_that_proved_nothing_prove_nothing_after_a_restart(keys, length):
    """Though they fit the tokens that came since: two prompts of other embeddings or images would be one."""
    known = noted(
        Part(news=News([4], [12], [0] * 12, extra_keys=[keys])),
        part_of(FactRow(4, tokens=[0] * (length - 12))),
    )
    news = known.revival(7, 4).news
    assert (news.num_tokens, len(news.tokens)) == ([length], length)
    with pytest.raises(InvalidArgument):
        RequestHasher.of_prompt(HashScheme.named(4), news.extra_keys[0], length)


OTHERS = ("request_id", "domain", "extra_keys", "skip_reading", "max_tokens")


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "sections"])
def test_the_record_keeps_what_was_sent_when_the_engine_changes_its_part_later(packed):
    """A part belongs to the engine again when it is answered."""
    known, builder = noted(part_of(NewsRow(3, range(5)), NewsRow(1, range(5)))), StepBuilder([3, 1])
    for number in range(40):  # more than are collected together
        builder.tokens[:] = array("I", [number, 100 + number])
        part = builder.part()
        if not packed:
            assert len(part.facts.slot) == 2, "the sections are made before"
        known.note(step(part), StepResult(1, 0, [PartResult(granted=[1, 1])]))
        for column in (part.facts.slot, part.facts.tokens, part.facts.appended, part.run.slot):
            column[:] = array("I", [9, 9])
    news = known.revival(1, 4).news
    assert (news.slot, news.num_tokens) == ([3, 1], [45, 45])
    assert list(news.tokens) == [*range(5), *range(40), *range(5), *range(100, 140)]


def test_a_request_that_is_preempted_and_admitted_in_one_part_runs():
    """By the engine (facts) or by the allocator (run rows), and by none of them with an admission that is refused."""
    by_engine = part_of(FactRow(0, end=End.PREEMPTED), AdmitRow(0))
    by_allocator = part_of(RunRow(0), AdmitRow(0))
    for part, preempted, status, runs in (
        (by_engine, [], 1, {0}),
        (by_allocator, [0], 1, {0}),
        (by_engine, [], 2, set()),
        (by_allocator, [0], 0, set()),
    ):
        known = noted(NEWS)
        assert known.running == {0}
        result = PartResult(granted=[0] * len(part.run.slot), preempted=preempted, admit_status=[status])
        known.note(step(part), StepResult(2, 0, [result]))
        assert known.running == runs
        assert known.revival(1, 4).running == tuple(runs)


@pytest.mark.parametrize("spec", [HYBRID, STATE], ids=["hybrid", "state"])
def test_the_record_of_a_preemption_and_admission_in_one_part_is_that_of_the_service(spec):
    world = World(spec)
    with open_session(world) as session:
        tables = BlockTables(len(world.life.host.replica.spec.groups))

        def apply(*rows):
            part = part_of(*rows)
            result = session.apply(part).parts[0]
            tables.update(part, result)
            return result

        apply(NewsRow(0, range(40)), NewsRow(1, range(100, 150)), AdmitRow(0), AdmitRow(1))
        result = apply(FactRow(0, end=End.PREEMPTED), AdmitRow(0))
        assert list(result.admit_status) == [AdmitStatus.GRANTED]
        assert 0 in tables
        apply(FactRow(0, tokens=[7]), RunRow(0))
        world.life.flush()
        world.restart()
        answer = session.apply(Part(), executed_through=session.next_seq - 1).parts[0]
        assert sorted(answer.preempted) == [0, 1], "both ran"


def test_the_new_life_has_a_higher_epoch_and_no_stamps():
    revival = noted(Part()).revival(7, 4)
    assert (revival.owner_epoch, revival.stamp_table, revival.incarnation) == (7, (), 0)


NEWS = part_of(NewsRow(0, range(40)), AdmitRow(0))


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([NEWS, part_of(FactRow(0, end=End.HELD))], "transfer may read"),
        ([part_of(NewsRow(0, range(40)), AdmitRow(0, external=16))], "external load"),
        ([part_of(NewsRow(0, range(40)), AdmitRow(0, flags=RowFlag.DELAY_CACHING))], "external load"),
        ([NEWS, Part(resume=Resume(slot=[0], computed=[3]))], "resumed with their blocks"),
        ([NEWS, part_of(NewsRow(1, num_tokens=16, hashes=[b"a" * 32]))], "others hashes"),
    ],
    ids=["held", "external", "delayed", "image", "mixed"],
)
def test_requests_that_the_session_cannot_restore_end_it(parts, why):
    with pytest.raises(ServiceRestarted, match=why) as caught:
        noted(*parts).revival(7, 4)
    assert "revive" in caught.value.remedy


def test_a_session_with_loads_in_progress_ends_with_its_service():
    world = World(HYBRID)
    session = open_session(world)
    session.apply(part_of(NewsRow(0, range(40)), AdmitRow(0, external=16)))
    world.life.flush()
    world.restart()
    for _ in range(2):
        with pytest.raises(ServiceRestarted, match="external load"):
            session.apply(Part(), executed_through=0)
    assert isinstance(session.ended, ServiceRestarted)


LOADS = part_of(NewsRow(0, range(40)), AdmitRow(0, flags=RowFlag.LOAD))


def loading(*jobs):
    """What is known behind an answer that orders these loads."""
    known = KnownRequests()
    admitted = PartResult(admit_status=[int(AdmitStatus.GRANTED)], admit_hit=[32], admit_granted=[0], admit_job=[*jobs])
    known.note(step(LOADS), StepResult(1, 0, [admitted]))
    return known


def test_a_load_from_a_tier_that_may_still_write_ends_the_session():
    """As an external load does: the restarted service would give its pages away."""
    known = loading(5 << 32 | 7)
    known.note(step(part_of(FactRow(0, end=End.PREEMPTED))), StepResult(2, 0, [PartResult()]))
    with pytest.raises(ServiceRestarted, match="load from a tier may write") as caught:
        known.revival(7, 4)
    assert "revive" in caught.value.remedy


@pytest.mark.parametrize(
    "cache", [Cache(jobs_done=[5 << 32 | 7]), Cache(jobs_failed=[5 << 32 | 7]), Cache(jobs_before=5 << 32 | 8)]
)
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_load_whose_end_was_reported_is_no_obstacle(cache, is_lost):
    """Nor in a step without an answer: no mover writes any more."""
    known, over = loading(5 << 32 | 7), step(Part(cache=cache))
    if not is_lost:
        known.note(over, StepResult(2, 0, [PartResult()]))
    assert (known.after([over]) if is_lost else known).revival(7, 4).news.slot == [0]


def test_an_admission_without_a_load_is_no_obstacle():
    assert loading(0).revival(7, 4).running == (0,)


def test_malformed_steps_in_flight_end_the_session():
    lost = step(part_of(NewsRow(1, [2**40]), cache=Cache(released=[3])))
    with pytest.raises(ServiceRestarted, match="is malformed"):
        noted(NEWS).after([lost]).revival(7, 4)
    assert noted(NEWS).after([]).revival(7, 4).running == (0,)
    assert noted(NEWS, part_of(FactRow(0, tokens=[1]), RunRow(0))).revival(7, 4).news.num_tokens == [41]
