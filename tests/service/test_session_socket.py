"""The session socket of a service, frame by frame: what the protocol permits a client, and what it does not."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import random
import re
import socket
import stat
import threading
import time
from functools import partial
from typing import Any

import grpc
import pytest
import uvloop
from google.rpc import status_pb2

from kvplane.base.errors import (
    DeadlineExceeded,
    InvalidArgument,
    LimitExceeded,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from kvplane.base.step import Part
from kvplane.blocking.client import connect
from kvplane.blocking.session import Session
from kvplane.rpc.status import error_of_status
from kvplane.v1.allocation_pb2 import SessionRequest, SessionResponse
from kvplane.v1.ttrpc_pb2 import TtrpcMetadata, TtrpcRequest, TtrpcResponse
from kvplane.wire.ttrpc import DATA, HEADER, NO_DATA, REMOTE_CLOSED, REMOTE_OPEN, REQUEST, RESPONSE, frame
from kvplane_service.auth.quotas import READS_AT_ONCE
from kvplane_service.config import Config
from kvplane_service.rpc import ttrpc
from tests.client.mini_engine import HYBRID
from tests.service.guarded import Caller, Guard
from tests.service.rig import NONCES, WAIT_S, error_of, running, until

SERVICE, METHOD = "kvplane.v1.Allocation", "Session"
STREAM = 5  # any odd number


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "sessions")


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def service(request, path):
    """On each loop; a task or a callback that raises fails the test."""
    config, unhandled = Config(listen="127.0.0.1:0", session_socket=path, max_connections=4), list[dict[str, Any]]()
    with running(config, new_loop=request.param) as service:
        service.loop.set_exception_handler(lambda _, context: unhandled.append(context))
        service.register()
        yield service
        gc.collect()
    assert not unhandled


class Raw:
    """A client of the session socket that sends what it is given."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.socket.settimeout(WAIT_S)
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.socket.close()

    def begin(self, flags: int = REMOTE_OPEN, stream: int = STREAM, **request: Any) -> None:
        facts: dict[str, Any] = {"service": SERVICE, "method": METHOD, **request}
        self.send(REQUEST, TtrpcRequest(**facts).SerializeToString(), flags, stream)

    def open(self, replica: str = "r") -> None:
        self.ask(open={"replica": replica, "nonce": next(NONCES)})

    def ask(self, **kind: Any) -> None:
        self.send(DATA, SessionRequest(**kind).SerializeToString())

    def send(self, kind: int, data: bytes, flags: int = 0, stream: int = STREAM) -> None:
        self.socket.sendall(frame(kind, data, flags, stream))

    def receive(self) -> tuple[int, bytes]:
        """Kind and data of the next frame; kind 0 at the end of the connection, which is a reset if the service has not
        read all that was sent.
        """
        try:
            header = self._file.read(HEADER.size)
        except ConnectionResetError:
            header = b""
        if not header:
            return 0, b""
        length, stream, kind, flags = HEADER.unpack(header)
        assert (stream, flags) == (STREAM, 0)
        return kind, self._file.read(length)

    def answer(self) -> SessionResponse:
        kind, data = self.receive()
        assert kind == DATA, self._error(data)
        return SessionResponse.FromString(data)

    def end(self):
        """The error with which the stream ends, None for OK; the connection ends with it."""
        while True:
            kind, data = self.receive()
            if kind == RESPONSE:
                assert self.receive() == (0, b"")
                return self._error(data)
            assert kind == DATA

    def _error(self, data: bytes):
        status = TtrpcResponse.FromString(data).status
        return error_of_status(status_pb2.Status.FromString(status)) if status else None


def test_a_session_by_the_protocol(service, path):
    with Raw(path) as client:
        client.begin()
        client.open()
        epoch = client.answer().opened.epoch
        client.ask(step={"epoch": epoch, "seq": 1, "executed_through": 0, "parts": [{}]})
        assert client.answer().result.seq == 1
        client.ask(heartbeat={})
        client.ask(close={})
        assert client.answer().HasField("closed")
        assert client.end() is None
    until(lambda: service.state() == "IDLE")


