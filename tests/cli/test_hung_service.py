"""A service process that is stopped (SIGSTOP) under engines: every wait ends, and each way to continue is tested."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import kvplane
from kvplane import AdmitRow, FactRow, NewsRow, Part, RunRow, aio, part_of
from kvplane.base.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from kvplane.base.stamp_table import StampTable, table_bytes
from kvplane.base.step import End, News
from kvplane.rank import Rank, RankGroup
from kvplane.rpc import channel
from kvplane.sansio.retry import RetryPolicy
from kvplane.session.reopening import Revival
from tests.cli.test_serve import serving
from tests.client.lasting import ONE_GROUP, PageMemory
from tests.client.loop_thread import LIMIT_S, Blocking, shared_loop

TEXT = list(range(100))
ASK = part_of(NewsRow(0, TEXT), AdmitRow(0))
QUICK: Any = {"step_timeout_s": 0.3, "open_timeout_s": 0.3, "retry": RetryPolicy(attempts=2)}


class Place:
    """A service that can be stopped."""

    def __init__(self, process, address):
        self._process, self.address = process, address

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def place():
    with serving("--set", "lease_ms=60000") as (process, address):
        yield Place(process, address)


@pytest.fixture(params=["blocking", "asyncio"])
def open_session(place, request):
    """Opens sessions of either kind on a new replica."""
    name = "hung/" + re.sub(r"[^a-z_]", "-", request.node.name)
    with kvplane.connect(place.address) as client:
        client.register_replica(name, ONE_GROUP)
        if request.param == "blocking":
            yield lambda revive=None, **options: client.session(name, revive, **{**QUICK, **options})
            return
    other: Any = shared_loop().make(aio.connect, place.address)
    yield lambda revive=None, **options: Blocking(shared_loop().do(other.session, name, revive, **{**QUICK, **options}))
    shared_loop().do(other.close)


def is_late(call) -> None:
    with pytest.raises((DeadlineExceeded, Unavailable)):
        call()


def receive_eventually(session):
    """The answer after the service has resumed: an attempt that began while it was stopped may fail."""
    for _ in range(100):
        try:
            return session.receive()
        except (DeadlineExceeded, Unavailable):
            continue
    raise AssertionError("no answer")


def test_a_call_times_out_and_a_retry_gets_the_answer(place, open_session):
    with open_session() as session:
        with place.stopped():
            with pytest.raises(DeadlineExceeded, match="did not answer within"):
                session.apply(ASK)
            assert session.in_flight == 1
            is_late(session.receive)
            assert (session.in_flight, session.ended) == (1, None)
        assert receive_eventually(session).parts[0].admit_granted == [100]
        assert session.apply(part_of(FactRow(0, tokens=[7]), RunRow(0))).parts[0].granted == [1]


@pytest.mark.parametrize("how", ["close", "abort"])
@pytest.mark.parametrize("where", ["waiting", "opening"])
def test_another_thread_ends_a_hanging_call(place, open_session, how, where):
    session = open_session(step_timeout_s=1000.0, open_timeout_s=1000.0)
    session.apply(Part())
    ended = threading.Event()
    seen = []

    def engine():
        try:
            session.apply(ASK)
        except FailedPrecondition as error:
            seen.append(error)
        ended.set()

    with place.stopped():
        if where == "opening":
            session._machine.interrupted()
        thread = threading.Thread(target=engine)
        thread.start()
        while not session.in_flight:
            assert not ended.wait(0.01)
        assert not ended.wait(0.1), "it hangs"
        end_session(session, how)
        assert ended.wait(LIMIT_S)
        thread.join()
    assert "aborted" in str(seen[0])
    with pytest.raises(FailedPrecondition):
        session.apply(Part())


def end_session(session, how):
    """End the session from this thread; an asyncio session is aborted on its loop."""
    if how == "abort" and isinstance(session, Blocking):
        shared_loop().make(session.abort)
    else:
        getattr(session, how)()


def test_keepalive_detects_a_stopped_service(place, monkeypatch):
    """Half a minute by default, two seconds here."""
    quick = {"grpc.keepalive_time_ms": 1000, "grpc.keepalive_timeout_ms": 500, "grpc.http2.ping_timeout_ms": 500}
    monkeypatch.setattr(channel, "_OPTIONS", tuple((key, quick.get(key, value)) for key, value in channel._OPTIONS))
    with kvplane.connect(place.address) as client:
        client.register_replica("hung/keepalive", ONE_GROUP)
        session = client.session("hung/keepalive", step_timeout_s=1000.0, retry=RetryPolicy(attempts=0))
        with place.stopped(), pytest.raises(Unavailable, match=r"(?i)keepalive|ping"):
            session.apply(ASK)
        assert session.in_flight == 1
        session.close()


def test_a_session_closes_while_its_service_hangs(place, open_session):
    session = open_session()
    session.apply(ASK)
    with place.stopped():
        session.close()
    with pytest.raises(FailedPrecondition, match="closed"):
        session.apply(Part())


def test_an_engine_begins_a_new_life_instead_of_waiting(place, open_session):
    """Its request is submitted again and hits the cache; the grants of the late answer are not used."""
    memory = PageMemory(ONE_GROUP.num_blocks)
    news = [News()]
    session = open_session(lambda: Revival(tuple(memory.stamps), memory.incarnation, news[0], running(news[0])))
    memory.carry_out(session.apply(ASK).parts[0])
    session.apply(part_of(FactRow(0, end=End.FREE)))
    session.apply(Part())
    with place.stopped():
        is_late(lambda: session.apply(part_of(NewsRow(1, TEXT), AdmitRow(1))))
    epoch = session.epoch
    news[0] = part_of(NewsRow(1, TEXT)).news
    session.begin_new_life()
    answer = receive_eventually(session).parts[0]
    assert (answer.admit_status, answer.preempted) == ([0], [1])
    assert session.epoch > epoch
    assert session.apply(part_of(AdmitRow(1))).parts[0].admit_hit == [96]
    session.close()


def running(news):
    return tuple(news.slot)


class NoMover:
    num_groups = 1

    def zero(self, group, blocks):
        """No bytes here."""

    def copy(self, group, src, dst):
        """No bytes here."""

    def moves(self):
        return None


def test_pages_of_a_launch_without_an_answer_are_never_hit(place, open_session):
    num_blocks = ONE_GROUP.num_blocks
    table = StampTable.create(bytearray(table_bytes(num_blocks)), num_blocks, incarnation=5)
    rank, group = Rank(table, NoMover()), RankGroup([table])
    news, pages = part_of(NewsRow(0, [*TEXT, 7])).news, list[int]()
    session = open_session(lambda: Revival(group.agreed_stamps(), group.incarnation, news, (0,)))
    group.claim(session.epoch)
    for part in (ASK, Part()):
        answer = session.apply(part)
        rank.carry_out(session.epoch, answer.seq, 0, answer.parts[0].orders)
        rank.executed(answer.seq)
        pages = answer.parts[0].tables.ids or pages
    with place.stopped():
        is_late(lambda: session.apply(part_of(FactRow(0, tokens=[7]), RunRow(0))))
    old_epoch = session.epoch
    rank.invalidate(old_epoch, pages[2:])  # the launch without an answer may write to these
    session.begin_new_life()
    answer = receive_eventually(session)
    assert answer.parts[0].preempted == [0]
    group.claim(session.epoch, answer.seq)
    with pytest.raises(kvplane.StaleEpoch):
        rank.carry_out(old_epoch, 3, 0, answer.parts[0].orders)
    rank.carry_out(session.epoch, answer.seq, 0, answer.parts[0].orders)
    assert session.apply(part_of(AdmitRow(0))).parts[0].admit_hit == [32], "the two pages that it did not touch"
    session.close()
