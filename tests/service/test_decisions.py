"""The decision log: its entries, its bounds, no tokens, and a replay of it that is equal bit for bit."""

from __future__ import annotations

import pytest

from kvplane import wire
from kvplane.base.step import Admit, Budget, Cache, End, EventKind, Facts, News, Part, Run, StepResult
from kvplane_service.config import Config
from kvplane_service.decisions.log import Decision, Life, hashed_part, hashed_step
from kvplane_service.replicas.host import new_replica
from tests.service.hosts import BLOCK, HostWorld, spec_of

CANARY = 987_654_321
PROMPT = [CANARY] * 40


def new(*slots: int, tokens: list[int] = PROMPT) -> Part:
    """New requests with the same prompt, admitted at once."""
    return Part(
        news=News(slot=list(slots), num_tokens=[len(tokens)] * len(slots), tokens=tokens * len(slots)),
        admit=Admit(slot=list(slots)),
    )


def decode(*slots: int, token: int = CANARY) -> Part:
    """One more token each, and a slot for the next."""
    facts = Facts(slot=list(slots), appended=[1] * len(slots), tokens=[token] * len(slots))
    return Part(facts=facts, run=Run(slot=list(slots)))


def drive(world: HostWorld) -> list[StepResult]:
    """Steps with tokens that allocate, hit, fill blocks, preempt and free; their answers."""
    engine = world.open()
    results = [engine.step(new(0, 1)), engine.step(new(2))]
    results += [engine.step(decode(0, 1, 2, token=step)) for step in range(60)]
    results.append(engine.step(Part(facts=Facts(slot=[0, 1], end=[End.FREE, End.PREEMPTED])), new(0)))
    more = Facts(slot=[2], appended=[3], tokens=[1, 2, 3])
    results.append(engine.step(Part(facts=more), Part(admit=Admit(slot=[1]))))
    results.append(engine.step(Part(cache=Cache(evicted=[3, 4]), budget=Budget(tokens=5), run=Run(slot=[0, 2]))))
    return results


def decisions_of(world: HostWorld) -> list[Decision]:
    return [entry for entry in world.host.decisions if isinstance(entry, Decision)]


def test_decision_log_keeps_no_tokens():
    world = HostWorld()
    drive(world)
    kept = decisions_of(world)
    assert len(kept) == 65
    assert str(CANARY) in repr(new(0))
    assert str(CANARY) not in repr(kept)
    assert all(not part.news.tokens and not part.facts.tokens for one in kept for part in one.step.parts)


def test_decision_log_replays_bit_for_bit():
    world = HostWorld(spec=spec_of(num_blocks=15))
    results = drive(world)
    assert any(part.preempted for result in results for part in result.parts)
    assert any(hit for result in results for part in result.parts for hit in part.admit_hit)
    again = new_replica(world.host.replica.spec)
    again.begin_epoch(2)
    for decision in decisions_of(world):
        step = hashed_step(decision, world.host.scheme.digest.size)
        for part, events in zip(decision.result.parts, decision.events, strict=True):
            part.events = events  # the session did not ask for them
        expected = wire.encode_result(decision.result).SerializeToString()
        assert wire.encode_result(again.apply(step)).SerializeToString() == expected


def test_decision_log_keeps_events_that_the_session_does_not_request():
    world = HostWorld()
    engine = world.open()
    assert engine.step(new(0)).parts[0].events == []
    (decision,) = decisions_of(world)
    (stored,) = decision.events[0]
    assert len(stored.hashes) == 2


def test_decision_log_has_the_hashes_of_new_requests():
    world = HostWorld()
    world.open().step(new(0, 1), new(2, tokens=[5] * 7))
    (decision,) = decisions_of(world)
    size = world.host.scheme.digest.size
    news, further = (
        hashed_part(part, result, size).news
        for part, result in zip(decision.step.parts, decision.result.parts, strict=True)
    )
    digests = world.host.replica.requests.hashes(0)
    assert digests
    assert (news.num_hashes, news.hashes) == ([len(digests)] * 2, b"".join(digests) * 2)
    assert not any(further.num_hashes)
    assert not further.hashes


def test_decision_log_has_an_entry_per_engine_life():
    world = HostWorld()
    engine = world.open()
    engine.step(new(0))
    engine.host.close(engine.nonce)
    world.open()
    assert [type(entry) for entry in world.host.decisions] == [Life, Decision, Decision, Life]
    life = list(world.host.decisions)[-1]
    assert isinstance(life, Life)
    assert life.epoch == 3
    assert [event.kind for event in life.events] == [EventKind.CLEARED]  # without a stamp table no key is kept


def test_decision_log_uses_the_service_s_clock():
    world = HostWorld()
    engine = world.open()
    world.now_ns = 5
    engine.step()
    (decision,) = decisions_of(world)
    assert (decision.at_ns, decision.took_ns) == (5, 0)


def test_decision_log_is_bounded_in_entries():
    world = HostWorld(Config(decision_log_steps=3))
    engine = world.open()
    for _ in range(9):
        engine.step()
    log = world.host.decisions
    assert len(log) == 3
    assert log.num_lost == 7  # nine steps and the life
    assert [entry.step.seq for entry in decisions_of(world)] == [7, 8, 9]


def test_decision_log_is_bounded_in_bytes():
    world = HostWorld(Config(log_bytes=1 << 20), spec_of(num_blocks=2000, max_model_len=1 << 15))
    engine = world.open()
    for slot in range(200):
        engine.step(new(0, tokens=[slot] * 16_000))
        engine.step(Part(facts=Facts(slot=[0], end=[End.FREE])))
    log, events = world.host.decisions, world.host.events
    assert 0 < len(log) < 100
    assert log.num_bytes + events.num_bytes <= 1 << 20
    assert log.num_lost + len(log) == 401


def test_decision_log_followers_get_entries_until_they_leave():
    world = HostWorld()
    seen: list[object] = []
    engine = world.open()
    world.host.decisions.follow(seen.append)
    engine.step()
    world.host.decisions.unfollow(seen.append)
    engine.step()
    assert [type(entry) for entry in seen] == [Decision]


@pytest.mark.parametrize("steps", [3, 100])
def test_decision_log_passes_entries_on_later_in_order_and_without_a_gap(steps):
    """They get nothing before the step is answered; few entries wait, also where they are dropped unpacked."""
    world = HostWorld(Config(decision_log_steps=steps))
    log, seen = world.host.decisions, list[object]()
    engine, at_once = world.open(), list[object]()
    log.follow(at_once.append)
    log.follow_later(seen.append)
    for _ in range(20):
        engine.step()
        assert seen == at_once[: len(seen)]
        assert len(at_once) - 9 <= len(seen) < len(at_once)
    engine.step()
    assert len(seen) < len(at_once)
    log.catch_up()
    assert seen == at_once
    engine.step()
    while log.pack_oldest():  # as in the background
        pass
    assert seen == at_once
    count = len(seen)
    log.unfollow(seen.append)
    engine.step()
    log.catch_up()
    assert len(seen) == count < len(at_once)


@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, 3 * BLOCK + 1])
def test_decision_log_replaces_tokens_with_hashes(size):
    world = HostWorld()
    world.open().step(new(0, tokens=[1] * size))
    (decision,) = decisions_of(world)
    (step,) = [hashed_step(decision, world.host.scheme.digest.size)]
    assert step.parts[0].news.num_hashes == [size // BLOCK]
    assert len(step.parts[0].news.hashes) == size // BLOCK * world.host.scheme.digest.size
