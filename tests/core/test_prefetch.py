"""Prompts that will be admitted soon: what only the disk has of them is copied to the host, and nothing is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplane import wire
from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import TierKind, TierSpec
from kvplane.base.sections import Prefetch
from kvplane.base.step import Part, Step
from kvplane.base.values import NO_REQUEST, PrefetchOutcome
from kvplane_core.spec.tiers import prefetch
from kvplane_service.decisions.text import operation_lines
from tests.core.builders import admit_row, digests, full, state, window
from tests.core.test_save_policies import crowd, finish
from tests.core.test_tiers import LOAD, Mover
from tests.core.test_tiers import small_pools as small_pools

HOST, DISK = TierSpec(TierKind.HOST, 32), TierSpec(TierKind.DISK, 400)
TEXT = "aaaabbbbcccc"
ALL, TOO_LATE, TOO_MANY = PrefetchOutcome


def on_disk(*groups, text=TEXT, **changes):
    """An engine with a text of which the device and the host have nothing any more, and a request for it that waits."""
    engine = Mover(*(groups or (full(),)), **{"tiers": (HOST, DISK), **changes})
    engine.save(text)
    while places(engine, text) != {1}:
        crowd(engine, 4)
    finish(engine)
    engine.add(3, text + "x")
    return engine


def places(engine, text=TEXT, domain=""):
    """The tiers from which a hit of the text would be loaded; -1: the device."""
    lookup, asked = engine.replica.coordinator.union, digests(engine.spec, text)
    hit = lookup.find(asked, domain, len(text), 1 << 62)
    found = [engine.tiers.location(block) for blocks in hit.blocks for block in blocks if block]
    return {one.tier if one else -1 for one in found}


def fetch(engine, *slots, **columns):
    """Prefetch these requests, and return (hit, blocks, outcome) of the last one."""
    return send(engine, Prefetch(list(slots), **columns))


def send(engine, rows):
    (result,) = engine.step(Part(prefetch=rows))
    done = result.prefetched
    assert len(done.hit) == len(rows.slot)
    assert set(result.orders.move_to_tier[: done.blocks[-1]]) <= {0}
    return done.hit[-1], done.blocks[-1], PrefetchOutcome(done.outcome[-1])


def content(engine, text=TEXT, domain="", within_ns=0):
    hashes = digests(engine.spec, text)
    return Prefetch([NO_REQUEST], [len(hashes)], b"".join(hashes), [domain], [within_ns])


def test_what_only_the_disk_has_is_copied_to_the_host():
    engine = on_disk()
    assert fetch(engine, 3) == (12, 3, ALL)
    orders = engine.last[0].orders
    assert (orders.move_tier[:3], orders.move_to_tier[:3]) == ([1, 1, 1], [0, 0, 0])
    finish(engine)
    assert places(engine) == {0}
    asked = engine.ask(3)
    assert (asked.hit, set(asked.result.orders.load_tier)) == (12, {0})
    assert engine.tiers.counters.prefetched == 3


def test_a_prompt_that_no_request_has_yet_is_given_by_its_hashes():
    engine = on_disk()
    assert send(engine, content(engine)) == (12, 3, ALL)
    finish(engine)
    assert places(engine) == {0}


def test_a_prompt_of_another_domain_has_no_hit():
    engine = on_disk()
    assert send(engine, content(engine, domain="other")) == (0, 0, ALL)


def test_what_is_being_copied_is_not_copied_again():
    engine = on_disk()
    assert fetch(engine, 3) == (12, 3, ALL)
    assert fetch(engine, 3) == (12, 0, ALL)
    assert send(engine, content(engine)) == (12, 0, ALL)
    finish(engine)
    assert fetch(engine, 3) == (12, 0, ALL)


def test_a_running_request_has_nothing_copied():
    engine = on_disk()
    asked = engine.ask(3)
    assert set(asked.result.orders.load_tier) == {1}
    assert fetch(engine, 3) == (0, 0, ALL)


def test_a_request_that_this_step_admits_has_nothing_copied():
    engine = on_disk()
    (result,) = engine.step(Part(admit=admit_row(3, flags=LOAD), prefetch=Prefetch([3])))
    assert result.admit_job
    assert (result.prefetched.hit, result.prefetched.blocks) == ([0], [0])


def test_only_the_blocks_that_a_hit_needs_are_copied():
    text = "aaaabbbbccccdddd"
    engine = on_disk(full(), window(6), text=text, num_blocks=25)
    assert fetch(engine, 3) == (16, 6, ALL)  # all of full attention, two of the window
    engine = on_disk(state(), full(), text=text, num_blocks=25)
    assert fetch(engine, 3) == (16, 5, ALL)  # one state


def test_a_copy_that_would_end_too_late_is_left_out():
    engine = on_disk()
    assert fetch(engine, 3, within_ns=[1]) == (12, 3, ALL), "the costs are unknown"
    engine = on_disk()
    engine.cache(costs_ns=[1, 1, 1000])
    assert fetch(engine, 3, within_ns=[2999]) == (12, 0, TOO_LATE)
    assert engine.tiers.counters.prefetches_late == 1
    assert fetch(engine, 3, within_ns=[3000]) == (12, 3, ALL)


def test_a_copy_waits_for_those_in_flight():
    """The disk reads one after the other."""
    engine = on_disk()
    engine.cache(costs_ns=[1, 1, 1000])
    assert send(engine, content(engine, "aaaa")) == (4, 1, ALL)
    assert fetch(engine, 3, within_ns=[2999]) == (12, 0, TOO_LATE)
    assert fetch(engine, 3, within_ns=[3000]) == (12, 2, ALL)


def test_no_copy_evicts_what_is_nowhere_else():
    """The host is full of what it alone has."""
    engine = on_disk()
    host, disk = engine.tiers.each
    for key, _ in list(host.in_order()):
        disk.drop(key)
    engine.changed()
    alone = {key for key, _ in host.in_order()}
    assert not host.num_free
    assert fetch(engine, 3) == (12, 0, TOO_MANY)
    assert alone <= {key for key, _ in host.in_order()}


def test_the_part_of_the_hit_that_the_host_has_is_kept():
    """Copies take the slots that are evicted next: not those of the same prompt."""
    engine = on_disk(text="aaaabbbbccccdddd")
    assert send(engine, content(engine, "aaaabbbb")) == (8, 2, ALL)
    finish(engine)
    assert places(engine, "aaaabbbbccccdddd") == {0, 1}
    near = [slot for key, slot in engine.tiers.each[0].in_order()][-2:]
    crowd(engine, 2)
    assert fetch(engine, 3) == (16, 2, ALL)
    order = [slot for _, slot in engine.tiers.each[0].in_order()]
    assert set(order[-2:]) == set(near)


@pytest.mark.specification
def test_the_number_of_copies_in_flight_is_limited(monkeypatch):
    engine = on_disk()
    monkeypatch.setattr(prefetch, "MOST_IN_FLIGHT", 2)
    assert fetch(engine, 3) == (12, 2, TOO_MANY)
    assert fetch(engine, 3) == (12, 0, TOO_MANY)
    finish(engine)
    assert fetch(engine, 3) == (12, 1, ALL)


def test_a_copy_whose_source_changed_is_no_copy():
    engine = on_disk()
    fetch(engine, 3)
    jobs = [job for job, move in engine.tiers.jobs.moves.items() if not move.tier]
    assert len(jobs) == 3
    for key in [move.key for move in engine.tiers.jobs.moves.values() if not move.tier]:
        engine.tiers.each[1].drop(key)
    engine.changed()
    engine.saved.clear()
    engine.cache(jobs_done=jobs)
    assert places(engine) == set()
    assert engine.tiers.counters.discarded >= 3


def test_the_decision_log_says_what_was_copied():
    engine = on_disk()
    rows = replace(content(engine), slot=[NO_REQUEST, 3], num_hashes=[3, 0], domain=["", ""], within_ns=[0, 0])
    step = Step(0, engine.seq + 1, [Part(prefetch=rows)], executed_through=engine.seq)
    result = engine.replica.apply(step)
    lines = list(operation_lines(step, result))
    assert "prefetch 3 hashes: hit 12, 3 blocks to the first tier (all)" in lines
    assert "prefetch slot 3: hit 12, 0 blocks to the first tier (all)" in lines
    assert wire.decode_step(wire.encode_step(step), 32).parts[0].prefetch == rows
    assert wire.decode_result(wire.encode_result(result)).parts[0].prefetched == result.parts[0].prefetched


# -- bad input --------------------------------------------------------------------------------------------------------

BAD = {
    "no request": (Prefetch([7]), "prefetch.slot[0]"),
    "a request and hashes": (Prefetch([3], [1], b"h" * 32), "prefetch.num_hashes[0]"),
    "nothing": (Prefetch([NO_REQUEST]), "prefetch.num_hashes[0]"),
    "hashes of another size": (Prefetch([NO_REQUEST], [2], b"h" * 40), "prefetch.hashes"),
    "hashes without a row": (Prefetch([], [], b"h" * 32), "prefetch.hashes"),
    "a time below 0": (Prefetch([3], within_ns=[-1]), "prefetch.within_ns"),
    "a time without end": (Prefetch([3], within_ns=[1 << 62]), "prefetch.within_ns"),
    "a time too many": (Prefetch([3], within_ns=[1, 1]), "prefetch.within_ns"),
    "a domain that is no text": (Prefetch([3], domain=[b"x"]), "prefetch.domain"),  # type: ignore[list-item]
}


@pytest.mark.parametrize("name", BAD)
def test_a_prefetch_that_names_no_prompt_is_refused(name):
    engine = on_disk()
    rows, field = BAD[name]
    before = engine.digest
    with pytest.raises(InvalidArgument) as refused:
        engine.step(Part(), Part(prefetch=rows))
    assert refused.value.field == f"parts[1].{field}"
    assert engine.digest == before


@pytest.mark.parametrize("tiers", [(), (HOST,), (DISK,)])
def test_a_replica_without_two_tiers_prefetches_nothing(tiers):
    engine = Mover(full(), tiers=tiers)
    engine.add(3, TEXT)
    with pytest.raises(InvalidArgument) as refused:
        fetch(engine, 3)
    assert (refused.value.field, bool(refused.value.remedy)) == ("parts[0].prefetch", True)


# -- planted faults ---------------------------------------------------------------------------------------------------

TWINS = {
    "evicts what is nowhere else": ("_room", lambda blocks, most: most, test_no_copy_evicts_what_is_nowhere_else),
    "no time is estimated": ("_time_ns", lambda blocks, missing: 0, test_a_copy_that_would_end_too_late_is_left_out),
    "copies in flight take no time": ("_copies", lambda blocks: [], test_a_copy_waits_for_those_in_flight),
}


@pytest.mark.parametrize("twin", TWINS)
def test_planted_faults_are_caught(twin, monkeypatch):
    name, fault, case = TWINS[twin]
    case()
    monkeypatch.setattr(prefetch, name, fault)
    with pytest.raises(AssertionError):
        case()