@pytest.mark.parametrize("umask", [0, 0o77])
@pytest.mark.parametrize(("directory", "mode"), [(0o755, 0o600), (0o2770, 0o660), (0o777, 0o666), (0o1777, 0o600)])
def test_who_may_connect_follows_from_the_directory_and_not_from_the_umask(tmp_path, directory, mode, umask):
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(directory)
    before = os.umask(umask)
    try:
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(folder / "sessions"))
        ttrpc._bound(str(folder / "sessions")).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "sessions").stat().st_mode) == mode


def test_a_client_that_sends_no_more_ends_its_stream(service, path):
    with Raw(path) as client:
        client.begin()
        client.open()
        client.answer()
        client.send(DATA, b"", REMOTE_CLOSED | NO_DATA)
        assert client.end() is None


def test_the_last_message_may_have_the_flag(service, path):
    with Raw(path) as client:
        client.begin()
        client.open()
        client.answer()
        client.send(DATA, SessionRequest(close={}).SerializeToString(), REMOTE_CLOSED)
        assert client.answer().HasField("closed")
        assert client.end() is None


def test_a_stream_in_single_bytes(service, path):
    raw = frame(REQUEST, TtrpcRequest(service=SERVICE, method=METHOD).SerializeToString(), REMOTE_OPEN, STREAM)
    raw += frame(DATA, SessionRequest(open={"replica": "r", "nonce": 1}).SerializeToString(), 0, STREAM)
    raw += frame(DATA, SessionRequest(close={}).SerializeToString(), REMOTE_CLOSED, STREAM)
    with Raw(path) as client:
        for at in range(len(raw)):
            client.socket.sendall(raw[at : at + 1])
        assert client.answer().HasField("opened")
        assert client.answer().HasField("closed")
        assert client.end() is None


@pytest.mark.parametrize(
    ("begin", "kind", "what"),
    [
        ({"method": "FindCacheHit"}, NotFound, "FindCacheHit is not served on this socket.*Session"),
        ({"service": "x" * 1000}, NotFound, "is not served"),
        ({"flags": 0}, InvalidArgument, "without a stream.*remote open"),
        ({"flags": REMOTE_CLOSED}, InvalidArgument, "without a stream"),
        ({"payload": b"x"}, InvalidArgument, "without a stream"),
        ({"payload": bytes(17 << 10)}, LimitExceeded, "maximum is 16384"),
    ],
)
def test_calls_that_are_refused(service, path, begin, kind, what):
    with Raw(path) as client:
        client.begin(**begin)
        error = client.end()
    assert type(error) is kind
    assert re.search(what, str(error))


@pytest.mark.parametrize(
    "sent",
    [
        frame(DATA, b"", 0, STREAM),
        frame(9, b"", 0, STREAM),
        frame(REQUEST, b"\xff\xff", REMOTE_OPEN, STREAM),
    ],
)
def test_a_connection_that_begins_with_another_frame(service, path, sent):
    with Raw(path) as client:
        client.socket.sendall(sent)
        assert type(client.end()) is InvalidArgument


def test_an_even_stream_is_refused(service, path):
    with Raw(path) as client:
        client.begin(stream=2)
        header = client._file.read(HEADER.size)
        length, stream, kind, _ = HEADER.unpack(header)
        assert (stream, kind) == (2, RESPONSE)
        assert b"odd stream" in client._file.read(length)


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (frame(DATA, b"", 0, STREAM + 2), InvalidArgument),
        (frame(REQUEST, b"", REMOTE_OPEN, STREAM), InvalidArgument),
        (frame(RESPONSE, b"", 0, STREAM), InvalidArgument),
        (HEADER.pack((32 << 20) + 1, STREAM, DATA, 0), LimitExceeded),
        (frame(DATA, b"\xff\xff", 0, STREAM), InvalidArgument),
        (frame(DATA, b"", 0, STREAM), InvalidArgument),
    ],
)
def test_a_frame_that_an_open_session_does_not_send(service, path, sent, kind):
    with Raw(path) as client:
        client.begin()
        client.open()
        assert client.answer().HasField("opened")
        client.socket.sendall(sent)
        assert type(client.end()) is kind
    until(lambda: service.state() != "LIVE")


