"""What an explanation costs: for each entry of the log, a bounded number of calls, however many requests run."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from itertools import count

import pytest

from kvplane.base.step import Admit, End, Facts, News, Part, Run
from kvplane_service.explain import history
from kvplane_service.explain.causes import Cause
from kvplane_service.explain.service import Prompt, explain_block, explain_prompt, explain_request
from kvplane_service.replicas.host import ReplicaHost
from kvplane_service.runtime.executors import Executor
from kvplane_service.runtime.slices import Turns
from tests.costs import calls_of
from tests.service.hosts import BLOCK, HostWorld, spec_of

STEPS, CALLS_PER_ENTRY = 100, 1000


def host_with(rows: int) -> ReplicaHost:
    """A host whose log has decode steps of this many requests, of which one ends and another comes at each."""
    world = HostWorld(spec=spec_of(8 * rows + 100, max_in_flight_tokens=rows * 4 * BLOCK))
    engine, numbers = world.open(), count(rows)

    def news_of(slots: list[int], names: list[int]) -> Part:
        tokens = [token for name in names for token in [name] * 2 * BLOCK]
        named = [f"request-{name}" for name in names]
        news = News(slot=slots, num_tokens=[2 * BLOCK] * len(slots), tokens=tokens, request_id=named)
        return Part(news=news, admit=Admit(slot=slots))

    engine.step(news_of([*range(rows)], [*range(rows)]))
    for step in range(STEPS):
        ended, running = step % rows, [slot for slot in range(rows) if slot != step % rows]
        ends = [0] * len(running) + [int(End.FREE)]
        facts = Facts(slot=[*running, ended], appended=[1] * len(running) + [0], tokens=running, end=ends)
        part = news_of([ended], [next(numbers)])
        part.facts, part.run = facts, Run(slot=running)
        engine.step(part)
    while world.host.decisions.pack_oldest():
        pass
    return world.host


async def at_once(work):
    return work()


@pytest.fixture(scope="module", params=[8, 256])
def rows(request):
    return request.param


@pytest.fixture(scope="module")
def host(rows):
    return host_with(rows)


def test_a_known_request_costs_a_bounded_number_of_calls_per_entry(host, rows):
    name = f"request-{rows + STEPS // 2}"
    turns = Turns("explanations", 0)
    calls = calls_of(lambda: asyncio.run(explain_request(host, name, turns, at_once)))
    assert STEPS < calls < CALLS_PER_ENTRY * STEPS


def admitted_together(rows: int, domains: bool) -> ReplicaHost:
    """A host that admitted this many requests in one step, each in a cache domain of its own or all in one."""
    world = HostWorld(spec=spec_of(3 * rows + 100, max_in_flight_tokens=rows * 4 * BLOCK))
    slots, engine = [*range(rows)], world.open()
    tokens, names = [token for row in slots for token in [row] * 2 * BLOCK], [f"request-{row}" for row in slots]
    of_rows = [f"domain-{row}" for row in slots] if domains else []
    news = News(slot=slots, num_tokens=[2 * BLOCK] * rows, tokens=tokens, request_id=names, domain=of_rows)
    engine.step(Part(news=news, admit=Admit(slot=slots)))
    return world.host


@pytest.mark.parametrize("domains", [False, True])
def test_requests_that_are_admitted_together_cost_the_same_each(domains):
    def explain(host: ReplicaHost, rows: int) -> None:
        turns = Turns("explanations", 0)
        asyncio.run(explain_request(host, f"request-{rows - 1}", turns, at_once))
        asyncio.run(explain_block(host, 5, turns, at_once))
        asyncio.run(explain_prompt(host, Prompt([bytes(32)], BLOCK + 1, "another domain"), at_once))

    few, many = (calls_of(partial(explain, admitted_together(rows, domains), rows)) for rows in (128, 512))
    assert many < 5 * few


def test_the_blocks_of_a_step_are_read_once_however_many_requests_it_admits(monkeypatch):
    """They are passed over in C, of which no call is counted."""
    real, made = history._Piece.takers, list[int]()

    def takers(piece):
        made.append(piece.number)
        return real(piece)

    monkeypatch.setattr(history._Piece, "takers", takers)
    asyncio.run(explain_block(admitted_together(128, domains=False), 5, Turns("explanations", 0), at_once))
    assert 0 < len(made) < 4


def test_a_name_that_others_contain_costs_no_second_reading(host, rows):
    turns = Turns("explanations", 0)
    names = (f"request-{name}" for name in (1 if rows < 100 else 25, rows + STEPS - 1))
    calls = [calls_of(partial(asyncio.run, explain_request(host, name, turns, at_once))) for name in names]
    assert calls[0] < 2 * calls[1]


def test_the_history_of_a_block_keeps_its_own_keys_alone(host):
    asked = asyncio.run(explain_block(host, 5, Turns("explanations", 0), at_once))
    assert {change.block for change, _ in asked if change.block == 5}
    calls = calls_of(lambda: asyncio.run(explain_block(host, 5, Turns("explanations", 0), at_once)))
    assert calls < CALLS_PER_ENTRY * STEPS


def test_a_long_prompt_is_looked_up_on_a_thread_in_pieces_while_its_replica_waits(host, monkeypatch):
    real, seen = type(host.replica).cached_columns, list[tuple[bool, int, bool]]()

    def look_up(replica, digests, domain):
        on_loop = threading.current_thread() is threading.main_thread()
        seen.append((on_loop, len(digests), host.steps.is_aside))
        return real(replica, digests, domain)

    monkeypatch.setattr(type(host.replica), "cached_columns", look_up)
    digests = [number.to_bytes(32, "big") for number in range(2500)]
    prompt = Prompt(digests, BLOCK * len(digests) + 1)
    found = asyncio.run(explain_prompt(host, prompt, Executor("explanations")))
    assert seen == [(False, 1024, True), (False, 1024, True), (False, 452, True)]
    assert (found.account.hit, found.why.cause) == (0, Cause.DIFFERS)
