"""Pages under loads are not allocated, however often the service, the engine or both are restarted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvplane.base.session import Opened, OpenRequest
from kvplane.base.step import Cache, End, Part, RowFlag
from kvplane.blocking.session import Session
from kvplane.session.reopening import Revival
from kvplane.session.rows import AdmitRow, FactRow, NewsRow, ResumeRow, RunRow, part_of, resume_of
from kvplane_core.face.inspect import check
from tests.client.lasting import HYBRID, PageMemory
from tests.store.test_restart import NAME, NONCES, Wire, World

PROMPT = list(range(70))
LOAD = AdmitRow(0, cap=0, external=64, flags=RowFlag.DELAY_CACHING)
ALL = HYBRID.num_blocks - 1


class Loading:
    """An engine whose request waits for a load, with what it sends to a restarted service."""

    def __init__(self) -> None:
        self.world, self.memory = World(), PageMemory(HYBRID.num_blocks)
        self.revival = Revival(tuple(self.memory.stamps), self.memory.incarnation)
        self.session = self.open()
        self.tables = [list[int]()]
        self.blocks = list[int]()

    def open(self) -> Session:
        """The next engine life, of an engine without knowledge of the load."""
        return self.world.session(self.revive)

    def revive(self) -> Revival:
        return replace(self.revival, stamp_table=tuple(self.memory.stamps))

    def apply(self, *parts: Part):
        (result,) = self.session.apply(*parts).parts
        self.memory.carry_out(result)
        check(self.world.life.host.replica)
        return result

    def load(self) -> None:
        result = self.apply(part_of(NewsRow(0, PROMPT), LOAD))
        self.tables = [result.tables.by_row()[0].get(group, []) for group in range(2)]
        self.blocks = sorted({block for table in self.tables for block in table if block})
        assert self.blocks

    def restart(self) -> None:
        self.world.life.flush()
        self.world.restart()

    def row(self, **changes) -> ResumeRow:
        return ResumeRow(0, 64, self.tables, len(PROMPT), **changes)

    def fill(self) -> set[int]:
        """The blocks allocated to requests that exhaust the pool."""
        rows = [(slot, [1000 * slot + at for at in range(96)]) for slot in range(1, 9)]
        part = part_of(*(NewsRow(*row) for row in rows), *(AdmitRow(slot) for slot, _ in rows))
        return set(self.apply(part).tables.ids) - {0}


@pytest.fixture
def engine() -> Loading:
    return Loading()


def test_blocks_under_a_load_stay_held_when_engine_and_service_die(engine: Loading):
    """The session of the next engine life lists the blocks to the next service."""
    engine.load()
    engine.session = engine.open()
    assert list(engine.session.busy_blocks) == engine.blocks
    engine.restart()
    assert engine.apply(Part()).free_blocks == ALL - len(engine.blocks)
    assert list(engine.session.busy_blocks) == engine.blocks
    assert not engine.fill() & set(engine.blocks)
    free = engine.apply(Part()).free_blocks
    assert engine.apply(Part(cache=Cache(loads_over=engine.blocks))).free_blocks == free + len(engine.blocks)
    assert engine.session.busy_blocks == ()


def test_a_load_that_ended_in_a_lost_step_has_ended_for_the_next_service(engine: Loading):
    engine.load()
    engine.session = engine.open()
    first, *others = engine.blocks
    engine.restart()
    answer = engine.apply(Part(cache=Cache(loads_over=[first])))
    assert answer.free_blocks == ALL - len(others)
    assert list(engine.session.busy_blocks) == others


def test_a_load_continues_for_its_request_in_the_next_service(engine: Loading):
    """Its pages are no longer busy: the request holds them, and its commit registers them."""
    engine.load()
    row = engine.row(loading=True)
    news = part_of(NewsRow(0, PROMPT)).news
    engine.revival = Revival((), engine.memory.incarnation, news, (0,), (), resume_of([row]), tuple(engine.blocks))
    engine.restart()
    assert engine.apply(Part()).preempted == []
    replica = engine.world.life.host.replica
    assert (engine.session.resume_refused, engine.session.busy_blocks, replica.busy_blocks) == (None, (), ())
    assert replica.requests.loading == {0}
    assert not engine.fill() & set(engine.blocks)
    engine.apply(part_of(FactRow(0, commit=64), RunRow(0)))
    engine.apply(part_of(FactRow(0, end=End.FREE)))
    hit = engine.apply(part_of(NewsRow(0, PROMPT), AdmitRow(0))).admit_hit
    assert hit == [64]


@pytest.mark.parametrize("why", ["no image", "an image that is refused", "an image that forgets the load"])
def test_a_load_whose_request_is_preempted_by_a_restart_keeps_its_pages(engine: Loading, why):
    engine.load()
    rows = {
        "no image": None,
        "an image that is refused": resume_of([replace(engine.row(loading=True), computed=0)]),
        "an image that forgets the load": resume_of([engine.row()]),
    }
    news = part_of(NewsRow(0, PROMPT)).news
    busy = tuple(engine.blocks)
    engine.revival = Revival((), engine.memory.incarnation, news, (0,), (), rows[why], busy)
    engine.restart()
    assert engine.apply(Part()).preempted == [0]
    assert bool(engine.session.resume_refused) == (why != "no image")
    assert engine.session.busy_blocks == busy
    assert not engine.fill() & set(busy)


def test_an_engine_lists_its_busy_blocks_to_a_new_service(engine: Loading):
    engine.load()
    engine.restart()
    engine.revival = replace(engine.revival, busy_blocks=tuple(engine.blocks))
    request = engine.revive().first_request(NAME, next(NONCES), False, "")
    engine.session = Session(Wire(engine.world), request, nonces=NONCES.__next__, heartbeats=False)
    assert list(engine.session.busy_blocks) == engine.blocks
    assert not engine.fill() & set(engine.blocks)


def test_a_reopened_stream_lists_no_busy_blocks(engine: Loading, monkeypatch):
    """The service has the busy blocks; the list of the first open may be outdated."""
    engine.load()
    engine.session = engine.open()
    engine.apply(Part(cache=Cache(loads_over=engine.blocks[:1])))
    opened: list[OpenRequest] = []
    host = engine.world.life.host
    real = host.open

    def watched(request: OpenRequest, *rest: Any) -> Opened:
        opened.append(request)
        return real(request, *rest)

    monkeypatch.setattr(host, "open", watched)
    engine.session._transport.abort()  # the stream breaks
    engine.apply(Part())
    assert [request.busy_blocks for request in opened] == [()]
    assert list(engine.session.busy_blocks) == engine.blocks[1:]
