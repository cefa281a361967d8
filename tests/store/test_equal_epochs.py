"""Two services begin an engine life of one epoch: the first one for an opening that its engine gave up."""

from __future__ import annotations

import pytest

from kvplane.base.errors import Unavailable
from kvplane.base.session import NEW_EPOCH, Opened, OpenRequest
from kvplane.base.stamp_table import StampTable, table_bytes
from kvplane.base.step import End, Part, StepResult
from kvplane.rank import CallersMoves, Rank, RankGroup
from kvplane.session.reopening import Revival
from kvplane.session.rows import AdmitRow, FactRow, NewsRow, part_of
from kvplane_core.face.inspect import check
from tests.client.lasting import HYBRID
from tests.core.specification import specification_of
from tests.store.test_restart import Life, World
from tests.twins import weakened

LOST, KEPT, NEXT = list(range(50)), list(range(200, 250)), list(range(400, 450))
HIT = 48  # of each of these texts


class Engine:
    """An engine of two ranks, which has no request when it reopens its session."""

    def __init__(self) -> None:
        size = HYBRID.num_blocks
        self.tables = [StampTable.create(bytearray(table_bytes(size)), size, incarnation=7 + at) for at in range(2)]
        self.ranks = [Rank(table, CallersMoves(len(HYBRID.groups))) for table in self.tables]
        self.world, self.epoch = World(), 0
        self.session = self.world.session(self.revive)

    def revive(self) -> Revival:
        group = RankGroup(self.tables)
        return Revival(group.agreed_stamps(), group.incarnation, owner_epoch=group.owner_epoch)

    def apply(self, part: Part) -> StepResult:
        """Apply a step, and let the ranks carry out its orders."""
        return self.obey(self.session.apply(part))

    def obey(self, answer: StepResult) -> StepResult:
        for rank in self.ranks:
            if self.session.epoch != self.epoch:
                rank.claim(self.session.epoch, answer.seq)
            for at, part in enumerate(answer.parts, answer.part):
                rank.carry_out(self.session.epoch, answer.seq, at, part.orders)
            rank.executed(answer.seq)
        self.epoch = self.session.epoch
        check(self.world.life.host.replica)
        return answer

    def serve(self, text: list[int]) -> tuple[int, set[int]]:
        """Run one request to its end; returns its hit and its blocks."""
        (result,) = self.apply(part_of(NewsRow(0, text), AdmitRow(0))).parts
        blocks = {block for table in result.tables.by_row()[0].values() for block in table} - {0}
        self.apply(part_of(FactRow(0, end=End.FREE)))
        self.apply(Part())
        return result.admit_hit[0], blocks

    def move_to(self, life: Life) -> None:
        """Break the stream; the next one reaches this service."""
        self.world.life = life
        self.world.deaths += 1

    def give_an_opening_up(self, monkeypatch: pytest.MonkeyPatch) -> OpenRequest:
        """A step whose new life is requested, and not answered; returns the request, which is still on its way."""
        sent, is_open = list[OpenRequest](), self.session._transport.open

        def is_lost(request: OpenRequest) -> Opened:
            sent.append(request)
            if request.epoch != NEW_EPOCH:
                return is_open(request)  # it is asked to continue a life that it does not know
            raise Unavailable("the answer is lost")

        with monkeypatch.context() as patch:
            patch.setattr(self.session._transport, "open", is_lost)
            with pytest.raises(Unavailable):
                self.session.apply(Part())
        return sent[-1]


def two_lives(monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, Life, Life]:
    """The engine, the service that read its opening after a launch without an answer, and that of its next attempt.

    Only one of the two ranks had written its stamps when the first life began, as in the seed 120399 of the simulation.
    """
    engine = Engine()
    engine.serve(LOST)
    blocks = sorted(keyed(engine.world.life) - engine.serve(KEPT)[1])
    engine.world.life.flush()
    lives = []
    for _ in range(2):
        engine.world.restart()
        lives.append(engine.world.life)
    first, second = lives
    opening = engine.give_an_opening_up(monkeypatch)
    engine.ranks[1].invalidate(engine.epoch, blocks)
    first.host.open(opening)
    engine.ranks[0].invalidate(engine.epoch, blocks)
    engine.session.abort()
    engine.session = engine.world.session(engine.revive)
    assert first.host.epoch == second.host.epoch == engine.session.epoch
    assert set(blocks) <= keyed(first), "keys that the memory of one rank does not prove"
    assert set(blocks).isdisjoint(keyed(second))
    return engine, first, second


def keyed(life: Life) -> set[int]:
    """Blocks with a key."""
    keys = specification_of(life.host.replica).coordinator.pool.key
    return {block for block, key in enumerate(keys) if key is not None}


def test_an_engine_never_continues_the_life_of_the_opening_that_it_gave_up(monkeypatch):
    engine, first, second = two_lives(monkeypatch)
    engine.move_to(first)
    engine.apply(Part())
    assert engine.epoch > second.host.epoch, "the first service has another life of this number"
    assert engine.serve(KEPT)[0] == HIT
    assert engine.serve(LOST)[0] == 0


def test_a_life_that_is_known_by_its_number_hits_pages_that_were_overwritten(monkeypatch):
    engine, first, second = two_lives(monkeypatch)
    with weakened("lives known by their number"):
        engine.move_to(first)
        assert engine.serve(LOST)[0] == HIT
    assert engine.epoch == second.host.epoch


@pytest.mark.parametrize("is_last", [False, True])
def test_what_such_a_life_stores_proves_nothing(monkeypatch, is_last):
    """Its stamps are of earlier epochs: a memory that has lost them never shows them again."""
    engine, first, second = two_lives(monkeypatch)
    engine.serve(NEXT)
    for life in (second, first) if is_last else (first, second):
        life.flush()
    engine.world.restart()
    engine.apply(Part())
    assert engine.serve(KEPT)[0] == HIT
    assert engine.serve(LOST)[0] == 0