def test_random_bytes_end_no_more_than_their_connection(service, path):
    rng = random.Random(4)
    kinds = (REQUEST, RESPONSE, DATA, 0, 77)
    for _ in range(200):
        with Raw(path) as client, contextlib.suppress(OSError):
            if rng.random() < 0.5:
                client.begin()
            for _ in range(rng.randint(1, 4)):
                data = rng.randbytes(rng.randint(0, 40))
                client.send(rng.choice(kinds), data, rng.randint(0, 255), rng.choice((STREAM, rng.getrandbits(32))))
            client.socket.sendall(rng.randbytes(rng.randint(0, 30)))
    until(lambda: opens(path))


def opens(path: str) -> bool:
    """Whether a session opens: not while connections that have ended are still to be accepted."""
    with Raw(path) as client, contextlib.suppress(OSError):
        client.begin()
        client.open()
        return client.receive()[0] == DATA
    return False


def test_a_silent_connection_ends(service, path, monkeypatch):
    monkeypatch.setattr(ttrpc, "MESSAGE_TIMEOUT_S", 0.05)
    with Raw(path) as client:
        client.socket.sendall(b"\0\0")
        assert client.receive() == (0, b"")


def test_connections_above_the_limit_are_closed_and_a_free_one_is_used(service, path):
    with contextlib.ExitStack() as stack:
        first, *_ = [stack.enter_context(Raw(path)) for _ in range(4)]
        until(lambda: len(service.app._server._local.open) == 4)
        with Raw(path) as refused:
            assert refused.receive() == (0, b"")
        first.__exit__()
        until(lambda: len(service.app._server._local.open) == 3)
        with Raw(path) as client:
            client.begin()
            client.open()
            assert client.answer().HasField("opened")


def test_a_client_that_is_gone_loses_its_session(service, path):
    with Raw(path) as client:
        client.begin()
        client.open()
        client.answer()
        assert service.state() == "LIVE"
    until(lambda: service.state() != "LIVE")


def test_nothing_is_kept_of_a_client_that_is_not_admitted(tmp_path, path):
    """Without a token, the service reads the frame of the call and refuses it; what follows is not read."""
    with running(Guard(tmp_path).config(session_socket=path)) as service, Raw(path) as client:
        client.begin()
        client.socket.settimeout(0.5)
        with contextlib.suppress(OSError):
            client.socket.sendall(HEADER.pack(30 << 20, STREAM, DATA, 0) + bytes(20 << 20))
        client.socket.settimeout(WAIT_S)
        assert type(client.end()) is Unauthenticated
        assert not service.app._server._local.open


def apply_for_ever(session: Session) -> None:
    while True:
        session.apply(Part())


def test_an_owner_is_known_by_the_token(tmp_path, path):
    guard = Guard(tmp_path)
    with running(guard.config(session_socket=path)) as service:
        with connect(service.address, token="token-acme") as client:
            client.register_replica("r", HYBRID)
            with client.session("r", session_socket=path) as session:
                session.apply(Part())
        operator = connect(service.address, token="token-operator")
        with operator as client, pytest.raises(PermissionDenied, match="lacks the scope `allocate`"):
            client.session("r", session_socket=path)
        with connect(service.address, token="token-rival") as client, pytest.raises(NotFound):
            client.session("r", session_socket=path)
        with Raw(path) as client:
            client.begin(metadata=[TtrpcMetadata(key="Authorization", value="Bearer wrong")])
            assert type(client.end()) is Unauthenticated
        with connect(service.address, token="token-acme") as client:
            session = client.session("r", session_socket=path)
            guard.write_tokens("rival", "operator")
            with pytest.raises(Unauthenticated, match="expired or were revoked"):
                apply_for_ever(session)
    assert f"unix:pid={os.getpid()},uid={os.getuid()}" in guard.audit_file.read_text()


