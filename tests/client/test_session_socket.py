"""Sessions over a session socket that is cut, refused, silent, full or hostile. The contract of all transports is in
test_session_contract.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing, contextmanager
from functools import partial

import pytest

from kvplane import aio
from kvplane.base.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    LimitExceeded,
    Moved,
    NotFound,
    PermissionDenied,
    StaleEpoch,
    Unavailable,
)
from kvplane.base.session import OpenRequest
from kvplane.base.step import Part
from kvplane.blocking.client import connect
from kvplane.blocking.session import Session
from kvplane.blocking.transport import GrpcTransport
from kvplane.blocking.ttrpc import SessionSocket, TtrpcStream
from kvplane.rpc.access import PLAIN
from kvplane.rpc.channel import open_channel
from kvplane.rpc.status import encode_status
from kvplane.sansio.retry import RetryPolicy
from kvplane.session.rows import AdmitRow, NewsRow, RunRow, part_of
from kvplane.v1.allocation_pb2 import Draining, Heartbeat, SessionRequest, SessionResponse
from kvplane.v1.ttrpc_pb2 import TtrpcResponse
from kvplane.wire.ttrpc import DATA, HEADER, NO_DATA, REMOTE_CLOSED, REQUEST, RESPONSE, frame
from tests.client.loop_thread import shared_loop
from tests.client.proxy import CuttingProxy
from tests.client.stepper import check_over_cuts
from tests.client.worlds import GrpcWorld
from tests.service.rig import until

ASK = part_of(NewsRow(0, range(40)), AdmitRow(0, cap=20))
ONCE = RetryPolicy(attempts=1)
NOTICE = SessionResponse(draining=Draining(grace_ms=1)).SerializeToString()


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "sessions")


@pytest.fixture
def world(path):
    with closing(GrpcWorld("127.0.0.1:0", path)) as world:
        yield world


@pytest.fixture
def proxy(world, path):
    with closing(CuttingProxy(world.service.address, path)) as proxy:
        yield proxy


@contextmanager
def peer(path):
    """A stream of the client, and the connection at its other end, which a test plays."""
    with socket.create_server(path, family=socket.AF_UNIX) as listener:
        stream = TtrpcStream(SessionSocket(path, PLAIN, 1 << 20))
        other, _ = listener.accept()
        other.settimeout(20)
        length, number, kind, _ = HEADER.unpack(other.recv(HEADER.size))
        assert (number, kind, len(other.recv(length))) == (1, REQUEST, length)
        with other:
            yield stream, other
        stream.cut()


def test_an_engine_gets_equal_answers_over_a_cut_connection(world, proxy):
    with connect(proxy.address) as client:
        session = client.session(world.replica, session_socket=proxy.session_socket)
        before = proxy.num_connections
        check_over_cuts(session, proxy)
        assert proxy.num_connections > before + 3
        session.close()


def test_a_beat_over_a_cut_connection_reopens_it(world, proxy):
    with closing(open_channel(proxy.address)) as channel:
        transport = GrpcTransport(channel, session_socket=SessionSocket(proxy.session_socket, PLAIN, 1 << 20))
        session = Session(transport, OpenRequest(world.replica, 1), heartbeats=False)
        before = proxy.num_connections
        proxy.cut()
        while proxy.num_connections == before:
            session.beat()
        assert session.apply(Part()).seq == 1
        session.close()


def test_a_restarted_service_refuses_to_resume(tmp_path, path):
    listen = f"unix:{tmp_path}/kvplane"
    first = GrpcWorld(listen, path)
    with connect(listen) as client:
        session = client.session(first.replica, session_socket=path)
        session.apply(ASK)
        first.close()
        assert not os.path.exists(path)
        with closing(GrpcWorld(listen, path)):
            with pytest.raises(StaleEpoch):
                session.apply(part_of(RunRow(0)))
            with client.session(first.replica, session_socket=path) as again:
                assert again.apply(ASK).parts[0].admit_granted == [20]


def test_a_draining_service_announces_it_and_waits_for_the_engine(world, path):
    session = world.client.session(world.replica, session_socket=path)
    session.apply(ASK)
    drained = threading.Thread(target=world.service.drain)
    drained.start()
    while not session.draining:
        session.apply(Part())
    assert session.apply(part_of(RunRow(0))).parts[0].granted == [20]
    session.close()
    drained.join(20)
    assert not drained.is_alive()


def test_a_socket_on_which_no_service_listens_is_unavailable(world, path):
    with pytest.raises(Unavailable, match=r"\.none: No such file.*session_socket"):
        world.client.session(world.replica, retry=ONCE, session_socket=f"{path}.none")


def test_a_socket_of_another_user_is_denied(path):
    if os.getuid():
        pytest.skip("only root can become another user")
    with socket.create_server(path, family=socket.AF_UNIX):
        program = (
            "import os, sys; from kvplane.blocking.ttrpc import PLAIN, SessionSocket; "
            "at = SessionSocket(sys.argv[1], PLAIN, 1); os.setgid(65534); os.setuid(65534); at.connect()"
        )
        done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=False)
    assert f"{PermissionDenied.__name__}: session_socket: cannot connect to {path}" in done.stderr


@pytest.mark.parametrize("given", ["x" * 108, "a\0b", "\ud800"])
def test_a_path_that_no_socket_can_have_is_refused(world, given):
    with pytest.raises(InvalidArgument, match="session_socket"):
        world.client.session(world.replica, session_socket=given)


def test_the_asyncio_client_has_no_session_socket(world, path):
    client = shared_loop().make(aio.connect, world.service.address)
    with pytest.raises(InvalidArgument, match="session_socket: the asyncio client"):
        shared_loop().do(partial(client.session, world.replica, session_socket=path))
    shared_loop().do(client.close)


def test_another_service_of_the_list_is_reached_by_grpc(world, path):
    with closing(GrpcWorld("127.0.0.1:0")) as other:
        addresses = f"127.0.0.1:1,{other.service.address}"
        with connect(addresses) as client, client.session(world.replica, session_socket=f"{path}.none") as session:
            assert session.apply(ASK).parts[0].admit_granted == [20]


def test_a_replica_that_moved_is_followed_to_its_owner_by_grpc(path):
    """The service on this machine redirects the session to another one."""
    with closing(GrpcWorld("127.0.0.1:0")) as owner, socket.create_server(path, family=socket.AF_UNIX) as listener:
        moved = Moved("the replica is elsewhere", metadata={"address": owner.service.address})
        response = TtrpcResponse(status=encode_status(moved).SerializeToString()).SerializeToString()

        def redirect():
            other, _ = listener.accept()
            with other:
                other.recv(1 << 16)
                other.sendall(frame(RESPONSE, response))

        redirecting = threading.Thread(target=redirect)
        redirecting.start()
        with connect("127.0.0.1:1") as client, client.session(owner.replica, session_socket=path) as session:
            assert session.apply(ASK).parts[0].admit_granted == [20]
            assert session.apply(part_of(RunRow(0))).parts[0].granted == [20]
        redirecting.join()


def test_open_and_step_have_a_deadline(path):
    with socket.create_server(path, family=socket.AF_UNIX), closing(open_channel("127.0.0.1:1")) as channel:
        silent = SessionSocket(path, PLAIN, 1 << 20)
        transport = GrpcTransport(channel, open_timeout_s=0.1, session_socket=silent)
        with pytest.raises(DeadlineExceeded, match=r"not answer within 0\.1 s"):
            transport.open(OpenRequest("x", 1))
        transport.close()


def test_a_full_socket_delays_no_call_and_loses_nothing(path):
    """The peer reads nothing at first: `send` returns at once, and later calls write the rest, in order."""
    beat = SessionRequest(heartbeat=Heartbeat())
    messages = [beat.SerializeToString()] + [bytes([number]) * (1 << 20) for number in range(8)]
    with peer(path) as (stream, other):
        stream.send(beat)
        for message in messages[1:]:
            stream.send(message)
        received = bytearray()

        def read():
            expected = sum(HEADER.size + len(one) for one in messages)
            while len(received) < expected:
                received.extend(other.recv(1 << 20))
            other.sendall(frame(DATA, NOTICE))

        reader = threading.Thread(target=read)
        reader.start()
        assert stream.receive(20).WhichOneof("kind") == "draining"
        reader.join()
    found = []
    while received:
        length, _, kind, _ = HEADER.unpack_from(received)
        assert kind == DATA
        found.append(bytes(received[HEADER.size : HEADER.size + length]))
        del received[: HEADER.size + length]
    assert found == messages


def test_a_silent_service_is_late_and_a_long_timeout_is_none(path):
    with peer(path) as (stream, other):
        other.sendall(frame(DATA, NOTICE) * 2)
        assert stream.receive(1e12).WhichOneof("kind") == "draining"
        assert stream.receive(0).WhichOneof("kind") == "draining"
        with pytest.raises(DeadlineExceeded, match=r"not answer within 0\.05 s"):
            stream.receive(0.05)


def test_a_flood_without_answers_does_not_outlast_the_timeout(path):
    with peer(path) as (stream, other):
        writer = threading.Thread(target=flood, args=(other,))
        writer.start()
        with pytest.raises(DeadlineExceeded):
            stream.receive(0.1)
        writer.join()


def flood(other):
    with contextlib.suppress(OSError):
        while True:
            other.sendall(frame(DATA, b"", NO_DATA) * 1000)


def test_one_heartbeat_makes_room_for_as_much_again(path):
    with peer(path) as (stream, other):
        other.setblocking(False)
        sent = [0, 0]
        for turn in range(2):
            with contextlib.suppress(BlockingIOError):
                while True:
                    sent[turn] += other.send(frame(DATA, NOTICE) * 100)
            stream.check()
        assert sent[1] >= sent[0] > 64 << 10


def test_a_refused_opening_leaves_no_descriptor(world, path):
    def open_once():
        with pytest.raises(NotFound):
            world.client.session("none", session_socket=path)

    gc.disable()
    try:
        open_once()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            open_once()
        until(lambda: len(os.listdir("/proc/self/fd")) <= before)  # the service, in this process, closes its ends later
    finally:
        gc.enable()


FORKS = """
import os, sys, time
from kvplane.blocking.ttrpc import SessionSocket, TtrpcStream
stream = TtrpcStream(SessionSocket(sys.argv[1]))
if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
os.kill(os.getpid(), 9)
"""
MANY_FILES = """
import os, resource, sys
from kvplane.blocking.ttrpc import SessionSocket
at = SessionSocket(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, 4096))
at.connect()
"""


def test_a_child_of_a_killed_engine_does_not_keep_its_connection(path):
    command = [sys.executable, "-c", FORKS, path]
    with (
        socket.create_server(path, family=socket.AF_UNIX) as listener,
        subprocess.Popen(command, start_new_session=True) as engine,
        listener.accept()[0] as other,
    ):
        other.settimeout(20)
        while other.recv(1000):
            pass
        os.killpg(engine.pid, signal.SIGKILL)


def test_too_many_open_files_are_an_error_of_kvplane(path):
    with socket.create_server(path, family=socket.AF_UNIX):
        done = subprocess.run([sys.executable, "-c", MANY_FILES, path], capture_output=True, text=True, check=False)
    assert f"{Unavailable.__name__}: session_socket: cannot connect to {path}: Too many open files" in done.stderr


def test_a_heartbeat_reads_what_arrived_so_that_the_service_can_write(path):
    with peer(path) as (stream, other):
        count = 4000
        writer = threading.Thread(target=other.sendall, args=(frame(DATA, NOTICE) * count,))
        writer.start()
        while writer.is_alive():
            stream.check()
        stream.check()
        for _ in range(count):
            assert stream.receive(20).WhichOneof("kind") == "draining"


def test_answers_arrive_in_any_pieces(path):
    sent = frame(DATA, NOTICE) * 3 + frame(DATA, b"", NO_DATA) + frame(RESPONSE, b"")
    rng = random.Random(5)
    with peer(path) as (stream, other):
        taken, at = 0, 0
        while taken < 3:
            end = min(len(sent) - 5, at + rng.randint(1, 4))
            other.sendall(sent[at:end])
            at = end
            if stream.ready() is None and stream._early is not None:
                assert stream.receive(0).WhichOneof("kind") == "draining"
                taken += 1
        other.sendall(sent[at:])
        with pytest.raises(Unavailable, match="ended the session's stream"):
            stream.receive(20)


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (frame(RESPONSE, b"\xff"), InternalError),
        (frame(RESPONSE, TtrpcResponse(status=b"\xff").SerializeToString()), InternalError),
        (frame(RESPONSE, TtrpcResponse(status=b"\x08\x05").SerializeToString()), NotFound),
        (frame(7, b""), InternalError),
        (frame(DATA, NOTICE, stream=3), InternalError),
        (frame(DATA, b"\xff\xff"), InternalError),
        (HEADER.pack((1 << 20) + 1, 1, DATA, 0), LimitExceeded),
        (frame(DATA, b"", REMOTE_CLOSED | NO_DATA), Unavailable),
        (b"\0\0", Unavailable),
    ],
)
def test_what_a_peer_must_not_send_ends_the_stream_with_an_error(path, sent, kind):
    with peer(path) as (stream, other):
        other.sendall(sent)
        other.shutdown(socket.SHUT_WR)
        for _ in range(2):  # a second call raises the same
            with pytest.raises(kind):
                stream.receive(20)
        assert stream.ready() is None
        with pytest.raises(kind):
            stream.check()
        stream.send(b"later")


def test_a_cut_by_another_thread_wakes_a_call(path):
    with peer(path) as (stream, _):
        timer = threading.Timer(0.05, stream.cut)
        timer.start()
        with pytest.raises(Unavailable, match="connection ended"):
            stream.receive(20)
        timer.join()


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt, which pytest keeps for itself."""


class AtLine:
    """Raises at the n-th line of ttrpc.py that is executed, as a signal handler may."""

    def __init__(self, number):
        self.left = number

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.endswith("blocking/ttrpc.py"):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise Interrupted
        return self


def test_a_session_continues_after_an_interrupt_at_any_line(world, path):
    """The answers are those of a session without interrupts, each once."""
    with world.client.session(world.replica, session_socket=path) as session:
        number = 0
        while True:
            number += 1
            where = AtLine(number)
            expected = session.next_seq
            sys.settrace(where)
            try:
                found = session.apply(Part()).seq
            except Interrupted:
                sys.settrace(None)
                found = session.receive().seq if session.in_flight else session.apply(Part()).seq
            finally:
                sys.settrace(None)
            assert found == expected, number
            if where.left > 0:
                break
        assert number > 30


def test_a_stream_that_is_collected_closes_its_connection(path):
    with socket.create_server(path, family=socket.AF_UNIX) as listener:
        stream = TtrpcStream(SessionSocket(path, PLAIN, 1 << 20))
        with listener.accept()[0] as other:
            del stream
            gc.collect()
            other.settimeout(20)
            while other.recv(1000):
                pass
