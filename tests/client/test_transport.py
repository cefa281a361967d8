"""Sessions over real connections that are cut, refused or silent."""

from __future__ import annotations

import signal
import socket
import sys
import threading
import traceback
from contextlib import closing

import pytest

from kvplane.base.errors import DeadlineExceeded, FailedPrecondition, OtherWriter, StaleEpoch, Unavailable
from kvplane.base.session import OpenRequest
from kvplane.base.step import Part
from kvplane.blocking.client import connect
from kvplane.blocking.session import Session
from kvplane.blocking.transport import GrpcTransport
from kvplane.rpc.channel import open_channel
from kvplane.sansio.retry import RetryPolicy
from kvplane.session.rows import AdmitRow, NewsRow, RunRow, part_of
from tests.client.mini_engine import HYBRID
from tests.client.proxy import CuttingProxy
from tests.client.stepper import check_over_cuts
from tests.client.worlds import GrpcWorld

ASK = part_of(NewsRow(0, range(40)), AdmitRow(0, cap=20))


@pytest.fixture
def proxy(world):
    with closing(CuttingProxy(world.service.address)) as proxy:
        yield proxy


@pytest.fixture
def session(world, proxy):
    with connect(proxy.address) as client, client.session(world.replica) as session:
        yield session


def test_an_engine_gets_equal_answers_over_a_cut_connection(session, proxy):
    check_over_cuts(session, proxy)
    assert proxy.num_connections > 3


def test_an_unreachable_service_is_unavailable_until_it_is_back(world, proxy):
    quick = RetryPolicy(attempts=2, first_delay_s=0.01)
    with connect(proxy.address) as client, client.session(world.replica, retry=quick) as session:
        session.apply(ASK)
        proxy.refuse(True)
        proxy.cut()
        with pytest.raises(Unavailable):
            session.apply(part_of(RunRow(0)))
        assert session.in_flight == 1
        proxy.refuse(False)
        for _ in range(100):
            try:
                answer = session.receive()
                break
            except Unavailable:
                continue
        assert answer.parts[0].granted == [20]


def test_beat_over_a_cut_connection_reopens_it(world, proxy):
    channel = open_channel(proxy.address)
    with closing(channel):
        session = Session(GrpcTransport(channel), OpenRequest(world.replica, 1), heartbeats=False)
        before = proxy.num_connections
        proxy.cut()
        while proxy.num_connections == before:
            session.beat()
        assert session.apply(Part()).seq == 1
        session.close()


@pytest.fixture
def silent():
    """The address of a peer that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_open_has_a_deadline(silent):
    with closing(open_channel(silent)) as channel:
        transport = GrpcTransport(channel, open_timeout_s=0.2)
        with pytest.raises(DeadlineExceeded, match=r"not answer within 0\.2 s"):
            transport.open(OpenRequest("x", 1))
        transport.close()


def test_a_draining_service_announces_it_and_waits_for_the_engine(tmp_path):
    with closing(GrpcWorld(f"unix:{tmp_path}/kvplane.sock")) as leaving:
        session = leaving.client.session(leaving.replica)
        session.apply(ASK)
        assert not session.draining
        drained = threading.Thread(target=leaving.service.drain)
        drained.start()
        while not session.draining:
            session.apply(Part())
        assert session.apply(part_of(RunRow(0))).parts[0].granted == [20]
        assert drained.is_alive()
        session.close()
        drained.join(20)
        assert not drained.is_alive()


def test_a_restarted_service_refuses_to_resume(tmp_path):
    listen = f"unix:{tmp_path}/kvplane.sock"
    first = GrpcWorld(listen)
    with connect(listen) as client:
        session = client.session(first.replica)
        session.apply(ASK)
        first.close()
        with closing(GrpcWorld(listen)):
            with pytest.raises(StaleEpoch):
                session.apply(part_of(RunRow(0)))
            with client.session(first.replica) as again:
                assert again.apply(ASK).parts[0].admit_granted == [20]


def test_a_closed_session_leaves_no_thread(world):
    with connect(world.service.address) as client:
        before = set(threading.enumerate())
        with client.session(world.replica) as session:
            session.apply(Part())
            during = set(threading.enumerate()) - before
        assert during
        for thread in during:
            thread.join(20)
            assert not thread.is_alive(), thread


def test_a_replaced_session_leaves_no_thread(world):
    with connect(world.service.address) as client:
        before = set(threading.enumerate())
        session = client.session(world.replica)
        during = set(threading.enumerate()) - before
        with client.session(world.replica), pytest.raises(OtherWriter):
            session.apply(Part())
        session.close()
        for thread in during:
            thread.join(20)
            assert not thread.is_alive(), thread


def test_a_closed_channel_is_refused(world):
    channel = open_channel(world.service.address)
    transport = GrpcTransport(channel)
    channel.close()
    with pytest.raises(FailedPrecondition, match="channel is closed"):
        transport.open(OpenRequest(world.replica, 1))


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt, which pytest keeps for itself."""


def interrupt_when(main_waits_in, done):
    """Send this thread's process a signal as soon as its main thread stands in the function."""
    main = threading.main_thread().ident or 0
    while not done.wait(0.005):
        frames = traceback.extract_stack(sys._current_frames()[main])
        if any(frame.name == main_waits_in for frame in frames):
            signal.pthread_kill(main, signal.SIGUSR1)
            return


def test_a_session_continues_after_an_interrupted_receive(world):
    def stop(*_):
        raise Interrupted

    before, done = signal.signal(signal.SIGUSR1, stop), threading.Event()
    interrupter = threading.Thread(target=interrupt_when, args=("receive", done))
    try:
        with connect(world.service.address) as client, client.session(world.replica) as session:
            interrupter.start()
            with pytest.raises(Interrupted):
                session._transport.receive()
            assert session.apply(ASK).parts[0].admit_granted == [20]
            session.close()
    finally:
        done.set()
        interrupter.join()
        signal.signal(signal.SIGUSR1, before)
    assert world.client.describe_replica(world.replica).free_blocks == HYBRID.num_blocks - 1