def test_bytes_that_the_call_does_not_read_stay_with_the_client(service, path, monkeypatch):
    """The service reads at most 64 KiB and one read of its own ahead of a call that waits."""
    held = asyncio.Event()

    async def hold(*_):
        await held.wait()

    with Raw(path) as client:
        client.begin()
        client.open()
        client.answer()
        (connection,) = service.app._server._local.open
        monkeypatch.setattr("kvplane_service.rpc.session._Stream._step", hold)
        client.ask(step={"seq": 1})
        client.socket.setblocking(False)
        sent, until_s = 0, time.monotonic() + 1
        with contextlib.suppress(BlockingIOError):
            while time.monotonic() < until_s:
                sent += client.socket.send(bytes(1 << 20))
        assert sent < 4 << 20
        assert len(connection._received) < 1 << 20
        client.socket.settimeout(WAIT_S)
        service.in_loop(held.set)


def header(length: int) -> bytes:
    return HEADER.pack(length, STREAM, DATA, 0)


@pytest.mark.parametrize("part", [header(5), header(1 << 20) + bytes(1000), b"\0"], ids=["header", "data", "byte"])
def test_a_message_of_which_a_part_arrives_ends_its_session(service, path, part, monkeypatch):
    monkeypatch.setattr(ttrpc, "MESSAGE_TIMEOUT_S", 0.2)
    with Raw(path) as raw:
        raw.begin()
        raw.open()
        raw.answer()
        raw.socket.sendall(part)
        assert isinstance(raw.end(), DeadlineExceeded)
    assert service.state() == "LAPSED"


def test_a_session_that_is_silent_between_messages_stays(service, path, monkeypatch):
    with Raw(path) as raw:
        raw.begin()
        raw.open()
        epoch = raw.answer().opened.epoch
        monkeypatch.setattr(ttrpc, "MESSAGE_TIMEOUT_S", 0.05)
        time.sleep(0.3)
        raw.ask(step={"epoch": epoch, "seq": 1, "parts": [{}]})
        assert raw.answer().WhichOneof("kind") == "result"


