"""A session of a draining service moves to another one as soon as nothing is in flight; the engine sees a pause."""

from __future__ import annotations

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.step import End, Part
from kvplane.session.rows import AdmitRow, FactRow, NewsRow, RunRow, part_of
from tests.client.lasting import HYBRID, PageMemory
from tests.store.test_restart import TEXT, Wire, World, shown

PART = part_of(NewsRow(7, TEXT))


class Leaving(Wire):
    """A stream to a service that goes; who closes it finds the next one."""

    def close(self):
        super().close()
        if self.draining:
            self._world.life.flush()
            self._world.restart()
            self.draining = False


@pytest.fixture
def moving(monkeypatch):
    """A world, its page memory, and a session that can move."""
    monkeypatch.setattr("tests.store.test_restart.Wire", Leaving)
    world, memory = World(), PageMemory(HYBRID.num_blocks)
    session = world.session(lambda: shown(memory))
    session._transport.can_move = True
    return world, memory, session


def test_a_session_moves_with_its_next_step(moving):
    world, memory, session = moving
    (result,) = session.apply(part_of(NewsRow(0, TEXT), AdmitRow(0))).parts
    memory.carry_out(result)
    session.apply(part_of(FactRow(0, end=End.FREE)))
    session._transport.draining = True
    assert session.apply(Part()).seq == 3
    assert (world.deaths, session.draining) == (1, False)
    (result,) = session.apply(part_of(NewsRow(0, TEXT), AdmitRow(0))).parts
    assert result.admit_hit == [96]


def test_steps_in_flight_are_answered_before_the_session_moves(moving):
    world, memory, session = moving
    session.submit(part_of(NewsRow(0, TEXT), AdmitRow(0)))
    session._transport.draining = True
    session.submit(part_of(NewsRow(1, TEXT), AdmitRow(1)), executed_through=0)
    assert session.in_flight == 2
    first = session.receive()
    memory.carry_out(first.parts[0])
    assert (first.parts[0].admit_status, world.deaths) == ([1], 0)
    second = session.receive()
    assert (second.seq, second.parts[0].admit_status, world.deaths) == (2, [0], 1)
    assert world.life.host.replica.num_running == 0


def test_later_parts_of_a_step_go_to_the_draining_service(moving):
    world, _, session = moving
    session.submit(Part(), last=False)
    session.receive()
    session._transport.draining = True
    session.apply(Part())
    assert world.deaths == 0
    session.apply(Part())
    assert world.deaths == 1


def test_a_refusal_is_raised_before_held_back_steps_are_sent(moving):
    world, _, session = moving
    session.submit(part_of(RunRow(5)))
    session._transport.draining = True
    session.submit(Part(), executed_through=0)
    with pytest.raises(InvalidArgument):
        session.receive()
    assert (session.in_flight, session.next_seq) == (0, 1)
    session.apply(Part())
    assert world.deaths == 1


def test_a_session_without_another_service_stays(moving):
    world, _, session = moving
    session._transport.draining, session._transport.can_move = True, False
    session.apply(Part())
    assert world.deaths == 0


def test_a_session_without_revive_stays(moving):
    world, _, _ = moving
    session = world.session()
    session._transport.draining = session._transport.can_move = True
    session.apply(Part())
    assert world.deaths == 0
