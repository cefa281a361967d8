"""The session contract, on every transport."""

from __future__ import annotations

from contextlib import closing

import pytest

from kvplane import aio
from kvplane.rpc.channel import open_aio_channel
from tests.client.loop_thread import Blocking, shared_loop
from tests.client.session_contract import SessionContract
from tests.client.worlds import GrpcWorld, InProcessWorld


class TestInProcess(SessionContract):
    @pytest.fixture
    def world(self):
        return InProcessWorld()


@pytest.fixture(scope="module")
def tcp():
    with closing(GrpcWorld("127.0.0.1:0")) as world:
        yield world


@pytest.fixture(scope="module")
def unix_socket(tmp_path_factory):
    with closing(GrpcWorld(f"unix:{tmp_path_factory.mktemp('socket')}/kvplane.sock")) as world:
        yield world


@pytest.fixture(scope="module")
def session_socket(tmp_path_factory):
    path = f"{tmp_path_factory.mktemp('socket')}/sessions.sock"
    with closing(GrpcWorld("127.0.0.1:0", path)) as world:
        yield world


class TestTcp(SessionContract):
    @pytest.fixture
    def world(self, tcp):
        tcp.reset()
        return tcp


class TestUnixSocket(SessionContract):
    @pytest.fixture
    def world(self, unix_socket):
        unix_socket.reset()
        return unix_socket


class TestSessionSocket(SessionContract):
    @pytest.fixture
    def world(self, session_socket):
        session_socket.reset()
        return session_socket


class TestAsyncio(TestTcp):
    """The asyncio transport and session, through blocking faces."""

    @pytest.fixture
    def world(self, tcp):
        tcp.reset()
        channel = shared_loop().make(open_aio_channel, tcp.service.address)
        yield AioWorld(tcp, channel)
        shared_loop().do(channel.close)

    def new_session(self, world, **facts):
        session = aio.Session(world.aio_transport(), self.request(world, **facts))
        return Blocking(shared_loop().do(session.open))


class AioWorld:
    """A service behind asyncio gRPC."""

    def __init__(self, served, channel):
        self.replica, self.digest = served.replica, served.digest
        self._channel = channel

    def aio_transport(self):
        return shared_loop().make(aio.GrpcTransport, self._channel)

    def transport(self):
        return Blocking(self.aio_transport())