def push(to: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # the service gives it up
        to.sendall(data)


def test_few_long_messages_of_an_owner_arrive_at_a_time(path, tmp_path):
    """Each takes its length in memory before it is complete; another owner's arrives."""
    guard = Guard(tmp_path, {"bob": {}, "alice": {}})
    config = guard.config(session_socket=path)
    length, held = 1 << 20, READS_AT_ONCE + 2
    with running(config) as service, contextlib.ExitStack() as stack:
        local = service.app._server._local
        for at in range(held + 1):
            owner = "bob" if at < held else "alice"
            Caller(service, f"token-{owner}").register(f"{owner}/{at}")
            raw = stack.enter_context(Raw(path))
            raw.begin(metadata=[TtrpcMetadata(key="authorization", value=f"Bearer token-{owner}")])
            raw.open(f"{owner}/{at}")
            raw.answer()
            threading.Thread(target=push, args=(raw.socket, header(length) + bytes(length - 1)), daemon=True).start()
        arrived = lambda: sorted(len(one._received) for one in local.open)  # noqa: E731
        until(lambda: sum(one > length // 2 for one in arrived()) == READS_AT_ONCE + 1)
        assert arrived()[1] < length // 2, "those beyond the share wait in the kernel"


def test_a_client_that_does_not_read_delays_itself_alone(path):
    """Its answers fill the socket; another session, and the end of the service, do not wait for it."""
    config = Config(listen="127.0.0.1:0", session_socket=path, drain_grace_ms=100)
    with running(config) as service, Raw(path) as client:
        service.register()
        client.begin()
        client.open()
        epoch = client.answer().opened.epoch
        step = SessionRequest(step={"epoch": epoch, "seq": 9, "executed_through": 0, "parts": [{}]})
        refused = frame(DATA, step.SerializeToString(), 0, STREAM) * 100
        client.socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            for _ in range(10_000):
                client.socket.send(refused)
        (connection,) = service.app._server._local.open
        until(lambda: not connection._may_write.is_set())
        service.register("other")
        with connect(service.address) as other, other.session("other", session_socket=path) as session:
            session.apply(Part())
        asyncio.run_coroutine_threadsafe(service.app.drain(), service.loop).result(WAIT_S)
        assert not service.app._server._local.open


def test_another_connection_is_served_between_two_messages(service, path):
    """Thousands of short messages that arrive at once: the loop runs between them."""
    turns, count = [0], 2000

    def turn() -> None:
        turns[0] += 1
        if turns[0] < 10 * count:
            service.loop.call_soon(turn)

    with Raw(path) as client:
        client.begin()
        client.open()
        client.answer()
        beats = frame(DATA, SessionRequest(heartbeat={}).SerializeToString(), 0, STREAM) * count

        def begin() -> None:
            turns[0] = 0
            client.socket.sendall(beats + frame(DATA, SessionRequest(close={}).SerializeToString(), 0, STREAM))
            service.loop.call_soon(turn)

        service.in_loop(begin)
        assert client.answer().HasField("closed")
        assert turns[0] > count // 2


def test_a_client_that_is_gone_behind_steps_leaves_no_error(service, path):
    for _ in range(20):
        with Raw(path) as client:
            client.begin()
            client.open()
            epoch = client.answer().opened.epoch
            step = SessionRequest(step={"epoch": epoch, "seq": 9, "executed_through": 0, "parts": [{}]})
            (connection,) = service.app._server._local.open
            client.socket.sendall(frame(DATA, step.SerializeToString(), 0, STREAM) * 500)
        until(lambda: not service.app._server._local.open)
        service.in_loop(partial(connection._end_with, b""))  # as a call does whose cancellation comes too late


def test_a_client_that_is_gone_is_seen_while_nothing_is_read(service, path, monkeypatch):
    monkeypatch.setattr(ttrpc, "_WATCH_S", 0.01)
    held = asyncio.Event()

    async def hold(*_):
        await held.wait()

    monkeypatch.setattr("kvplane_service.rpc.session._Stream._step", hold)
    with Raw(path) as client:
        client.begin()
        client.open()
        client.answer()
        (connection,) = service.app._server._local.open
        client.ask(step={"seq": 1})
        client.socket.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            client.socket.sendall(bytes(8 << 20))
        assert connection._is_paused
    until(lambda: not service.app._server._local.open)
    until(lambda: service.state() != "LIVE")


def test_a_client_is_watched_by_one_timer(service, path, monkeypatch):
    """However often reading is paused and resumed."""
    monkeypatch.setattr(ttrpc, "_WATCH_S", 0.02)
    looks = list[float]()
    with Raw(path) as client:
        client.begin()
        client.open()
        client.answer()
        (connection,) = service.app._server._local.open

        def look() -> bool:
            looks.append(time.monotonic())
            return False

        monkeypatch.setattr(connection, "_is_hung_up", look)

        def pause_often() -> None:
            connection._received.extend(HEADER.pack(1 << 20, STREAM, DATA, 0) + bytes(80 << 10))
            reader, connection._reader = connection._reader, None
            for _ in range(100):
                connection._is_paused = False
                connection.data_received(b"")
            connection._reader = reader

        service.in_loop(pause_often)
        until(lambda: len(looks) > 2)
        assert all(after - before > 0.01 for before, after in itertools.pairwise(looks))


def test_a_client_that_sends_no_more_gets_its_answers(service, path):
    with Raw(path) as client:
        client.begin()
        client.open()
        epoch = client.answer().opened.epoch
        for seq in (1, 2, 3):
            client.ask(step={"epoch": epoch, "seq": seq, "executed_through": seq - 1, "parts": [{}]})
        client.socket.shutdown(socket.SHUT_WR)
        assert [client.answer().result.seq for _ in range(3)] == [1, 2, 3]
        assert client.end() is None


def test_a_client_that_does_not_read_its_status_is_closed(service, path, monkeypatch):
    monkeypatch.setattr(ttrpc, "_LAST_S", 0.05)
    with Raw(path) as client:
        client.begin()
        client.open()
        epoch = client.answer().opened.epoch
        (connection,) = service.app._server._local.open
        step = SessionRequest(step={"epoch": epoch, "seq": 9, "executed_through": 0, "parts": [{}]})
        raw = frame(DATA, step.SerializeToString(), 0, STREAM) * 10
        client.socket.settimeout(0.2)
        with contextlib.suppress(TimeoutError):
            while connection._may_write.is_set():
                client.socket.sendall(raw)
        service.in_loop(lambda: connection._end_with(b""))
        until(lambda: not service.app._server._local.open)


def test_the_file_of_another_service_stays(path):
    with running(Config(listen="127.0.0.1:0", session_socket=path)):
        os.unlink(path)
        other = running(Config(listen="127.0.0.1:0", session_socket=path))
        other.__enter__()
    with Raw(path):
        pass
    other.__exit__(None, None, None)
    assert not os.path.exists(path)


@pytest.mark.parametrize("key", ["session_socket", "listen"])
def test_a_hung_process_that_listens_delays_no_start(path, key):
    given = {"listen": "127.0.0.1:0", key: path if key == "session_socket" else f"unix:{path}"}
    with contextlib.ExitStack() as stack:
        hung = stack.enter_context(socket.socket(socket.AF_UNIX))
        hung.bind(path)
        hung.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(path)
        with pytest.raises(Unavailable, match=f"{key}: cannot listen on unix:.*in use"):
            running(Config.model_validate(given)).__enter__()


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_no_socket_stays(path, kind):
    {"file": lambda: open(path, "w").close(), "folder": lambda: os.mkdir(path), "link": lambda: os.symlink("x", path)}[
        kind
    ]()
    with pytest.raises(Unavailable, match="session_socket: cannot listen on"):
        running(Config(listen="127.0.0.1:0", session_socket=path)).__enter__()
    assert os.path.lexists(path)


def test_the_file_goes_with_the_service_and_is_not_taken_from_another(path):
    with running(Config(listen="127.0.0.1:0", session_socket=path)):
        assert stat.S_ISSOCK(os.stat(path).st_mode)
        with pytest.raises(Unavailable, match=r"session_socket: cannot listen on unix:.*in use"):
            running(Config(listen="127.0.0.1:0", session_socket=path)).__enter__()
        with Raw(path):
            pass
    assert not os.path.exists(path)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(path)
    with running(Config(listen="127.0.0.1:0", session_socket=path)), Raw(path):
        pass
    with pytest.raises(Unavailable, match="session_socket: cannot listen on"):
        running(Config(listen="127.0.0.1:0", session_socket=f"{path}.folder/none")).__enter__()


@pytest.mark.parametrize("given", ["unix:/run/x", "x" * 108, "a\0b"])
def test_a_path_that_no_socket_can_have_is_refused(given):
    with pytest.raises(ValueError, match="session_socket"):
        Config(session_socket=given)


def test_errors_are_those_of_grpc(service, path):
    with Raw(path) as client:
        client.begin()
        client.open("none")
        local = client.end()
    with pytest.raises(grpc.RpcError) as failed:
        service.open("none")
    remote = error_of(failed.value)
    assert (type(local), str(local), local.metadata) == (type(remote), str(remote), remote.metadata)
